"""The whole chain with the real programs: demo, fragscope, Prometheus, Alertmanager, a webhook that is paged."""

import contextlib
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.paths import REPOSITORY
from tests.test_prometheus import free_port, number, query

PROGRAMS = ("prometheus", "prometheus-alertmanager")
pytestmark = pytest.mark.skipif(
    any(shutil.which(name) is None for name in PROGRAMS),
    reason="prometheus and prometheus-alertmanager are missing (apt)",
)

DURATIONS = {"for", "keep_firing_for", "group_wait", "group_interval", "repeat_interval"}


@dataclass
class Pager:
    """A webhook receiver that remembers who was paged."""

    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def alerts(self, path: str, name: str, status: str) -> list[dict[str, Any]]:
        return [
            alert
            for where, body in self.seen
            if where == path
            for alert in body["alerts"]
            if alert["labels"]["alertname"] == name and alert["status"] == status
        ]


@contextlib.contextmanager
def paging() -> Iterator[tuple[Pager, int]]:
    pager = Pager()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            pager.seen.append((self.path, json.loads(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield pager, server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def shortened(source: Path, **durations: str) -> str:
    """A copy of a shipped file in which only durations are other ones."""
    text = source.read_text()
    for name, value in durations.items():
        assert name in DURATIONS
        text = re.sub(rf"^(\s*{name}:) .*$", rf"\1 {value}", text, flags=re.MULTILINE)
    return text


@contextlib.contextmanager
def program(*command: str) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(15)


@contextlib.contextmanager
def stack(folder: Path, ours: int, webhook: int) -> Iterator[tuple[int, int]]:
    """Prometheus with our rules and Alertmanager with our configuration; gives their ports."""
    prometheus, alertmanager = free_port(), free_port()
    for path in (REPOSITORY / "deploy" / "prometheus").glob("fragscope-*.yaml"):
        (folder / path.name).write_text(shortened(path, **{"for": "3s", "keep_firing_for": "3s"}))
    text = shortened(
        REPOSITORY / "deploy" / "alertmanager" / "alertmanager.yml",
        group_wait="1s", group_interval="2s", repeat_interval="1h",
    )  # fmt: skip
    (folder / "alertmanager.yml").write_text(text.replace("localhost:9911", f"127.0.0.1:{webhook}"))
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(folder / "fragscope-*.yaml")],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alertmanager}"]}]}]},
        "scrape_configs": [
            {"job_name": "fragscope", "honor_labels": True, "static_configs": [{"targets": [f"127.0.0.1:{ours}"]}]}
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with (
        program(
            "prometheus-alertmanager",
            f"--config.file={folder / 'alertmanager.yml'}",
            f"--storage.path={folder / 'am'}",
            f"--web.listen-address=127.0.0.1:{alertmanager}",
            "--cluster.listen-address=",
            "--log.level=error",
        ),
        program(
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{prometheus}",
            "--log.level=error",
        ),
    ):
        yield prometheus, alertmanager


def demo(scenario: str, port: int, duration_s: float) -> list[str]:
    """The demo, with the hold shortened by settings so that its alarm can end within the test."""
    return [
        sys.executable, "-m", "fragscope", "demo", "--scenario", scenario, "--speed", "20",
        "--web.listen-address", f"127.0.0.1:{port}", "--duration", f"{duration_s:.0f}",
    ]  # fmt: skip


def wait(what: str, claim: Callable[[], Any], within_s: float) -> Any:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            found = claim()
            if found:
                return found
        time.sleep(0.2)
    raise AssertionError(f"{what}: not within {within_s:.0f} s")


def test_a_pseudo_oom_pages_once_with_its_labels_and_resolves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAGSCOPE_HOLD_S", "60")
    monkeypatch.setenv("FRAGSCOPE_THRESHOLDS__HEADROOM_BACK_S", "20")
    ours = free_port()
    with (
        paging() as (pager, webhook),
        stack(tmp_path, ours, webhook) as (prometheus, _),
        program(*demo("pseudo-oom", ours, 150)),
    ):
        wait("the page", lambda: pager.alerts("/page", "FragscopePseudoOOMSuspected", "firing"), 60)
        wait("its end", lambda: pager.alerts("/page", "FragscopePseudoOOMSuspected", "resolved"), 60)
        fired = pager.alerts("/page", "FragscopePseudoOOMSuspected", "firing")
        assert len({alert["startsAt"] for alert in fired}) == 1, "paged once"
        labels = fired[0]["labels"]
        assert (labels["target"], labels["engine"], labels["model_name"]) == ("demo", "0", "demo-llama")
        assert (labels["severity"], labels["component"]) == ("warning", "fragscope")
        assert "demo engine 0" in fired[0]["annotations"]["description"]
        assert not pager.alerts("/page", "FragscopePseudoOOMConfirmed", "firing"), "only circumstances said so"
        assert number(prometheus, "max_over_time(fragscope_verdict_phase{phase='suspected'}[2m])") == 1
        lost = number(prometheus, "fragscope_requests_lost_total")
        assert lost is not None
        assert lost > 0


@pytest.mark.parametrize("scenario", ["healthy", "admission-limit"])
def test_healthy_and_queue_limit_page_nobody_about_memory(scenario: str, tmp_path: Path) -> None:
    ours = free_port()
    with (
        paging() as (pager, webhook),
        stack(tmp_path, ours, webhook) as (prometheus, alertmanager),
        program(*demo(scenario, ours, 60)),
    ):
        wait("a scrape", lambda: number(prometheus, 'up{job="fragscope"}') == 1, 30)
        if scenario == "admission-limit":
            wait("its own alert", lambda: pager.alerts("/ticket", "FragscopeAdmissionLimit", "firing"), 30)
        else:
            time.sleep(15)
        assert query(prometheus, "count(fragscope_pseudo_oom_suspected == 1)") == []
        assert [where for where, _ in pager.seen if where == "/page"] == []
        with urllib.request.urlopen(f"http://127.0.0.1:{alertmanager}/api/v2/alerts", timeout=5) as answer:
            active = {alert["labels"]["alertname"] for alert in json.load(answer)}
        assert active <= {"FragscopeAdmissionLimit"}


def test_inhibition_is_per_engine_and_never_across_targets(tmp_path: Path) -> None:
    with paging() as (pager, webhook), stack(tmp_path, free_port(), webhook) as (_, alertmanager):
        base = f"http://127.0.0.1:{alertmanager}/api/v2"
        wait("Alertmanager", lambda: urllib.request.urlopen(f"{base}/status", timeout=2).read(), 20)
        for name, target in (
            ("FragscopePseudoOOMConfirmed", "a"),
            ("FragscopeEngineDown", "a"),
            ("FragscopePseudoOOMSuspected", "a"),
            ("FragscopePseudoOOMSuspected", "b"),
            ("FragscopeEvidenceMissing", "a"),
            ("FragscopeEvidenceMissing", "b"),
        ):
            labels = {
                "alertname": name,
                "component": "fragscope",
                "severity": "warning",
                "namespace": "p",
                "pod": f"{target}-0",
            }
            body = [{"labels": {**labels, "container": "vllm", "target": target, "engine": "0"}}]
            request = urllib.request.Request(
                f"{base}/alerts", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
            )
            urllib.request.urlopen(request, timeout=5).read()
        wait("the page of b", lambda: pager.alerts("/page", "FragscopePseudoOOMSuspected", "firing"), 20)
        time.sleep(3)
        told = {
            (alert["labels"]["alertname"], alert["labels"]["target"])
            for _, body in pager.seen
            for alert in body["alerts"]
        }
    assert told == {
        ("FragscopePseudoOOMConfirmed", "a"),
        ("FragscopeEngineDown", "a"),
        ("FragscopePseudoOOMSuspected", "b"),
        ("FragscopeEvidenceMissing", "b"),
    }
