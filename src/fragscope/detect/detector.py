"""The detector: samples of one target in, an assessment out. A fold, and nothing else."""

from dataclasses import replace

from fragscope.detect.allocator import Allocators
from fragscope.detect.attribution import Circumstances
from fragscope.detect.correlation import Correlation
from fragscope.detect.engine import EngineWindow
from fragscope.detect.episodes import Docket
from fragscope.detect.forecast import Outlook
from fragscope.detect.measures import EVIDENCE, Tallies, measures_of
from fragscope.detect.parameters import Parameters
from fragscope.detect.signals import Finding, Lingering, engine_findings, target_findings
from fragscope.detect.testimony import Span
from fragscope.detect.verdict import (
    PhaseMachine,
    Presence,
    Stand,
    cause_of,
    evidence_of,
    probabilities_of,
    remedy_of,
    sentence_of,
)
from fragscope.detect.vram import Headroom, Vram
from fragscope.detect.waterfall import Inside
from fragscope.detect.window import Answer, BeforeDeath, TargetWindow, Turn
from fragscope.model import Assessment, Cause, Condition, Part, Reason, Sample, Verdict

_CLOCK_SET_BACK_S = 60.0
"""A sample that is older than this is no late sample: somebody set the clock of a recording's host."""


class Detector:
    """Folds the samples of one target into verdicts; holds a bounded past, whatever the run's length."""

    def __init__(self, target: str, parameters: Parameters | None = None) -> None:
        self.target = target
        self._p = parameters or Parameters()
        self._window = TargetWindow(self._p)
        self._vram = Vram(self._p)
        self._docket = Docket(self._p)
        self._presence = Presence(self._p)
        self._phase = PhaseMachine(self._p)
        self._allocators = Allocators(self._p)
        self._outlook = Outlook(self._p)
        self._correlation = Correlation(self._p)
        self._target_lingering = Lingering(self._p)
        self._engine_lingering: dict[str, Lingering] = {}
        self._log_since: float | None = None
        self._tallies = Tallies()
        self._lost: tuple[float | None, float] | None = None
        self._process_since = float("-inf")
        self._at = float("-inf")
        self._offset_s = 0.0

    def observe(self, sample: Sample) -> Assessment:
        """Takes the next sample of the target and says what it adds up to."""
        sample = self._in_order(sample)
        self._at = at = max(self._at, sample.at)
        self._listen(sample, at)
        if self._window.process is not None:
            self._process_since = self._window.process.first_seen_at
        turn = self._window.observe(sample)
        facts = sample.log_facts + self._allocators.observe(self.target, sample.allocators, at)
        if facts:
            self._docket.hear(facts, at, self._circumstances(at), self._span(at), alive=self._alive())
        if turn.died:
            self._died(at, turn.before)
        if turn.restarted or turn.returned:
            self._came_back(at, turn)
        self._count(turn)
        self._vram.observe(at, sample.gpus, self._allocators, serving=self._serving(), warm=self._warm(at))
        self._weigh_failures(at, turn)
        self._docket.advance(at)
        if self._docket.open is None:
            self._count_lost(at)
        self._forget_the_gone(at)
        return self._assess(at, turn)

    def resume(self) -> None:
        """After a pause: what the counters did meanwhile belongs to no poll, so the next one only sets baselines."""
        self._window.resume()

    def _in_order(self, sample: Sample) -> Sample:
        """The sample on a time that does not run backwards: a clock that was set back is carried along."""
        if sample.at + self._offset_s < self._at - _CLOCK_SET_BACK_S:
            self._offset_s = self._at - sample.at
        return shifted(sample, self._offset_s) if self._offset_s else sample

    def _listen(self, sample: Sample, at: float) -> None:
        spoke = {"gpu"} if sample.gpus else set()
        if sample.engines:
            spoke.add("engine")
        if sample.allocators:
            spoke.add("allocator")
        for gpu in sample.gpus:
            if gpu.own_bytes is not None:
                spoke.add("own_bytes")
        log_gap = False
        for gap in sample.gaps:
            log_gap = log_gap or gap.part is Part.LOG
            if gap.part is Part.GPU and gap.reason is Reason.UNASSIGNED:
                self._vram.clear()
                self._presence.silence("gpu")
        if log_gap:
            self._log_since = None
            self._presence.silence("log")
        else:
            spoke.add("log")
            self._log_since = at if self._log_since is None else self._log_since
        self._presence.observe(at, spoke)

    def _span(self, at: float, died_at: float | None = None, last_good_at: float | None = None) -> Span:
        """What a fact must lie in to bear on the present process; before one answered, everything does."""
        process = self._window.process
        alive_since = process.first_seen_at if process is not None and process.dead_at is None else float("-inf")
        since = self._process_since if died_at is not None else alive_since
        good_at = last_good_at if last_good_at is not None else self._window.last_good_at
        return Span(since, good_at if good_at is not None else at, died_at)

    def _alive(self) -> bool:
        return self._window.process is not None and not self._window.dead

    def _serving(self) -> bool:
        process = self._window.process
        return process is not None and process.dead_at is None and process.generated

    def _warm(self, at: float) -> bool:
        process = self._window.process
        if process is None or process.dead_at is not None or process.age_s(at) < self._p.warmup_s:
            return False
        return not any(
            engine.reading is not None and engine.reading.sleeping for engine in self._window.engines.values()
        )

    def _circumstances(self, at: float) -> Circumstances:
        last = self._window.totals.last()
        headroom = self._headroom()
        return Circumstances(
            crashed=False,
            usage_ratio=self._window.usage_ratio(),
            headroom=headroom,
            inside=self._inside(headroom, at),
            growing=self._growing(),
            queueing=any(_waits(engine) for engine in self._window.engines.values()),
            log_present=self._log_since is not None and last is not None and self._log_since <= last.at,
        )

    def _inside(self, headroom: Headroom | None, at: float) -> Inside:
        """The worst card's memory by owner as of `at`."""
        if headroom is None:
            return Inside(self._allocators.held(None, at, self._p.window_s))
        held = self._allocators.held(headroom.gpu, at, self._p.window_s)
        return Inside(held, self._vram.parts(headroom.gpu, at))

    def _growing(self) -> bool | None:
        return self._vram.growing() if self._presence.has("gpu", self._at) else None

    def _headroom(self) -> Headroom | None:
        return self._vram.headroom_now() if self._presence.has("gpu", self._at) else None

    def _died(self, at: float, before: BeforeDeath | None) -> None:
        last_good_at = before.last_good_at if before is not None else at
        headroom = self._vram.headroom_before_death(last_good_at - self._p.window_s, at)
        died_at = self._window.first_bad_at if self._window.first_bad_at is not None else at
        circumstances = Circumstances(
            crashed=True,
            usage_ratio=before.usage_ratio if before is not None else None,
            headroom=headroom,
            inside=self._inside(headroom, last_good_at),
            growing=self._growing(),
            lost=before.lost if before is not None else None,
            worked=before.worked if before is not None else None,
            drained=before.drained if before is not None else None,
            seen_by_health=self._window.last_polled is Answer.UNHEALTHY,
            log_present=self._log_since is not None and self._log_since <= last_good_at,
            earlier_crash=self._docket.earlier_crash(at),
        )
        self._docket.died(at, circumstances, self._span(at, died_at, last_good_at))
        if before is not None and before.lost and not before.drained:
            self._lost = (before.usage_ratio, before.lost)

    def _came_back(self, at: float, turn: Turn) -> None:
        if turn.restarted:
            self._tallies.restarts[self._kind_of_restart()] += 1
            self._vram.rebase()
            self._count_lost(at)
        if turn.returned:
            self._lost = None
        self._docket.answered(at, restarted=turn.restarted, returned=turn.returned)

    def _count_lost(self, at: float) -> None:
        """Once it is sure that the process is gone: a server that was only cut off has lost nothing."""
        if self._lost is not None:
            usage_ratio, lost = self._lost
            self._tallies.lost_total += lost
            self._correlation.lose(at, usage_ratio, lost)
        self._lost = None

    def _kind_of_restart(self) -> str:
        episode = self._docket.latest(self._at - self._p.forget_s)
        if episode is None or not episode.circumstances.crashed:
            return "unknown"
        if episode.cause == "shutdown" or episode.circumstances.drained:
            return "planned"
        return "unknown" if episode.circumstances.lost is None else "unplanned"

    def _count(self, turn: Turn) -> None:
        if turn.total is not None:
            self._correlation.count(turn.total.at, self._window.usage_ratio(), turn.total.outcomes)

    def _weigh_failures(self, at: float, turn: Turn) -> None:
        if turn.answer is not Answer.GOOD or turn.total is None or turn.total.outcomes.server_error <= 0:
            return
        if self._correlation.failing(at):
            self._docket.failed(at, self._circumstances(at), self._span(at))

    def _forget_the_gone(self, at: float) -> None:
        process = self._window.process
        newest = self._docket.newest_held()
        if process is None and newest is not None and at - newest.last_at >= self._p.forget_s:
            self._docket.end_held()
        if process is None or process.dead_at is None or at - process.dead_at < self._p.forget_s:
            return
        self._window.forget()
        self._vram.rebase()
        self._allocators.clear()
        self._engine_lingering.clear()
        self._presence.forget()
        self._docket.end_held()

    def _assess(self, at: float, turn: Turn) -> Assessment:
        fresh = turn.answer is Answer.GOOD
        enough = self._presence.enough(at, engine_gone=self._window.dead)
        engine_up = self._window.last_polled is Answer.GOOD
        headroom = self._headroom()
        watch = self._outlook.update(at, self._vram, self._allocators, seen=headroom is not None)
        blind = headroom is None and self._vram.last_at() is not None
        stand = self._phase.update(at, self._docket, headroom, watch, enough=enough, engine_up=engine_up, blind=blind)
        shared = self._target_lingering.update(at, target_findings(self._window, at, self._p, fresh=fresh))
        available = {kind: self._presence.has(kind, at) for kind in EVIDENCE}
        missing = tuple(kind for kind in EVIDENCE if not available[kind])
        present = self._window.engines
        for gone in [name for name in self._engine_lingering if name not in present]:
            del self._engine_lingering[gone]
        verdicts = tuple(
            self._verdict(at, engine, self._findings(at, engine, shared, fresh=fresh), stand, missing)
            for engine in (self._window.engines.values() or (None,))
        )
        measures = measures_of(
            at, self.target, self._window, self._vram, self._correlation, self._docket, self._tallies, available
        )
        return Assessment(verdicts, measures)

    def _findings(self, at: float, engine: EngineWindow | None, shared: list[Finding], *, fresh: bool) -> list[Finding]:
        if engine is None or engine.reading is None:
            return shared
        lingering = self._engine_lingering.setdefault(engine.reading.engine, Lingering(self._p))
        awake = fresh or not self._window.dead
        own = engine_findings(engine, self._p, fresh=fresh) if awake else []
        found = shared + lingering.update(at, own)
        if len(found) < 2:
            return found
        return sorted(found, key=lambda finding: _STRENGTH[finding.condition])

    def _verdict(
        self,
        at: float,
        engine: EngineWindow | None,
        findings: list[Finding],
        stand: Stand,
        missing: tuple[str, ...],
    ) -> Verdict:
        latest = self._docket.latest(at - self._p.hold_s)
        cause = cause_of(stand, latest, findings)
        shown = stand.leading or self._docket.open
        episode = shown or latest
        evidence = evidence_of(episode, findings, stand)
        reading = engine.reading if engine is not None else None
        return Verdict(
            at=at,
            target=self.target,
            engine=reading.engine if reading is not None else None,
            model_name=reading.model_name if reading is not None else None,
            phase=stand.phase,
            cause=cause,
            conditions=tuple(finding.condition for finding in findings),
            since=stand.since,
            probabilities=probabilities_of(shown),
            sentence=sentence_of(cause, stand, episode, evidence, missing),
            remedy=remedy_of(cause, stand, episode),
            evidence=evidence,
            missing=missing,
            episodes=self._docket.opened_total,
            fragmentation_suspected=self._fragmentation_suspected(stand, cause),
            ticket=stand.leading is not None or self._docket.deserves_ticket(at - self._p.hold_s),
        )

    def _fragmentation_suspected(self, stand: Stand, cause: str) -> bool:
        if stand.leading is None:
            return False
        likely = stand.leading.judgement.probabilities.get(Cause.FRAGMENTATION, 0.0)
        named = cause in (Cause.FRAGMENTATION, Cause.MEMORY_UNDETERMINED)
        return named or likely >= self._p.fragmentation_probability


def shifted(sample: Sample, seconds: float) -> Sample:
    """The same sample at another time; when a process started it said itself, once."""
    return replace(
        sample,
        at=sample.at + seconds,
        engines=tuple(replace(engine, at=engine.at + seconds) for engine in sample.engines),
        gpus=tuple(replace(g, at=g.at + seconds) for g in sample.gpus),
        allocators=tuple(replace(a, at=a.at + seconds) for a in sample.allocators),
        log_facts=tuple(replace(f, at=f.at + seconds) for f in sample.log_facts),
    )


_STRENGTH = {condition: rank for rank, condition in enumerate(Condition)}


def _waits(engine: EngineWindow) -> bool:
    last = engine.polls.last()
    return last is not None and last.waiting > 0
