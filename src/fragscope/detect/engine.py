"""The recent past of one engine: its good polls, how full its pool was while it was busy, how long it stalled."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from fragscope.detect.outcomes import Increments
from fragscope.detect.parameters import Parameters
from fragscope.detect.statistics import Highest
from fragscope.model import EngineReading


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


Row = TypeVar("Row", Poll, Total)


class Recent(Generic[Row]):
    """The rows of the last minute, and at least the last few where polls are rare."""

    def __init__(self, parameters: Parameters) -> None:
        self._p = parameters
        self._rows: deque[Row] = deque()
        self._window: deque[Row] = deque()

    def add(self, row: Row) -> None:
        """Adds the newest row and drops what no window reaches any more."""
        self._rows.append(row)
        keep_since = row.at - max(self._p.drain_window_s, self._p.peak_window_s)
        while len(self._rows) > self._p.window_polls + 1 and self._rows[0].at < keep_since:
            self._rows.popleft()
        window, since = self._window, row.at - self._p.window_s
        window.append(row)
        while len(window) > self._p.window_polls and window[0].at < since:
            window.popleft()

    def last(self) -> Row | None:
        """The newest row."""
        return self._rows[-1] if self._rows else None

    def window(self) -> deque[Row]:
        """The last `window_s`, or the last `window_polls` rows where these reach further back."""
        return self._window

    def before_death(self) -> list[Row]:
        """The last `window_s`, at least two rows if there are two."""
        if not self._rows:
            return []
        since = self._rows[-1].at - self._p.window_s
        found: list[Row] = []
        for row in reversed(self._rows):
            if row.at < since and len(found) >= 2:
                break
            found.append(row)
        found.reverse()
        return found

    def since(self, at: float) -> Iterator[Row]:
        """Rows at or after `at`, newest first."""
        for row in reversed(self._rows):
            if row.at < at:
                return
            yield row

    def clear(self) -> None:
        """Forgets everything: another process answers now."""
        self._rows.clear()
        self._window.clear()


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
        self.peak_usage = Highest(parameters.peak_window_s)
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
        if poll.usage_ratio is not None:
            self.peak_usage.add(poll.at, poll.usage_ratio)
        self._count_busy(poll)
        self._follow_stall(poll)
        return poll

    def restart(self) -> None:
        """Forgets the old process; its last reading stays, for whoever asks what it was."""
        self.polls.clear()
        self.peak_usage.clear()
        self._busy.clear()
        self.last_full_at = None
        self.stalled_since = None
        if self.reading is not None:
            self.reading = EngineReading(self.reading.at, self.reading.engine, self.reading.model_name)

    def _poll(self, now: EngineReading) -> Poll:
        before = self.reading
        if before is None:
            return Poll(now.at, now.kv_usage_ratio, now.running or 0.0, now.waiting or 0.0, 0.0, worked=False)
        worked = (
            _rise(now.generation_tokens_total, before.generation_tokens_total) > 0
            or _rise(now.prompt_tokens_total, before.prompt_tokens_total) > 0
            or _rise(now.first_tokens_total, before.first_tokens_total) > 0
        )
        return Poll(
            at=now.at,
            usage_ratio=now.kv_usage_ratio,
            running=now.running or 0.0,
            waiting=now.waiting or 0.0,
            preemptions=_rise(now.preemptions_total, before.preemptions_total),
            worked=worked,
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


def _rise(now: float | None, before: float | None) -> float:
    if now is None or before is None:
        return 0.0
    return now - before if now >= before else now
