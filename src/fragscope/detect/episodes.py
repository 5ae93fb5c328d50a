"""Episodes: failures close in time, or the death of an engine, opened, weighed, merged and closed.

A crash makes hundreds of failed requests at once, so requests are not independent trials: the episode
is the unit of inference. What a log says later re-weighs an episode while it is open.
"""

from collections import deque
from dataclasses import dataclass

from fragscope.detect.attribution import Circumstances, Judgement, judge, weigh
from fragscope.detect.parameters import Parameters
from fragscope.detect.testimony import Span, Testimony
from fragscope.model import MEMORY_CAUSES, Cause, Fact, LogFact

_HISTORY_KEPT = 32


@dataclass(slots=True)
class Episode:
    """One episode; `last_at` is its last failure, `ended` says that its verdict no longer holds."""

    opened_at: float
    last_at: float
    circumstances: Circumstances
    span: Span
    earlier: float
    judgement: Judgement
    told: LogFact | None = None
    closed: bool = False
    ended: bool = False
    retracted: bool = False

    @property
    def cause(self) -> Cause:
        """The likeliest explanation."""
        return Cause.UNEXPLAINED if self.retracted else self.judgement.cause

    @property
    def memory(self) -> bool:
        """Whether that is a memory cause."""
        return self.cause in MEMORY_CAUSES


@dataclass(frozen=True, slots=True)
class Past:
    """A closed episode, as far as later ones care."""

    at: float
    score: float
    crashed: bool


class Docket:
    """All episodes of one target: at most one open, a few past ones remembered."""

    def __init__(self, parameters: Parameters) -> None:
        self._p = parameters
        self._testimony = Testimony(parameters)
        self._past: deque[Past] = deque(maxlen=_HISTORY_KEPT)
        self._kept: deque[Episode] = deque(maxlen=_HISTORY_KEPT)
        self.open: Episode | None = None
        self.opened_total = 0
        self.memory_failures: dict[Cause, int] = dict.fromkeys(MEMORY_CAUSES, 0)

    def hear(self, facts: tuple[LogFact, ...], at: float, circumstances: Circumstances, span: Span) -> None:
        """Takes what the log said; an out-of-memory message opens an episode by itself."""
        for fact in facts:
            self._testimony.add(fact)
        # The start of a log tells of processes long gone: their words open nothing.
        since = self._testimony.since(Fact.OOM, span)
        oom_at = max((fact.at for fact in facts if fact.what is Fact.OOM and fact.at >= since), default=None)
        if oom_at is not None:
            if self.open is None:
                self._open(min(oom_at, at), at, circumstances, span)
            elif not self.open.circumstances.crashed:
                self.open.last_at = max(self.open.last_at, min(oom_at, at))
        if self.open is not None:
            self._weigh(self.open)

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
        episode.last_at = at
        episode.circumstances = circumstances
        episode.span = span
        self._weigh(episode)
        return episode

    def answered(self, at: float, *, restarted: bool, returned: bool) -> None:
        """The engine answers (again): closes a crash; the *same* process answering takes it back."""
        episode = self.open
        if returned and episode is not None and episode.circumstances.crashed:
            episode.retracted = not episode.judgement.confirmed
        if episode is not None and (restarted or returned) and episode.circumstances.crashed:
            self._close(episode)
        self.advance(at)

    def advance(self, at: float) -> None:
        """Closes what has been quiet for long enough."""
        if self.open is not None and at - self.open.last_at >= self._p.episode_gap_s:
            self._close(self.open)

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

    def end_held(self) -> None:
        """Headroom is back and the hold is over: no episode pages any longer."""
        for episode in self._kept:
            episode.ended = episode.ended or episode.closed

    def earlier_crash(self, at: float) -> float:
        """0..1: the last undrained crash with a memory cause, decayed."""
        ages = [at - past.at for past in self._past if past.crashed]
        return float(0.5 ** (min(ages) / self._p.crash_half_life_s)) if ages else 0.0

    def _pages(self, episode: Episode) -> bool:
        if episode.retracted:
            return False
        judgement = episode.judgement
        return judgement.confirmed or judgement.memory_probability >= self._p.suspected_probability

    def _open(self, opened_at: float, at: float, circumstances: Circumstances, span: Span) -> Episode:
        told = self._testimony.explains(span)
        score, evidence = weigh(circumstances, told, self._p)
        judgement = judge(score, 0.0, evidence, circumstances, told, self._p)
        episode = Episode(opened_at, max(opened_at, at), circumstances, span, self._earlier(at), judgement)
        self._weigh(episode)
        self.open = episode
        self._kept.append(episode)
        self.opened_total += 1
        return episode

    def _weigh(self, episode: Episode) -> None:
        told = self._testimony.explains(episode.span)
        if episode.told is not None and episode.told.what is Fact.OOM and (told is None or told.what is not Fact.OOM):
            # The allocator has spoken: a process that dies a while later does not take its words back.
            told = episode.told
        episode.told = told
        score, evidence = weigh(episode.circumstances, told, self._p)
        earlier = episode.earlier if _may_repeat(episode.circumstances, told) else 0.0
        episode.judgement = judge(score, earlier, evidence, episode.circumstances, told, self._p)

    def _earlier(self, at: float) -> float:
        half_life_s = self._p.half_life_s
        return float(sum(past.score * 0.5 ** ((at - past.at) / half_life_s) for past in self._past))

    def _close(self, episode: Episode) -> None:
        episode.closed = True
        self.open = None
        if not episode.memory:
            return
        self.memory_failures[episode.cause] += 1
        if episode.judgement.score > 0:
            crashed = episode.circumstances.crashed and not episode.circumstances.drained
            self._past.append(Past(episode.last_at, episode.judgement.score, crashed))


def _may_repeat(circumstances: Circumstances, told: LogFact | None) -> bool:
    """An earlier memory failure counts only where nothing else explains this one and headroom is short.

    Otherwise a rollout or a kill an hour after a real out-of-memory death would be called another.
    """
    if told is not None or circumstances.drained:
        return False
    return circumstances.headroom is None or circumstances.headroom.ratio < 2
