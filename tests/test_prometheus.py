"""A real Prometheus scrapes a running daemon for a minute."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (apt)")

CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
scrape_configs:
  - job_name: fragscope
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def query(port: int, expression: str) -> list[dict[str, object]]:
    url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(url, timeout=5) as answer:
        found: list[dict[str, object]] = json.load(answer)["data"]["result"]
        return found


def number(port: int, expression: str) -> float | None:
    rows = query(port, expression)
    return float(rows[0]["value"][1]) if rows else None  # type: ignore[index]


def test_a_real_prometheus_scrapes_the_demo_for_a_minute(tmp_path: Path) -> None:
    ours, theirs = free_port(), free_port()
    (tmp_path / "prometheus.yml").write_text(CONFIG.format(port=ours))
    prometheus = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{theirs}",
            "--log.level=error",
        ]
    )
    demo = subprocess.Popen(
        [sys.executable, "-m", "fragscope", "demo", "--web.listen-address", f"127.0.0.1:{ours}", "--duration", "100"],
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 30
        up = None
        while up != 1 and time.monotonic() < deadline:
            time.sleep(0.5)
            try:
                up = number(theirs, 'up{job="fragscope"}')
            except OSError:
                continue
        assert up == 1
        time.sleep(60)
        assert number(theirs, 'min_over_time(up{job="fragscope"}[60s])') == 1
        assert (number(theirs, 'count_over_time(up{job="fragscope"}[60s])') or 0) >= 55
        assert (number(theirs, "max_over_time(scrape_samples_scraped[60s])") or 999) <= 150 + 20
        assert number(theirs, "max_over_time(fragscope_pseudo_oom_suspected[90s])") == 1
        assert (number(theirs, "max_over_time(scrape_duration_seconds[60s])") or 9) < 0.5
    finally:
        for process in (demo, prometheus):
            process.send_signal(signal.SIGTERM)
            process.wait(10)
