"""What the running daemon costs: resident memory, and its share of a core."""

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.figure import Figure
from bench.neighbour import neighbour
from bench.recorded_pages import Recorded, born
from fragscope.serve.clock import Clock
from fragscope.serve.gpu_feed import GpuFeed

_PATIENCE_S = 30.0
_AGE_S = 3600.0
_SETTLED_S = 5.0
_PAGES = ("/metrics", "/", "/api/v1/verdicts", "/api/v1/targets")
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class _Daemon:
    """A running `fragscope serve`."""

    pid: int
    url: str

    def resident_mib(self) -> float:
        """VmRSS."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1]) / 1024

    def cpu_s(self) -> float:
        """User and system time of all its threads, to a hundredth of a second."""
        after_name = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(after_name[11]) + int(after_name[12])) / _TICKS_A_SECOND

    def scrape(self) -> None:
        """Asks for every page once, as a Prometheus and a person would."""
        for path in _PAGES:
            with urllib.request.urlopen(self.url + path, timeout=_PATIENCE_S) as answer:  # noqa: S310 - our own
                answer.read()


@contextmanager
def _daemon(engine_url: str, sysfs_root: Path, interval_s: float) -> Iterator[_Daemon]:
    command = [sys.executable, "-m", "fragscope", "serve", "--target", engine_url, "--interval", f"{interval_s:g}"]
    command += ["--web.listen-address", "127.0.0.1:0"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FRAGSCOPE_")}
    environment |= {"FRAGSCOPE_SYSFS_ROOT": str(sysfs_root), "FRAGSCOPE_GPU_SOURCES": "sysfs"}
    # Opened to append, since it shares its position with the daemon.
    with tempfile.TemporaryFile("a+") as said:
        process = subprocess.Popen(command, env=environment, stderr=said)
        try:
            _wait(lambda: _address(said) is not None or process.poll() is not None, "fragscope serve does not start")
            address = _address(said)
            if address is None:
                raise SystemExit(f"bench: fragscope serve ended with {process.poll()}")
            yield _Daemon(process.pid, f"http://{address}")
        finally:
            process.terminate()
            process.wait(_PATIENCE_S)


def _address(said: Any) -> str | None:
    said.seek(0)
    events = [json.loads(line) for line in said if line.startswith("{") and line.endswith("}\n")]
    return next((event["address"] for event in events if "address" in event), None)


def _wait(done: Callable[[], bool], otherwise: str, seconds: float = _PATIENCE_S) -> None:
    until = time.monotonic() + seconds
    while not done():
        if time.monotonic() > until:
            raise TimeoutError(otherwise)
        time.sleep(0.05)


def memory_figure(pages: Recorded, sysfs_root: Path, samples: int) -> Figure:
    """Resident memory after so many samples, taken ten times as fast as the second apart that they stand for."""
    pages = born(pages, time.time() - _AGE_S)
    with neighbour(pages.texts, sysfs_root) as server, _daemon(server.url, sysfs_root, 0.1) as daemon:
        _wait(lambda: server.pages_served() >= samples, "too few polls", _PATIENCE_S + samples)
        daemon.scrape()
        resident = daemon.resident_mib()
    what = f"serve: resident memory, {samples} samples"
    return Figure(what, resident, "MiB", most=64.0)


def share_figures(pages: Recorded, sysfs_root: Path, share_s: float, feed_s: float) -> list[Figure]:
    """The daemon's share of one core at an interval of a second, and that of its GPU feed alone."""
    pages = born(pages, time.time() - _AGE_S)
    with neighbour(pages.texts, sysfs_root) as server:
        with _daemon(server.url, sysfs_root, 1.0) as daemon:
            _wait(lambda: server.pages_served() >= 3, "too few polls")
            time.sleep(min(_SETTLED_S, share_s / 2))
            began_s, began_at = daemon.cpu_s(), time.monotonic()
            time.sleep(share_s)
            share = (daemon.cpu_s() - began_s) / (time.monotonic() - began_at)
        feed = _feed_share(sysfs_root, feed_s)
    return [
        Figure(f"serve: share of a core, over {share_s:g} s", 100 * share, "%", most=1.0),
        Figure(f"  the GPU feed alone, over {feed_s:g} s", 100 * feed, "%", most=0.3),
    ]


def _feed_share(sysfs_root: Path, seconds: float) -> float:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_feed, args=(sysfs_root, seconds, theirs), daemon=True)
    child.start()
    if not ours.poll(_PATIENCE_S + seconds):
        raise TimeoutError("the GPU feed says nothing")
    share: float = ours.recv()
    child.join(_PATIENCE_S)
    return share


def _feed(sysfs_root: Path, seconds: float, pipe: Any) -> None:
    stop = threading.Event()
    feed = GpuFeed(sysfs_root, 20.0, Clock(), stop)
    feed.start()
    time.sleep(0.5)
    began_s, began_at = time.process_time(), time.monotonic()
    time.sleep(seconds)
    share = (time.process_time() - began_s) / (time.monotonic() - began_at)
    if not feed.take().readings:
        raise SystemExit("bench: the GPU feed read nothing")
    stop.set()
    pipe.send(share)
