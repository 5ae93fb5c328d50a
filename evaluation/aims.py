"""What the figures should be, declared before they were measured, beside those of an earlier prototype."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from evaluation.figures import Figures, figures
from evaluation.reliability import bins, calibration_error
from evaluation.scoring import RunScore

Measure = Callable[[Sequence[RunScore]], float | None]


@dataclass(frozen=True, slots=True)
class Aim:
    """One figure of one tier; met where it is at least `least`, or at most `most`."""

    tier: str
    what: str
    measure: Measure
    least: float | None = None
    most: float | None = None
    prototype: float | None = None
    """The prototype's figure, on its own simulator, seeds 100 to 107, 22 scenarios."""

    def cells(self, scores: Mapping[str, Sequence[RunScore]]) -> tuple[str, ...] | None:
        """Tier, what, measured, aim, met, prototype; None where the tier was not run."""
        if self.tier not in scores:
            return None
        value = self.measure(scores[self.tier])
        shown = "-" if value is None else f"{value:.3f}"
        prototype = "" if self.prototype is None else f"{self.prototype:.2f}"
        return self.tier, self.what, shown, self._limit(), self._met(value), prototype

    def _limit(self) -> str:
        return f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"

    def _met(self, value: float | None) -> str:
        if value is None:
            return "-"
        met = value >= self.least if self.least is not None else value <= (self.most or 0.0)
        return "yes" if met else "NO"


def _of(part: Callable[[Figures], float | None]) -> Measure:
    return lambda scores: part(figures(scores))


def _calibration(scores: Sequence[RunScore]) -> float | None:
    return calibration_error(bins((row for score in scores for row in score.episodes), lambda row: row.said_last))


_PRECISION = _of(lambda f: f.alarm_precision.ratio)
_RECALL = _of(lambda f: f.run_recall.ratio)
_FALSE = _of(lambda f: f.false_alarms.per_day)
_CAUSE = _of(lambda f: f.cause_right.ratio)
_IN_TIME = _of(lambda f: f.in_time.ratio)
_LED = _of(lambda f: float(f.fragmentation_led_runs))

AIMS = (
    Aim("T0", "alarm precision", _PRECISION, least=0.9, prototype=0.73),
    Aim("T0", "run recall", _RECALL, least=0.65, prototype=0.64),
    Aim("T0", "false alarms a day, all negatives", _FALSE, most=0.1, prototype=0.48),
    Aim("T0", "runs in which fragmentation led", _LED, most=0),
    Aim("T1", "runs in which fragmentation led", _LED, most=0),
    Aim("T2", "alarm precision", _PRECISION, least=0.97, prototype=0.91),
    Aim("T2", "run recall", _RECALL, least=0.97, prototype=0.95),
    Aim("T2", "cause right", _CAUSE, least=0.95, prototype=0.98),
    Aim("T3", "cause right", _CAUSE, least=0.95, prototype=0.97),
    Aim("T3-lossy", "alarm precision", _PRECISION, least=0.99, prototype=1.0),
    Aim("T3-lossy", "run recall", _RECALL, least=0.99, prototype=1.0),
    Aim("T3-lossy", "cause right", _CAUSE, least=0.95),
    *(Aim(tier, "by the second poll after a death", _IN_TIME, least=1) for tier in ("T0", "T1", "T2", "T3")),
    *(Aim(tier, "calibration error", _calibration, most=0.05) for tier in ("T0", "T1", "T2", "T3", "T3-lossy")),
)
