"""Feeds: one blocking reader each, in a daemon thread of its own. What they read waits for the tick."""

import json
import random
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from fragscope.model import EngineReading, Fact, Gap, LogFact, Part, Reason
from fragscope.serve.clock import Clock
from fragscope.sources.exposition import Parser
from fragscope.sources.scrape import Body, Client, Failure
from fragscope.sources.vllm import read, wanted

log = structlog.get_logger("fragscope")

_KEPT_POLLS = 16
_AFTER_BUG_S = 5.0
_JITTER = 0.05
_PATIENT_S = 60.0
"""No back-off this soon after a good reading: a death is judged at the second refused poll."""
_BACKOFF_STEPS = 6.0


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """How a source fares; `failures` counts by reason since the start."""

    source: str
    up: bool = False
    last_success_at: float | None = None
    last_duration_s: float | None = None
    failures: Mapping[Reason, int] = field(default_factory=dict)

    def succeeded(self, at: float, duration_s: float) -> "SourceStatus":
        """After a good reading."""
        return replace(self, up=True, last_success_at=at, last_duration_s=duration_s)

    def failed(self, reason: Reason, duration_s: float) -> "SourceStatus":
        """After a failure."""
        counted = replace(self, up=False, last_duration_s=duration_s)
        return counted.counted(reason)

    def counted(self, reason: Reason, times: int = 1) -> "SourceStatus":
        """With a fault counted that did not spoil the whole reading."""
        return replace(self, failures={**self.failures, reason: self.failures.get(reason, 0) + times})


@dataclass(frozen=True, slots=True)
class EnginePoll:
    """One poll of one server: its engines or a gap, and what else the visit brought."""

    at: float
    engines: tuple[EngineReading, ...] = ()
    gap: Gap | None = None
    facts: tuple[LogFact, ...] = ()
    malformed: tuple[str, ...] = ()
    text: str | None = None
    health: int | None = None


class Feed(threading.Thread):
    """A loop that reads and waits; subclasses say what to read and how long to wait."""

    def __init__(self, name: str, clock: Clock, stop: threading.Event) -> None:
        super().__init__(name=name, daemon=True)
        self._clock = clock
        self._stopping = stop

    def run(self) -> None:
        """Reads until stopped."""
        while not self._stopping.is_set():
            try:
                delay_s = self.row()
            except Exception:
                # A thread that ends in silence would look like a witness with nothing to say.
                log.exception("reader failed", feed=self.name)
                delay_s = _AFTER_BUG_S * self._clock.speed
            if self._clock.wait(self._stopping, delay_s):
                return

    def row(self) -> float:
        """One step, or several in one go; returns the seconds to wait before the next."""
        return self.step()

    def step(self) -> float:
        """Reads once; returns the seconds to wait before the next time."""
        raise NotImplementedError


class Visitor:
    """Polls one server: one GET of /metrics, one of /health, and /version once per start of the server."""

    def __init__(self, target: str, client: Client, clock: Clock, planned_stop_file: Path | None) -> None:
        self._target = target
        self._client = client
        self._clock = clock
        self._marker = planned_stop_file
        self._marker_seen: float | None = None
        self._parser = Parser(wanted)
        self._version: tuple[float | None, str | None] | None = None

    def poll(self) -> EnginePoll:
        """What the server says now."""
        at = self._clock.now()
        facts = self._planned_stop()
        body = self._client.get("/metrics")
        if isinstance(body, Failure):
            # Nothing to ask where nobody listens; a server that only fails /metrics can still be unhealthy.
            health = 0 if body.reason is Reason.REFUSED else None
            return EnginePoll(at, gap=Gap(Part.ENGINE, body.reason, body.detail), facts=facts, health=health)
        health = self._client.status("/health")
        page = self._parser.parse(body)
        if isinstance(page, Failure):
            gap = Gap(Part.ENGINE, page.reason, page.detail)
            return EnginePoll(at, gap=gap, facts=facts, text=body.text, health=health)
        answer = read(page, at, health)
        engines = tuple(replace(engine, version=self._version_of(engine)) for engine in answer.engines)
        return EnginePoll(at, engines, answer.gap, facts, answer.malformed, body.text, health)

    def _version_of(self, engine: EngineReading) -> str | None:
        if self._version is None or self._version[0] != engine.started_at:
            self._version = (engine.started_at, self._ask_version())
        return self._version[1]

    def _ask_version(self) -> str | None:
        body = self._client.get("/version")
        if not isinstance(body, Body):
            return None
        try:
            version = json.loads(body.text)["version"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return str(version)[:64]

    def _planned_stop(self) -> tuple[LogFact, ...]:
        try:
            touched_at = self._marker.stat().st_mtime if self._marker is not None else None
        except OSError:
            return ()
        if touched_at is None or touched_at == self._marker_seen:
            return ()
        self._marker_seen = touched_at
        return (LogFact(self._clock.since_wall(touched_at), self._target, Fact.PLANNED_STOP),)


class EngineFeed(Feed):
    """Polls one server for ever; polls queue up for the tick, so that none is lost or counted twice."""

    def __init__(self, target: str, visitor: Visitor, interval_s: float, clock: Clock, stop: threading.Event) -> None:
        super().__init__(f"engine-{target}", clock, stop)
        self._visitor = visitor
        self._interval_s = interval_s
        self._polls: deque[EnginePoll] = deque(maxlen=_KEPT_POLLS)
        self._good_at: float | None = None
        self._failed_in_a_row = 0
        self._due_at = clock.now()
        self.status = SourceStatus("vllm")

    def take(self) -> list[EnginePoll]:
        """The polls since the last call, oldest first."""
        taken = []
        while self._polls:
            taken.append(self._polls.popleft())
        return taken

    def step(self) -> float:
        """One poll."""
        began = self._clock.now()
        poll = self._visitor.poll()
        now = self._clock.now()
        self._account(poll, now, now - began)
        self._polls.append(poll)
        delay_s = self._delay_s(now) * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - spread, not secrecy
        self._due_at = now + delay_s
        return delay_s

    def late(self, now: float, grace_s: float) -> bool:
        """Whether the next poll should have come `grace_s` ago: the reader hangs."""
        return now - self._due_at > grace_s

    def _account(self, poll: EnginePoll, now: float, duration_s: float) -> None:
        if poll.gap is None:
            self._good_at, self._failed_in_a_row = now, 0
            self.status = self.status.succeeded(now, duration_s)
        else:
            self._failed_in_a_row += 1
            self.status = self.status.failed(poll.gap.reason, duration_s)
        if poll.malformed:
            self.status = self.status.counted(Reason.MALFORMED, len(poll.malformed))

    def _delay_s(self, now: float) -> float:
        patient = self._good_at is not None and now - self._good_at < _PATIENT_S
        if self._failed_in_a_row == 0 or patient:
            return self._interval_s
        return self._interval_s * min(_BACKOFF_STEPS, 2.0 ** min(self._failed_in_a_row - 1, 8))
