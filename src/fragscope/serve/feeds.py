"""Feeds: one blocking reader each, in a daemon thread of its own. What they read waits for the tick."""

import json
import random
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from fragscope.model import EngineReading, Fact, Gap, GpuReading, LogFact, Part, Reason
from fragscope.serve.clock import Clock
from fragscope.sources.exposition import Parser
from fragscope.sources.gpu import sysfs
from fragscope.sources.scrape import Body, Client, Failure
from fragscope.sources.vllm import read, wanted

log = structlog.get_logger("fragscope")

_KEPT_POLLS = 16
_AFTER_BUG_S = 5.0
_JITTER = 0.05
_PATIENT_S = 60.0
"""No back-off this soon after a good reading: a death is judged at the second refused poll."""
_BACKOFF_STEPS = 6.0
_ENUMERATE_S = 10.0
_LOOK_S = 1.0


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
                delay_s = self.step()
            except Exception:
                # A thread that ends in silence would look like a witness with nothing to say.
                log.exception("reader failed", feed=self.name)
                delay_s = _AFTER_BUG_S * self._clock.speed
            if self._clock.wait(self._stopping, delay_s):
                return

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


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """What the GPU feed knows at a tick; `gaps` are cards that cannot even be enumerated, or the source's own."""

    cards: tuple[sysfs.Card, ...] = ()
    readings: Mapping[str, GpuReading] = field(default_factory=dict)
    failed: Mapping[str, Gap] = field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()


@dataclass(slots=True)
class _Watched:
    """One card between two ticks."""

    card: sysfs.Card
    at: float
    used_bytes: int
    peak_bytes: int
    gtt_bytes: int | None


class GpuFeed(Feed):
    """Samples every card's VRAM at high rate; a tick takes the last value and the peak since the tick before.

    Once a second it looks around (cards that came or went, host memory, its own health); in between it
    only glances at the one number, since after 50 ms asleep each line of code is paid for in cache misses.
    """

    def __init__(self, root: Path, sample_hz: float, clock: Clock, stop: threading.Event) -> None:
        super().__init__("gpu-sysfs", clock, stop)
        self._root = root
        # In real time: sampling faster than this would cost CPU, whatever the speed of a demo's clock.
        self._period_s = clock.speed / sample_hz
        self._lock = threading.Lock()
        self._watched: dict[str, _Watched] = {}
        self._found = sysfs.Enumeration((), (Gap(Part.GPU, Reason.ABSENT, "not read yet"),))
        self._failed: dict[str, Gap] = {}
        self._enumerated_at: float | None = None
        self._looked_at = float("-inf")
        self.status = SourceStatus(sysfs.NAME)

    def step(self) -> float:
        """One read of every card."""
        now = self._clock.now()
        if now - self._looked_at >= _LOOK_S * self._clock.speed:
            self._look_around(now)
            return self._period_s
        for watched in self._watched.values():
            used = sysfs.glance_used_bytes(watched.card)
            if used is not None:
                watched.at = now
                watched.used_bytes = used
                # The tick may begin a new peak meanwhile: then this one is told twice, and none is lost.
                watched.peak_bytes = max(watched.peak_bytes, used)
        return self._period_s

    def _look_around(self, now: float) -> None:
        if self._enumerated_at is None or now - self._enumerated_at >= _ENUMERATE_S * self._clock.speed:
            self._enumerate(now)
        failed = {card.gpu: gap for card in self._found.cards if (gap := self._read(card, now)) is not None}
        if any(gap.reason is Reason.ABSENT for gap in failed.values()):
            self._enumerated_at = None
        with self._lock:
            self._failed = failed
        self._looked_at = now
        self._account(failed, now)

    def take(self) -> GpuSnapshot:
        """What is known now; starts a new peak."""
        with self._lock:
            readings = {gpu: _reading(gpu, watched) for gpu, watched in self._watched.items()}
            for watched in self._watched.values():
                watched.peak_bytes = watched.used_bytes
            return GpuSnapshot(self._found.cards, readings, dict(self._failed), self._found.gaps)

    def _enumerate(self, now: float) -> None:
        found = sysfs.enumerate_cards(self._root)
        self._enumerated_at = now
        present = {card.gpu for card in found.cards}
        with self._lock:
            self._found = found
            self._watched = {gpu: watched for gpu, watched in self._watched.items() if gpu in present}

    def _read(self, card: sysfs.Card, at: float) -> Gap | None:
        used = sysfs.read_used_bytes(card)
        if isinstance(used, Gap):
            return used
        gtt = sysfs.read_gtt_used_bytes(card)
        known = self._watched.get(card.gpu)
        peak = used if known is None else max(known.peak_bytes, used)
        with self._lock:
            self._watched[card.gpu] = _Watched(card, at, used, peak, gtt)
        return None

    def _account(self, failed: Mapping[str, Gap], began: float) -> None:
        """Once a look: a failure at the sampling rate would count twenty."""
        duration_s = self._clock.now() - began
        gaps = [*failed.values(), *(() if self._found.cards else self._found.gaps)]
        if gaps:
            self.status = self.status.failed(gaps[0].reason, duration_s)
        else:
            self.status = self.status.succeeded(began, duration_s)


def _reading(gpu: str, watched: _Watched) -> GpuReading:
    return GpuReading(
        at=watched.at,
        gpu=gpu,
        total_bytes=watched.card.total_bytes,
        used_bytes=watched.used_bytes,
        peak_used_bytes=watched.peak_bytes,
        gtt_used_bytes=watched.gtt_bytes,
        source=sysfs.NAME,
    )
