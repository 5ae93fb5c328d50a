"""Real containers without an engine or a registry: buildah, podman and runc, on a base made of Debian's debs."""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.paths import REPOSITORY

BASE = "localhost/pybase:ci"
IMAGE = "localhost/fragscope:ci"
BASE_PYTHON = "3.11"
"""What .ci/mkbase.sh unpacks: Debian 12's."""

HARDENED = ("--read-only", "--read-only-tmpfs=false", "--cap-drop=all", "--security-opt=no-new-privileges")
CONTEXT = ("Dockerfile", ".dockerignore", "pyproject.toml", "README.md", "src")


def missing() -> str | None:
    """Why no container can be built and run here."""
    tools = [name for name in ("buildah", "podman", "runc", "netavark", "dpkg-deb", "apt-get") if not _found(name)]
    if tools:
        return f"{', '.join(tools)} not installed (apt install buildah podman runc netavark)"
    return None if os.geteuid() == 0 else "not root"


def _found(name: str) -> bool:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/usr/lib/podman") is not None


@dataclass(frozen=True)
class Engine:
    """An image store of its own; short, since podman refuses run roots of more than 50 characters."""

    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="fs", dir="/tmp")))

    def __call__(self, tool: str, *arguments: str, check: bool = True) -> str:
        store = ["--storage-driver=overlay", f"--root={self.folder}/root", f"--runroot={self.folder}/run"]
        environment = {**os.environ, "CONTAINERS_CONF": str(REPOSITORY / ".ci" / "containers.conf")}
        made = subprocess.run(
            [tool, *store, *arguments], check=False, capture_output=True, text=True, timeout=300, env=environment
        )
        assert not check or made.returncode == 0, f"{tool} {arguments}: {made.stdout}\n{made.stderr}"
        return made.stdout.strip()

    def build(self) -> None:
        """The image, by the means of a machine without network: a base from debs, dependencies from wheels."""
        archive, context = self.folder / "base.tar", self.folder / "context"
        _run(["sh", str(REPOSITORY / ".ci" / "mkbase.sh"), str(archive)])
        self("podman", "import", "--quiet", str(archive), BASE)
        context.mkdir()
        for name in CONTEXT:
            source = REPOSITORY / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, context / name)
        _wheels(context)
        self(
            "buildah", "bud", "--format=docker", "--layers=false", "--isolation=chroot", "--network=host",
            f"--build-arg=BASE={BASE}", f"--tag={IMAGE}", str(context),
        )  # fmt: skip

    def size(self, image: str) -> int:
        """Bytes of all its layers, uncompressed."""
        return int(self("podman", "image", "inspect", "--format={{.Size}}", image))

    @contextmanager
    def running(
        self, *options: str, variables: Mapping[str, str], command: Sequence[str] = ()
    ) -> Iterator["Container"]:
        """A container as Kubernetes would run it: no privilege, nothing writable, 128 MiB."""
        given = [f"--env={name}={value}" for name, value in variables.items()]
        name = self(
            "podman", "run", "--detach", "--memory=128m", "--memory-swap=128m", *HARDENED, *options, *given, IMAGE,
            *command,
        )  # fmt: skip
        try:
            yield Container(self, name)
        finally:
            self("podman", "rm", "--force", "--time=10", name, check=False)

    def remove(self) -> None:
        """Everything in the store."""
        self("podman", "rmi", "--all", "--force", check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class Container:
    """One that runs."""

    engine: Engine
    name: str

    def inspect(self, what: str) -> str:
        return self.engine("podman", "inspect", "--format={{" + what + "}}", self.name)

    def status(self) -> dict[str, str]:
        """What the kernel says of its process."""
        lines = Path(f"/proc/{self.inspect('.State.Pid')}/status").read_text().splitlines()
        return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}

    def peak_bytes(self) -> int:
        """The most memory that its cgroup ever held, page cache included (version 1 or 2)."""
        for line in Path(f"/proc/{self.inspect('.State.Pid')}/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            for file in (
                Path(f"/sys/fs/cgroup/memory{path}/memory.max_usage_in_bytes"),
                Path(f"/sys/fs/cgroup{path}/memory.peak"),
            ):
                if kinds in ("memory", "") and file.is_file():
                    return int(file.read_text())
        raise AssertionError("no memory cgroup")

    def stop_s(self) -> float:
        """Seconds from SIGTERM to its end; Kubernetes would kill it after 30."""
        began = time.monotonic()
        self.engine("podman", "stop", "--time=20", self.name)
        return time.monotonic() - began


def page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def wait_until_ready(address: str, patience_s: float = 180) -> None:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            page(f"http://{address}/-/ready")
        except OSError:
            assert time.monotonic() < deadline, "never ready"
            time.sleep(0.1)
        else:
            return


def _run(command: Sequence[str]) -> None:
    made = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    if made.returncode != 0:
        pytest.fail(f"{command}: {made.stdout}\n{made.stderr}")


def _wheels(context: Path) -> None:
    """Ours and its dependencies for the base's Python, whichever Python runs the tests."""
    folder, pip = context / "wheels", [sys.executable, "-m", "pip", "--quiet"]
    _run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(REPOSITORY)])
    (own,) = folder.glob("fragscope-*.whl")
    platforms = [f"--platform=manylinux_2_{minor}_{platform.machine()}" for minor in (36, 34, 28, 17)]
    _run([*pip, "download", "--only-binary=:all:", f"--python-version={BASE_PYTHON}", "--implementation=cp", *platforms,
          f"--platform=manylinux2014_{platform.machine()}", "--dest", str(folder), str(own)])  # fmt: skip
