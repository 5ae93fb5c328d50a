"""What the log, and the planned-stop marker, said: kept as bursts, so that a flood of lines evicts nothing."""

from collections import deque
from dataclasses import dataclass

from fragscope.detect.parameters import Parameters
from fragscope.model import Fact, LogFact

_BURSTS_KEPT = 8
_INTERLEAVED_S = 5.0
"""Several processes write one log: a death notice may overtake the message that explains it."""


@dataclass(frozen=True, slots=True)
class Span:
    """The stretch that a fact must lie in to explain a failure; `died_at` is None while the engine lives."""

    process_since: float
    last_good_at: float
    died_at: float | None = None


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
        self._bursts: dict[Fact, deque[_Burst]] = {kind: deque(maxlen=_BURSTS_KEPT) for kind in Fact}

    def add(self, fact: LogFact) -> None:
        """Keeps a fact, in the burst it belongs to or as the first of a new one."""
        figured = fact if {"tried", "free"} <= fact.facts.keys() else None
        for burst in self._bursts[fact.what]:
            if burst.first.at - self._p.episode_gap_s <= fact.at <= burst.last_at + self._p.episode_gap_s:
                burst.first = min(burst.first, fact, key=lambda each: each.at)
                burst.last_at = max(burst.last_at, fact.at)
                burst.figured = burst.figured or figured
                return
        self._bursts[fact.what].append(_Burst(fact, fact.at, figured))

    def explains(self, span: Span) -> LogFact | None:
        """What came first explains the rest; an out-of-memory message outranks a death notice it trails."""
        kinds = (kind for kind in Fact if kind is not Fact.REQUEST_TOO_LONG)
        relevant = [burst for kind in kinds for burst in self._bursts[kind] if self._bears_on(kind, burst, span)]
        if not relevant:
            return None
        first = min(relevant, key=lambda burst: burst.first.at)
        ooms = [burst for burst in relevant if burst.first.what is Fact.OOM]
        if (
            first.first.what in (Fact.ENGINE_DEATH, Fact.WORKER_DEATH)
            and ooms
            and ooms[0].first.at - first.first.at <= _INTERLEAVED_S
        ):
            first = ooms[0]
        return first.figured or first.first

    def since(self, kind: Fact, span: Span) -> float:
        """How old a fact of this kind may be to bear on the span's process."""
        return max(span.process_since, span.last_good_at - self._reach_s(kind))

    def _bears_on(self, kind: Fact, burst: _Burst, span: Span) -> bool:
        since = self.since(kind, span)
        if kind is Fact.PLANNED_STOP and span.died_at is not None:
            # What is touched after the death announces nothing: deleting a crashed pod runs its hook, too.
            since = max(span.process_since, span.died_at - self._p.planned_stop_valid_s)
            return since <= burst.last_at and burst.first.at <= span.died_at
        return burst.last_at >= since

    def _reach_s(self, kind: Fact) -> float:
        asked_for = kind in (Fact.SHUTDOWN, Fact.PLANNED_STOP)
        return self._p.planned_stop_valid_s if asked_for else self._p.episode_gap_s
