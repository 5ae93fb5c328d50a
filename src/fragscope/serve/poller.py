"""The tick: takes what the feeds left, makes samples, asks the detectors, publishes the board."""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import structlog

from fragscope.detect.detector import Detector
from fragscope.detect.snapshot import dump
from fragscope.model import Assessment, Gap, GpuReading, LogFact, Part, Reason, Sample, Verdict
from fragscope.serve.board import Board, GpuInfo, TargetView, View
from fragscope.serve.clock import Clock
from fragscope.serve.feeds import EngineFeed, EnginePoll, GpuFeed, GpuSnapshot
from fragscope.serve.flight import FlightRecorder
from fragscope.serve.keeper import NOTHING_KEPT, Keeper, Kept
from fragscope.serve.logfeed import LogFeed, LogIntake
from fragscope.sources.gpu.assignment import Assigned, assign
from fragscope.sources.gpu.sysfs import Card

log = structlog.get_logger("fragscope")

_FIRST_TICK_S = 0.3
_REMIND_S = 600.0
_NAMED_LINES = 100
_PATIENCE = 3
_CLOCKS_APART_S = 60.0

Tap = Callable[[Sample, EnginePoll | None], None]
LogTap = Callable[[str, LogIntake], None]


class Memory:
    """What outlives the process: states after every tick, incidents when they begin."""

    def __init__(self, keeper: Keeper, recorder: FlightRecorder) -> None:
        self._keeper = keeper
        self._recorder = recorder

    @property
    def kept(self) -> Kept:
        """What has been written so far."""
        return self._keeper.kept

    def observe(self, sample: Sample, assessment: Assessment) -> None:
        """Hands a sample to the flight recorder."""
        incident = self._recorder.observe(sample, assessment)
        if incident is not None:
            self._keeper.keep_incident(incident)

    def keep(self, detector: Detector) -> None:
        """Hands over what a detector has learned."""
        self._keeper.keep_state(detector.target, dump(detector))


@dataclass(slots=True)
class Watch:
    """One target as the tick sees it."""

    name: str
    url: str
    labels: Mapping[str, str]
    feed: EngineFeed
    detector: Detector
    stale_after_s: float
    anew: Callable[[], Detector]
    wanted_gpus: tuple[str, ...] = ()
    expected_gpus: int | None = None
    log: LogFeed | None = None
    log_tap: LogTap | None = None
    assessment: Assessment | None = None
    gaps: tuple[Gap, ...] = ()
    gpus: tuple[GpuInfo, ...] = ()
    started_at: float | None = None
    told: dict[str | None, tuple[object, ...]] = field(default_factory=dict)
    said: dict[Part, tuple[Reason, float]] = field(default_factory=dict)
    named_lines: set[str] = field(default_factory=set)
    failures_total: int = 0
    raised_in_a_row: int = 0


class Poller(threading.Thread):
    """Ticks at the interval; a late tick is skipped, never made up for in a burst."""

    def __init__(
        self,
        watches: list[Watch],
        gpu_feed: GpuFeed,
        board: Board,
        clock: Clock,
        stop: threading.Event,
        *,
        interval_s: float,
        history: int = 500,
        tap: Tap | None = None,
        memory: Memory | None = None,
    ) -> None:
        super().__init__(name="tick", daemon=True)
        self._watches = watches
        self._gpu_feed = gpu_feed
        self._board = board
        self._clock = clock
        self._stopping = stop
        self._interval_s = interval_s
        self._history: deque[Verdict] = deque(maxlen=history)
        self._tap = tap
        self._memory = memory
        self._ticks = 0

    def run(self) -> None:
        """Ticks until stopped."""
        due = self._clock.now() + min(_FIRST_TICK_S * self._clock.speed, self._interval_s)
        while not self._clock.wait(self._stopping, due - self._clock.now()):
            self.tick()
            behind_s = self._clock.now() - due
            due += self._interval_s * (1 + max(0, int(behind_s // self._interval_s)))

    def tick(self) -> None:
        """One round over all targets; one target's trouble is logged and does not touch the others."""
        now = self._clock.now()
        snapshot = self._gpu_feed.take()
        for watch in self._watches:
            try:
                self._tick_target(watch, now, snapshot)
                if self._memory is not None:
                    self._memory.keep(watch.detector)
                watch.raised_in_a_row = 0
            except Exception:
                log.exception("target could not be judged", target=watch.name)
                self._after_bug(watch)
        self._ticks += 1
        kept = self._memory.kept if self._memory is not None else NOTHING_KEPT
        views = tuple(map(self._view, self._watches))
        self._board.publish(View(now, views, tuple(self._history), self._ticks, kept))

    def _after_bug(self, watch: Watch) -> None:
        """A detector that keeps raising is worth less than one that has forgotten; both are counted."""
        watch.failures_total += 1
        watch.raised_in_a_row += 1
        if watch.raised_in_a_row >= _PATIENCE:
            log.warning("the detector starts anew", target=watch.name)
            watch.detector, watch.raised_in_a_row = watch.anew(), 0

    def _tick_target(self, watch: Watch, now: float, snapshot: GpuSnapshot) -> None:
        oldest_at = now - watch.stale_after_s
        assigned, gpus, gaps = gpus_of(snapshot, watch.wanted_gpus, watch.expected_gpus, oldest_at)
        watch.gpus = tuple(_info(card, assigned.rule) for card in assigned.cards)
        polls: list[EnginePoll | None] = [*watch.feed.take()]
        started = [engine.started_at for poll in polls if poll is not None for engine in poll.engines]
        watch.started_at = next((at for at in reversed(started) if at is not None), watch.started_at)
        facts, log_gaps = _take_log(watch, now)
        gaps += [Gap(Part.ALLOCATOR, Reason.ABSENT), *log_gaps]
        if not polls and watch.feed.late(now, watch.stale_after_s):
            gaps.append(Gap(Part.ENGINE, Reason.STALE, "the reader of the engine hangs"))
        polls = polls or [None]
        for number, poll in enumerate(polls, start=1):
            sample = _sample(watch.name, now, poll, gpus, tuple(gaps))
            until = float("inf") if number == len(polls) else sample.at
            told = tuple(fact for fact in facts if fact.at <= until)
            facts = tuple(fact for fact in facts if fact.at > until)
            self._observe(watch, replace(sample, log_facts=sample.log_facts + told), poll)
            # One peak belongs to one sample.
            gpus = tuple(replace(gpu, peak_used_bytes=None) for gpu in gpus)

    def _observe(self, watch: Watch, sample: Sample, poll: EnginePoll | None) -> None:
        watch.assessment = watch.detector.observe(sample)
        if self._memory is not None:
            self._memory.observe(sample, watch.assessment)
        watch.gaps = sample.gaps
        if self._tap is not None:
            self._tap(sample, poll)
        self._report_gaps(watch, sample, poll)
        for verdict in watch.assessment.verdicts:
            self._report_change(watch, verdict)

    def _report_change(self, watch: Watch, verdict: Verdict) -> None:
        told = (verdict.phase, verdict.cause, verdict.conditions)
        before = watch.told.get(verdict.engine)
        if before == told:
            return
        watch.told[verdict.engine] = told
        self._history.append(verdict)
        numbers = {row.signal: row.value for row in verdict.evidence if row.value is not None}
        write = log.warning if verdict.phase in ("suspected", "confirmed") else log.info
        write(
            "verdict",
            target=verdict.target,
            engine=verdict.engine,
            phase=str(verdict.phase),
            cause=verdict.cause,
            conditions=list(map(str, verdict.conditions)),
            probability=round(max(verdict.probabilities.values()), 3),
            numbers=numbers,
            sentence=verdict.sentence,
            remedy=verdict.remedy,
        )

    def _report_gaps(self, watch: Watch, sample: Sample, poll: EnginePoll | None) -> None:
        for gap in sample.gaps:
            if gap.part in (Part.ENGINE, Part.GPU) or (gap.part is Part.LOG and watch.log is not None):
                self._report_gap(watch, gap, sample.at)
        if poll is not None and poll.gap is None and watch.said.pop(Part.ENGINE, None) is not None:
            log.info("engine answers again", target=watch.name)
        if sample.gpus and watch.said.pop(Part.GPU, None) is not None:
            log.info("GPUs can be read again", target=watch.name)
        if all(gap.part is not Part.LOG for gap in sample.gaps) and watch.said.pop(Part.LOG, None) is not None:
            log.info("log can be read again", target=watch.name)
        for line in poll.malformed if poll is not None else ():
            name = line.split("{", 1)[0].split(" ", 1)[0][:80]
            if name not in watch.named_lines and len(watch.named_lines) < _NAMED_LINES:
                watch.named_lines.add(name)
                log.warning("a line could not be used", target=watch.name, line=line[:200])

    def _report_gap(self, watch: Watch, gap: Gap, at: float) -> None:
        """On change, and then every ten minutes."""
        before = watch.said.get(gap.part)
        if before is not None and before[0] is gap.reason and at - before[1] < _REMIND_S:
            return
        watch.said[gap.part] = (gap.reason, at)
        log.warning("no evidence", target=watch.name, part=str(gap.part), reason=str(gap.reason), detail=gap.detail)

    def _view(self, watch: Watch) -> TargetView:
        log_sources = () if watch.log is None else (watch.log.status,)
        sources = (watch.feed.status, self._gpu_feed.status, *log_sources)
        return TargetView(
            watch.name,
            watch.url,
            watch.labels,
            watch.assessment,
            sources,
            watch.gpus,
            watch.gaps,
            watch.failures_total,
        )


def _take_log(watch: Watch, now: float) -> tuple[tuple[LogFact, ...], list[Gap]]:
    """What the log established since the tick before, and the gap where it says nothing of the present process."""
    if watch.log is None:
        return (), [Gap(Part.LOG, Reason.ABSENT)]
    intake = watch.log.take()
    if watch.log_tap is not None:
        watch.log_tap(watch.name, intake)
    gap = intake.gap
    if watch.log.late(now, watch.stale_after_s):
        gap = Gap(Part.LOG, Reason.STALE, "the reader of the log hangs")
    elif gap is None and _never_written(intake.modified_at, watch.started_at):
        # vLLM logs when it starts. The silence of a file that is not its own must not speak for it.
        gap = Gap(Part.LOG, Reason.STALE, "nothing was written to it since the engine started: is it its log?")
    return intake.facts, [] if gap is None else [gap]


def _never_written(modified_at: float | None, started_at: float | None) -> bool:
    """By the process that started then, or soon before where two hosts' clocks differ; both in unix seconds."""
    return modified_at is not None and started_at is not None and modified_at < started_at - _CLOCKS_APART_S


def _sample(
    target: str, now: float, poll: EnginePoll | None, gpus: tuple[GpuReading, ...], gaps: tuple[Gap, ...]
) -> Sample:
    if poll is None:
        return Sample(now, target, gpus=gpus, gaps=gaps)
    if poll.gap is not None:
        gaps = (poll.gap, *gaps)
    return Sample(poll.at, target, poll.engines, gpus, log_facts=poll.facts, gaps=gaps)


def gpus_of(
    snapshot: GpuSnapshot, wanted: tuple[str, ...], expected: int | None, oldest_at: float
) -> tuple[Assigned, tuple[GpuReading, ...], list[Gap]]:
    """Which GPUs are a target's, their readings not older than `oldest_at`, or the gap in their place."""
    unreadable = len(snapshot.gaps) if snapshot.cards else 0
    assigned = assign(snapshot.cards, wanted, expected, unreadable)
    return assigned, *_gpu_part(assigned, snapshot, oldest_at)


def _gpu_part(assigned: Assigned, snapshot: GpuSnapshot, oldest_at: float) -> tuple[tuple[GpuReading, ...], list[Gap]]:
    """All of the target's GPUs, or a gap: a group is not exonerated by the ones that can be seen."""
    if assigned.gap is not None:
        return (), [snapshot.gaps[0] if not snapshot.cards and snapshot.gaps else assigned.gap]
    gpus = []
    for card in assigned.cards:
        reading = snapshot.readings.get(card.gpu)
        if reading is None or reading.at < oldest_at:
            late = Gap(Part.GPU, Reason.STALE, f"{card.gpu} has not been read in time")
            return (), [snapshot.failed.get(card.gpu, late)]
        gpus.append(reading)
    return tuple(gpus), []


def _info(card: Card, rule: str) -> GpuInfo:
    return GpuInfo(card.gpu, card.unique_id, card.card, card.render, rule)
