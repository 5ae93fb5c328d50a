"""All sources of GPU figures as the tick sees them: one speaks, the others check it or say whose memory it is."""

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from fragscope.model import Evidence, Gap, GpuReading, Part, Reason
from fragscope.serve.clock import Clock
from fragscope.serve.feeds import SourceStatus
from fragscope.serve.gpu_feed import GpuFeed, GpuSnapshot
from fragscope.serve.ownership import Asking, OwnershipFeed, Places, Tenant
from fragscope.serve.witness import Reference, WitnessFeed
from fragscope.sources.gpu import fdinfo, kfd, nvml, sysfs
from fragscope.sources.gpu.assignment import Assigned, Claimed, Identity, Named, assign
from fragscope.sources.gpu.choice import ATTRIBUTION, VENDORS, Registry, Role, choose, role, speaker
from fragscope.sources.gpu.crosscheck import Difference, known_addresses
from fragscope.sources.gpu.device import Partition
from fragscope.sources.gpu.engine_processes import alone, own_pid, processes

GIB = 2**30


class Taker(Protocol):
    """Whatever leaves a snapshot for the tick."""

    def take(self) -> GpuSnapshot:
        """What is known now; starts a new peak."""

    @property
    def statuses(self) -> tuple[SourceStatus, ...]:
        """How each source fares."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which sources to ask, where and how."""

    names: tuple[str, ...] = ()
    sysfs_root: Path = Path("/sys")
    proc_root: Path = Path("/proc")
    sample_hz: float = 20.0
    interval_s: float = 5.0
    check_s: float = 10.0
    tolerance_bytes: int = 0
    tenants: tuple[Tenant, ...] = ()


class Gpus:
    """The feeds of all chosen sources, and the one snapshot made of them."""

    def __init__(self, wanted: Wanted, clock: Clock, stop: threading.Event, vendors: Registry = VENDORS) -> None:
        self._wanted = wanted
        self._clock = clock
        self.choice = choose(wanted.names, lambda name: why_not(name, wanted, vendors) is None)
        self.sysfs = GpuFeed(wanted.sysfs_root, wanted.sample_hz, clock, stop)
        self.slow = {
            name: WitnessFeed(name, vendors[name], self, wanted.check_s, wanted.tolerance_bytes, clock, stop)
            for name in self.choice.slow
        }
        self.ownership = OwnershipFeed(
            Places(wanted.sysfs_root, wanted.proc_root),
            wanted.tenants,
            Asking(
                self.choice.attribution,
                lambda asked: self._appearing(asked, vendors),
                topology=self.choice.automatic or kfd.NAME in self.choice.attribution,
            ),
            self._by_pid,
            lambda: self.known()[0],
            wanted.interval_s,
            clock,
            stop,
        )

    def start(self) -> None:
        """Starts a thread for each source."""
        if sysfs.NAME in self.choice.figures:
            self.sysfs.start()
        for feed in self.slow.values():
            feed.start()
        files = any(tenant.render_nodes_file for tenant in self._wanted.tenants)
        if self.choice.automatic or self.choice.attribution or files or nvml.NAME in self.slow:
            self.ownership.start()

    def close(self) -> None:
        """Ends the children of the sources."""
        for feed in self.slow.values():
            feed.close()

    # What the slow sources ask.

    def role(self, name: str) -> Role:
        """What a slow source is asked for; nothing before sysfs has had its look."""
        gaps = self._sysfs_gaps()
        if name != nvml.NAME and self._sysfs_yields():
            return Role.IDLE
        return Role.IDLE if gaps is None else role(self.choice, name, self._speaker(), gaps)

    def reference(self) -> Reference:
        """What the speaking source says: sysfs is read now, another's last figures are taken."""
        speaking = self._speaker()
        if speaking == sysfs.NAME:
            used = {card.gpu: sysfs.read_used_bytes(card) for card in self.sysfs.cards}
            known = {gpu: size for gpu, size in used.items() if isinstance(size, int)}
            return Reference(sysfs.NAME, known, {card.gpu: card.total_bytes for card in self.sysfs.cards})
        devices = self.slow[speaking].devices if speaking is not None else ()
        return Reference(
            speaking or "",
            {str(d.gpu): d.used_bytes for d in devices},
            {str(d.gpu): d.total_bytes for d in devices},
        )

    def known(self) -> tuple[frozenset[str], Mapping[str, str]]:
        """Every PCI address that sysfs shows, and addresses by unique_id."""
        cards = self.sysfs.cards
        addresses = known_addresses(self._wanted.sysfs_root) | {card.gpu for card in cards}
        return addresses, {card.unique_id: card.gpu for card in cards if card.unique_id is not None}

    def _appearing(self, asked: Collection[str], vendors: Registry) -> tuple[str, ...]:
        """The sources of attribution that could not be tried at the start and can be now; a list is obeyed."""
        names = ATTRIBUTION if self.choice.automatic else ()
        return tuple(n for n in names if n not in asked and why_not(n, self._wanted, vendors) is None)

    def _by_pid(self) -> Mapping[str, Mapping[int, int]]:
        """Only NVML's are taken: AMD's lists count wrong in several versions (docs/sources.md)."""
        feed = self.slow.get(nvml.NAME)
        if feed is None or feed.role is not Role.FIGURES:
            return {}
        return {str(d.gpu): d.own_bytes_by_pid for d in feed.devices if d.own_bytes_by_pid is not None}

    def _sysfs_gaps(self) -> Sequence[Gap] | None:
        """The cards that sysfs knows and cannot read; None before its first look. Of none that it cannot list."""
        gaps = self.sysfs.gaps if sysfs.NAME in self.choice.figures else ()
        return gaps if gaps is None or self.sysfs.listed else ()

    def _sysfs_yields(self) -> bool:
        """Whether NVML is to speak in its place: AMD's is only a desktop processor's GPU."""
        return self.choice.automatic and nvml.NAME in self.slow and self.sysfs.beside_the_point

    def _speaker(self) -> str | None:
        now = self._clock.now()
        seeing = {name for name, feed in self.slow.items() if feed.sees(now)}
        if self.sysfs.cards and not self._sysfs_yields():
            seeing.add(sysfs.NAME)
        return speaker(self.choice, seeing)

    # What the tick asks.

    def take(self) -> GpuSnapshot:
        """The speaking source's cards and figures, with what the others add."""
        speaking = self._speaker()
        feed = self.slow.get(speaking) if speaking is not None else None
        if speaking is None:
            taken = GpuSnapshot(gaps=self._why_none())
        else:
            taken = self.sysfs.take() if feed is None else _of(feed)
        return replace(
            taken,
            owned=self.ownership.owned,
            renders=self.ownership.topology.gpu_of_render(),
            partitions={**self._parts_of_libraries(), **self.ownership.topology.partitions()},
            differences=tuple(d for slow in self.slow.values() for d in slow.differences),
        )

    def _parts_of_libraries(self) -> dict[str, tuple[Partition, ...]]:
        """For where KFD's topology is closed to us and a library's child knows."""
        return {str(d.gpu): d.partitions for slow in self.slow.values() for d in slow.devices if d.partitions}

    def _why_none(self) -> tuple[Gap, ...]:
        """Of those that were asked the first in the order of preference has the word."""
        words = {
            sysfs.NAME: self.sysfs.gaps or (),
            **{name: feed.gaps for name, feed in self.slow.items() if feed.asked},
        }
        nothing = Gap(Part.GPU, Reason.ABSENT, f"{', '.join(self.choice.figures)}: not read yet")
        return tuple(gap for name in self.choice.figures for gap in words.get(name, ())) or (nothing,)

    @property
    def statuses(self) -> tuple[SourceStatus, ...]:
        """How each source fares; one that nobody asks is left out."""
        slow = {name: feed.status for name, feed in self.slow.items() if feed.asked and feed.role is not Role.IDLE}
        first = {sysfs.NAME: self.sysfs.status, **slow}
        if self.choice.automatic and self._speaker() not in (None, sysfs.NAME):
            del first[sysfs.NAME]  # no AMD GPU here, and none is missed
        return (*(first[name] for name in self.choice.figures if name in first), *self.ownership.statuses)


def _of(feed: WitnessFeed) -> GpuSnapshot:
    readings, gaps = feed.take()
    cards: tuple[Identity, ...] = tuple(Named(str(d.gpu), d.unique_id) for d in feed.devices)
    return GpuSnapshot(tuple(sorted(cards, key=lambda card: card.gpu)), readings, {}, gaps)


def why_not(name: str, wanted: Wanted, vendors: Registry = VENDORS) -> Gap | None:
    """A cheap look at whether a source can be tried, None if so; nothing is started."""
    if name == kfd.NAME:
        return kfd.why_not(wanted.sysfs_root, wanted.proc_root)
    if name == fdinfo.NAME:
        return _unshared(wanted.proc_root)
    source = vendors[name]()
    try:
        return source.why_not()
    finally:
        source.close()


def _unshared(proc_root: Path) -> Gap | None:
    if alone(processes(proc_root).values(), own_pid(proc_root)):
        return Gap(Part.GPU, Reason.BLIND, "no process but our own is visible: the PID namespace is not shared")
    return None


def gpus_of(
    snapshot: GpuSnapshot, target: str, claimed: Claimed, oldest_at: float
) -> tuple[Assigned, tuple[GpuReading, ...], list[Gap]]:
    """Which GPUs are a target's, their readings not older than `oldest_at`, or the gap in their place."""
    unreadable = len(snapshot.gaps) + len(snapshot.others) if snapshot.cards else 0
    owned = snapshot.owned.get(target)
    assigned = assign(snapshot.cards, claimed, owned, snapshot.renders, unreadable)
    if assigned.gap is not None:
        return assigned, (), [snapshot.gaps[0] if not snapshot.cards and snapshot.gaps else assigned.gap]
    gpus = []
    for card in assigned.cards:
        reading = snapshot.readings.get(card.gpu)
        if reading is None or reading.at < oldest_at:
            # All of the target's GPUs, or a gap: a group is not exonerated by the ones that can be seen.
            late = Gap(Part.GPU, Reason.STALE, f"{card.gpu} has not been read in time")
            return assigned, (), [snapshot.failed.get(card.gpu, late)]
        fresh = owned is not None and owned.held is not None and owned.at >= oldest_at
        own = owned.held.own_bytes(card.gpu) if fresh and owned is not None and owned.held is not None else None
        # Memory shared between processes is counted in each of them: never more than is in use.
        gpus.append(replace(reading, own_bytes=None if own is None else min(own, reading.used_bytes)))
    return assigned, tuple(gpus), []


def lasting(differences: Iterable[Difference], gpus: Sequence[GpuReading]) -> tuple[Difference, ...]:
    """Where sources lastingly disagree on a target's GPUs."""
    own = {gpu.gpu for gpu in gpus}
    return tuple(found for found in differences if found.lasting and found.gpu in own)


def note(found: Difference) -> Evidence:
    """A difference as a line of evidence; it weighs nothing, and nothing is averaged."""
    size = f"{abs(found.difference_bytes) / GIB:.2f} GiB {'more' if found.difference_bytes > 0 else 'less'}"
    sentence = f"{found.source} shows {size} in use on {found.gpu} than {found.against}, which is believed"
    return Evidence("gpu_source_difference", float(found.difference_bytes), "bytes", 0.0, "none", sentence)
