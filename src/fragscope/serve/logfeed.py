"""The log's feed: follows it in a thread of its own and keeps for the tick what its lines establish."""

import threading
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fragscope.explain.witness import QUIET_S, LineReader
from fragscope.model import Fact, Gap, LogFact, Part, Reason
from fragscope.serve.clock import Clock
from fragscope.serve.feeds import Feed, SourceStatus
from fragscope.sources.logs.envelope import Entry
from fragscope.sources.logs.follow import NAME, Follower, Look

_LOOK_S = 0.5
_AT_ONCE_S = 0.1
_KEPT_FACTS = 64
"""Of each kind between two ticks: each failed request may announce the engine's death once more."""
_KEPT_CHARACTERS = 4 * 2**20
"""Of lines between two ticks, for a recording."""


@dataclass(frozen=True, slots=True)
class LogIntake:
    """What the log said since the tick before; `lines` only where a recording wants them.

    `modified_at` is when the file was last written to, in unix seconds; None while there is none.
    """

    facts: tuple[LogFact, ...] = ()
    gap: Gap | None = None
    lines: tuple[tuple[float, str], ...] = ()
    modified_at: float | None = None


class LogFeed(Feed):
    """Looks twice a second; facts queue up for the tick, a bounded number of each kind."""

    def __init__(
        self,
        target: str,
        follower: Follower,
        clock: Clock,
        stop: threading.Event,
        *,
        interval_s: float,
        keep_lines: bool = False,
    ) -> None:
        super().__init__(f"log-{target}", clock, stop)
        self._follower = follower
        self._reader = LineReader(target)
        self._interval_s = interval_s
        self._counted: tuple[Reason | None, float] = (None, clock.now())
        self._look_s = min(_LOOK_S, interval_s / 2)
        self._keep_lines = keep_lines
        self._lock = threading.Lock()
        self._facts: list[LogFact] = []
        self._kept: Counter[Fact] = Counter()
        self._lines: deque[tuple[float, str]] = deque()
        self._characters = 0
        self._gap: Gap | None = Gap(Part.LOG, Reason.ABSENT, "not read yet")
        self._modified_at: float | None = None
        self._path: Path | None = None
        self._heard_at = self._last_line_at = clock.now()
        self._flushed = True
        self._due_at = clock.now()
        self.status = SourceStatus(NAME)

    def step(self) -> float:
        """One look."""
        began = self._clock.now()
        look = self._follower.look()
        now = self._clock.now()
        for stretch in look.stretches:
            if stretch.path != self._path:
                self._flush()
                self._path = stretch.path
            self._hear(stretch.lines, now)
        if not look.stretches and now - self._heard_at >= QUIET_S:
            self._flush()
        self._account(look, now, now - began)
        delay_s = _AT_ONCE_S if look.more else self._look_s
        self._due_at = now + delay_s
        return delay_s

    def take(self) -> LogIntake:
        """What was heard since the last call."""
        with self._lock:
            intake = LogIntake(tuple(self._facts), self._gap, tuple(self._lines), self._modified_at)
            self._facts.clear()
            self._kept.clear()
            self._lines.clear()
            self._characters = 0
        return intake

    def late(self, now: float, grace_s: float) -> bool:
        """Whether the next look should have come `grace_s` ago: the reader hangs."""
        return now - self._due_at > grace_s

    def _hear(self, lines: Iterable[Entry], now: float) -> None:
        for line in lines:
            # A stamp is wall time; a file's clock that is ahead of ours says no more than "now".
            at = now if line.wall is None else min(now, self._clock.since_wall(line.wall))
            self._keep(self._reader.feed(at, line.text))
            self._last_line_at = at
            self._keep_line(at, line.text)
            self._flushed = False
        self._heard_at = now

    def _flush(self) -> None:
        if not self._flushed:
            self._keep(self._reader.flush())
            self._flushed = True

    def _keep(self, facts: Iterable[LogFact]) -> None:
        for fact in facts:
            with self._lock:
                if self._kept[fact.what] < _KEPT_FACTS:
                    self._kept[fact.what] += 1
                    self._facts.append(fact)

    def _keep_line(self, at: float, text: str) -> None:
        if not self._keep_lines:
            return
        with self._lock:
            self._lines.append((at, text))
            self._characters += len(text)
            while self._characters > _KEPT_CHARACTERS:
                self._characters -= len(self._lines.popleft()[1])

    def _account(self, look: Look, now: float, duration_s: float) -> None:
        with self._lock:
            self._gap, self._modified_at = look.gap, look.modified_at
        if look.gap is None:
            self.status = self.status.succeeded(now, duration_s)
        elif self.status.up or look.gap.reason is not self._counted[0] or now >= self._counted[1]:
            # Once an interval: a file that is not there is looked for twice a second.
            self.status = self.status.failed(look.gap.reason, duration_s)
            self._counted = (look.gap.reason, now + self._interval_s)
        if look.skipped_bytes:
            # The writer was faster than we read: what lies between is not known.
            self.status = self.status.counted(Reason.STALE)
