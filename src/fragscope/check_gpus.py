"""What `check` says of every GPU source: what it sees, what a read costs, why not, and what to grant to see more."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fragscope.model import Gap, Part, Reason
from fragscope.serve.gpu_feed import GpuSnapshot
from fragscope.serve.gpus import Gpus, Wanted, why_not
from fragscope.serve.witness import WitnessFeed
from fragscope.sources.gpu import fdinfo, kfd, sysfs
from fragscope.sources.gpu.choice import ATTRIBUTION, NAMES, Registry
from fragscope.sources.gpu.device import Device, Listing
from fragscope.sources.gpu.holdings import Held

GIB = 2**30
_DEADLINE_S = 13.0
"""The sources' own deadline of 10 s, the second in which a child is killed, and some."""
_HUNG = Gap(Part.GPU, Reason.TIMEOUT, "a read does not come back")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Probe:
    """One source, asked once; `cost_s` is the time of the read, None where there was none."""

    source: str
    devices: tuple[Device, ...] = ()
    gaps: tuple[Gap, ...] = ()
    cost_s: float | None = None
    note: str = ""

    @property
    def state(self) -> str:
        """`ok`, `partly`, or the reason."""
        if self.devices or (self.note and not self.gaps):
            return "partly" if self.gaps else "ok"
        return str(self.gaps[0].reason) if self.gaps else str(Reason.ABSENT)

    def cells(self) -> list[str]:
        """A row of the table."""
        used = " ".join(f"{d.used_bytes / GIB:.1f}" for d in self.devices)
        total = " ".join(f"{d.total_bytes / GIB:.1f}" for d in self.devices)
        cost = "-" if self.cost_s is None else f"{1000 * self.cost_s:.3g} ms"
        words = [self.note, *(gap.detail for gap in self.gaps)]
        count = str(len(self.devices)) if self.devices else "-"
        return [self.source, self.state, count, total or "-", used or "-", cost, "; ".join(filter(None, words))]

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        devices = [{"gpu": d.gpu, "total_bytes": d.total_bytes, "used_bytes": d.used_bytes} for d in self.devices]
        return {
            "source": self.source,
            "state": self.state,
            "devices": devices,
            "cost_s": self.cost_s,
            "why_not": "; ".join(gap.detail for gap in self.gaps) or None,
            "note": self.note or None,
        }


COLUMNS = ("GPU source", "state", "GPUs", "total GiB", "used GiB", "a read costs", "what, or why not")


def look_at_gpus(gpus: Gpus, wanted: Wanted, vendors: Registry, patience_s: float) -> tuple[GpuSnapshot, list[Probe]]:
    """Asks every source once (those listed, or all there are), none longer than its deadline."""
    names = wanted.names or NAMES
    # A read that hangs must not hang the check: its thread is left behind.
    hung = not _side_by_side({sysfs.NAME: gpus.sysfs.step}, patience_s)
    untouchable = [gap for gap in gpus.sysfs.gaps or () if gap.reason is Reason.UNSUPPORTED]
    found: dict[str, Probe] = {}
    works: dict[str, Callable[[], Probe]] = {sysfs.NAME: lambda: _sysfs(gpus)} if not hung else {}
    for name in (name for name in names if name in vendors):
        if untouchable and not wanted.names:
            detail = f"left alone: {untouchable[0].detail}"
            found[name] = Probe(name, gaps=(Gap(Part.GPU, Reason.UNSUPPORTED, detail),))
        else:
            works[name] = partial(_vendor, gpus, name, vendors, None if hung else gpus.slow.get(name))
    found |= _side_by_side(works, _DEADLINE_S)
    _side_by_side({"ownership": gpus.ownership.step}, _DEADLINE_S)
    snapshot = gpus.take()
    found |= _side_by_side({n: partial(_attribution, n, gpus, wanted, snapshot) for n in ATTRIBUTION}, _DEADLINE_S)
    return snapshot, [found.get(name, Probe(name, gaps=(_HUNG,))) for name in names]


def _side_by_side(works: Mapping[str, Callable[[], T]], seconds: float) -> dict[str, T]:
    """The results of those that come back in time."""
    done: dict[str, T] = {}

    def work_on(name: str) -> None:
        done[name] = works[name]()

    threads = [threading.Thread(target=work_on, args=(name,), daemon=True) for name in works]
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return dict(done)


def _vendor(gpus: Gpus, name: str, vendors: Registry, feed: WitnessFeed | None) -> Probe:
    if feed is not None:
        feed.step()
        if feed.asked:
            return Probe(name, feed.devices, feed.gaps, feed.status.last_duration_s, _apart(gpus, name))
    source = vendors[name]()
    try:
        gap = source.why_not()
        if gap is not None:
            return Probe(name, gaps=(gap,))
        listing, cost_s = _timed(source.read)
        return Probe(name, listing.devices, listing.gaps, cost_s)
    finally:
        source.close()


def _timed(read: Callable[[], Listing]) -> tuple[Listing, float]:
    began = time.perf_counter()
    listing = read()
    return listing, time.perf_counter() - began


def _apart(gpus: Gpus, name: str) -> str:
    found = [d for d in gpus.slow[name].differences if d.difference_bytes]
    return "; ".join(f"{d.gpu} differs by {d.difference_bytes / 2**20:+.0f} MiB from {d.against}" for d in found)


def _sysfs(gpus: Gpus) -> Probe:
    listing, cost_s = _timed(gpus.sysfs.source.read)
    return Probe(sysfs.NAME, listing.devices, listing.gaps, cost_s / max(1, len(listing.devices)))


def _attribution(name: str, gpus: Gpus, wanted: Wanted, snapshot: GpuSnapshot) -> Probe:
    gap = why_not(name, wanted)
    if gap is not None:
        return Probe(name, gaps=(gap, *_topology_gaps(name, gpus)))
    words, gaps = [], []
    began = time.perf_counter()
    for tenant in wanted.tenants:
        held = gpus.ownership.ask(name, tenant)
        if isinstance(held, Gap):
            gaps.append(held)
        else:
            words.append(f"{tenant.name} holds {_held_words(held)}")
    cost_s = time.perf_counter() - began
    for gpu, parts in snapshot.partitions.items() if name == kfd.NAME else ():
        words.append(f"{gpu} is split in {len(parts)}")
    return Probe(name, (), (*gaps, *_topology_gaps(name, gpus)), cost_s, "; ".join(words))


def _topology_gaps(name: str, gpus: Gpus) -> tuple[Gap, ...]:
    return gpus.ownership.topology.gaps[:1] if name == kfd.NAME else ()


def _held_words(held: Held) -> str:
    sizes = [f"{size / GIB:.1f} GiB of {gpu}" for gpu, size in sorted(held.bytes_by_gpu.items())]
    words = ", ".join(sizes) or "nothing"
    return words if held.complete else f"at least {words} (this kernel leaves compute memory out)"


def advice(assigned_gaps: Sequence[Gap], probes: Sequence[Probe]) -> str:
    """The one thing to mount, set or grant that would show most."""
    by_name = {probe.source: probe for probe in probes}
    if not any(probe.devices for probe in probes):
        return (
            "No GPU can be read: mount the host's /sys (read-only) on a node with the amdgpu driver, or on NVIDIA give "
            "this container the engine's GPUs and install fragscope[nvidia]."
        )
    if any(gap.reason is Reason.UNASSIGNED for gap in assigned_gaps):
        return (
            "Say which GPUs are the engine's: set FRAGSCOPE_TARGETS__0__GPUS, or "
            "FRAGSCOPE_TARGETS__0__RENDER_NODES_FILE with a listing "
            "of /dev/dri by the engine's container (docs/sources.md)."
        )
    return _advice_on_whose([by_name[name] for name in ATTRIBUTION if name in by_name])


def _advice_on_whose(whose: Sequence[Probe]) -> str:
    """How to see whose memory it is."""
    if not whose:
        return "Add kfd and fdinfo to `gpu_sources` to see whose memory it is."
    if any(probe.note and not probe.gaps for probe in whose):
        return "Nothing: whose memory it is can be seen."
    if any(gap.reason is Reason.DENIED for probe in whose if probe.source == fdinfo.NAME for gap in probe.gaps):
        return (
            "To see whose memory it is, run as the engine's user (runAsUser) with no fewer capabilities than it has, "
            "or grant SYS_PTRACE."
        )
    if any(gap.reason is Reason.BLIND for probe in whose for gap in probe.gaps):
        return (
            "To see whose memory it is, share the PID namespace (shareProcessNamespace: true in a pod, "
            "hostPID: true in a DaemonSet) and run as the engine's user."
        )
    return "Whose memory it is cannot be seen; the rows of kfd and fdinfo say why."
