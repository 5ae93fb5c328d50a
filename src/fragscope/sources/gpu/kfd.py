"""KFD, the compute half of the amdgpu driver: VRAM per process, and the partitions of a GPU.

The files under `kfd/proc` are world-readable counters, named by the process ids of the host. Only `vram_*` is
read there: `sdma_*` schedules work in the process that it asks about, `stats_*` touches the hardware. The
topology is closed (EPERM) for every GPU whose render node the container's device cgroup denies.
"""

import errno
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from fragscope.model import Gap, Part, Reason
from fragscope.sources.gpu.device import Partition
from fragscope.sources.gpu.holdings import HELD_BYTES, Held

NAME = "kfd"
_FOLDER = Path("class/kfd/kfd")
_VRAM = re.compile(r"vram_([0-9]+)")
_MOST_BYTES = 2**50
"""A number above a pebibyte is no memory of a GPU."""
_DENIED = (errno.EACCES, errno.EPERM)


@dataclass(frozen=True, slots=True)
class Node:
    """One GPU, or one partition of it, as KFD lists it; `gpu` is the PCI address of the physical GPU."""

    gpu: str
    kfd_id: int
    partition: int
    render: str | None
    total_bytes: int | None
    used_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Topology:
    """The GPU nodes that can be read, and why others cannot."""

    nodes: tuple[Node, ...] = ()
    gaps: tuple[Gap, ...] = ()

    def partitions(self) -> dict[str, tuple[Partition, ...]]:
        """The parts of each GPU that is split, where their size can be read; whole GPUs are left out."""
        by_gpu: dict[str, list[Partition]] = {}
        for node in sorted(self.nodes, key=lambda node: (node.gpu, node.partition)):
            if node.total_bytes:
                by_gpu.setdefault(node.gpu, []).append(Partition(node.partition, node.total_bytes, node.used_bytes))
        return {gpu: tuple(parts) for gpu, parts in by_gpu.items() if len(parts) > 1}

    def gpu_of_render(self) -> dict[str, str]:
        """Which GPU a render node belongs to, partitions included."""
        return {node.render: node.gpu for node in self.nodes if node.render is not None}


def read_topology(root: Path, known: Collection[str] = ()) -> Topology:
    """The GPU nodes under `root` (normally /sys); `known` are the PCI addresses that exist."""
    folder = root / _FOLDER / "topology" / "nodes"
    try:
        names = sorted((path.name for path in folder.iterdir() if path.name.isdigit()), key=int)
    except OSError as error:
        return Topology(gaps=(_gap(error, f"{folder} cannot be listed"),))
    nodes: list[Node] = []
    gaps: list[Gap] = []
    for name in names:
        found = _node(folder / name, known)
        if isinstance(found, Node):
            nodes.append(found)
        elif found is not None:
            gaps.append(found)
    return Topology(tuple(nodes), tuple(gaps))


def _node(folder: Path, known: Collection[str]) -> Node | Gap | None:
    kfd_id = _number(folder / "gpu_id")
    if isinstance(kfd_id, Gap):
        return kfd_id
    if kfd_id == 0:
        return None  # a CPU
    properties = _properties(folder / "properties")
    if isinstance(properties, Gap):
        return properties
    if "location_id" not in properties:
        return Gap(Part.GPU, Reason.MALFORMED, f"{folder}/properties holds no location_id")
    gpu, partition = _place(properties, known)
    minor = properties.get("drm_render_minor", 0)
    bank = _properties(folder / "mem_banks" / "0" / "properties")
    total = None if isinstance(bank, Gap) else bank.get("size_in_bytes")
    used = _number(folder / "mem_banks" / "0" / "used_memory")
    return Node(
        gpu, kfd_id, partition, f"renderD{minor}" if minor > 0 else None, total, None if isinstance(used, Gap) else used
    )


def _place(properties: dict[str, int], known: Collection[str]) -> tuple[str, int]:
    """(PCI address of the physical GPU, partition): in bits 31:28, on older kernels in the function's bits."""
    where = properties["location_id"]
    partition, function = where >> 28 & 0xF, where & 0x7
    head = f"{properties.get('domain', 0):04x}:{where >> 8 & 0xFF:02x}:{where >> 3 & 0x1F:02x}"
    if f"{head}.{function}" in known or function == 0:
        return f"{head}.{function}", partition
    return f"{head}.0", partition or function


def host_pids_visible(proc_root: Path) -> bool:
    """Whether the processes under `proc_root` carry the host's ids: kernel threads live nowhere else."""
    try:
        return (proc_root / "2" / "comm").read_text().strip() == "kthreadd"
    except OSError:
        return False


def why_not(root: Path, proc_root: Path) -> Gap | None:
    """A cheap look: None where per-process memory can be read and belongs to processes that can be named."""
    folder = root / _FOLDER / "proc"
    if not folder.is_dir():
        return Gap(Part.GPU, Reason.ABSENT, f"{folder} is not there: no AMD compute driver")
    if not host_pids_visible(proc_root):
        detail = "KFD names processes by the host's ids, which this PID namespace does not show (hostPID: true does)"
        return Gap(Part.GPU, Reason.BLIND, detail)
    return None


def read_held(root: Path, pids: Collection[int], topology: Topology) -> Held | Gap:
    """VRAM of these processes (ids of the host) by GPU; a gap where none of them computes or a GPU has no name."""
    gpus = {node.kfd_id: node.gpu for node in topology.nodes}
    held: dict[str, int] = {}
    nameless: list[int] = []
    computing = False
    for pid in sorted(pids):
        for kfd_id, size in _process(root / _FOLDER / "proc" / str(pid)):
            computing = True
            if isinstance(size, Gap):
                return size
            if kfd_id in gpus:
                held[gpus[kfd_id]] = held.get(gpus[kfd_id], 0) + size
            elif size >= HELD_BYTES:
                nameless.append(kfd_id)
    if nameless:
        why = topology.gaps[0].detail if topology.gaps else "the topology does not list it"
        return Gap(Part.GPU, Reason.DENIED, f"KFD GPU {nameless[0]} has no address here: {why}")
    if not computing:
        return Gap(Part.GPU, Reason.ABSENT, "none of the engine's processes uses KFD")
    return Held(NAME, held, frozenset(held))


def _process(folder: Path) -> Iterator[tuple[int, int | Gap]]:
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return  # it does not compute, or has ended
    for name in sorted(names):
        match = _VRAM.fullmatch(name)
        if match is None:
            continue
        size = _number(folder / name)
        if isinstance(size, Gap) and size.reason is Reason.ABSENT:
            continue
        yield int(match[1]), size


def _properties(path: Path) -> dict[str, int] | Gap:
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        return _gap(error, f"{path} cannot be read")
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and _is_size(pair[1])}


def _number(path: Path) -> int | Gap:
    try:
        text = path.read_text(errors="replace").strip()
    except OSError as error:
        return _gap(error, f"{path} cannot be read")
    if not _is_size(text):
        return Gap(Part.GPU, Reason.MALFORMED, f"{path} holds {text[:20]!r}, not a number of bytes")
    return int(text)


def _is_size(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20 and int(text) < _MOST_BYTES


def _gap(error: OSError, what: str) -> Gap:
    reason = Reason.DENIED if error.errno in _DENIED else Reason.ABSENT
    return Gap(Part.GPU, reason, f"{what}: {error.strerror}")
