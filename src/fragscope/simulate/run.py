"""A scenario under a seed, as samples (fast) or as the lines of a recording; ground truth comes in between.

Both tell the same story: `replay` of the lines gives the samples. Labels are `LabelLine`s whose note
begins with their kind: memory (a pseudo-OOM), death (of something else) or condition.
"""

import random
from collections.abc import Iterable, Iterator

from fragscope.explain.lines import read_line
from fragscope.model import (
    AllocatorReading,
    EngineReading,
    Gap,
    GpuReading,
    Part,
    Reason,
    Sample,
)
from fragscope.recording import AllocatorLine, Device, ExpositionLine, GpuLine, LabelLine, LogLine
from fragscope.simulate.catalogue import SCENARIOS, script
from fragscope.simulate.fates import turn
from fragscope.simulate.happenings import Script, What
from fragscope.simulate.page import page
from fragscope.simulate.served import Life, Server
from fragscope.simulate.sight import Statistics, allocators, gpus, readings
from fragscope.simulate.truth import CONDITION, Episode, Truth

Written = ExpositionLine | GpuLine | AllocatorLine | LogLine | LabelLine
"""The kinds of lines of a simulated recording."""

BEGAN = 1_750_000_000.0
"""When every run begins, in unix seconds."""
SOURCE = "simulated"
_STEP_S = 1.0
_WARM_UP_S = 900
_STALE_S = 15.0
_STATS_S = 10
_REFUSED = "[Errno 111] Connection refused"
_TIMED_OUT = "timed out"


class Simulation:
    """One run, to be iterated once, as samples or as lines; `interval_s` is the time between polls.

    Raises KeyError for an unknown scenario, ValueError for an interval that is no multiple of a second.
    """

    def __init__(self, name: str, seed: int, hours: float | None = None, interval_s: float = 5.0) -> None:
        if interval_s < 1 or interval_s % 1:
            raise ValueError(f"interval_s is {interval_s}, but must be whole seconds, at least 1")
        self.script: Script = script(name, seed, hours)
        self._interval = int(interval_s)
        self._seconds = int((hours or SCENARIOS[name].hours) * 3600)
        self._truth = Truth()
        self._scraper = random.Random(f"{name}/{seed}/scraper")  # noqa: S311 - repeatable on purpose
        self._servers = [Server(plan, f"{name}/{seed}", BEGAN, self._truth) for plan in self.script.plans]
        self._warm_up(fresh=self._scraper.random() < 0.3)

    def samples(self) -> Iterator[Sample | LabelLine]:
        """Samples with every tier of evidence, and labels when they are complete."""
        eyes = [_Eye(server, self._interval) for server in self._servers]
        for at, over in self._advance():
            if at is not None:
                yield from (eye.sample(at, self._misses(eye.server)) for eye in eyes)
            yield from over

    def lines(self) -> Iterator[Written]:
        """The same as a recording."""
        statistics = [Statistics() for _ in self._servers]
        for at, over in self._advance():
            if at is not None:
                for server, of in zip(self._servers, statistics, strict=True):
                    yield from _lines(server, of, at, missed=self._misses(server))
            yield from over

    def _misses(self, server: Server) -> bool:
        return self._scraper.random() < server.plan.missed_polls

    def _warm_up(self, *, fresh: bool) -> None:
        """Most servers have served for a while when the run begins: their caches are filled."""
        seconds = 0 if fresh else _WARM_UP_S
        for server in self._servers:
            server.started_at = BEGAN - (30 if fresh else seconds + self._scraper.uniform(60, 86400))
        for number in range(-seconds, 0):
            self._step(BEGAN + number + 1)
        for server in self._servers:
            server.take_lines(BEGAN)
            gpus(server)
        self._truth.take_over()

    def _step(self, at: float) -> None:
        for server in self._servers:
            turn(server, at, BEGAN)
            server.step(at, _STEP_S)

    def _advance(self) -> Iterator[tuple[float | None, list[LabelLine]]]:
        """The time of a poll (None: no poll now) and the labels that became complete."""
        yield None, [_condition(c.at, c.until, c.cause, c.target) for c in self.script.conditions]
        for number in range(1, self._seconds + 1):
            at = BEGAN + number
            self._step(at)
            over = [_label(episode, at) for episode in self._truth.take_over()]
            polled = number % self._interval == 0
            if polled or over:
                yield (at if polled else None), over
        yield None, [_label(episode, BEGAN + self._seconds) for episode in self._truth.open]


def samples(name: str, seed: int, hours: float | None = None, interval_s: float = 5.0) -> Iterator[Sample | LabelLine]:
    """A scenario's samples and labels. Raises KeyError for an unknown name."""
    return Simulation(name, seed, hours, interval_s).samples()


def generate(name: str, seed: int, hours: float | None = None, interval_s: float = 5.0) -> Iterator[Written]:
    """A scenario as the lines of a recording. Raises KeyError for an unknown name."""
    return Simulation(name, seed, hours, interval_s).lines()


def _condition(at: float, until: float, cause: str, target: str) -> LabelLine:
    return LabelLine(BEGAN + at, BEGAN + until, cause, target, CONDITION)


def _label(episode: Episode, at: float) -> LabelLine:
    until = episode.until if episode.until is not None else at
    return LabelLine(episode.at, until, episode.cause, episode.target, f"{episode.kind}: {episode.note}")


def _poll(server: Server, at: float, *, missed: bool) -> tuple[tuple[EngineReading, ...], str | None]:
    """The readings, or why there are none."""
    if missed or any(h.what is What.GAP for h in server.active):
        return (), _TIMED_OUT
    if server.life is Life.DOWN:
        return (), _REFUSED
    return readings(server, at), None


class _Eye:
    """Sees one server as the daemon would: what is newest stands in until it is stale."""

    def __init__(self, server: Server, interval_s: int) -> None:
        self.server = server
        self._fresh_s = max(_STALE_S, 3.0 * interval_s)
        self._allocators: dict[tuple[str, int], AllocatorReading] = {}

    def sample(self, at: float, missed: bool) -> Sample:  # noqa: FBT001
        """What everybody said since the sample before."""
        server, target = self.server, self.server.plan.target
        engines, error = _poll(server, at, missed=missed)
        gaps: list[Gap] = []
        if error is not None:
            gaps.append(Gap(Part.ENGINE, Reason.TIMEOUT if error is _TIMED_OUT else Reason.REFUSED, error))
        cards = tuple(
            GpuReading(at, gpu, total, used, peak, own, source=SOURCE) for gpu, total, used, peak, own in gpus(server)
        )
        for reading in allocators(server, at):
            self._allocators[reading.gpu, reading.pid] = reading
        fresh = tuple(a for a in self._allocators.values() if at - a.at <= self._fresh_s)
        if not fresh:
            gaps.append(Gap(Part.ALLOCATOR, Reason.STALE if self._allocators else Reason.ABSENT))
        facts = (read_line(when, target, text) for when, text in server.take_lines(at))
        return Sample(at, target, engines, cards, fresh, tuple(fact for fact in facts if fact is not None), tuple(gaps))


def _lines(server: Server, statistics: Statistics, at: float, *, missed: bool) -> Iterator[Written]:
    target = server.plan.target
    yield from (LogLine(when, text, target) for when, text in server.take_lines(at))
    if at - BEGAN <= _STATS_S:
        # The log's first line says that there is one.
        yield LogLine(at, 'INFO:     127.0.0.1:41222 - "GET /metrics HTTP/1.1" 200 OK', target)
    if server.life is Life.UP and int(at) % _STATS_S == 0:
        yield from (LogLine(at, text, target) for text in statistics.lines(server, at))
    devices = [Device(gpu, total, used, peak, own) for gpu, total, used, peak, own in gpus(server)]
    yield GpuLine(at, devices, target, SOURCE)
    yield from _allocator_lines(allocators(server, at), target)
    engines, error = _poll(server, at, missed=missed)
    if error is not None:
        yield ExpositionLine(at, target, None, error, 0)
    else:
        health = 200 if server.life is Life.UP else 503
        yield ExpositionLine(at, target, page(engines, server.plan.dialect), None, health)


def _allocator_lines(figures: Iterable[AllocatorReading], target: str) -> Iterator[Written]:
    for a in figures:
        yield AllocatorLine(
            at=a.at,
            gpu=a.gpu,
            pid=a.pid,
            allocated_bytes=a.allocated_bytes,
            reserved_bytes=a.reserved_bytes,
            inactive_split_bytes=a.inactive_split_bytes,
            retries_total=a.retries_total,
            ooms_total=a.ooms_total,
            target=target,
            largest_free_bytes=a.largest_free_bytes,
            config=a.config,
        )
