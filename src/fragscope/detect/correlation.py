"""Cache usage against failures: the correlation, the failure ratio and the gate before saying anything."""

from collections.abc import Mapping

from fragscope.detect.outcomes import Increments
from fragscope.detect.parameters import Parameters
from fragscope.detect.statistics import Decayed, log_odds_ratio, wilson
from fragscope.model import Band, Failures, LogOdds, Outcome

_DISPLAY_Z = 1.96
_STAGE_S = 300.0
"""Outcomes wait this long before they count as background, so that a storm does not excuse itself."""


class Correlation:
    """Attributes every outcome to the KV usage it happened at, and keeps the decayed counts."""

    def __init__(self, parameters: Parameters) -> None:
        self._p = parameters
        self._totals: dict[tuple[Band, Outcome], float] = {(b, o): 0.0 for b in Band for o in Outcome}
        self._recent = _Pair(parameters.failures_half_life_s)
        self._answered = _Pair(parameters.failures_half_life_s)
        self._strata = {band: _Pair(parameters.correlation_half_life_s) for band in (Band.LOW, Band.HIGH)}
        self._background = _Background(parameters)

    def count(self, at: float, usage_ratio: float | None, outcomes: Increments) -> None:
        """Adds one poll's outcomes at the highest usage of the window; without a usage only the ratio moves."""
        tried = outcomes.ok + outcomes.server_error
        self._recent.add(at, outcomes.server_error, tried)
        self._answered.add(at, outcomes.server_error, tried)
        self._background.add(at, outcomes.server_error, tried, storm=self._background.known(at) and self.failing(at))
        band = self._band(usage_ratio)
        if band is None:
            return
        for outcome, amount in outcomes.by_outcome():
            self._totals[band, outcome] += amount
        if band in self._strata:
            self._strata[band].add(at, outcomes.server_error, tried)

    def lose(self, at: float, usage_ratio: float | None, lost: float) -> None:
        """Adds the work that died with a process: without it the worst failures are invisible."""
        self._recent.add(at, lost, lost)
        band = self._band(usage_ratio)
        if band is None:
            return
        self._totals[band, Outcome.LOST] += lost
        if band in self._strata:
            self._strata[band].add(at, lost, lost)

    def failing(self, at: float) -> bool:
        """Whether failures are surely above the server's own background."""
        return self._gate(at, self._background.ratio(at))

    def outcomes(self) -> Mapping[tuple[Band, Outcome], float]:
        """Every outcome so far, by band."""
        return dict(self._totals)

    def failures(self, at: float) -> Failures | None:
        """The decayed failure ratio with its bounds; None before the first outcome."""
        k, n = self._recent.values(at)
        if n < 1e-9:
            return None
        lower, upper = wilson(k, n, _DISPLAY_Z)
        return Failures(min(1.0, k / n), lower, upper)

    def log_odds(self, at: float) -> LogOdds | None:
        """Failures at low against failures at high usage; None until both were seen."""
        low, high = self._strata[Band.LOW].values(at), self._strata[Band.HIGH].values(at)
        if low[1] < 1.0 or high[1] < 1.0:
            return None
        return LogOdds(*log_odds_ratio(low, high))

    def _gate(self, at: float, floor: float) -> bool:
        # Without imputed losses: one crash must not make the next server error look like a burst.
        k, n = self._answered.values(at)
        return k >= self._p.gate_min_failures and wilson(k, n, self._p.gate_z)[0] > floor

    def _band(self, usage_ratio: float | None) -> Band | None:
        if usage_ratio is None:
            return None
        if usage_ratio < self._p.band_mid_ratio:
            return Band.LOW
        return Band.MID if usage_ratio < self._p.band_high_ratio else Band.HIGH


class _Pair:
    """Decayed (failures, outcomes)."""

    __slots__ = ("_k", "_n")

    def __init__(self, half_life_s: float) -> None:
        self._k, self._n = Decayed(half_life_s), Decayed(half_life_s)

    def add(self, at: float, k: float, n: float) -> None:
        if k or n:
            self._k.add(at, k)
            self._n.add(at, n)

    def values(self, at: float) -> tuple[float, float]:
        return self._k.value(at), self._n.value(at)


class _Background:
    """The server's own share of failures over a day, learned only from quiet stretches."""

    def __init__(self, parameters: Parameters) -> None:
        self._p = parameters
        self._kept = _Pair(parameters.baseline_half_life_s)
        self._first_at: float | None = None
        self._stage_at: float | None = None
        self._stage = (0.0, 0.0)

    def add(self, at: float, k: float, n: float, *, storm: bool) -> None:
        if self._first_at is None or self._stage_at is None:
            self._first_at = self._stage_at = at
        if storm:
            self._stage, self._stage_at = (0.0, 0.0), at
            return
        self._stage = (self._stage[0] + k, self._stage[1] + n)
        if at - self._stage_at >= _STAGE_S:
            self._kept.add(at, *self._stage)
            self._stage, self._stage_at = (0.0, 0.0), at

    def known(self, at: float) -> bool:
        """Whether enough was seen; until then everything is learned, and nothing excused by it."""
        seen_s = at - self._first_at if self._first_at is not None else 0.0
        return seen_s >= self._p.baseline_min_s and self._kept.values(at)[1] >= self._p.baseline_min_outcomes

    def ratio(self, at: float) -> float:
        """The floor for the gate: half a percent, or three times the background once that is known."""
        k, n = self._kept.values(at)
        if not self.known(at):
            return self._p.gate_ratio
        return max(self._p.gate_ratio, self._p.gate_baseline_factor * k / n)
