"""The little statistics the detector needs, in plain functions."""

import math
from collections import deque
from collections.abc import Iterable, Sequence


class Decayed:
    """A sum that halves every `half_life_s`."""

    __slots__ = ("_at", "_half_life_s", "_value")

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._at = 0.0
        self._value = 0.0

    def add(self, at: float, amount: float) -> None:
        """Adds `amount` at time `at` (unix seconds, not decreasing)."""
        self._value = self.value(at) + amount
        self._at = at

    def value(self, at: float) -> float:
        """The sum as of `at`."""
        if self._value == 0.0:
            return 0.0
        return float(self._value * 0.5 ** (max(0.0, at - self._at) / self._half_life_s))


class Highest:
    """The highest value of the last `window_s`, in constant time: values that a later one tops are dropped."""

    __slots__ = ("_rows", "_window_s")

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._rows: deque[tuple[float, float]] = deque()

    def add(self, at: float, value: float) -> None:
        """Adds a value at time `at` (not decreasing)."""
        rows = self._rows
        while rows and rows[-1][1] <= value:
            rows.pop()
        rows.append((at, value))
        self._drop(at)

    def value(self, at: float) -> float | None:
        """The highest as of `at`; None where nothing was added in the window."""
        self._drop(at)
        return self._rows[0][1] if self._rows else None

    def clear(self) -> None:
        """Forgets everything."""
        self._rows.clear()

    def _drop(self, at: float) -> None:
        rows, since = self._rows, at - self._window_s
        while rows and rows[0][0] < since:
            rows.popleft()


class Spacing:
    """How far apart things come: the median of the last few distances, so that one gap does not stretch it."""

    __slots__ = ("_distances", "_last_at")

    def __init__(self) -> None:
        self._distances: deque[float] = deque(maxlen=7)
        self._last_at: float | None = None

    def observe(self, at: float) -> None:
        """One more thing, at time `at`."""
        if self._last_at is not None and at > self._last_at:
            self._distances.append(at - self._last_at)
        self._last_at = at

    @property
    def typical_s(self) -> float:
        """The usual distance in seconds; 0 before there were three."""
        if len(self._distances) < 3:
            return 0.0
        return sorted(self._distances)[len(self._distances) // 2]

    def fresh_s(self, stale_after_s: float) -> float:
        """How old a figure may be: `stale_after_s`, or three of the usual distances where these are longer."""
        return max(stale_after_s, 3 * self.typical_s)


def wilson(k: float, n: float, z: float) -> tuple[float, float]:
    """Wilson's bounds for the share k of n (1927); (0, 1) where n is 0."""
    if n <= 0:
        return 0.0, 1.0
    p = min(1.0, k / n)
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def log_odds_ratio(low: tuple[float, float], high: tuple[float, float]) -> tuple[float, float, float]:
    """The log odds ratio of failure in `low` against `high`, with 95 % bounds.

    Each stratum is (failures, outcomes). Haldane-Anscombe's 0.5 keeps empty cells finite.
    """
    cells = []
    for failures, outcomes in (low, high):
        cells.append(failures + 0.5)
        cells.append(max(0.0, outcomes - failures) + 0.5)
    fl, sl, fh, sh = cells
    value = math.log(fl * sh / (sl * fh))
    half = 1.96 * math.sqrt(sum(1 / cell for cell in cells))
    return value, value - half, value + half


def sigmoid(log_odds: float) -> float:
    """Log-odds to probability."""
    return 1 / (1 + math.exp(-log_odds))


def kendall_z(score: int, n: int) -> float:
    """Mann and Kendall's trend statistic as a z score, from n values' count of rises minus falls over all pairs."""
    if n < 3 or score == 0:
        return 0.0
    sd = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    return (score - math.copysign(1, score)) / sd


def theil_sen_slope(points: Sequence[tuple[float, float]]) -> float:
    """The median slope over all pairs of (x, y); 0 for fewer than two distinct x."""
    slopes = [(y2 - y1) / (x2 - x1) for i, (x1, y1) in enumerate(points) for x2, y2 in points[i + 1 :] if x2 != x1]
    return median(slopes) if slopes else 0.0


def median(values: Iterable[float]) -> float:
    """The middle value, or the mean of the two in the middle. Raises IndexError where there is none."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
