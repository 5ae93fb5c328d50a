"""The demo and a real Prometheus that scrapes it and its simulated vLLM: for the dashboard's picture and its tests."""

import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
scrape_configs:
  - job_name: fragscope
    static_configs: [{{targets: ["127.0.0.1:{fragscope}"]}}]
  - job_name: vllm
    static_configs: [{{targets: ["{vllm}"]}}]
"""
_READY_S = 30


def free_port() -> int:
    """A port nobody listens on at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@contextmanager
def demo(scenario: str, speed: float, port: int) -> Iterator[str]:
    """Runs `fragscope demo`; yields host and port of its simulated vLLM."""
    command = [sys.executable, "-u", "-m", "fragscope", "demo", "--scenario", scenario, "--speed", f"{speed:g}"]
    command += ["--web.listen-address", f"127.0.0.1:{port}", "--format", "text"]
    with tempfile.NamedTemporaryFile("w") as out, _ending(subprocess.Popen(command, stdout=out)) as process:  # noqa: S603
        deadline = time.monotonic() + _READY_S
        while process.poll() is None and time.monotonic() < deadline:
            found = re.search(r"simulated vLLM\s+http://([^/\s]+)/metrics", Path(out.name).read_text())
            if found:
                yield found[1]
                return
            time.sleep(0.1)
        raise RuntimeError("the demo did not say where its simulated vLLM is")


@contextmanager
def prometheus(fragscope: int, vllm: str, *flags: str) -> Iterator[str]:
    """Runs Prometheus over both, with more flags; yields its address once it is ready."""
    if shutil.which("prometheus") is None:
        raise RuntimeError("prometheus is not installed (apt)")
    with tempfile.TemporaryDirectory(prefix="fragscope-prometheus-") as folder:
        (Path(folder) / "prometheus.yml").write_text(_CONFIG.format(fragscope=fragscope, vllm=vllm))
        with serving(Path(folder), *flags) as address:
            yield address


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[str]:
    """Runs Prometheus on a folder with its prometheus.yml and tsdb; yields its address once it is ready."""
    port = free_port()
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error", *flags]
    with _ending(subprocess.Popen(command)):  # noqa: S603 - fixed arguments
        address = f"http://127.0.0.1:{port}"
        _wait_until_ready(address)
        yield address


@contextmanager
def running(scenario: str = "pseudo-oom", speed: float = 20.0) -> Iterator[str]:
    """Both; yields the address of Prometheus."""
    port = free_port()
    with demo(scenario, speed, port) as vllm, prometheus(port, vllm) as address:
        yield address


@contextmanager
def _ending(process: "subprocess.Popen[bytes]") -> Iterator["subprocess.Popen[bytes]"]:
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(address: str) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{address}/-/ready", timeout=2):  # noqa: S310 - loopback
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("Prometheus did not become ready")
