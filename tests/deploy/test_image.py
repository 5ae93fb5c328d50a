# ruff: noqa: T201 - figures for whoever reads the log
"""The image, built and run for real: as the non-root user, read-only, without privilege, in 128 MiB."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.containers import BASE, IMAGE, Engine, missing, page, wait_until_ready
from tests.servers import answering, serving
from tests.servers import page as fixed_page
from tests.sources.test_bad_input import GOOD
from tests.sources.test_sysfs import add_card
from tests.test_prometheus import free_port

LIMIT_BYTES = 128 * 2**20
LAYERS_BYTES = 100 * 10**6
EVERY_S = 2.0

reason = missing()
pytestmark = pytest.mark.skipif(reason is not None, reason=reason or "")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine()
    try:
        began = time.monotonic()
        made.build()
        print(f"\nimage built in {time.monotonic() - began:.1f} s")
        yield made
    finally:
        made.remove()


def listening(url: str = "") -> tuple[str, dict[str, str]]:
    """An address on the loopback, and the variables that make the daemon use it and watch nothing that runs."""
    address = f"127.0.0.1:{free_port()}"
    url = url or f"http://127.0.0.1:{free_port()}"
    return address, {"FRAGSCOPE_WEB_LISTEN_ADDRESS": address, "FRAGSCOPE_TARGETS__0__URL": url}


HOST = ("--network=host", "--no-healthcheck")


def test_our_layers_stay_below_a_hundred_megabytes(engine: Engine) -> None:
    ours = engine.size(IMAGE) - engine.size(BASE)
    print(f"\nour layers: {ours / 1e6:.1f} MB uncompressed")
    assert 0 < ours < LAYERS_BYTES


def test_it_says_what_it_is(engine: Engine) -> None:
    (image,) = json.loads(engine("podman", "image", "inspect", IMAGE))
    labels, config = image["Labels"], image["Config"]
    for name in ("title", "description", "version", "source"):
        assert labels[f"org.opencontainers.image.{name}"]
    assert config["User"] == "65532:65532"
    assert config["ExposedPorts"] == {"23724/tcp": {}}
    assert config["Entrypoint"] == ["/opt/fragscope/bin/fragscope"]


def test_it_serves_against_nothing_without_any_privilege(engine: Engine) -> None:
    address, variables = listening()
    began = time.monotonic()
    with engine.running(*HOST, variables=variables) as container:
        wait_until_ready(address)
        print(f"\nready {time.monotonic() - began:.1f} s after `podman run`")
        assert "fragscope_build_info" in page(f"http://{address}/metrics")
        status = container.status()
        assert status["Uid"].split() == ["65532"] * 4
        assert int(status["CapEff"], 16) == 0
        assert status["NoNewPrivs"] == "1"
        assert status["Seccomp"] == "2"
        assert container.stop_s() < 5
        assert container.inspect(".State.ExitCode") == "0"


def test_its_root_is_read_only_and_it_needs_no_shell_or_pip(engine: Engine) -> None:
    _, variables = listening()
    with engine.running(*HOST, variables=variables) as container:
        write = ("/opt/fragscope/bin/python", "-c", "open('/opt/fragscope/x', 'w')")
        assert engine("podman", "exec", container.name, *write, check=False) == ""
        tried = (
            "/opt/fragscope/bin/python",
            "-c",
            "import errno\ntry: open('/x', 'w')\nexcept OSError as e: print(e.errno)",
        )
        assert engine("podman", "exec", container.name, *tried) == "30", "EROFS"
        pip = ("/opt/fragscope/bin/python", "-c", "import importlib.util as u; print(u.find_spec('pip'))")
        assert engine("podman", "exec", container.name, *pip) == "None"


def test_its_healthcheck_succeeds_on_the_default_port(engine: Engine) -> None:
    with engine.running("--network=none", variables={}) as container:
        deadline = time.monotonic() + 30
        while engine("podman", "healthcheck", "run", container.name, check=False) != "":
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert container.inspect(".State.Running") == "true"


@pytest.mark.parametrize("command", [("serve",), ("demo", "--scenario", "healthy")])
def test_sigterm_ends_it_as_process_1(engine: Engine, command: tuple[str, ...]) -> None:
    address, variables = listening()
    options: tuple[str, ...] = HOST
    if command[0] == "demo":  # it keeps its simulated card in files
        command, variables, options = (*command, "--web.listen-address", address), {}, (*HOST, "--tmpfs=/tmp")
    with engine.running(*options, variables=variables, command=command) as container:
        wait_until_ready(address)
        took = container.stop_s()
        print(f"\n{command[0]} stopped in {took:.1f} s")
        assert took < 5
        assert container.inspect(".State.ExitCode") == "0"


def test_it_watches_one_target_within_the_limits_of_the_manifest(engine: Engine, tmp_path: Path, soak_s: float) -> None:
    """50m of CPU and 128 MiB, scraped more often than a Prometheus would: it starts, answers and stays small."""
    add_card(tmp_path, 1, "0000:c1:00.0")
    tmp_path.chmod(0o755)
    with serving(answering({"/metrics": fixed_page(GOOD.encode()), "/health": fixed_page(b"")})) as url:
        address, variables = listening(url)
        options = (*HOST, "--cpus=0.05", f"--volume={tmp_path}:{tmp_path}:ro", "--volume=/var/lib/fragscope")
        variables |= {"FRAGSCOPE_SYSFS_ROOT": str(tmp_path), "FRAGSCOPE_STATE_DIR": "/var/lib/fragscope"}
        began = time.monotonic()
        with engine.running(*options, variables=variables) as container:
            wait_until_ready(address)
            started, slowest, text = time.monotonic() - began, 0.0, ""
            until = time.monotonic() + soak_s
            while time.monotonic() < until:
                asked = time.monotonic()
                text = page(f"http://{address}/metrics")
                slowest = max(slowest, time.monotonic() - asked)
                time.sleep(EVERY_S)
            status, peak = container.status(), container.peak_bytes()
            listing = "import os; print(os.listdir('/var/lib/fragscope'))"
            kept = engine("podman", "exec", container.name, "/opt/fragscope/bin/python", "-S", "-c", listing)
            resident, most = (int(status[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
            took = container.stop_s()
            print(
                f"\nat 50m of CPU: ready after {started:.1f} s; slowest scrape in {soak_s:.0f} s {slowest:.2f} s; "
                f"resident {resident:.1f} MiB, at most {most:.1f}; cgroup at most {peak / 2**20:.1f} MiB; "
                f"stopped in {took:.1f} s"
            )
            assert 'fragscope_engine_up{target="vllm"} 1.0' in text
            assert 'fragscope_evidence_available{evidence="gpu",target="vllm"} 1.0' in text
            assert container.inspect(".State.OOMKilled") == "false"
            assert kept != "[]", "an unprivileged user writes into a fresh volume"
    assert peak < LIMIT_BYTES * 0.9
    assert slowest < 5
    assert took < 5
