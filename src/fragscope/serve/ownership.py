"""Whose memory it is: the engine's processes and what they hold, looked up in a thread of its own."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fragscope.model import Gap, Part, Reason
from fragscope.serve.clock import Clock
from fragscope.serve.feeds import Feed, SourceStatus
from fragscope.sources.gpu import fdinfo, kfd, nvml
from fragscope.sources.gpu.engine_processes import engine_pids
from fragscope.sources.gpu.holdings import Held, Owned
from fragscope.sources.gpu.plausible import address
from fragscope.sources.gpu.render_nodes import read_render_nodes

_TOPOLOGY_S = 30.0
_LOOK_S = 5.0
"""At least so long between looks: fdinfo takes a lock of the process's GPU memory on older kernels."""
_SCAN_S = 30.0
_SEARCH_S = 15.0
"""Reading every command line of a busy host takes some 10 ms: not at every look while there is no engine."""
_YOUNG_S = 120.0
"""Workers appear one by one: for so long after a change every look is a scan."""

_ORDER = (kfd.NAME, nvml.NAME, fdinfo.NAME)
"""KFD counts all compute memory, fdinfo not on every kernel."""

ByPid = Callable[[], Mapping[str, Mapping[int, int]]]


@dataclass(frozen=True, slots=True)
class Tenant:
    """A target as this thread sees it."""

    name: str
    url: str
    render_nodes_file: Path | None = None


@dataclass(slots=True)
class _Known:
    """What was found of one target's processes, and when."""

    pids: frozenset[int] = frozenset()
    scanned_at: float = float("-inf")
    changed_at: float = float("-inf")
    gap: Gap | None = None
    openings: tuple[str, ...] | Gap = ()
    holding: Held | None = None


@dataclass(frozen=True, slots=True)
class Places:
    """Where the kernel shows itself."""

    sysfs: Path
    proc: Path


@dataclass(frozen=True, slots=True)
class Asking:
    """Which sources may be asked, and those beside the given ones that have become usable.

    KFD's topology can be read without the host's process ids, and is unless `topology` is False.
    """

    names: Sequence[str]
    appearing: Callable[[Collection[str]], Sequence[str]] = lambda _: ()
    topology: bool = True


class OwnershipFeed(Feed):
    """Looks up every target's processes and their memory once an interval.

    `by_pid` is what NVML says of processes, by GPU: ids of the host, so that it counts only where these are visible.
    """

    def __init__(
        self,
        places: Places,
        tenants: Sequence[Tenant],
        asking: Asking,
        by_pid: ByPid,
        known: Callable[[], frozenset[str]],
        interval_s: float,
        clock: Clock,
        stop: threading.Event,
    ) -> None:
        super().__init__("gpu-ownership", clock, stop)
        self._asking = asking
        self._places = places
        self._tenants = tuple(tenants)
        self._by_pid = by_pid
        self._known_addresses = known
        self._interval_s = interval_s
        self._known = {tenant.name: _Known() for tenant in tenants}
        self._looked_around_at = float("-inf")
        self._statuses = {name: SourceStatus(name) for name in asking.names}
        self.topology = kfd.Topology()
        self.owned: Mapping[str, Owned] = {}

    @property
    def statuses(self) -> tuple[SourceStatus, ...]:
        """How the sources of attribution fare; one that another makes needless is left out."""
        return tuple(status for status in self._statuses.values() if status.last_duration_s is not None)

    def step(self) -> float:
        """One look at every target."""
        now = self._clock.now()
        if now - self._looked_around_at >= _TOPOLOGY_S * self._clock.speed:
            self._look_around()
            self._looked_around_at = now
        self.owned = {tenant.name: self._look(tenant, now) for tenant in self._tenants}
        return max(self._interval_s, _LOOK_S * self._clock.speed)

    def _look_around(self) -> None:
        """The driver may be loaded, or a process namespace filled, long after our start."""
        for name in self._asking.appearing(self._statuses):
            self._statuses[name] = SourceStatus(name)
        if self._asking.topology:
            self.topology = kfd.read_topology(self._places.sysfs, self._known_addresses())

    def _look(self, tenant: Tenant, now: float) -> Owned:
        file = tenant.render_nodes_file
        nodes = read_render_nodes(file, self._places.sysfs) if file is not None else None
        known = self._known[tenant.name]
        gap = self._find(tenant, known, now)
        held = self._held(known, now) if gap is None else self._unfound(gap, now)
        if isinstance(held, Gap):
            return Owned(now, None, known.holding, held, nodes)
        if held.gpus() or known.holding is None:
            known.holding = held
        return Owned(now, held, known.holding, None, nodes)

    def _find(self, tenant: Tenant, known: _Known, now: float) -> Gap | None:
        """Keeps the engine's process ids up to date; scanning everything is for when something changed."""
        speed = self._clock.speed
        gone = any(not (self._places.proc / str(pid)).is_dir() for pid in known.pids)
        young = now - known.changed_at < _YOUNG_S * speed
        rest_s = (_SCAN_S if known.pids else _SEARCH_S) * speed
        if not gone and not (known.pids and young) and now - known.scanned_at < rest_s:
            return known.gap
        found = engine_pids(self._places.proc, tenant.url)
        known.scanned_at = now
        pids = found if isinstance(found, frozenset) else frozenset()
        if pids != known.pids:
            known.pids, known.changed_at = pids, now
        if fdinfo.NAME in self._statuses:
            known.openings = fdinfo.read_openings(self._places.proc, pids)
        known.gap = found if isinstance(found, Gap) else None
        return known.gap

    def _held(self, known: _Known, now: float) -> Held | Gap:
        """What the first witness says that counts everything; fdinfo, which costs most, is asked last."""
        held: list[Held] = []
        gaps: list[Gap] = []
        for name in _ORDER:
            if name not in self._statuses and name != nvml.NAME:
                continue
            answer = self._from(name, known.pids, known.openings)
            if name in self._statuses:
                self._account(name, answer, now)
            if isinstance(answer, Gap):
                gaps.append(answer)
                continue
            if answer.complete and answer.gpus():
                return answer
            held.append(answer)
        return held[0] if held else gaps[0]

    def ask(self, name: str, tenant: Tenant) -> Held | Gap:
        """What one source says of a target's processes, now and from the beginning: for `check`."""
        pids = engine_pids(self._places.proc, tenant.url)
        if isinstance(pids, Gap):
            return pids
        return self._from(name, pids, fdinfo.read_openings(self._places.proc, pids))

    def _from(self, name: str, pids: frozenset[int], openings: tuple[str, ...] | Gap) -> Held | Gap:
        if name == nvml.NAME:
            return self._from_nvml(pids)
        if name == kfd.NAME:
            return self._from_kfd(pids)
        return openings if isinstance(openings, Gap) else fdinfo.read_held(openings, self._gpu_of_render)

    def _gpu_of_render(self, node: str) -> str | None:
        """The GPU behind a render node: sysfs knows a whole GPU's, KFD's topology a partition's."""
        device = (self._places.sysfs / "class" / "drm" / node / "device").resolve().name
        return address(device) or self.topology.gpu_of_render().get(node)

    def _unfound(self, gap: Gap, now: float) -> Gap:
        for name in self._statuses:
            self._account(name, gap, now)
        return gap

    def _from_kfd(self, pids: frozenset[int]) -> Held | Gap:
        gap = kfd.why_not(self._places.sysfs, self._places.proc)
        return gap if gap is not None else kfd.read_held(self._places.sysfs, pids, self.topology)

    def _from_nvml(self, pids: frozenset[int]) -> Held | Gap:
        by_gpu = self._by_pid()
        if by_gpu and not kfd.host_pids_visible(self._places.proc):
            detail = "NVML names processes by the host's ids, which this PID namespace does not show"
            return Gap(Part.GPU, Reason.BLIND, detail)
        held = {gpu: sum(size for pid, size in sizes.items() if pid in pids) for gpu, sizes in by_gpu.items()}
        if not any(held.values()):
            return Gap(Part.GPU, Reason.ABSENT, "no source names the engine's processes")
        return Held(nvml.NAME, held, frozenset(gpu for gpu, size in held.items() if size))

    def _account(self, name: str, answer: Held | Gap, now: float) -> None:
        took_s = self._clock.now() - now
        status = self._statuses[name]
        if isinstance(answer, Gap):
            self._statuses[name] = status.failed(answer.reason, took_s)
        else:
            self._statuses[name] = status.succeeded(now, took_s)
