"""A recording through the detector: the same samples, in the same order, as the daemon would have made."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from fragscope.detect.detector import Detector
from fragscope.detect.parameters import Parameters
from fragscope.detect.statistics import Spacing
from fragscope.explain.witness import LineReader
from fragscope.model import (
    MEMORY_CAUSES,
    AllocatorReading,
    Assessment,
    Cause,
    EngineReading,
    Gap,
    GpuReading,
    LogFact,
    Part,
    Phase,
    Reason,
    Sample,
    Verdict,
)
from fragscope.recording import (
    AllocatorLine,
    ExpositionLine,
    GpuLine,
    LabelLine,
    Line,
    LogLine,
    SampleLine,
)
from fragscope.sources.exposition import Parser
from fragscope.sources.scrape import Body, Failure, failure_from_text
from fragscope.sources.vllm import read, wanted

DEFAULT_TARGET = "vllm"
_FOR_ALL_KEPT = 256


class Joiner:
    """Raw lines of one target joined into samples: one per poll, with what else was newest then."""

    def __init__(self, target: str, stale_after_s: float) -> None:
        self._target = target
        self._stale_after_s = stale_after_s
        self._parser = Parser(wanted)
        self._gpus: dict[str, GpuReading] = {}
        self._gpu_at: float | None = None
        self._most_gpus: dict[str, int] = {}
        self._incomplete: str | None = None
        self._spacing = Spacing()
        self._peaks: dict[str, int] = {}
        self._allocators: dict[tuple[str, int], AllocatorReading] = {}
        self._facts: list[LogFact] = []
        self._reader = LineReader(target)
        self._log_seen = False
        self._pending_at: float | None = None

    def poll(self, line: ExpositionLine) -> Sample:
        """The sample of one exposition line."""
        engines, gaps = self._engines(line)
        self._spacing.observe(line.at)
        self._facts += self._reader.flush(line.at)
        self._pending_at = None
        return self._sample(line.at, engines, gaps)

    def close(self) -> Sample | None:
        """One last sample if anything was said after the last poll: no data of the engine, not a failed poll."""
        if self._pending_at is None:
            return None
        self._facts += self._reader.flush()
        return self._sample(self._pending_at, (), [])

    def gpu(self, line: GpuLine) -> None:
        """Newer figures of the GPUs; the peak since the last sample is kept."""
        self._pending_at = line.at
        self._gpu_at = line.at
        self._gpus = {}
        most = self._most_gpus[line.source] = max(len(line.devices), self._most_gpus.get(line.source, 0))
        short = len(line.devices) < most
        self._incomplete = f"{len(line.devices)} of {most} GPUs are left" if short else None
        for device in line.devices:
            peak = max(device.peak_used_bytes or 0, device.used_bytes, self._peaks.get(device.gpu, 0))
            self._peaks[device.gpu] = peak
            self._gpus[device.gpu] = GpuReading(
                line.at,
                device.gpu,
                device.total_bytes,
                device.used_bytes,
                peak,
                device.own_bytes,
                source=line.source,
            )

    def allocator(self, line: AllocatorLine) -> None:
        """Newer figures of one worker's allocator."""
        self._pending_at = line.at
        self._allocators[line.gpu, line.pid] = AllocatorReading(
            line.at,
            line.gpu,
            line.pid,
            line.allocated_bytes,
            line.reserved_bytes,
            line.inactive_split_bytes,
            line.retries_total,
            line.ooms_total,
            line.largest_free_bytes,
            line.config,
        )

    def log(self, line: LogLine) -> None:
        """A line of the log, and what it establishes."""
        self._pending_at = line.at
        self._log_seen = True
        self._facts += self._reader.feed(line.at, line.line)

    def with_log(self, sample: Sample) -> Sample:
        """A ready-made sample with what `log` lines beside it said."""
        self._pending_at = None
        if not self._log_seen:
            return sample
        self._facts += self._reader.flush(sample.at)
        facts, self._facts = tuple(self._facts), []
        gaps = tuple(gap for gap in sample.gaps if gap.part is not Part.LOG)
        return replace(sample, log_facts=sample.log_facts + facts, gaps=gaps)

    def _engines(self, line: ExpositionLine) -> tuple[tuple[EngineReading, ...], list[Gap]]:
        if line.text is None:
            failure = failure_from_text(line.error or "no answer recorded")
            return (), [Gap(Part.ENGINE, failure.reason, failure.detail)]
        page = self._parser.parse(Body(line.text, ""))
        if isinstance(page, Failure):
            return (), [Gap(Part.ENGINE, page.reason, page.detail)]
        answer = read(page, line.at, line.health)
        return answer.engines, [answer.gap] if answer.gap is not None else []

    def _sample(self, at: float, engines: tuple[EngineReading, ...], gaps: list[Gap]) -> Sample:
        limit_s = self._spacing.fresh_s(self._stale_after_s)
        fresh = self._gpu_at is not None and at - self._gpu_at <= limit_s
        if not fresh:
            gaps.append(Gap(Part.GPU, Reason.ABSENT if self._gpu_at is None else Reason.STALE))
        elif self._incomplete is not None:
            gaps.append(Gap(Part.GPU, Reason.ABSENT, self._incomplete))
        allocators = [a for a in self._allocators.values() if at - a.at <= limit_s]
        if not allocators:
            gaps.append(Gap(Part.ALLOCATOR, Reason.STALE if self._allocators else Reason.ABSENT))
        if not self._log_seen:
            gaps.append(Gap(Part.LOG, Reason.ABSENT))
        gpus = tuple(self._gpus.values()) if fresh and self._incomplete is None else ()
        # One peak belongs to one sample.
        self._gpus = {name: replace(gpu, peak_used_bytes=None) for name, gpu in self._gpus.items()}
        facts, self._facts, self._peaks = tuple(self._facts), [], {}
        return Sample(at, self._target, engines, gpus, tuple(allocators), facts, tuple(gaps))


@dataclass(slots=True)
class _Track:
    """What replay keeps of one target; the first kind of poll line seen decides which kind is replayed."""

    joiner: Joiner
    detector: Detector
    raw: bool | None = None


class Replayer:
    """Feeds lines to one detector per target; `tap` sees every sample before it is judged.

    `parameters_of` gives each target's thresholds by its name.
    """

    def __init__(
        self,
        parameters_of: Callable[[str], Parameters] = lambda _: Parameters(),
        tap: Callable[[Sample], None] | None = None,
    ) -> None:
        self._parameters_of = parameters_of
        self._tap = tap
        self._tracks: dict[str, _Track] = {}
        self._for_all: deque[Line] = deque(maxlen=_FOR_ALL_KEPT)
        self.labels: list[LabelLine] = []

    def feed(self, line: Line) -> Iterator[Assessment]:
        """The assessments that a line leads to."""
        if isinstance(line, LabelLine):
            self.labels.append(line)
            return
        for target in self._targets_of(line):
            track = self._track(target)
            assessment = self._step(track, line)
            if assessment is not None:
                yield assessment

    def finish(self) -> Iterator[Assessment]:
        """The assessments of the closing samples."""
        for track in self._tracks.values():
            sample = track.joiner.close() if track.raw is not False else None
            if sample is not None:
                yield self._observe(track, sample)

    def _targets_of(self, line: Line) -> list[str]:
        if line.target is not None:
            return [line.target]
        if isinstance(line, ExpositionLine):
            return list(self._tracks) or [DEFAULT_TARGET]
        # A target that is met later gets it as well.
        self._for_all.append(line)
        return list(self._tracks)

    def _track(self, target: str) -> _Track:
        track = self._tracks.get(target)
        if track is None:
            parameters = self._parameters_of(target)
            track = _Track(Joiner(target, parameters.stale_after_s), Detector(target, parameters))
            self._tracks[target] = track
            for line in self._for_all:
                self._step(track, line)
        return track

    def _step(self, track: _Track, line: Line) -> Assessment | None:
        if isinstance(line, SampleLine):
            track.raw = False if track.raw is None else track.raw
            return self._observe(track, track.joiner.with_log(line.sample)) if not track.raw else None
        if isinstance(line, ExpositionLine):
            track.raw = True if track.raw is None else track.raw
            return self._observe(track, track.joiner.poll(line)) if track.raw else None
        if isinstance(line, GpuLine):
            track.joiner.gpu(line)
        elif isinstance(line, AllocatorLine):
            track.joiner.allocator(line)
        elif isinstance(line, LogLine):
            track.joiner.log(line)
        return None

    def _observe(self, track: _Track, sample: Sample) -> Assessment:
        if self._tap is not None:
            self._tap(sample)
        return track.detector.observe(sample)


def replay(lines: Iterable[Line], replayer: Replayer) -> Iterator[Assessment]:
    """Every assessment of a stream of lines, the closing ones included."""
    for line in lines:
        yield from replayer.feed(line)
    yield from replayer.finish()


@dataclass(slots=True)
class _Story:
    """What happened to one engine so far."""

    last: Verdict
    told: tuple[Any, ...]
    seen: dict[str, list[float]] = field(default_factory=dict)


class Timeline:
    """Turns assessments into changes of phase, cause or conditions, and final verdicts."""

    def __init__(self) -> None:
        self._stories: dict[tuple[str, str | None], _Story] = {}
        self.highest = Phase.UNKNOWN

    def observe(self, assessment: Assessment) -> Iterator[Verdict]:
        """The verdicts that differ from the one before."""
        for verdict in assessment.verdicts:
            self.highest = max(self.highest, verdict.phase, key=rank)
            if self._changed(verdict):
                yield verdict

    def finals(self) -> list[tuple[Verdict, dict[str, list[float]]]]:
        """The last verdict of every engine with the causes and conditions seen: name -> [first, last].

        What was superseded is none: the time before an engine was known, an engine that was forgotten.
        """
        last_at: dict[str, float] = {}
        for (target, _), story in self._stories.items():
            last_at[target] = max(story.last.at, last_at.get(target, story.last.at))
        return [
            (story.last, self._seen(target, engine))
            for (target, engine), story in self._stories.items()
            if story.last.at == last_at[target]
        ]

    def _seen(self, target: str, engine: str | None) -> dict[str, list[float]]:
        """An engine's own story; that of a target without one is everything."""
        if engine is not None:
            return self._stories[target, engine].seen
        merged: dict[str, list[float]] = {}
        for (other, _), story in self._stories.items():
            for name, (first, last) in story.seen.items() if other == target else ():
                known = merged.setdefault(name, [first, last])
                merged[name] = [min(first, known[0]), max(last, known[1])]
        return merged

    def _changed(self, verdict: Verdict) -> bool:
        told = (verdict.phase, verdict.cause, verdict.conditions)
        key = (verdict.target, verdict.engine)
        story = self._stories.get(key)
        changed = story is None or story.told != told
        if story is None:
            early = self._stories.get((verdict.target, None))
            story = self._stories[key] = _Story(verdict, told, dict(early.seen) if early is not None else {})
        story.last, story.told = verdict, told
        for name in {verdict.cause, *map(str, verdict.conditions)} - {str(Cause.NONE)}:
            story.seen.setdefault(name, [verdict.at, verdict.at])[1] = verdict.at
        return changed


def rank(phase: Phase) -> int:
    """Phases in order: unknown < clear < watch < suspected < confirmed."""
    return list(Phase).index(phase)


@dataclass(frozen=True, slots=True)
class Score:
    """How well the alarms of a run match its labels; delays in seconds from the label's begin."""

    labels: int
    found: int
    cause_right: int
    alarms: int
    false_alarms: int
    delays_s: tuple[float, ...]


@dataclass(slots=True)
class Alarm:
    """A stretch of suspected or confirmed; a later cause replaces an earlier one."""

    target: str
    since: float
    until: float
    cause: str


class Alarms:
    """Collects alarms from assessments."""

    def __init__(self) -> None:
        self.all: list[Alarm] = []
        self._open: dict[tuple[str, str | None], Alarm] = {}

    def observe(self, assessment: Assessment) -> None:
        """Opens, prolongs and closes alarms."""
        for verdict in assessment.verdicts:
            key = (verdict.target, verdict.engine)
            if verdict.phase not in (Phase.SUSPECTED, Phase.CONFIRMED):
                self._open.pop(key, None)
                continue
            alarm = self._open.get(key)
            if alarm is None:
                alarm = self._open[key] = Alarm(verdict.target, verdict.at, verdict.at, verdict.cause)
                self.all.append(alarm)
            alarm.until, alarm.cause = verdict.at, verdict.cause


def score(labels: Iterable[LabelLine], alarms: list[Alarm], before_s: float = 600.0, after_s: float = 3600.0) -> Score:
    """Matches alarms to memory labels: an alarm is true if it overlaps [at - before, until + after]."""
    memory = [label for label in labels if label.cause in MEMORY_CAUSES]
    found, right, delays, matched = 0, 0, [], set()
    for label in memory:
        hits = [i for i, alarm in enumerate(alarms) if _overlaps(label, alarm, before_s, after_s)]
        matched.update(hits)
        if hits:
            found += 1
            delays.append(max(0.0, min(alarms[i].since for i in hits) - label.at))
            right += any(alarms[i].cause == label.cause for i in hits)
    return Score(len(memory), found, right, len(alarms), len(alarms) - len(matched), tuple(delays))


def _overlaps(label: LabelLine, alarm: Alarm, before_s: float, after_s: float) -> bool:
    if label.target is not None and label.target != alarm.target:
        return False
    return alarm.until >= label.at - before_s and alarm.since <= label.until + after_s
