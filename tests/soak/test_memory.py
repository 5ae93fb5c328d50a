"""The daemon's memory does not grow with time: twenty seconds in the suite, ten minutes by hand."""

import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tests.servers import answering, page, serving
from tests.sources.test_bad_input import GOOD
from tests.sources.test_sysfs import add_card

LIMIT_BYTES = 64 * 2**20
GROWTH_BYTES = 4 * 2**20


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def test_memory_stays_where_it_is(tmp_path: Path, soak_s: float) -> None:
    add_card(tmp_path, 1, "0000:c1:00.0")
    with serving(answering({"/metrics": page(GOOD.encode()), "/health": page(b"")})) as url:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "fragscope", "serve", "--target", url, "--interval", "0.1",
             "--web.listen-address", "127.0.0.1:0"],
            stderr=subprocess.PIPE,
            text=True,
            env={"FRAGSCOPE_SYSFS_ROOT": str(tmp_path), "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        assert daemon.stderr is not None
        port = json.loads(daemon.stderr.readline())["address"].rpartition(":")[2]
        began, sizes = time.monotonic(), []
        while time.monotonic() - began < soak_s:
            for _ in range(5):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read()
            time.sleep(1)
            sizes.append(resident_bytes(daemon.pid))
        daemon.send_signal(signal.SIGTERM)
        daemon.communicate(timeout=10)
    warm = sizes[len(sizes) // 4]
    print(f"resident: {warm / 2**20:.1f} MiB warm, {sizes[-1] / 2**20:.1f} MiB after {soak_s:.0f} s")
    assert sizes[-1] < LIMIT_BYTES
    assert sizes[-1] - warm < GROWTH_BYTES
