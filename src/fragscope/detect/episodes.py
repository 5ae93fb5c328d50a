"""Episodes: failures close in time, or the death of an engine, opened, weighed, merged, closed, corrected.

A crash makes hundreds of failed requests at once, so requests are not independent trials: the episode
is the unit of inference. What a log says later re-weighs the episode it is about, open or closed, and an
answer that changes by it says so.
"""

from collections import deque
from dataclasses import dataclass, replace

from fragscope.detect.attribution import Circumstances, weigh
from fragscope.detect.judgement import Judgement, judge
from fragscope.detect.parameters import Parameters
from fragscope.detect.testimony import HEARD, Span, Testimony
from fragscope.model import MEMORY_CAUSES, Cause, Fact, LogFact

_HISTORY_KEPT = 32
_STARTS_BY_ITSELF = frozenset({Fact.REFUSAL, Fact.DRIVER_FAULT, Fact.HOST_OOM})
"""While nothing answers these are failures of their own: a process that dies while loading was never polled."""


@dataclass(frozen=True, slots=True)
class Correction:
    """What was said before, and what changed it."""

    at: float
    was: Cause
    was_probability: float
    why: str


@dataclass(slots=True)
class Episode:
    """One episode; `last_at` is its last failure, `ended` says that its verdict no longer holds."""

    opened_at: float
    last_at: float
    judged_at: float
    """When the detector first spoke of it: what it says in the same breath is no correction."""
    circumstances: Circumstances
    span: Span
    earlier: float
    judgement: Judgement
    told: LogFact | None = None
    closed: bool = False
    ended: bool = False
    retracted: bool = False
    counted: bool = False
    correction: Correction | None = None

    @property
    def cause(self) -> Cause:
        """The likeliest explanation."""
        return Cause.UNEXPLAINED if self.retracted else self.judgement.cause

    @property
    def memory(self) -> bool:
        """Whether that is a memory cause."""
        return self.cause in MEMORY_CAUSES

    @property
    def probability(self) -> float:
        """How likely a memory cause is, 0..1."""
        return 0.0 if self.retracted else self.judgement.memory_probability


class Docket:
    """All episodes of one target: at most one open, a few past ones remembered."""

    def __init__(self, parameters: Parameters) -> None:
        self._p = parameters
        self._testimony = Testimony(parameters)
        self._past: deque[Episode] = deque(maxlen=_HISTORY_KEPT)
        self._kept: deque[Episode] = deque(maxlen=_HISTORY_KEPT)
        self.open: Episode | None = None
        self.opened_total = 0
        self.memory_failures: dict[Cause, int] = dict.fromkeys(MEMORY_CAUSES, 0)

    def hear(
        self, facts: tuple[LogFact, ...], at: float, circumstances: Circumstances, span: Span, *, alive: bool
    ) -> None:
        """Takes what the log said; an out-of-memory message opens an episode by itself."""
        facts = tuple(fact for fact in facts if fact.what in HEARD)
        if not facts:
            return
        for fact in facts:
            self._testimony.add(fact)
        fresh = [fact for fact in facts if not self._was_of_the_last(fact)]
        if len(fresh) < len(facts) and self._kept:
            self._weigh(self._kept[-1], at)
        failed_at = max((fact.at for fact in fresh if _opens(fact, alive=alive)), default=None)
        if failed_at is not None:
            if self.open is None:
                self._open(min(failed_at, at), at, circumstances, span)
            elif not self.open.circumstances.crashed:
                self.open.last_at = max(self.open.last_at, min(failed_at, at))
        if self.open is not None:
            self._weigh(self.open, at)

    def failed(self, at: float, circumstances: Circumstances, span: Span) -> None:
        """Server errors pass the gate while the engine lives."""
        if self.open is None:
            self._open(at, at, circumstances, span)
        else:
            self.open.last_at = at

    def died(self, at: float, circumstances: Circumstances, span: Span) -> Episode:
        """The engine died; an open episode becomes this one."""
        if self.open is None:
            return self._open(at, at, circumstances, span)
        episode = self.open
        episode.last_at = episode.judged_at = at
        episode.circumstances = circumstances
        episode.span = span
        self._weigh(episode, at)
        return episode

    def answered(self, at: float, *, restarted: bool, returned: bool) -> None:
        """The engine answers (again): closes a crash; the *same* process answering takes it back."""
        newest = self._kept[-1] if self._kept else None
        if newest is not None and newest.circumstances.crashed and (restarted or returned):
            if returned:
                self._take_back(newest, at)
            if not newest.closed:
                self._close(newest, at)
        self.advance(at)

    def advance(self, at: float) -> None:
        """Closes what has been quiet for long enough."""
        if self.open is not None and at - self.open.last_at >= self._p.episode_gap_s:
            self._close(self.open, self.open.last_at + self._p.episode_gap_s)

    def leading(self) -> Episode | None:
        """The memory episode that the phase rests on: confirmed before suspected, then the latest."""
        return max(self._held(), key=lambda e: (e.judgement.confirmed, e.last_at), default=None)

    def newest_held(self) -> Episode | None:
        """The last memory episode; the hold is counted from it."""
        return max(self._held(), key=lambda e: e.last_at, default=None)

    def _held(self) -> list[Episode]:
        return [episode for episode in self._kept if not episode.ended and self._pages(episode)]

    def latest(self, since: float) -> Episode | None:
        """The last episode whose last failure is not older than `since`."""
        if not self._kept or self._kept[-1].last_at < since:
            return None
        return self._kept[-1]

    def deserves_ticket(self, since: float) -> bool:
        """Whether an episode that is open, or not older than `since`, is likely enough for the lower point."""
        threshold = min(self._p.ticket_probability, self._p.suspected_probability)
        return any(
            (not episode.closed or episode.last_at >= since)
            and (episode.judgement.confirmed or episode.probability >= threshold)
            and episode.memory
            for episode in self._kept
        )

    def end_held(self) -> None:
        """Headroom is back and the hold is over: no episode pages any longer."""
        for episode in self._kept:
            episode.ended = episode.ended or episode.closed

    def earlier_crash(self, at: float) -> float:
        """0..1: the last undrained crash with a memory cause, decayed."""
        ages = [at - past.last_at for past in self._remembered() if _crashed(past)]
        return float(0.5 ** (min(ages) / self._p.crash_half_life_s)) if ages else 0.0

    def _pages(self, episode: Episode) -> bool:
        if episode.retracted:
            return False
        judgement = episode.judgement
        return judgement.confirmed or judgement.memory_probability >= self._p.suspected_probability

    def _was_of_the_last(self, fact: LogFact) -> bool:
        """Whether a fact is about a failure that is closed already: a line that came late."""
        if not self._kept or not self._kept[-1].closed:
            return False
        last = self._kept[-1]
        until = last.span.until if last.span.until is not None else last.last_at
        return last.span.last_good_at - self._p.episode_gap_s <= fact.at <= until

    def _open(self, opened_at: float, at: float, circumstances: Circumstances, span: Span) -> Episode:
        told = self._testimony.explains(span)
        score, evidence = weigh(circumstances, told, self._p)
        judgement = judge(score, 0.0, evidence, circumstances, told, self._p)
        episode = Episode(opened_at, max(opened_at, at), at, circumstances, span, self._earlier(at), judgement)
        self._weigh(episode, at)
        self.open = episode
        self._kept.append(episode)
        self.opened_total += 1
        return episode

    def _weigh(self, episode: Episode, at: float) -> None:
        before = episode.judgement
        told = self._testimony.explains(episode.span)
        if episode.told is not None and episode.told.what is Fact.OOM and (told is None or told.what is not Fact.OOM):
            # The allocator has spoken: a process that dies a while later does not take its words back.
            told = episode.told
        episode.told = told
        score, evidence = weigh(episode.circumstances, told, self._p)
        earlier = episode.earlier if _may_repeat(episode.circumstances, told) else 0.0
        after = judge(score, earlier, evidence, episode.circumstances, told, self._p)
        episode.judgement = after
        if told is None or at <= episode.judged_at:
            return
        if (before.cause, before.confirmed) != (after.cause, after.confirmed) and not episode.retracted:
            episode.correction = Correction(at, before.cause, before.memory_probability, _WHY[told.what])
            episode.ended = episode.ended and not self._pages(episode)
        if episode.closed:
            self._remember(episode)

    def _take_back(self, episode: Episode, at: float) -> None:
        if episode.judgement.confirmed:
            return
        episode.retracted = True
        why = "the same process answers again: it was cut off, not dead"
        episode.correction = Correction(at, episode.judgement.cause, episode.judgement.memory_probability, why)

    def _earlier(self, at: float) -> float:
        half_life_s = self._p.half_life_s
        past = self._remembered()
        return float(sum(each.judgement.score * 0.5 ** ((at - each.last_at) / half_life_s) for each in past))

    def _remembered(self) -> list[Episode]:
        return [past for past in self._past if past.memory and past.judgement.score > 0]

    def _close(self, episode: Episode, until: float) -> None:
        episode.closed = True
        episode.span = replace(episode.span, until=until)
        self.open = None
        self._remember(episode)

    def _remember(self, episode: Episode) -> None:
        """Counts a closed memory episode, once: a counter cannot take back what a late line corrects."""
        if not episode.memory or episode.counted:
            return
        episode.counted = True
        self.memory_failures[episode.cause] += 1
        self._past.append(episode)


_WHY = {
    Fact.OOM: "the allocator's own words came in",
    Fact.SHUTDOWN: "the log shows that a shutdown was asked for",
    Fact.PLANNED_STOP: "the planned-stop marker was found",
    Fact.DRIVER_FAULT: "the log shows a fault of the GPU or its driver",
    Fact.HOST_OOM: "the log shows that the host's own memory ran out",
    Fact.REFUSAL: "the log shows that vLLM refused to start",
    Fact.REQUEST_TOO_LONG: "the log shows requests that were too long",
    Fact.ENGINE_DEATH: "the log names the engine's death, and no out-of-memory message",
    Fact.WORKER_DEATH: "the log names a worker's death, and no out-of-memory message",
}


def _opens(fact: LogFact, *, alive: bool) -> bool:
    return fact.what is Fact.OOM or (not alive and fact.what in _STARTS_BY_ITSELF)


def _crashed(episode: Episode) -> bool:
    return episode.circumstances.crashed and not episode.circumstances.drained


def _may_repeat(circumstances: Circumstances, told: LogFact | None) -> bool:
    """An earlier memory failure counts only where nothing else explains this one and headroom is short.

    Otherwise a rollout or a kill an hour after a real out-of-memory death would be called another.
    """
    if told is not None or circumstances.drained:
        return False
    return circumstances.headroom is None or circumstances.headroom.ratio < 2
