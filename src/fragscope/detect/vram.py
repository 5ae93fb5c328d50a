"""What VRAM did: headroom against the largest transient seen, the climb towards exhaustion, and whose it was."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from fragscope.detect.allocator import Allocators, Held
from fragscope.detect.parameters import Parameters
from fragscope.detect.staircase import Climb, Kept, Staircase
from fragscope.detect.statistics import Highest
from fragscope.detect.waterfall import Growth, Waterfall
from fragscope.model import GpuReading

_TOGETHER_S = 1.0
"""Readings of device and allocator that are further apart are not subtracted to judge a climb."""


@dataclass(frozen=True, slots=True)
class Headroom:
    """The least free memory of the worst GPU against the largest transient the engine is known to want."""

    gpu: str
    total_bytes: int
    free_bytes: int
    need_bytes: float

    @property
    def ratio(self) -> float:
        """Free over need: below 1 an ordinary step can fail."""
        return self.free_bytes / self.need_bytes


@dataclass(frozen=True, slots=True)
class Exhaustion:
    """A GPU that climbs, and when its free memory will no longer meet the need."""

    gpu: str
    slope_bytes_per_s: float
    left_s: float
    own: bool
    """Whether the engine's own memory climbs, or nobody can tell."""


def peak_of(reading: GpuReading) -> int:
    """The highest known use since the reading before."""
    peak = reading.peak_used_bytes
    return peak if peak is not None and peak > reading.used_bytes else reading.used_bytes


class _Card:
    """One GPU of the target."""

    def __init__(self, parameters: Parameters, first: GpuReading) -> None:
        self.last = first
        self.largest_step_bytes: int | None = None
        self.peak = Highest(parameters.peak_window_s)
        self.device = Climb(parameters)
        self.own = Climb(parameters)
        self.kept = Kept(parameters)
        self.waterfall = Waterfall(parameters)
        self._growth_bytes = parameters.growth_bytes

    def stop_climbing(self) -> None:
        """What climbed until now says nothing any more."""
        self.device.clear()
        self.own.clear()
        self.kept.clear()

    def rebase(self) -> None:
        """Another process uses the memory now."""
        self.largest_step_bytes = None
        self.stop_climbing()
        self.waterfall.rebase()

    def climbs(self) -> bool | None:
        """Whether the engine's memory climbs: its own where that is known, so that a tenant's is not ours."""
        return self.own.climbs if self.own.climbs is not None else self.device.climbs

    def slope(self) -> tuple[float, bool] | None:
        """(bytes/s, whether it is the engine's own) of a climb, else None."""
        own, device = self.own.slope_bytes_per_s, self.device.slope_bytes_per_s
        if own is not None:
            return (device if device is not None else own), True
        if device is None:
            return None
        # The two rings are judged at different ticks: only growth of what others hold points to them.
        others = self.waterfall.growth(self.last.at).external or 0.0
        return device, self.own.climbs is None or others < self._growth_bytes


class Vram:
    """The GPUs of one target: recent readings, needs, climbs, and where the memory went."""

    def __init__(self, parameters: Parameters) -> None:
        self._p = parameters
        self._recent: deque[tuple[float, tuple[GpuReading, ...]]] = deque()
        self._cards: dict[str, _Card] = {}
        self._pending: deque[tuple[_Card, Climb, Staircase]] = deque()

    def observe(
        self, at: float, gpus: tuple[GpuReading, ...], allocators: Allocators, *, serving: bool, warm: bool
    ) -> None:
        """Takes one tick's readings; `serving`: a token was made since boot, `warm`: past warm-up and awake."""
        if gpus:
            self._recent.append((at, gpus))
            while self._recent[0][0] < at - self._p.headroom_history_s and len(self._recent) > 4:
                self._recent.popleft()
            if len(gpus) != len(self._cards) or any(gpu.gpu not in self._cards for gpu in gpus):
                self._meet(gpus)
            for gpu in gpus:
                self._read(at, gpu, allocators.on(gpu.gpu, at), serving=serving, warm=warm)
        # A slope over all pairs costs more than the rest of a tick: at most one of them a tick.
        while self._pending:
            card, climb, ring = self._pending.popleft()
            if climb.judge(ring, card.kept):
                break

    def _meet(self, gpus: tuple[GpuReading, ...]) -> None:
        present = {gpu.gpu: gpu for gpu in gpus}
        self._cards = {name: card for name, card in self._cards.items() if name in present}
        for name, gpu in present.items():
            if name not in self._cards:
                self._cards[name] = _Card(self._p, gpu)

    def _read(self, at: float, gpu: GpuReading, held: Held | None, *, serving: bool, warm: bool) -> None:
        card = self._cards[gpu.gpu]
        before, card.last = card.last, gpu
        card.peak.add(at, peak_of(gpu))
        if serving and before is not gpu:
            step = peak_of(gpu) - before.used_bytes
            if self._p.need_min_bytes <= step <= self._p.need_max_ratio * gpu.total_bytes:
                card.largest_step_bytes = max(step, card.largest_step_bytes or 0)
        if not warm or self._fell(before, gpu):
            card.stop_climbing()
        card.waterfall.observe(gpu, held, warm=warm)
        if not warm:
            return
        self._pending.extend((card, card.device, ring) for ring in card.device.add(gpu.at, gpu.used_bytes))
        if gpu.own_bytes is not None:
            self._pending.extend((card, card.own, ring) for ring in card.own.add(gpu.at, gpu.own_bytes))
        if held is None:
            card.kept.clear()
            return
        together = abs(gpu.at - held.at) <= _TOGETHER_S
        kept = held.allocated_bytes + held.inactive_split_bytes
        card.kept.add(gpu.at, kept, gpu.used_bytes - held.reserved_bytes if together else None)

    def rebase(self) -> None:
        """Forgets steps, climbs and growth: another process uses the memory now."""
        for card in self._cards.values():
            card.rebase()
        self._pending.clear()

    def _fell(self, before: GpuReading, after: GpuReading) -> bool:
        return after.used_bytes < before.used_bytes * (1 - self._p.vram_drop_ratio)

    def need_bytes(self, gpu: GpuReading) -> float:
        """The largest step seen since boot, else 1 % of the card."""
        card = self._cards.get(gpu.gpu)
        step = card.largest_step_bytes if card is not None else None
        return float(step) if step is not None else max(1.0, self._p.need_default_ratio * gpu.total_bytes)

    def headroom_now(self) -> Headroom | None:
        """The worst GPU of the last reading."""
        return self._worst(self.readings())

    def headroom_before_death(self, since: float, until: float) -> Headroom | None:
        """The worst GPU between `since` and `until`, not counting what the death itself freed."""
        seen: list[GpuReading] = []
        last: dict[str, GpuReading] = {}
        fallen: set[str] = set()
        for at, gpus in self._recent:
            if not since <= at <= until:
                continue
            for gpu in gpus:
                if gpu.gpu in fallen:
                    continue
                before = last.get(gpu.gpu)
                if before is not None and self._fell(before, gpu):
                    # The peak since the reading before still belongs to the living process.
                    fallen.add(gpu.gpu)
                    if gpu.peak_used_bytes is None:
                        continue
                last[gpu.gpu] = gpu
                seen.append(gpu)
        return self._worst(seen)

    def _worst(self, readings: Iterable[GpuReading]) -> Headroom | None:
        worst, least = None, float("inf")
        for reading in readings:
            ratio = (reading.total_bytes - peak_of(reading)) / self.need_bytes(reading)
            if ratio < least:
                worst, least = reading, ratio
        if worst is None:
            return None
        return Headroom(worst.gpu, worst.total_bytes, worst.total_bytes - peak_of(worst), self.need_bytes(worst))

    def growing(self) -> bool | None:
        """Whether the engine's memory climbs on any GPU; None while no ring is long enough."""
        known = [climbs for card in self._cards.values() if (climbs := card.climbs()) is not None]
        return any(known) if known else None

    def growth(self, gpu: str) -> tuple[float, float] | None:
        """(bytes/s, seconds until free memory no longer meets the need) of a climbing GPU, else None."""
        found = self._exhaustion(self._cards[gpu]) if gpu in self._cards else None
        return (found.slope_bytes_per_s, found.left_s) if found is not None else None

    def _exhaustion(self, card: _Card) -> Exhaustion | None:
        climb = card.slope()
        if climb is None:
            return None
        slope, own = climb
        room = card.last.total_bytes - card.last.used_bytes - self.need_bytes(card.last)
        return Exhaustion(card.last.gpu, slope, max(0.0, room / slope), own)

    def exhaustion(self) -> Exhaustion | None:
        """The climbing GPU that fills first, else None."""
        found = [each for card in self._cards.values() if (each := self._exhaustion(card)) is not None]
        return min(found, key=lambda each: each.left_s, default=None)

    def parts(self, gpu: str, until: float) -> Growth:
        """How much each part of a GPU's memory has grown since the process settled."""
        return self._cards[gpu].waterfall.growth(until) if gpu in self._cards else Growth()

    def readings(self) -> tuple[GpuReading, ...]:
        """The last reading of every GPU that is still there."""
        return tuple([card.last for card in self._cards.values()])

    def last_at(self) -> float | None:
        """When a GPU last spoke."""
        return self._recent[-1][0] if self._recent else None

    def peak_bytes(self, gpu: str, at: float) -> int:
        """The highest use of a GPU in the last `peak_window_s`; the last reading counts in any case."""
        card = self._cards[gpu]
        return max(peak_of(card.last), int(card.peak.value(at) or 0))

    def clear(self) -> None:
        """Forgets the GPUs: nobody reads them any more."""
        self._recent.clear()
        self._cards.clear()
        self._pending.clear()
