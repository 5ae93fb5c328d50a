"""Bounds of means and shares over time whose neighbours are alike: batches of time slices, fewer while these are alike.

Requests that queue behind each other are no independent draws, so `sigma / sqrt(n)` is far too narrow. Method of batch
means: Law and Carson, A sequential procedure for determining the length of a steady-state simulation (1979).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from fragscope.model import Histogram

_BATCHES = (20, 10, 5)
_ALIKE = 0.2
"""Batches whose lag-1 autocorrelation is above this are made longer."""
_ALIKE_MAX = 0.9
_STUDENT = ((2, 12.71), (3, 4.30), (4, 3.18), (5, 2.78), (6, 2.57), (8, 2.36), (10, 2.26), (15, 2.14), (20, 2.09))
"""Two-sided 95 % of Student's t for so many batches."""
_SLICES_MAX = 480


@dataclass(slots=True)
class Slices:
    """Rises of a histogram by slices of time, made wider as the time grows: at most 480 of them."""

    width_s: float = 60.0
    rows: dict[int, Histogram] = field(default_factory=dict)

    def add(self, at: float, rise: Histogram) -> None:
        """One more rise, counted where it ended."""
        _put(self.rows, int(at // self.width_s), rise)
        while len(self.rows) > _SLICES_MAX:
            self._widen()

    def _widen(self) -> None:
        self.width_s *= 2
        rows: dict[int, Histogram] = {}
        for index, rise in sorted(self.rows.items()):
            _put(rows, index // 2, rise)
        self.rows = rows


def _put(rows: dict[int, Histogram], index: int, rise: Histogram) -> None:
    before = rows.get(index)
    if before is None or len(before.buckets) != len(rise.buckets):
        rows[index] = rise
        return
    buckets = tuple((bound, n + m) for (bound, n), (_, m) in zip(before.buckets, rise.buckets, strict=True))
    rows[index] = Histogram(before.count + rise.count, before.sum + rise.sum, buckets)


def together(parts: Sequence[Slices]) -> list[Histogram]:
    """The slices of several engines, time by time, as wide as the widest."""
    width = max((part.width_s for part in parts), default=0.0)
    rows: dict[int, Histogram] = {}
    for part in parts:
        for index, rise in sorted(part.rows.items()):
            _put(rows, int(index * part.width_s // width), rise)
    return [rise for _, rise in sorted(rows.items())]


def error_of(sums: Sequence[float], weights: Sequence[float]) -> float | None:
    """Half the width of the 95 % bounds of `sum(sums) / sum(weights)`, from slices in order of time.

    Slices are put into 20 batches, into 10 or 5 while neighbouring batches are alike; what likeness is left widens the
    bounds as in a first-order autoregression. None below two slices with weight.
    """
    total = sum(weights)
    if len(sums) < 2 or total <= 0:
        return None
    mean = sum(sums) / total
    for number in _BATCHES:
        rests = _rests(sums, weights, mean, number)
        alike = _lag_1(rests)
        if alike <= _ALIKE:
            break
    n = len(rests)
    alike = min(_ALIKE_MAX, max(0.0, alike))
    spread = math.sqrt(sum(rest * rest for rest in rests) * n / (n - 1)) / total
    student = next((t for least, t in reversed(_STUDENT) if least <= n), 12.71)
    return student * spread * math.sqrt((1 + alike) / (1 - alike))


def _rests(sums: Sequence[float], weights: Sequence[float], mean: float, number: int) -> list[float]:
    """What each batch has over the mean; the batches have the same number of slices but for one."""
    count = min(number, len(sums))
    edges = [round(i * len(sums) / count) for i in range(count + 1)]
    return [sum(sums[a:b]) - mean * sum(weights[a:b]) for a, b in pairwise(edges)]


def _lag_1(values: Sequence[float]) -> float:
    """Autocorrelation of neighbours; their mean is 0."""
    square = sum(value * value for value in values)
    return sum(a * b for a, b in pairwise(values)) / square if square else 0.0
