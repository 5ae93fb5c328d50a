"""What VRAM did: headroom against the largest transient seen, and the staircase that leads to exhaustion."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from fragscope.detect.parameters import Parameters
from fragscope.detect.statistics import mann_kendall_z, theil_sen_slope
from fragscope.model import GpuReading


@dataclass(frozen=True, slots=True)
class Headroom:
    """The least free memory of the worst GPU against the largest transient the engine is known to want."""

    gpu: str
    free_bytes: int
    need_bytes: float

    @property
    def ratio(self) -> float:
        """Free over need: below 1 an ordinary step can fail."""
        return self.free_bytes / self.need_bytes


@dataclass(frozen=True, slots=True)
class Trend:
    """A growing staircase; `exhaustion_s` is the time until free memory no longer meets the need."""

    slope_bytes_per_s: float
    growing: bool


def peak_of(reading: GpuReading) -> int:
    """The highest known use since the reading before."""
    return max(reading.used_bytes, reading.peak_used_bytes or 0)


class Staircase:
    """Per-minute minima of one GPU over half an hour, judged when a minute closes.

    Mann-Kendall with a tie band decides *whether* memory climbs, Theil-Sen how fast; steps in the second
    half and the absence of drops tell a leak from warm-up and from a cache.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._p = parameters
        self._closed: deque[tuple[int, int]] = deque(maxlen=parameters.trend_buckets)
        self._open: tuple[int, int] | None = None
        self._first_at: float | None = None
        self._stale = False
        self.trend: Trend | None = None

    def add(self, at: float, used_bytes: int) -> None:
        """Adds one reading; a minute's minimum enters the ring when the next minute begins."""
        if self._first_at is None:
            self._first_at = at
        bucket = int((at - self._first_at) // self._p.trend_bucket_s)
        if self._open is None:
            self._open = (bucket, used_bytes)
        elif bucket == self._open[0]:
            self._open = (bucket, min(used_bytes, self._open[1]))
        else:
            self._closed.append(self._open)
            self._open = (bucket, used_bytes)
            self._stale = True

    def clear(self) -> None:
        """Forgets everything: the engine restarted, slept or is still warming up."""
        self._closed.clear()
        self._open = None
        self._first_at = None
        self._stale = False
        self.trend = None

    def judge(self) -> bool:
        """Recomputes the trend if a minute has closed since; True if it did the work."""
        if not self._stale:
            return False
        self._stale = False
        self.trend = self._judge() if len(self._closed) >= self._p.trend_min_buckets else None
        return True

    def _judge(self) -> Trend:
        p = self._p
        values = [value for _, value in self._closed]
        rises = [b - a for a, b in pairwise(values)]
        steps = [i for i, rise in enumerate(rises) if rise > p.trend_step_bytes]
        late = sum(1 for i in steps if i >= len(rises) / 2)
        drops = sum(1 for rise in rises if rise < -p.trend_step_bytes)
        growing = (
            len(steps) >= p.trend_min_steps
            and late >= p.trend_min_late_steps
            and drops <= p.trend_max_drops
            and mann_kendall_z(values, p.trend_tie_bytes) > p.trend_z
        )
        slope = (
            theil_sen_slope([(bucket * p.trend_bucket_s, value) for bucket, value in self._closed]) if growing else 0.0
        )
        return Trend(slope_bytes_per_s=slope, growing=growing and slope > 0)


class Vram:
    """The GPUs of one target: recent readings, needs and staircases."""

    def __init__(self, parameters: Parameters) -> None:
        self._p = parameters
        self._recent: deque[tuple[float, tuple[GpuReading, ...]]] = deque()
        self._last: dict[str, GpuReading] = {}
        self._largest_step: dict[str, int] = {}
        self._stairs: dict[str, Staircase] = {}

    def observe(self, at: float, gpus: tuple[GpuReading, ...], *, serving: bool, warm: bool) -> None:
        """Takes one tick's readings; `serving`: a token was made since boot, `warm`: past warm-up and awake."""
        if not gpus:
            return
        self._recent.append((at, gpus))
        while self._recent[0][0] < at - self._p.headroom_history_s and len(self._recent) > 4:
            self._recent.popleft()
        present = {gpu.gpu for gpu in gpus}
        for gone in [gpu for gpu in self._last if gpu not in present]:
            self._forget(gone)
        for gpu in gpus:
            self._step(gpu, serving=serving)
            self._climb(gpu, warm=warm)
            self._last[gpu.gpu] = gpu
        # The pairwise statistics cost far more than the rest of a tick: at most one GPU per tick.
        any(stair.judge() for stair in self._stairs.values())

    def rebase(self) -> None:
        """Forgets steps and staircases: another process uses the memory now."""
        self._largest_step.clear()
        for stair in self._stairs.values():
            stair.clear()

    def _forget(self, gpu: str) -> None:
        self._last.pop(gpu, None)
        self._largest_step.pop(gpu, None)
        self._stairs.pop(gpu, None)

    def _step(self, gpu: GpuReading, *, serving: bool) -> None:
        before = self._last.get(gpu.gpu)
        if before is None or not serving:
            return
        step = peak_of(gpu) - before.used_bytes
        if self._p.need_min_bytes <= step <= self._p.need_max_ratio * gpu.total_bytes:
            self._largest_step[gpu.gpu] = max(step, self._largest_step.get(gpu.gpu, 0))

    def _climb(self, gpu: GpuReading, *, warm: bool) -> None:
        stair = self._stairs.setdefault(gpu.gpu, Staircase(self._p))
        before = self._last.get(gpu.gpu)
        if not warm or (before is not None and self._fell(before, gpu)):
            stair.clear()
        if warm:
            stair.add(gpu.at, gpu.used_bytes if gpu.own_bytes is None else gpu.own_bytes)

    def _fell(self, before: GpuReading, after: GpuReading) -> bool:
        return after.used_bytes < before.used_bytes * (1 - self._p.vram_drop_ratio)

    def need_bytes(self, gpu: GpuReading) -> float:
        """The largest step seen since boot, else 1 % of the card."""
        step = self._largest_step.get(gpu.gpu)
        return float(step) if step is not None else max(1.0, self._p.need_default_ratio * gpu.total_bytes)

    def headroom_now(self) -> Headroom | None:
        """The worst GPU of the last reading."""
        return self._worst(self._last.values())

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
        rooms = [Headroom(g.gpu, g.total_bytes - peak_of(g), self.need_bytes(g)) for g in readings]
        return min(rooms, key=lambda room: room.ratio, default=None)

    def growing(self) -> bool | None:
        """Whether any GPU climbs; None while no staircase is long enough."""
        trends = [stair.trend for stair in self._stairs.values() if stair.trend is not None]
        return any(trend.growing for trend in trends) if trends else None

    def growth(self, gpu: str) -> tuple[float, float] | None:
        """(bytes/s, seconds until free memory no longer meets the need) of a climbing GPU, else None."""
        stair, last = self._stairs.get(gpu), self._last.get(gpu)
        if stair is None or last is None or stair.trend is None or not stair.trend.growing:
            return None
        slope = stair.trend.slope_bytes_per_s
        room = last.total_bytes - last.used_bytes - self.need_bytes(last)
        return slope, max(0.0, room / slope)

    def exhaustion_s(self) -> tuple[str, float, float] | None:
        """(gpu, bytes/s, seconds left) of the GPU that fills first, else None."""
        found = [(g, *growth) for g in self._last if (growth := self.growth(g)) is not None]
        return min(found, key=lambda row: row[2], default=None)

    def readings(self) -> tuple[GpuReading, ...]:
        """The last reading of every GPU that is still there."""
        return tuple(self._last.values())

    def last_at(self) -> float | None:
        """When a GPU last spoke."""
        return self._recent[-1][0] if self._recent else None

    def peaks_bytes(self, since: float) -> dict[str, int]:
        """The highest use of every GPU since then; the last reading counts in any case."""
        peaks = {name: peak_of(reading) for name, reading in self._last.items()}
        for at, gpus in reversed(self._recent):
            if at < since:
                break
            for gpu in gpus:
                if gpu.gpu in peaks:
                    peaks[gpu.gpu] = max(peaks[gpu.gpu], peak_of(gpu))
        return peaks

    def clear(self) -> None:
        """Forgets the GPUs: nobody reads them any more."""
        self._recent.clear()
        self._last.clear()
        self._largest_step.clear()
        self._stairs.clear()
