"""The staircase that leads to exhaustion: minima of minutes and of hours, and whether they climb.

Mann-Kendall with a tie band decides *whether* memory climbs, Theil-Sen how fast; steps in the second half
and the absence of drops tell a leak from warm-up and from a cache.
"""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from fragscope.detect.parameters import Parameters
from fragscope.detect.statistics import kendall_z, median, theil_sen_slope


@dataclass(frozen=True, slots=True)
class Trend:
    """A staircase judged; the slope is 0 where it does not climb."""

    slope_bytes_per_s: float
    growing: bool


class Staircase:
    """Minima of one series per bucket, judged when a bucket closes."""

    def __init__(self, parameters: Parameters, bucket_s: float) -> None:
        self._p = parameters
        self._bucket_s = bucket_s
        self._closed: deque[tuple[int, float]] = deque()
        self._open: tuple[int, float] | None = None
        self._first_at: float | None = None
        self._score = 0
        self.trend: Trend | None = None

    def add(self, at: float, used_bytes: float) -> bool:
        """Adds one reading; True where it closed a bucket, whose minimum then enters the ring."""
        if self._first_at is None:
            self._first_at = at
        bucket = int((at - self._first_at) // self._bucket_s)
        if self._open is None:
            self._open = bucket, used_bytes
            return False
        if bucket == self._open[0]:
            if used_bytes < self._open[1]:
                self._open = bucket, used_bytes
            return False
        self._close(self._open)
        self._open = bucket, used_bytes
        return True

    def _close(self, row: tuple[int, float]) -> None:
        """Keeps Mann and Kendall's score as rows come and go: thirty comparisons instead of 435."""
        if len(self._closed) >= self._p.trend_buckets:
            _, gone = self._closed.popleft()
            self._score -= sum(self._sign(value - gone) for _, value in self._closed)
        self._score += sum(self._sign(row[1] - value) for _, value in self._closed)
        self._closed.append(row)

    def _sign(self, difference: float) -> int:
        tie = self._p.trend_tie_bytes
        return (difference > tie) - (difference < -tie)

    def clear(self) -> None:
        """Forgets everything: the engine restarted, slept or is still warming up."""
        self._closed.clear()
        self._open = None
        self._first_at = None
        self._score = 0
        self.trend = None

    def judge(self) -> bool:
        """Recomputes the trend; True if it had to do the costly part, the slope."""
        if len(self._closed) < self._p.trend_min_buckets:
            self.trend = None
            return False
        if not self._climbs():
            self.trend = Trend(0.0, growing=False)
            return False
        slope = theil_sen_slope([(bucket * self._bucket_s, value) for bucket, value in self._closed])
        self.trend = Trend(slope, growing=slope > 0)
        return True

    def _climbs(self) -> bool:
        p = self._p
        if kendall_z(self._score, len(self._closed)) <= p.trend_z:
            return False
        rises = [after - before for (_, before), (_, after) in pairwise(self._closed)]
        steps = [i for i, rise in enumerate(rises) if rise > p.trend_step_bytes]
        late = sum(1 for i in steps if i >= len(rises) / 2)
        drops = sum(1 for rise in rises if rise < -p.trend_step_bytes)
        return len(steps) >= p.trend_min_steps and late >= p.trend_min_late_steps and drops <= p.trend_max_drops

    def rise_bytes(self) -> float | None:
        """How much higher the younger half lies than the older, by their medians; None for a short ring."""
        values = [value for _, value in self._closed]
        if len(values) < self._p.trend_min_buckets:
            return None
        middle = len(values) // 2
        return median(values[middle:]) - median(values[:middle])


class Climb:
    """One series in two rings: half an hour of minutes, and thirty hours for leaks that take days."""

    def __init__(self, parameters: Parameters) -> None:
        self.minutes = Staircase(parameters, parameters.trend_bucket_s)
        self.hours = Staircase(parameters, parameters.trend_long_bucket_s)
        self.slope_bytes_per_s: float | None = None
        """The steepest climb of the two rings that no cache explains; None where none climbs."""

    def add(self, at: float, used_bytes: float) -> list[Staircase]:
        """Adds one reading; returns the rings that have closed a bucket by it."""
        closed = []
        if self.minutes.add(at, used_bytes):
            closed.append(self.minutes)
        if self.hours.add(at, used_bytes):
            closed.append(self.hours)
        return closed

    def clear(self) -> None:
        """Forgets both rings."""
        self.minutes.clear()
        self.hours.clear()
        self.slope_bytes_per_s = None

    def judge(self, ring: Staircase, cache: "Climb") -> bool:
        """Judges a ring that has closed a bucket; `cache` is what the allocator would give back when asked.

        True if it was costly.
        """
        costly = ring.judge()
        pairs = ((self.minutes, cache.minutes), (self.hours, cache.hours))
        slopes = [r.trend.slope_bytes_per_s for r, c in pairs if r.trend and r.trend.growing and not _is_cache(r, c)]
        self.slope_bytes_per_s = max(slopes, default=None)
        return costly

    @property
    def climbs(self) -> bool | None:
        """Whether either ring climbs; None while both are too short to say."""
        if self.minutes.trend is None and self.hours.trend is None:
            return None
        return self.slope_bytes_per_s is not None


def _is_cache(ring: Staircase, cache: Staircase) -> bool:
    """Whether at least half of a climb is memory that the allocator would give back when asked."""
    rise, cached = ring.rise_bytes(), cache.rise_bytes()
    return rise is not None and cached is not None and cached >= rise / 2
