"""Confidence bounds of what was counted: shares (Wilson) and rates (exact Poisson, Garwood 1936)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from fragscope.detect.statistics import wilson

_Z = 1.96
_TAIL = 0.025


@dataclass(frozen=True, slots=True)
class Share:
    """`hits` of `of`, as a ratio with 95 % bounds; the ratio is None where there was nothing to hit."""

    hits: int
    of: int

    @property
    def ratio(self) -> float | None:
        """0..1."""
        return self.hits / self.of if self.of else None

    @property
    def bounds(self) -> tuple[float, float]:
        """Wilson's."""
        return wilson(self.hits, self.of, _Z)


@dataclass(frozen=True, slots=True)
class Rate:
    """`events` in `days`, as events a day with exact 95 % bounds; None where no time was watched."""

    events: int
    days: float

    @property
    def per_day(self) -> float | None:
        """Events a day."""
        return self.events / self.days if self.days else None

    @property
    def bounds(self) -> tuple[float, float]:
        """Garwood's; (0, infinity) where no time was watched."""
        if not self.days:
            return 0.0, math.inf
        low, high = garwood(self.events)
        return low / self.days, high / self.days


def garwood(events: int) -> tuple[float, float]:
    """The 95 % bounds of a Poisson mean of which `events` were seen.

    The bounds are the means at which that many or more, and that many or fewer, have a probability of
    2.5 % each (Garwood, Biometrika 28, 1936).
    """
    low = 0.0 if events == 0 else _mean_where(lambda mean: 1 - _at_most(events - 1, mean) > _TAIL, events)
    return low, _mean_where(lambda mean: _at_most(events, mean) < _TAIL, events)


def _mean_where(beyond: Callable[[float], bool], events: int) -> float:
    """The smallest mean that is beyond, by bisection."""
    low, high = 0.0, events + 10 * math.sqrt(events + 1) + 10
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if beyond(middle) else (middle, high)
    return high


def _at_most(events: int, mean: float) -> float:
    """P(N <= events) of a Poisson variable, summed in logarithms so that hundreds do not underflow."""
    if mean <= 0:
        return 1.0
    return min(1.0, math.fsum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(events + 1)))
