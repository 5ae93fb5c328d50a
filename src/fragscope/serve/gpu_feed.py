"""The GPU feed: sysfs at high rate, and what it leaves for the tick."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fragscope.model import Gap, GpuReading, Part, Reason
from fragscope.serve.clock import Clock
from fragscope.serve.feeds import Feed, SourceStatus
from fragscope.sources.gpu import sysfs
from fragscope.sources.gpu.assignment import Identity
from fragscope.sources.gpu.crosscheck import Difference
from fragscope.sources.gpu.device import Partition
from fragscope.sources.gpu.holdings import Owned

_ENUMERATE_S = 10.0
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """What is known of the GPUs at a tick; `gaps` are cards that cannot even be enumerated, or the source's own.

    `others` are GPUs of another vendor, of which the speaking source knows no more than that they are there.
    `owned` is by target, `renders` are GPUs by render node beyond the cards' own.
    """

    cards: tuple[Identity, ...] = ()
    readings: Mapping[str, GpuReading] = field(default_factory=dict)
    failed: Mapping[str, Gap] = field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()
    others: tuple[str, ...] = ()
    owned: Mapping[str, Owned] = field(default_factory=dict)
    renders: Mapping[str, str] = field(default_factory=dict)
    partitions: Mapping[str, tuple[Partition, ...]] = field(default_factory=dict)
    differences: tuple[Difference, ...] = ()


@dataclass(slots=True)
class _Watched:
    """One card between two ticks."""

    card: sysfs.Card
    glance: sysfs.Glance
    at: float
    used_bytes: int
    peak_bytes: int
    gtt_bytes: int | None


class GpuFeed(Feed):
    """Samples every card's VRAM at high rate; a tick takes the last value and the peak since the tick before.

    Once a second it looks around (cards that came or went, host memory, its own health); in between it
    only glances at the one number, since after 50 ms asleep each line of code is paid for in cache misses.
    """

    def __init__(self, root: Path, sample_hz: float, clock: Clock, stop: threading.Event) -> None:
        super().__init__("gpu-sysfs", clock, stop)
        self._root = root
        self.source = sysfs.Sysfs(root)
        # In real time: sampling faster than this would cost CPU, whatever the speed of a demo's clock.
        self._period_s = 1 / sample_hz
        self._lock = threading.Lock()
        self._watched: dict[str, _Watched] = {}
        self._found = sysfs.Enumeration((), (Gap(Part.GPU, Reason.ABSENT, "not read yet"),))
        self._failed: dict[str, Gap] = {}
        self._enumerated_at: float | None = None
        self._looked_at = float("-inf")
        self.status = SourceStatus(sysfs.NAME)

    @property
    def statuses(self) -> tuple[SourceStatus, ...]:
        """How the source fares."""
        return (self.status,)

    @property
    def cards(self) -> tuple[sysfs.Card, ...]:
        """The cards of the last look."""
        return self._found.cards

    @property
    def gaps(self) -> tuple[Gap, ...] | None:
        """What the last look could not enumerate; None before the first."""
        return self._found.gaps if self._looked_at > float("-inf") else None

    @property
    def listed(self) -> bool:
        """Whether the names of the cards could be seen."""
        return self._found.listed

    @property
    def beside_the_point(self) -> bool:
        """Whether the engine is surely on another vendor's GPU."""
        return self._found.beside_the_point

    def step(self) -> float:
        """One look around if a second has passed since the last, else one glance at every card."""
        now = self._clock.now()
        if now - self._looked_at >= _LOOK_S * self._clock.speed:
            self._look_around(now)
        else:
            self._glance()
        return self._period_s * self._clock.speed

    def row(self) -> float:
        """A look around and a second of glances, in a loop with as little in it as possible."""
        if self._period_s >= _LOOK_S:
            return self.step()
        self._look_around(self._clock.now())
        sleep, glance, stopped, period_s = time.sleep, self._glance, self._stopping.is_set, self._period_s
        for _ in range(round(_LOOK_S / period_s)):
            sleep(period_s)
            if stopped():
                break
            glance()
        return 0.0

    def _glance(self) -> None:
        for watched in self._watched.values():
            used = watched.glance.used_bytes()
            if used is None:
                continue
            watched.used_bytes = used
            # The tick may begin a new peak meanwhile: then this one is told twice, and none is lost.
            watched.peak_bytes = max(watched.peak_bytes, used)

    def _look_around(self, now: float) -> None:
        if self._enumerated_at is None or now - self._enumerated_at >= _ENUMERATE_S * self._clock.speed:
            self._enumerate(now)
        failed = {card.gpu: gap for card in self._found.cards if (gap := self._read(card, now)) is not None}
        if any(gap.reason is Reason.ABSENT for gap in failed.values()):
            self._enumerated_at = None
        with self._lock:
            self._failed = failed
        self._looked_at = now
        self._account(failed, now)

    def take(self) -> GpuSnapshot:
        """What is known now; starts a new peak."""
        with self._lock:
            readings = {gpu: _reading(gpu, watched) for gpu, watched in self._watched.items()}
            for watched in self._watched.values():
                watched.peak_bytes = watched.used_bytes
            return GpuSnapshot(self._found.cards, readings, dict(self._failed), self._found.gaps, self._found.others)

    def _enumerate(self, now: float) -> None:
        found = sysfs.enumerate_cards(self._root)
        self._enumerated_at = now
        present = set(found.cards)
        gone = [watched for watched in self._watched.values() if watched.card not in present]
        with self._lock:
            self._found = found
            self._watched = {gpu: watched for gpu, watched in self._watched.items() if watched.card in present}
        for watched in gone:
            watched.glance.close()

    def _read(self, card: sysfs.Card, at: float) -> Gap | None:
        used = sysfs.read_used_bytes(card)
        if isinstance(used, Gap):
            return used
        gtt = sysfs.read_gtt_used_bytes(card)
        known = self._watched.get(card.gpu)
        with self._lock:
            if known is None:
                self._watched[card.gpu] = _Watched(card, sysfs.Glance(card), at, used, used, gtt)
            else:
                known.at, known.used_bytes, known.gtt_bytes = at, used, gtt
                known.peak_bytes = max(known.peak_bytes, used)
        return None

    def _account(self, failed: Mapping[str, Gap], began: float) -> None:
        """Once a look: a failure at the sampling rate would count twenty."""
        duration_s = self._clock.now() - began
        gaps = [*failed.values(), *(() if self._found.cards else self._found.gaps)]
        if gaps:
            self.status = self.status.failed(gaps[0].reason, duration_s)
        else:
            self.status = self.status.succeeded(began, duration_s)


def _reading(gpu: str, watched: _Watched) -> GpuReading:
    return GpuReading(
        at=watched.at,
        gpu=gpu,
        total_bytes=watched.card.total_bytes,
        used_bytes=watched.used_bytes,
        peak_used_bytes=watched.peak_bytes,
        gtt_used_bytes=watched.gtt_bytes,
        source=sysfs.NAME,
    )
