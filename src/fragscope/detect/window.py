"""The recent past of one target: polls, processes, deaths and restarts.

Nothing here judges. A poll is *good* when `/metrics` answers and `/health` does not fail; a process is
*dead* at the second bad poll in a row (refused, reset, or `/health` >= 500); a time-out is no data.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

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
class Poll:
    """One good poll of one engine, as increments since its poll before."""

    at: float
    usage_ratio: float | None
    running: float
    waiting: float
    preemptions: float
    worked: bool
    """A prompt, first-token or generation counter rose."""


@dataclass(frozen=True, slots=True)
class Total:
    """One good poll of the whole target."""

    at: float
    usage_ratio: float | None
    in_flight: float
    worked: bool
    outcomes: Increments


@dataclass(frozen=True, slots=True)
class BeforeDeath:
    """What was known of the engine before it died; None where too few polls were seen to say."""

    last_good_at: float
    usage_ratio: float | None
    lost: float | None
    worked: bool | None
    drained: bool | None


Row = TypeVar("Row", Poll, Total)


class Recent(Generic[Row]):
    """The rows of the last minute, and at least the last few where polls are rare."""

    def __init__(self, parameters: Parameters) -> None:
        self._p = parameters
        self._rows: deque[Row] = deque()

    def add(self, row: Row) -> None:
        """Adds the newest row and drops what no window reaches any more."""
        self._rows.append(row)
        keep_since = row.at - max(self._p.drain_window_s, self._p.peak_window_s)
        while len(self._rows) > self._p.window_polls + 1 and self._rows[0].at < keep_since:
            self._rows.popleft()

    def last(self) -> Row | None:
        """The newest row."""
        return self._rows[-1] if self._rows else None

    def window(self) -> list[Row]:
        """The last `window_s`, or the last `window_polls` rows where these reach further back."""
        return self._back(self._p.window_s, self._p.window_polls)

    def before_death(self) -> list[Row]:
        """The last `window_s`, at least two rows if there are two."""
        return self._back(self._p.window_s, 2)

    def since(self, at: float) -> Iterator[Row]:
        """Rows at or after `at`, newest first."""
        for row in reversed(self._rows):
            if row.at < at:
                return
            yield row

    def _back(self, seconds: float, rows: int) -> list[Row]:
        if not self._rows:
            return []
        since = self._rows[-1].at - seconds
        found: list[Row] = []
        for row in reversed(self._rows):
            if row.at < since and len(found) >= rows:
                break
            found.append(row)
        found.reverse()
        return found

    def clear(self) -> None:
        """Forgets everything: another process answers now."""
        self._rows.clear()


_BUSY_SLOT_S = 60.0


@dataclass(slots=True)
class _Busy:
    """One minute of an engine's polls with work, for the share of them that met a full pool."""

    first_at: float
    last_at: float
    polls: int = 0
    full: int = 0
    preemptions: float = 0.0


class EngineWindow:
    """The recent past of one engine of a target."""

    def __init__(self, parameters: Parameters) -> None:
        self._p = parameters
        self.polls: Recent[Poll] = Recent(parameters)
        self.reading: EngineReading | None = None
        self.last_full_at: float | None = None
        self.stalled_since: float | None = None
        self._busy: deque[_Busy] = deque()

    def observe(self, reading: EngineReading, *, restarted: bool) -> Poll:
        """Adds one good poll."""
        if restarted:
            self.restart()
        poll = self._poll(reading)
        self.reading = reading
        self.polls.add(poll)
        self._count_busy(poll)
        self._follow_stall(poll)
        return poll

    def restart(self) -> None:
        """Forgets the old process; its last reading stays, for whoever asks what it was."""
        self.polls.clear()
        self._busy.clear()
        self.last_full_at = None
        self.stalled_since = None
        if self.reading is not None:
            self.reading = EngineReading(self.reading.at, self.reading.engine, self.reading.model_name)

    def _poll(self, now: EngineReading) -> Poll:
        before = self.reading
        if before is None:
            return Poll(now.at, now.kv_usage_ratio, now.running or 0.0, now.waiting or 0.0, 0.0, worked=False)
        moved = (
            _rise(now.prompt_tokens_total, before.prompt_tokens_total),
            _rise(now.first_tokens_total, before.first_tokens_total),
            _rise(now.generation_tokens_total, before.generation_tokens_total),
        )
        return Poll(
            at=now.at,
            usage_ratio=now.kv_usage_ratio,
            running=now.running or 0.0,
            waiting=now.waiting or 0.0,
            preemptions=_rise(now.preemptions_total, before.preemptions_total),
            worked=any(rise > 0 for rise in moved),
        )

    def _count_busy(self, poll: Poll) -> None:
        if poll.usage_ratio is not None and poll.usage_ratio >= self._p.band_high_ratio:
            self.last_full_at = poll.at
        if poll.running + poll.waiting <= 0:
            return
        if not self._busy or poll.at - self._busy[-1].first_at >= _BUSY_SLOT_S:
            self._busy.append(_Busy(poll.at, poll.at))
        slot = self._busy[-1]
        slot.last_at = poll.at
        slot.polls += 1
        slot.full += self.last_full_at == poll.at
        slot.preemptions += poll.preemptions
        while self._busy[0].last_at < poll.at - self._p.kv_window_s:
            self._busy.popleft()

    def _follow_stall(self, poll: Poll) -> None:
        idle_queue = poll.running == 0 and poll.waiting > 0 and not poll.worked
        empty = poll.usage_ratio is not None and poll.usage_ratio < self._p.stalled_usage_ratio
        if not (idle_queue and empty):
            self.stalled_since = None
        elif self.stalled_since is None:
            self.stalled_since = poll.at

    def busy(self) -> tuple[float, float, float]:
        """(share of busy polls at a full pool, seconds they span, preemptions) over `kv_window_s`."""
        polls = sum(slot.polls for slot in self._busy)
        if not polls:
            return 0.0, 0.0, 0.0
        share = sum(slot.full for slot in self._busy) / polls
        seen_s = self._busy[-1].last_at - self._busy[0].first_at
        return share, seen_s, sum(slot.preemptions for slot in self._busy)


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
            return Turn(answer)
        return self._bad(sample, answer)

    def _bad(self, sample: Sample, answer: Answer) -> Turn:
        if answer is Answer.UNHEALTHY:
            self._ledger.advance(sample.engines, restarted=False, counting=False)
        self._bad_polls += 1
        died = self._bad_polls == 2 and self.process is not None and self.process.dead_at is None
        if died and self.process is not None:
            self.process.dead_at = sample.at
        return Turn(answer, died=died, before=self.before_death() if died else None)

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
            return started_at > self.process.started_at + 1.0
        return any(_fell(engine, self.engines.get(engine.engine)) for engine in engines)

    def usage_ratio(self) -> float | None:
        """The highest KV usage of the window: a full pool's gauge oscillates between polls."""
        usages = [total.usage_ratio for total in self.totals.window() if total.usage_ratio is not None]
        return max(usages, default=None)

    def before_death(self) -> BeforeDeath | None:
        """What the last good polls of the process say; None if there were none."""
        rows = self.totals.before_death()
        if not rows:
            return None
        usages = [row.usage_ratio for row in rows if row.usage_ratio is not None]
        enough = len(rows) >= 2
        worked = any(row.worked for row in rows[1:]) if enough else None
        peak = max(row.in_flight for row in self.totals.since(rows[-1].at - self._p.drain_window_s))
        emptied = rows[-1].in_flight <= self._p.drained_ratio * peak
        return BeforeDeath(
            last_good_at=rows[-1].at,
            usage_ratio=max(usages, default=None),
            lost=max(row.in_flight for row in rows) if enough else None,
            worked=worked,
            drained=(emptied and not worked) if enough else None,
        )

    def resume(self) -> None:
        """Lets the next poll set baselines again."""
        self._ledger.resume()

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


def _rise(now: float | None, before: float | None) -> float:
    if now is None or before is None:
        return 0.0
    return now - before if now >= before else now


def _started_at(engines: tuple[EngineReading, ...]) -> float | None:
    return next((engine.started_at for engine in engines if engine.started_at is not None), None)


def _fell(now: EngineReading, window: EngineWindow | None) -> bool:
    before = window.reading if window is not None else None
    if before is None:
        return False
    pairs = (
        (now.generation_tokens_total, before.generation_tokens_total),
        (now.prompt_tokens_total, before.prompt_tokens_total),
    )
    return any(a is not None and b is not None and a < b for a, b in pairs)
