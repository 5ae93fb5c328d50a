"""One run, one observer: alarms and episodes against what was true."""

from dataclasses import dataclass, replace
from enum import StrEnum

from evaluation.course import NOT_MEMORY, Course, Death
from evaluation.watched import Alarm, EpisodeRow, Opened, Watched, circumstances_of, said_of, values_of, weights_of
from fragscope.model import Cause
from fragscope.recording import LabelLine

BEFORE_S = 600.0
AFTER_S = 3600.0
"""An alarm is true if it overlaps [-10 min, +60 min] around a memory failure."""
NEAR_S = 120.0
"""An episode, a death or a name belongs to a label that is not further off: a restart may fall between polls."""


@dataclass(frozen=True, slots=True)
class Run:
    """Which run it was, and who watched: a tier's name, or a naive rule's."""

    scenario: str
    seed: int
    observer: str


class Kind(StrEnum):
    """How one can be wrong."""

    MISSED = "missed"
    FALSE_ALARM = "false_alarm"
    WRONG_CAUSE = "wrong_cause"


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing to look at; `at` is the failure's time, or the false alarm's beginning."""

    run: Run
    kind: Kind
    target: str
    at: float
    truth: str | None
    said: str | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class RunScore:
    """Counts of one run, to be added up; times in seconds."""

    run: Run
    seconds: float
    interval_s: float
    positive: bool
    hard: bool
    failures: int
    found: int
    alarms: int
    true_alarms: int
    alarm_s: float
    delay_s: float | None
    """From the first failure of the run to the first true alarm; None where there was none."""
    causes: int = 0
    """Found failures of which the observer names a cause."""
    cause_right: int = 0
    cause_undetermined: int = 0
    deaths: int = 0
    """Deaths for lack of memory that were found at all."""
    deaths_in_time: int = 0
    """Of them, those in alarm by the second poll after the engine was gone."""
    fragmentation_led: int = 0
    others: int = 0
    """Labels that are no memory cause."""
    others_named: int = 0
    watch_s: float = 0.0
    watch_lead_s: float | None = None
    """From the first `watch` in the six hours before the first failure to that failure."""
    episodes: tuple[EpisodeRow, ...] = ()
    mistakes: tuple[Mistake, ...] = ()

    @property
    def false_alarms(self) -> int:
        """Alarms with no memory failure near."""
        return self.alarms - self.true_alarms


def score_alarms(run: Run, course: Course, alarms: list[Alarm]) -> RunScore:
    """What can be said of any rule that is sometimes in alarm."""
    failures = course.failures
    true = [alarm for alarm in alarms if any(_overlaps(alarm, label) for label in failures)]
    found = [label for label in failures if any(_overlaps(alarm, label) for alarm in alarms)]
    first = failures[0].at if failures else 0.0
    return RunScore(
        run=run,
        seconds=course.seconds,
        interval_s=course.interval_s,
        positive=course.positive,
        hard=course.hard,
        failures=len(failures),
        found=len(found),
        alarms=len(alarms),
        true_alarms=len(true),
        alarm_s=sum(alarm.on_s + course.interval_s for alarm in alarms),
        delay_s=max(0.0, min(alarm.since for alarm in true) - first) if true else None,
        mistakes=(
            *(_mistake(run, Kind.MISSED, label) for label in failures if label not in found),
            *(_false(run, course, alarm) for alarm in alarms if alarm not in true),
        ),
    )


def score_watched(run: Run, course: Course, watched: Watched) -> RunScore:
    """The same for a detector, which also names causes, speaks at deaths, and opens episodes."""
    alarms = watched.log.all
    plain = score_alarms(run, course, alarms)
    causes = [_cause_said(label, course.failures, alarms) for label in course.failures]
    pairs = [(label, cause) for label, cause in zip(course.failures, causes, strict=True) if cause is not None]
    deaths = [death for death in course.deaths if _found(death, course, alarms)]
    watch = [at for target, at in watched.watched_at]
    wrong = [(label, cause) for label, cause in pairs if label.cause != cause]
    return replace(
        plain,
        causes=len(pairs),
        cause_right=sum(label.cause == cause for label, cause in pairs),
        cause_undetermined=sum(cause == Cause.MEMORY_UNDETERMINED for _, cause in pairs),
        deaths=len(deaths),
        deaths_in_time=sum(_in_time(death, alarms) for death in deaths),
        fragmentation_led=watched.fragmentation_led,
        others=len(course.others),
        others_named=sum(_named(label, watched) for label in course.others),
        watch_s=len(watch) * course.interval_s,
        watch_lead_s=_lead_s(course, watched),
        episodes=tuple(_row(run, course, opened) for opened in watched.opened),
        mistakes=(*plain.mistakes, *(_mistake(run, Kind.WRONG_CAUSE, label, cause) for label, cause in wrong)),
    )


def _mistake(run: Run, kind: Kind, label: LabelLine, said: str | None = None) -> Mistake:
    return Mistake(run, kind, label.target or "", label.at, label.cause, said, label.note)


def _false(run: Run, course: Course, alarm: Alarm) -> Mistake:
    near = next((label for label in course.others if _near(label, alarm.target, alarm.since)), None)
    said = alarm.causes[-1][1] if alarm.causes else None
    truth, note = (near.cause, near.note) if near is not None else (None, "")
    return Mistake(run, Kind.FALSE_ALARM, alarm.target, alarm.since, truth, said, note)


def _overlaps(alarm: Alarm, label: LabelLine) -> bool:
    if label.target is not None and label.target != alarm.target:
        return False
    return alarm.until >= label.at - BEFORE_S and alarm.since <= label.until + AFTER_S


def _cause_said(label: LabelLine, failures: tuple[LabelLine, ...], alarms: list[Alarm]) -> str | None:
    """The last cause said of this failure: before the alarm ended, and before the next failure."""
    later = [other.at for other in failures if other.at > label.at and other.target == label.target]
    until = min(later, default=float("inf"))
    hits = [alarm for alarm in alarms if _overlaps(alarm, label) and alarm.causes]
    # The alarm that stands nearest is the one that speaks of it.
    nearest = min(hits, key=lambda alarm: _distance(alarm, label.at), default=None)
    return nearest.cause_before(until) if nearest is not None else None


def _distance(alarm: Alarm, at: float) -> float:
    return max(0.0, alarm.since - at, at - alarm.until)


def _near(label: LabelLine, target: str, at: float) -> bool:
    right_target = label.target is None or label.target == target
    return right_target and label.at - NEAR_S <= at <= label.until + NEAR_S


def _found(death: Death, course: Course, alarms: list[Alarm]) -> bool:
    """Whether it was for lack of memory, and some alarm spoke of it before the engine was long back."""
    untils = [label.until for label in course.failures if _near(label, death.target, death.first_bad_at)]
    if not untils:
        return False
    last = max(untils) + NEAR_S
    return any(a.target == death.target and a.since <= last and a.until >= death.due_at for a in alarms)


def _in_time(death: Death, alarms: list[Alarm]) -> bool:
    return any(a.target == death.target and a.since <= death.due_at <= a.until for a in alarms)


def _named(label: LabelLine, watched: Watched) -> bool:
    """Whether an observer said the label's word while it was true, or shortly after."""
    return any(
        label.at <= at <= label.until + NEAR_S
        for (target, name), times in watched.named.items()
        if name == label.cause and (label.target is None or label.target == target)
        for at in times
    )


def _lead_s(course: Course, watched: Watched) -> float | None:
    if not course.failures:
        return None
    first = course.failures[0]
    before = [
        at
        for target, at in watched.watched_at
        if first.at - 6 * 3600 <= at <= first.at and (first.target is None or first.target == target)
    ]
    return first.at - before[0] if before else None


def _row(run: Run, course: Course, opened: Opened) -> EpisodeRow:
    episode = opened.episode
    failures = [label for label in course.failures if _near(label, opened.target, episode.opened_at)]
    others = [
        label for label in course.labels if label.cause in NOT_MEMORY and _near(label, opened.target, episode.opened_at)
    ]
    label = next(iter(failures or others), None)
    return EpisodeRow(
        tier=run.observer,
        scenario=run.scenario,
        seed=run.seed,
        target=opened.target,
        opened_at=episode.opened_at,
        crashed=episode.circumstances.crashed,
        said_first=opened.said_first,
        said_last=said_of(episode),
        cause=str(episode.cause),
        memory=bool(failures),
        true_cause=label.cause if label is not None else None,
        score=episode.judgement.score,
        earlier=episode.earlier,
        weights=weights_of(episode),
        values=values_of(episode),
        circumstances=circumstances_of(episode),
    )
