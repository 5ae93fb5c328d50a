"""One detector under observation: when it alarms and for what, and every episode with what it was weighed by."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fragscope.detect.detector import Detector
from fragscope.detect.episodes import Episode
from fragscope.detect.parameters import Parameters
from fragscope.model import Assessment, Cause, Phase, Sample

_ALARMING = (Phase.SUSPECTED, Phase.CONFIRMED)


@dataclass(slots=True)
class Alarm:
    """A stretch of alarm; `causes` are (at, cause) as they changed on the way, empty for rules that name none."""

    target: str
    since: float
    until: float
    causes: list[tuple[float, str]] = field(default_factory=list)
    on_s: float = 0.0
    """How long it was on; less than its length where it went off and came back."""

    def cause_before(self, at: float) -> str | None:
        """The last cause said before `at`, or the first one said if that was later."""
        said = [cause for changed_at, cause in self.causes if changed_at < at]
        if said:
            return said[-1]
        return self.causes[0][1] if self.causes else None


class AlarmLog:
    """Turns "in alarm now" into intervals, one target at a time; one that comes back within `merge_s` goes on."""

    def __init__(self, merge_s: float = 0.0) -> None:
        self.all: list[Alarm] = []
        self._merge_s = merge_s
        self._last: dict[str, Alarm] = {}
        self._on: set[str] = set()

    def observe(self, target: str, at: float, *, alarming: bool, cause: str | None = None) -> None:
        """Opens, prolongs or closes the target's alarm."""
        if not alarming:
            self._on.discard(target)
            return
        alarm = self._last.get(target)
        was_on = target in self._on
        if alarm is None or not (was_on or at - alarm.until <= self._merge_s):
            alarm = self._last[target] = Alarm(target, at, at)
            self.all.append(alarm)
        alarm.on_s += at - alarm.until if was_on else 0.0
        alarm.until = at
        self._on.add(target)
        if cause is not None and (not alarm.causes or alarm.causes[-1][1] != cause):
            alarm.causes.append((at, cause))


@dataclass(frozen=True, slots=True)
class Opened:
    """An episode and what was said of it in the sample that opened it: P of the memory causes together."""

    target: str
    said_first: float
    episode: Episode


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One episode, ready for fitting: what spoke, what was said, and what was true."""

    tier: str
    scenario: str
    seed: int
    target: str
    opened_at: float
    crashed: bool
    said_first: float
    said_last: float
    cause: str
    memory: bool
    """Whether a labelled memory failure lies there."""
    true_cause: str | None
    """The label's cause; None where nothing was labelled."""
    score: float
    earlier: float
    weights: Mapping[str, float]
    values: Mapping[str, float | None]
    circumstances: Mapping[str, Any]


class Watched:
    """Runs one detector per target of a run, with the same parameters."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._detectors: dict[str, Detector] = {}
        self._met: set[int] = set()
        self.log = AlarmLog()
        self.opened: list[Opened] = []
        self.fragmentation_led = 0
        self.named: dict[tuple[str, str], list[float]] = {}
        """(target, cause or condition) -> the times at which it was said."""
        self.watched_at: list[tuple[str, float]] = []

    def observe(self, sample: Sample) -> None:
        """Feeds the sample to its target's detector and notes what came of it."""
        detector = self._detectors.get(sample.target)
        if detector is None:
            detector = self._detectors[sample.target] = Detector(sample.target, self._parameters)
        assessment = detector.observe(sample)
        self._note_alarm(sample, assessment)
        self._note_names(sample, assessment)
        self.opened += self._new_episodes(sample.target, detector)

    def _note_alarm(self, sample: Sample, assessment: Assessment) -> None:
        alarming = [verdict for verdict in assessment.verdicts if verdict.phase in _ALARMING]
        cause = alarming[0].cause if alarming else None
        self.log.observe(sample.target, sample.at, alarming=bool(alarming), cause=cause)
        if any(verdict.phase is Phase.WATCH for verdict in assessment.verdicts):
            self.watched_at.append((sample.target, sample.at))

    def _note_names(self, sample: Sample, assessment: Assessment) -> None:
        said = {name for v in assessment.verdicts for name in (v.cause, *map(str, v.conditions))}
        self.fragmentation_led += any(verdict.cause == Cause.FRAGMENTATION for verdict in assessment.verdicts)
        for name in said - {str(Cause.NONE)}:
            self.named.setdefault((sample.target, name), []).append(sample.at)

    def _new_episodes(self, target: str, detector: Detector) -> Iterator[Opened]:
        # No verdict shows every episode, and fitting needs them all: the one place that looks inside.
        for episode in detector._docket._kept:  # noqa: SLF001
            if id(episode) not in self._met:
                self._met.add(id(episode))
                yield Opened(target, said_of(episode), episode)


def said_of(episode: Episode) -> float:
    """The probability of the memory causes together, as it stands."""
    return 0.0 if episode.retracted else episode.judgement.memory_probability


def weights_of(episode: Episode) -> dict[str, float]:
    """What each signal added to the log-odds."""
    return {row.signal: row.weight for row in episode.judgement.evidence}


def values_of(episode: Episode) -> dict[str, float | None]:
    """The figure behind each signal."""
    return {row.signal: row.value for row in episode.judgement.evidence}


def circumstances_of(episode: Episode) -> dict[str, Any]:
    """Everything known before the failure, as plain values."""
    return asdict(episode.circumstances)
