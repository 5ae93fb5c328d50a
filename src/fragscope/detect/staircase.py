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

    def rise_bytes(self) -> float:
        """How much higher the younger half of the ring lies than the older, by their medians."""
        return _rise([value for _, value in self._closed])


class Level:
    """One series by bucket, least and mean, to say how much it has risen; O(1) a reading."""

    def __init__(self, parameters: Parameters, bucket_s: float) -> None:
        self._bucket_s = bucket_s
        self._fewest = parameters.trend_min_buckets
        self._closed: deque[tuple[float, float]] = deque(maxlen=parameters.trend_buckets)
        self._first_at: float | None = None
        self._bucket = 0
        self._least = self._sum = 0.0
        self._count = 0

    def add(self, at: float, value: float) -> None:
        """Adds one reading."""
        if self._first_at is None:
            self._first_at = at
        bucket = int((at - self._first_at) // self._bucket_s)
        if bucket != self._bucket and self._count:
            self._closed.append((self._least, self._sum / self._count))
            self._sum, self._count = 0.0, 0
        self._bucket = bucket
        self._least = min(self._least, value) if self._count else value
        self._sum += value
        self._count += 1

    def rise_bytes(self, *, mean: bool) -> float | None:
        """How much higher the younger half lies than the older; None for a short ring."""
        if len(self._closed) < self._fewest:
            return None
        return _rise([row[mean] for row in self._closed])

    def clear(self) -> None:
        """Forgets everything."""
        self._closed.clear()
        self._first_at = None
        self._sum, self._count = 0.0, 0


class Kept:
    """What the allocator could not give back if it were asked: live and stranded memory, and what is not its own.

    The rest of a climb is cache, and no threat. Device and allocator are read at different times while the
    cache breathes by gigabytes, so their difference is a mean, and only of readings close in time.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._any = False
        self._held = [Level(parameters, parameters.trend_bucket_s), Level(parameters, parameters.trend_long_bucket_s)]
        self._other = [Level(parameters, parameters.trend_bucket_s), Level(parameters, parameters.trend_long_bucket_s)]

    def add(self, at: float, held_bytes: float, other_bytes: float | None) -> None:
        """Adds one reading; `other_bytes` is None where device and allocator were read too far apart."""
        self._any = True
        for level in self._held:
            level.add(at, held_bytes)
        for level in self._other if other_bytes is not None else ():
            level.add(at, other_bytes or 0.0)

    def clear(self) -> None:
        """Forgets everything."""
        if not self._any:
            return
        self._any = False
        for level in (*self._held, *self._other):
            level.clear()

    def explains(self, number: int, rise_bytes: float) -> bool:
        """Whether at least half of a rise of the minutes' ring (0) or the hours' (1) was kept; so where not known."""
        held = self._held[number].rise_bytes(mean=False)
        if held is None:
            return True
        other = self._other[number].rise_bytes(mean=True) or 0.0
        return held + max(0.0, other) >= rise_bytes / 2


class Climb:
    """One series in two rings: half an hour of minutes, and thirty hours for leaks that take days."""

    def __init__(self, parameters: Parameters) -> None:
        self.minutes = Staircase(parameters, parameters.trend_bucket_s)
        self.hours = Staircase(parameters, parameters.trend_long_bucket_s)
        self.slope_bytes_per_s: float | None = None
        """The steepest climb of the two rings that is no cache; None where none climbs."""

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

    def judge(self, ring: Staircase, kept: Kept) -> bool:
        """Judges a ring that has closed a bucket, by what the allocator kept. True if it was costly."""
        costly = ring.judge()
        slopes = [
            each.trend.slope_bytes_per_s
            for number, each in enumerate((self.minutes, self.hours))
            if each.trend is not None and each.trend.growing and kept.explains(number, each.rise_bytes())
        ]
        self.slope_bytes_per_s = max(slopes, default=None)
        return costly

    @property
    def climbs(self) -> bool | None:
        """Whether either ring climbs; None while both are too short to say."""
        if self.minutes.trend is None and self.hours.trend is None:
            return None
        return self.slope_bytes_per_s is not None


def _rise(values: list[float]) -> float:
    middle = len(values) // 2
    return median(values[middle:]) - median(values[:middle])
