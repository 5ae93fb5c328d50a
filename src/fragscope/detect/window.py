"""The recent past of one target: polls, processes, deaths and restarts.

Nothing here judges. A poll is *good* when `/metrics` answers and `/health` does not fail; a process is
*dead* at the second bad poll in a row (refused, reset, or `/health` >= 500); a time-out is no data.
"""

from dataclasses import dataclass
from enum import Enum

from fragscope.detect.engine import EngineWindow, Recent, Total
from fragscope.detect.outcomes import Increments, Ledger
from fragscope.detect.parameters import Parameters
from fragscope.model import EngineReading, Part, Reason, Sample


class Answer(Enum):
    """What one poll of a target came to."""

    GOOD = "good"
    UNHEALTHY = "unhealthy"
    REFUSED = "refused"
    SILENT = "silent"
    """No data: a time-out, a torn page, or no poll at all."""


@dataclass(frozen=True, slots=True)
class BeforeDeath:
    """What was known of the engine before it died; None where too few polls were seen to say."""

    last_good_at: float
    usage_ratio: float | None
    lost: float | None
    worked: bool | None
    drained: bool | None


@dataclass(slots=True)
class Process:
    """One life of the server, from its first good poll to its death."""

    first_seen_at: float
    started_at: float | None
    dead_at: float | None = None
    generated: bool = False

    def age_s(self, at: float) -> float:
        """Seconds since it started, or since it was first seen where it does not say."""
        born = self.started_at if self.started_at is not None else self.first_seen_at
        return at - born


@dataclass(frozen=True, slots=True)
class Turn:
    """What one sample changed."""

    answer: Answer
    total: Total | None = None
    died: bool = False
    restarted: bool = False
    returned: bool = False
    """The same process answers again: it was cut off, not dead."""
    before: BeforeDeath | None = None
    """The last that was seen of the process that died."""


class TargetWindow:
    """The recent past of one target: its engines, its process, its polls."""

    def __init__(self, parameters: Parameters) -> None:
        self._p = parameters
        self._ledger = Ledger()
        self._bad_polls = 0
        self.engines: dict[str, EngineWindow] = {}
        self.totals: Recent[Total] = Recent(parameters)
        self.process: Process | None = None
        self.last_good_at: float | None = None
        self.last_polled: Answer | None = None
        self.ever_answered = False
        self.first_bad_at: float | None = None
        self.version: str | None = None

    @property
    def dead(self) -> bool:
        """Whether the process that was last seen is gone."""
        return self.process is not None and self.process.dead_at is not None

    def observe(self, sample: Sample) -> Turn:
        """Adds one sample's engine part."""
        answer = _answer(sample)
        if answer is not Answer.SILENT or any(gap.part is Part.ENGINE for gap in sample.gaps):
            self.last_polled = answer
        if answer is Answer.GOOD:
            return self._good(sample)
        if answer is Answer.SILENT:
            if self.last_polled is Answer.SILENT and not self.dead:
                self._bad_polls = 0
            return Turn(answer)
        return self._bad(sample, answer)

    def _bad(self, sample: Sample, answer: Answer) -> Turn:
        if answer is Answer.UNHEALTHY:
            self._meet_unhealthy(sample)
        self._bad_polls += 1
        if self._bad_polls == 1:
            self.first_bad_at = sample.at
        died = self._bad_polls == 2 and self.process is not None and self.process.dead_at is None
        if died and self.process is not None:
            self.process.dead_at = sample.at
        return Turn(answer, died=died, before=self.before_death() if died else None)

    def _meet_unhealthy(self, sample: Sample) -> None:
        """A server whose engine was dead when it was first seen is known, too."""
        self._ledger.advance(sample.engines, restarted=False, counting=False)
        self.ever_answered = True
        if self.process is None:
            self.process = Process(sample.at, _started_at(sample.engines))
            for reading in sample.engines:
                window = self.engines.setdefault(reading.engine, EngineWindow(self._p))
                window.reading = EngineReading(reading.at, reading.engine, reading.model_name)

    def _good(self, sample: Sample) -> Turn:
        answer = Answer.GOOD
        engines = sample.engines
        restarted = self._restarted(engines)
        returned = self.dead and not restarted
        died = restarted and not self.dead
        before = self.before_death() if died else None
        if self.process is None or restarted:
            self.process = Process(sample.at, _started_at(engines))
        self.process.dead_at = None
        self._bad_polls = 0
        self.first_bad_at = None
        self.ever_answered = True
        self.version = next((e.version for e in engines if e.version is not None), self.version)
        increments = self._ledger.advance(engines, restarted=restarted, counting=True)
        total = self._add(sample.at, engines, increments, restarted=restarted)
        self.last_good_at = sample.at
        return Turn(answer, total, died, restarted, returned, before)

    def _add(self, at: float, engines: tuple[EngineReading, ...], increments: Increments, *, restarted: bool) -> Total:
        if restarted:
            self.totals.clear()
        polls = []
        present = {engine.engine for engine in engines}
        for gone in [name for name in self.engines if name not in present]:
            del self.engines[gone]
        for reading in engines:
            window = self.engines.setdefault(reading.engine, EngineWindow(self._p))
            polls.append(window.observe(reading, restarted=restarted))
        if self.process is not None:
            self.process.generated |= any((e.generation_tokens_total or 0) > 0 for e in engines)
        usages = [poll.usage_ratio for poll in polls if poll.usage_ratio is not None]
        total = Total(
            at=at,
            usage_ratio=max(usages, default=None),
            in_flight=sum(poll.running + poll.waiting for poll in polls),
            worked=any(poll.worked for poll in polls),
            outcomes=increments,
        )
        self.totals.add(total)
        return total

    def _restarted(self, engines: tuple[EngineReading, ...]) -> bool:
        if self.process is None:
            return False
        started_at = _started_at(engines)
        if started_at is not None and self.process.started_at is not None:
            # Smaller counts as well: the clock of the engine's host may have been set back.
            return abs(started_at - self.process.started_at) > 1.0
        if self.dead:
            return not any(_continues(engine, self.engines.get(engine.engine)) for engine in engines)
        return any(_fell(engine, self.engines.get(engine.engine)) for engine in engines)

    def usage_ratio(self) -> float | None:
        """The highest KV usage of the window: a full pool's gauge oscillates between polls."""
        highest = None
        for total in self.totals.window():
            usage = total.usage_ratio
            if usage is not None and (highest is None or usage > highest):
                highest = usage
        return highest

    def before_death(self) -> BeforeDeath | None:
        """What the last good polls of the process say; None if there were none."""
        rows = self.totals.before_death()
        if not rows:
            return None
        usages = [row.usage_ratio for row in rows if row.usage_ratio is not None]
        enough = len(rows) >= 2
        worked = any(row.worked for row in rows[1:]) if enough else None
        peak = max(row.in_flight for row in self.totals.since(rows[-1].at - self._p.drain_window_s))
        emptied = peak > 0 and rows[-1].in_flight <= self._p.drained_ratio * peak
        return BeforeDeath(
            last_good_at=rows[-1].at,
            usage_ratio=max(usages, default=None),
            lost=max(row.in_flight for row in rows) if enough else None,
            worked=worked,
            drained=(emptied and not worked) if enough else None,
        )

    def resume(self) -> None:
        """Lets the next poll set baselines again; what was in flight before the pause says nothing after it."""
        self._ledger.resume()
        self.totals.clear()
        for engine in self.engines.values():
            engine.polls.clear()
            engine.peak_usage.clear()

    def forget(self) -> None:
        """Forgets a target that has been gone for too long to speak of."""
        self.engines.clear()
        self.totals.clear()
        self.process = None
        self.last_good_at = None
        self._ledger = Ledger()


def _answer(sample: Sample) -> Answer:
    if sample.engines:
        unhealthy = any(engine.healthy is False for engine in sample.engines)
        return Answer.UNHEALTHY if unhealthy else Answer.GOOD
    refused = any(gap.part is Part.ENGINE and gap.reason is Reason.REFUSED for gap in sample.gaps)
    return Answer.REFUSED if refused else Answer.SILENT


def _started_at(engines: tuple[EngineReading, ...]) -> float | None:
    return next((engine.started_at for engine in engines if engine.started_at is not None), None)


def _continues(now: EngineReading, window: EngineWindow | None) -> bool:
    """Whether the token counters go on where they were: then it is the same process."""
    before = window.reading if window is not None else None
    if before is None or not before.generation_tokens_total or now.generation_tokens_total is None:
        return False
    return now.generation_tokens_total >= before.generation_tokens_total


def _fell(now: EngineReading, window: EngineWindow | None) -> bool:
    before = window.reading if window is not None else None
    if before is None:
        return False
    pairs = (
        (now.generation_tokens_total, before.generation_tokens_total),
        (now.prompt_tokens_total, before.prompt_tokens_total),
    )
    return any(a is not None and b is not None and a < b for a, b in pairs)
