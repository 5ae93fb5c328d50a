"""A scenario under a seed, as samples (fast) or as the lines of a recording; ground truth comes in between.

Both tell the same story: `replay` of the lines gives the samples. Labels are `LabelLine`s whose note
begins with their kind: memory (a pseudo-OOM), death (of something else) or condition.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from fragscope.explain.lines import read_line
from fragscope.model import (
    AllocatorReading,
    EngineReading,
    Gap,
    GpuReading,
    LogFact,
    Part,
    Reason,
    Sample,
)
from fragscope.recording import AllocatorLine, Device, ExpositionLine, GpuLine, LabelLine, Line, LogLine
from fragscope.simulate.catalogue import SCENARIOS, script
from fragscope.simulate.happenings import Script
from fragscope.simulate.page import page
from fragscope.simulate.served import Life, Server
from fragscope.simulate.truth import CONDITION, Episode, Truth

T = TypeVar("T")

BEGAN = 1_750_000_000.0
_STEP_S = 1.0
_STALE_S = 15.0
_STATS_S = 10
_REFUSED = "[Errno 111] Connection refused"
_TIMED_OUT = "timed out"
SOURCE = "simulated"


class Simulation:
    """One run; iterate `samples` or `lines` once. `marks` says whether a memory failure would be a surprise."""

    def __init__(self, name: str, seed: int, hours: float | None = None, interval_s: float = 5.0) -> None:
        self.script: Script = script(name, seed, hours)
        self.interval_s = interval_s
        self._run_s = (hours or SCENARIOS[name].hours) * 3600
        self._truth = Truth()
        self.servers = [Server(plan, f"{name}/{seed}", BEGAN, self._truth) for plan in self.script.plans]

    def samples(self) -> Iterator[Sample | LabelLine]:
        """Samples with every tier of evidence, and labels when they are complete."""
        witnesses = [_Witness(server, self.interval_s) for server in self.servers]
        yield from self._advance(lambda at: [witness.sample(at) for witness in witnesses])

    def lines(self) -> Iterator[Line]:
        """The same as a recording."""

        def tick(at: float) -> Iterator[Line]:
            for server in self.servers:
                yield from _lines(server, at)

        yield from self._advance(tick)

    def _advance(self, look: Callable[[float], Iterable[T]]) -> Iterator[T | LabelLine]:
        for condition in self.script.conditions:
            note = CONDITION
            yield LabelLine(BEGAN + condition.at, BEGAN + condition.until, condition.cause, condition.target, note)
        at, polled = BEGAN, 0.0
        step_s = min(_STEP_S, self.interval_s)
        for number in range(1, int(self._run_s / step_s) + 1):
            at = BEGAN + number * step_s
            for server in self.servers:
                server.step(at, step_s)
            polled += step_s
            if polled >= self.interval_s - 1e-9:
                polled = 0.0
                yield from look(at)
            for episode in self._truth.take_over():
                yield _label(episode, at)
        for episode in self._truth.open:
            yield _label(episode, at)


def samples(name: str, seed: int, hours: float | None = None, interval_s: float = 5.0) -> Iterator[Sample | LabelLine]:
    """A scenario's samples and labels. Raises KeyError for an unknown name."""
    return Simulation(name, seed, hours, interval_s).samples()


def generate(name: str, seed: int, hours: float | None = None, interval_s: float = 5.0) -> Iterator[Line]:
    """A scenario as the lines of a recording. Raises KeyError for an unknown name."""
    return Simulation(name, seed, hours, interval_s).lines()


def _label(episode: Episode, at: float) -> LabelLine:
    until = episode.until if episode.until is not None else at
    return LabelLine(episode.at, until, episode.cause, episode.target, f"{episode.kind}: {episode.note}")


def _poll(server: Server, at: float) -> tuple[tuple[EngineReading, ...], str | None]:
    """The readings, or why there are none."""
    if server.timing_out(at):
        return (), _TIMED_OUT
    if server.life is Life.DOWN:
        return (), _REFUSED
    return server.readings(at), None


class _Witness:
    """Sees one server as the daemon would; what is newest stands in until it is stale."""

    def __init__(self, server: Server, interval_s: float) -> None:
        self._server = server
        self._fresh_s = max(_STALE_S, 3 * interval_s)
        self._allocators: dict[tuple[str, int], AllocatorReading] = {}

    def sample(self, at: float) -> Sample:
        """What everybody said since the sample before."""
        server, target = self._server, self._server.plan.target
        engines, error = _poll(server, at)
        gaps: list[Gap] = []
        if error is not None:
            reason = Reason.TIMEOUT if error is _TIMED_OUT else Reason.REFUSED
            gaps.append(Gap(Part.ENGINE, reason, error))
        gpus = tuple(
            GpuReading(at, gpu, total, used, peak, own, source=SOURCE) for gpu, total, used, peak, own in server.gpus()
        )
        for reading in server.allocators(at):
            self._allocators[reading.gpu, reading.pid] = reading
        self._allocators = {key: a for key, a in self._allocators.items() if at - a.at <= self._fresh_s}
        if not self._allocators:
            gaps.append(Gap(Part.ALLOCATOR, Reason.STALE))
        return Sample(at, target, engines, gpus, tuple(self._allocators.values()), self._facts(at), tuple(gaps))

    def _facts(self, at: float) -> tuple[LogFact, ...]:
        lines = self._server.take_lines(at)
        facts = (read_line(when, self._server.plan.target, text) for when, text in lines)
        return tuple(fact for fact in facts if fact is not None)


def _lines(server: Server, at: float) -> Iterator[Line]:
    target = server.plan.target
    for when, text in server.take_lines(at):
        yield LogLine(when, text, target)
    if server.life is Life.UP and int(at) % _STATS_S == 0:
        yield from (LogLine(at, text, target) for text in server.stats_lines(at))
    devices = [Device(gpu, total, used, peak, own) for gpu, total, used, peak, own in server.gpus()]
    yield GpuLine(at, devices, target, SOURCE)
    for a in server.allocators(at):
        yield AllocatorLine(
            at, a.gpu, a.pid, a.allocated_bytes, a.reserved_bytes, a.inactive_split_bytes, a.retries_total,
            a.ooms_total, target, a.largest_free_bytes, a.config,
        )  # fmt: skip
    readings, error = _poll(server, at)
    if error is not None:
        yield ExpositionLine(at, target, None, error, 0)
    else:
        health = 200 if server.life is Life.UP else 503
        yield ExpositionLine(at, target, page(readings, server.plan.dialect), None, health)
