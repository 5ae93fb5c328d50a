"""What really happened in a run: the labels, and what anybody can read off the samples without judging."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from fragscope.model import MEMORY_CAUSES, Cause, Part, Reason, Sample
from fragscope.recording import LabelLine

HARD_FREE_RATIO = 0.05
"""A death that was no memory failure is a hard one where less of the card was free before it."""
_FREE_WINDOW_S = 60.0
NOT_MEMORY = frozenset(str(cause) for cause in Cause if cause not in MEMORY_CAUSES and cause is not Cause.NONE)


@dataclass(frozen=True, slots=True)
class Death:
    """An engine that went away: its first bad poll, and the one at which a verdict is due."""

    target: str
    first_bad_at: float
    due_at: float
    free_ratio: float | None
    """The least share of any card that was free in the minute before; None without GPU readings."""


@dataclass(frozen=True, slots=True)
class Course:
    """One run as it was; times in unix seconds."""

    labels: tuple[LabelLine, ...]
    deaths: tuple[Death, ...]
    seconds: float
    """How long the run was, times the number of targets in it."""
    interval_s: float

    @property
    def failures(self) -> tuple[LabelLine, ...]:
        """The labelled memory failures."""
        return tuple(label for label in self.labels if label.cause in MEMORY_CAUSES)

    @property
    def others(self) -> tuple[LabelLine, ...]:
        """What else was labelled: other episodes, and conditions."""
        return tuple(label for label in self.labels if label.cause not in (*MEMORY_CAUSES, Cause.NONE))

    @property
    def positive(self) -> bool:
        """Whether an allocation outside the KV pool failed."""
        return bool(self.failures)

    @property
    def hard(self) -> bool:
        """Whether it is a negative that looks like a positive: a death with hardly any memory free."""
        near = any(death.free_ratio is not None and death.free_ratio < HARD_FREE_RATIO for death in self.deaths)
        return near and not self.positive


@dataclass(slots=True)
class _Track:
    """One target so far."""

    first_at: float
    last_at: float
    polls: int = 0
    bad_polls: int = 0
    first_bad_at: float = 0.0
    answered: bool = False
    started_at: float | None = None
    tokens: float = 0.0
    counted: bool = False
    free: deque[tuple[float, float]] = field(default_factory=deque)


class CourseKeeper:
    """Folds samples into a course; knows nothing of the detector."""

    def __init__(self) -> None:
        self._tracks: dict[str, _Track] = {}
        self._deaths: list[Death] = []

    def observe(self, sample: Sample) -> None:
        """Takes the next sample, with everything in it."""
        track = self._tracks.setdefault(sample.target, _Track(sample.at, sample.at))
        track.last_at, track.polls = sample.at, track.polls + 1
        if sample.engines and all(engine.healthy is not False for engine in sample.engines):
            self._good(track, sample)
        elif sample.engines or any(gap.part is Part.ENGINE and gap.reason is Reason.REFUSED for gap in sample.gaps):
            self._bad(track, sample)
        if sample.gpus:
            track.free.append((sample.at, min(_free_ratio(sample))))
        while track.free and track.free[0][0] < sample.at - 2 * _FREE_WINDOW_S:
            track.free.popleft()

    def course(self, labels: Iterable[LabelLine]) -> Course:
        """The whole run; labels are known at its end."""
        tracks = self._tracks.values()
        seconds = sum(track.last_at - track.first_at for track in tracks)
        gaps = sum(max(1, track.polls - 1) for track in tracks)
        ordered = tuple(sorted(labels, key=lambda label: label.at))
        return Course(ordered, tuple(self._deaths), seconds, seconds / gaps if gaps else 0.0)

    def _good(self, track: _Track, sample: Sample) -> None:
        if _is_new(track, sample) and not track.counted:
            self._die(track, sample, track.first_bad_at if track.bad_polls else sample.at)
        track.answered, track.counted, track.bad_polls = True, False, 0
        track.started_at, track.tokens = _started_at(sample), _tokens(sample)

    def _bad(self, track: _Track, sample: Sample) -> None:
        track.bad_polls += 1
        if track.bad_polls == 1:
            track.first_bad_at = sample.at
        if track.bad_polls == 2 and track.answered:
            self._die(track, sample, track.first_bad_at)
            track.counted = True

    def _die(self, track: _Track, sample: Sample, first_bad_at: float) -> None:
        free = [ratio for at, ratio in track.free if first_bad_at - _FREE_WINDOW_S <= at < first_bad_at]
        self._deaths.append(Death(sample.target, first_bad_at, sample.at, min(free, default=None)))


def _is_new(track: _Track, sample: Sample) -> bool:
    started_at = _started_at(sample)
    if started_at is not None and track.started_at is not None:
        return abs(started_at - track.started_at) > 1.0
    return _tokens(sample) < track.tokens


def _started_at(sample: Sample) -> float | None:
    return next((engine.started_at for engine in sample.engines if engine.started_at is not None), None)


def _tokens(sample: Sample) -> float:
    return sum(engine.generation_tokens_total or 0.0 for engine in sample.engines)


def _free_ratio(sample: Sample) -> list[float]:
    return [1 - max(gpu.peak_used_bytes or 0, gpu.used_bytes) / gpu.total_bytes for gpu in sample.gpus]
