"""What comes in: Poisson arrivals that swell and burst, with the lengths of a real trace."""

import random

from fragscope.simulate.happenings import Plan
from fragscope.simulate.lengths import Lengths

_SWELL_S = 7200.0
_BURST_SHARE = 0.2


class Traffic:
    """Arrivals at one server."""

    def __init__(self, plan: Plan, rng: random.Random, began: float) -> None:
        self._demand = plan.demand
        self._rng = rng
        self._began = began
        self._lengths = Lengths(plan.demand.trace, plan.build.model.max_model_len, rng)
        self._bursting_until = 0.0
        self._calm_until = 0.0

    def draw(self) -> tuple[int, int]:
        """(prompt, output) tokens of a request."""
        return self._lengths.draw()

    def arrivals(self, at: float, seconds: float, factor: float) -> int:
        """How many requests come in the `seconds` before `at`."""
        demand = self._demand
        rate = demand.per_s * factor
        if demand.daily_swing:
            # A slow swell instead of a day: a run is hours long.
            phase = (at - self._began) / _SWELL_S % 1.0
            rate *= 1 + demand.daily_swing * (4 * abs(phase - 0.5) - 1)
        if demand.burst_factor > 1:
            rate *= self._burst(at)
        return self.some(rate * seconds)

    def some(self, expected: float) -> int:
        """A Poisson number."""
        if expected <= 0:
            return 0
        count, passed = 0, self._rng.expovariate(1.0)
        while passed < expected:
            count += 1
            passed += self._rng.expovariate(1.0)
        return count

    def _burst(self, at: float) -> float:
        """A fifth of the time in bursts, at a mean rate that stays what it was."""
        rng, factor, period_s = self._rng, self._demand.burst_factor, self._demand.burst_period_s
        if at >= self._calm_until:
            self._bursting_until = at + rng.expovariate(1 / (_BURST_SHARE * period_s))
            self._calm_until = self._bursting_until + rng.expovariate(1 / ((1 - _BURST_SHARE) * period_s))
        if at < self._bursting_until:
            return factor
        return max(0.05, (1 - _BURST_SHARE * factor) / (1 - _BURST_SHARE))
