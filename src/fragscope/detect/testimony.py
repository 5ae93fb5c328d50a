"""What the log, and the planned-stop marker, said: kept as bursts, so that a flood of lines evicts nothing."""

from collections import deque
from dataclasses import dataclass

from fragscope.detect.parameters import Parameters
from fragscope.model import Fact, LogFact

_BURSTS_KEPT = 8
_INTERLEAVED_S = 5.0
"""Several processes write one log: a death notice may overtake the message that explains it."""
DEATH_NOTICES = (Fact.ENGINE_DEATH, Fact.WORKER_DEATH)
"""That something died, not why: they give way to a reason that comes with them."""
_REASONS = (Fact.OOM, Fact.DRIVER_FAULT, Fact.HOST_OOM, Fact.REFUSAL)
HEARD = frozenset(Fact) - {Fact.STATS}
"""Kinds that can explain a failure."""


@dataclass(frozen=True, slots=True)
class Span:
    """The stretch that a fact must lie in to explain a failure.

    `died_at` is None while the engine lives, `until` while the episode is open: what is said
    after that is about something else.
    """

    process_since: float
    last_good_at: float
    died_at: float | None = None
    until: float | None = None


@dataclass(slots=True)
class _Burst:
    """Facts of one kind, close in time: the first of them, and the first that has figures."""

    first: LogFact
    last_at: float
    figured: LogFact | None


class Testimony:
    """Answers what explains a failure; facts may arrive late, so they count by their own time."""

    def __init__(self, parameters: Parameters) -> None:
        self._p = parameters
        self._bursts: dict[Fact, deque[_Burst]] = {kind: deque(maxlen=_BURSTS_KEPT) for kind in Fact if kind in HEARD}

    def add(self, fact: LogFact) -> None:
        """Keeps a fact, in the burst it belongs to or as the first of a new one."""
        if fact.what not in HEARD:
            return
        figured = fact if {"tried", "free"} <= fact.facts.keys() else None
        for burst in self._bursts[fact.what]:
            if burst.first.at - self._p.episode_gap_s <= fact.at <= burst.last_at + self._p.episode_gap_s:
                burst.first = min(burst.first, fact, key=lambda each: each.at)
                burst.last_at = max(burst.last_at, fact.at)
                burst.figured = burst.figured or figured
                return
        self._bursts[fact.what].append(_Burst(fact, fact.at, figured))

    def explains(self, span: Span) -> LogFact | None:
        """What came first explains the rest; a reason outranks a death notice that it trails.

        A request that was too long is refused every day: it explains failures of a living engine, where nothing
        else does, and never a death.
        """
        relevant = [burst for kind in self._bursts for burst in self._bursts[kind] if self._bears_on(kind, burst, span)]
        weighty = [burst for burst in relevant if burst.first.what is not Fact.REQUEST_TOO_LONG]
        relevant = weighty or (relevant if span.died_at is None else [])
        if not relevant:
            return None
        first = min(relevant, key=lambda burst: burst.first.at)
        if first.first.what in DEATH_NOTICES:
            reasons = [
                b for b in relevant if b.first.what in _REASONS and b.first.at - first.first.at <= _INTERLEAVED_S
            ]
            first = min(reasons, key=lambda burst: burst.first.at, default=first)
        return first.figured or first.first

    def _bears_on(self, kind: Fact, burst: _Burst, span: Span) -> bool:
        since = max(span.process_since, span.last_good_at - self._reach_s(kind))
        if span.until is not None and burst.first.at > span.until:
            return False
        if kind is Fact.PLANNED_STOP and span.died_at is not None:
            # What is touched after the death announces nothing: deleting a crashed pod runs its hook, too.
            since = max(span.process_since, span.died_at - self._p.planned_stop_valid_s)
            return since <= burst.last_at and burst.first.at <= span.died_at
        return burst.last_at >= since

    def _reach_s(self, kind: Fact) -> float:
        asked_for = kind in (Fact.SHUTDOWN, Fact.PLANNED_STOP)
        return self._p.planned_stop_valid_s if asked_for else self._p.episode_gap_s
