"""Which processes are an engine's: found by what they are called, told apart by where they listen.

A process says so itself (`vllm serve`, `-m vllm...`, the titles `VLLM::...`). With it come its descendants and,
where one container holds one engine, the container's other processes (Ray workers do not descend from it).
Another engine's are told apart by the network that it lives in (a target on the loopback is one whose listening
socket is seen from there and from here, another address one that is local there), and by the port: the engine
holds the socket that listens on it, or names it on its command line. A neighbour on the same address, left over
when the target has died, does neither.
"""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

from fragscope.model import Gap, Part, Reason

_TITLE = "VLLM::"
_MODULE = re.compile(r"vllm(\..+)?")
_COMMANDS = ("vllm", "vllm.entrypoints.cli.main")
"""Modules that take the words of the `vllm` program."""
_BENCHMARKS = "vllm.benchmarks"
_CONTAINER = re.compile(r"[0-9a-f]{64}")
_LOCAL_ROUTE = re.compile(r"\|-- (\S+)\s+/32 host LOCAL")
_LISTENING = "0A"
_DEFAULT_PORT = 8000
_LOOPBACK = ("localhost", "::1")


@dataclass(frozen=True, slots=True)
class Process:
    """One process as /proc shows it."""

    pid: int
    parent: int
    arguments: tuple[str, ...]


@dataclass(slots=True)
class _Engine:
    """The processes of one engine; `root` is the first of them.

    `port` is what its command line says, the default of a server that says none, else None. `port_said` is False
    for the default.
    """

    root: int
    pids: set[int] = field(default_factory=set)
    port: int | None = None
    port_said: bool = False


def processes(proc_root: Path) -> dict[int, Process]:
    """Everything that can be seen."""
    try:
        pids = [int(path.name) for path in proc_root.iterdir() if path.name.isdigit()]
    except OSError:
        return {}
    found = (_process(proc_root / str(pid), pid) for pid in pids)
    return {process.pid: process for process in found if process is not None}


def _process(folder: Path, pid: int) -> Process | None:
    try:
        arguments = (folder / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
        # The name stands in parentheses and may hold any character.
        parent = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return Process(pid, parent, tuple(arguments) if arguments != [""] else ())


def says_vllm(arguments: tuple[str, ...]) -> bool:
    """Whether a command line is an engine of vLLM's, and not its client or one that only speaks of it."""
    if not arguments:
        return False
    if arguments[0].startswith(_TITLE):
        return True
    names = [argument.rsplit("/", 1)[-1] for argument in arguments]
    if "vllm" in names[:2] and (names[0] == "vllm" or names[0].startswith("python")):
        return _serves(arguments[names.index("vllm") + 1 :])
    for i, (option, module) in enumerate(pairwise(arguments)):
        if option == "-m" and _MODULE.fullmatch(module):
            return _serves(arguments[i + 2 :]) if module in _COMMANDS else not module.startswith(_BENCHMARKS)
    return False


def _serves(words: tuple[str, ...]) -> bool:
    """`vllm serve`, and neither `vllm bench serve` nor another client."""
    return words[:1] == ("serve",)


def alone(seen: Iterable[Process], own_pid: int) -> bool:
    """Whether nothing can be seen but ourselves: the PID namespace is not shared."""
    return not any(
        process.arguments and process.pid != own_pid and not any("fragscope" in word for word in process.arguments[:4])
        for process in seen
    )


def own_pid(proc_root: Path) -> int:
    """Our own id as that /proc shows it; 0 where it does not show us."""
    try:
        return int((proc_root / "self").readlink().name)
    except (OSError, ValueError):
        return 0


def engine_pids(proc_root: Path, url: str) -> frozenset[int] | Gap:
    """The processes of the engine that answers at `url`, or why they cannot be told."""
    seen = processes(proc_root)
    engines = _engines(proc_root, seen)
    if not engines:
        if alone(seen.values(), own_pid(proc_root)):
            return Gap(Part.GPU, Reason.BLIND, "no process but our own is visible: the PID namespace is not shared")
        return Gap(Part.GPU, Reason.ABSENT, "no vLLM process is visible")
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    near = [engine for engine in engines if _lives_at(proc_root, engine, host, port)]
    here = _answering(proc_root, near, port)
    if not here:
        detail = f"{len(engines)} vLLM visible, but none that is known to answer at {host}:{port}"
        return Gap(Part.GPU, Reason.UNASSIGNED, detail)
    if len(here) > 1:
        return Gap(Part.GPU, Reason.UNASSIGNED, f"{len(here)} vLLM are visible that could answer at {host}:{port}")
    return frozenset(here[0].pids)


def _answering(proc_root: Path, near: list[_Engine], port: int) -> list[_Engine]:
    """Those that hold the socket listening on the port, else those that name the port.

    A server that names none has vLLM's default, unless the socket is seen to be somebody else's.
    """
    holding = {engine.root: _holds(proc_root, engine, port) for engine in near}
    holders = [engine for engine in near if holding[engine.root]]
    if holders:
        return holders
    naming = [engine for engine in near if engine.port == port]
    return [engine for engine in naming if engine.port_said or holding[engine.root] is None]


def _holds(proc_root: Path, engine: _Engine, port: int) -> bool | None:
    """Whether one of its processes has the listening socket open; None where there is none, or no look inside."""
    wanted = {f"socket:[{inode}]" for inode in _sockets(proc_root / str(engine.root) / "net", port)}
    hidden = not wanted
    for pid in sorted(engine.pids) if wanted else ():
        try:
            with os.scandir(proc_root / str(pid) / "fd") as links:
                if any(_target(link) in wanted for link in links):
                    return True
        except FileNotFoundError:
            continue  # it has ended
        except OSError:
            hidden = True
    return None if hidden else False


def _target(link: "os.DirEntry[str]") -> str:
    try:
        return os.readlink(link.path)  # noqa: PTH115 - a worker has hundreds of descriptors
    except OSError:
        return ""


def _engines(proc_root: Path, seen: dict[int, Process]) -> list[_Engine]:
    speaking = {pid for pid, process in seen.items() if says_vllm(process.arguments)}
    engines: dict[int, _Engine] = {}
    for pid in seen:
        root = _root(pid, seen, speaking)
        if root is not None:
            engines.setdefault(root, _Engine(root)).pids.add(pid)
    containers: dict[str, list[_Engine]] = {}
    for engine in engines.values():
        _read_port(engine, seen)
        container = _container(proc_root, engine.root)
        if container is not None:
            containers.setdefault(container, []).append(engine)
    _add_container_mates(proc_root, seen, containers)
    return list(engines.values())


def _read_port(engine: _Engine, seen: dict[int, Process]) -> None:
    """The port on the command lines, the first process's before the others'.

    A title (`VLLM::...`) replaces the command line and says no port, and a file of settings may: then it is unknown.
    """
    lines = [seen[pid].arguments for pid in sorted(engine.pids, key=lambda pid: (pid != engine.root, pid))]
    said = next((port for line in lines for port in _ports(line)), None)
    if said is not None:
        engine.port, engine.port_said = said, True
    elif not any(word.startswith(("--config", _TITLE)) for word in lines[0]):
        engine.port = _DEFAULT_PORT


def _root(pid: int, seen: dict[int, Process], speaking: set[int]) -> int | None:
    """The highest ancestor (or the process itself) that says vLLM; None where there is none."""
    root, at, steps = None, pid, 0
    while at in seen and steps < 64:
        if at in speaking:
            root = at
        at, steps = seen[at].parent, steps + 1
    return root


def _add_container_mates(proc_root: Path, seen: dict[int, Process], containers: dict[str, list[_Engine]]) -> None:
    single = {container: engines[0] for container, engines in containers.items() if len(engines) == 1}
    if not single:
        return
    for pid, process in seen.items():
        container = _container(proc_root, pid) if process.arguments else None
        if container in single:
            single[container].pids.add(pid)


def _container(proc_root: Path, pid: int) -> str | None:
    """The id of the container that a process lives in, from its cgroup; a session's cgroup says nothing."""
    try:
        found = _CONTAINER.findall((proc_root / str(pid) / "cgroup").read_text(errors="replace"))
    except OSError:
        return None
    return found[-1] if found else None


def _ports(arguments: tuple[str, ...]) -> Iterator[int]:
    for i, argument in enumerate(arguments):
        value = argument.removeprefix("--port=") if argument.startswith("--port=") else None
        if argument == "--port" and i + 1 < len(arguments):
            value = arguments[i + 1]
        if value is not None and value.isdigit():
            yield int(value)


def _lives_at(proc_root: Path, engine: _Engine, host: str, port: int) -> bool:
    there = proc_root / str(engine.root) / "net"
    if host in _LOOPBACK or host.startswith("127."):
        return bool(_sockets(there, port) & _sockets(proc_root / "self" / "net", port))
    try:
        routes = (there / "fib_trie").read_text(errors="replace")
    except OSError:
        return False
    return host in _LOCAL_ROUTE.findall(routes)


def _sockets(net: Path, port: int) -> frozenset[str]:
    """The inodes of the sockets that listen on a port, as one network namespace shows them."""
    return frozenset(inode for name in ("tcp", "tcp6") for inode in _listening(net / name, f":{port:04X}"))


def _listening(path: Path, suffix: str) -> Iterator[str]:
    try:
        lines = path.read_text(errors="replace").splitlines()[1:]
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if len(fields) > 9 and fields[1].endswith(suffix) and fields[3] == _LISTENING:
            yield fields[9]
