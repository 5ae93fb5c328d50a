"""What one poll costs: fetch, parse and detect, alone and together, in CPU time of this process."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from statistics import median, quantiles

from prometheus_client.parser import text_string_to_metric_families

from bench.figure import Figure
from bench.neighbour import neighbour
from bench.recorded_pages import Recorded, successive
from fragscope.detect.detector import Detector
from fragscope.model import Gap, GpuReading, Part, Reason, Sample
from fragscope.recording import ExpositionLine
from fragscope.replay import Joiner
from fragscope.serve.clock import Clock
from fragscope.serve.feeds import Visitor
from fragscope.sources.exposition import Page, Parser
from fragscope.sources.scrape import Body, Client, Failure
from fragscope.sources.vllm import read, wanted

_TARGET = "bench"
_INTERVAL_S = 1.0
_BLOCK = 500
_PAUSE_S = 0.2
_FEWEST = 10
_MISSING = (Gap(Part.ALLOCATOR, Reason.ABSENT), Gap(Part.LOG, Reason.ABSENT))


class _Steps(Clock):
    """A clock that moves by one interval a poll: the detector meets a second between pages fetched at once."""

    def __init__(self, at: float) -> None:
        super().__init__()
        self.at = at

    def now(self) -> float:
        return self.at


class _Metered(Client):
    """Counts the CPU time of its requests."""

    spent_ns = 0

    def get(self, path: str) -> Body | Failure:
        began = time.process_time_ns()
        answer = super().get(path)
        self.spent_ns += time.process_time_ns() - began
        return answer

    def status(self, path: str) -> int:
        began = time.process_time_ns()
        status = super().status(path)
        self.spent_ns += time.process_time_ns() - began
        return status


@dataclass(frozen=True, slots=True)
class _Cost:
    """CPU nanoseconds of one poll."""

    fetch: int
    parse: int
    detect: int

    @property
    def total(self) -> int:
        return self.fetch + self.parse + self.detect


def poll_figures(pages: Recorded, sysfs_root: Path, what: str, aim_ms: float, warm: int, polls: int) -> list[Figure]:
    """Polls as the daemon does, back to back; the pages come from another process."""
    with neighbour(pages.texts, sysfs_root) as server:
        costs = list(_polls(server.url, pages, warm + polls))[warm:]
        spaced = list(_polls(server.url, pages, max(_FEWEST, polls // 8), _PAUSE_S))[1:]
    shares = [
        Figure(f"  of it {part}", median(getattr(cost, part) for cost in costs) / 1e6, "ms")
        for part in ("fetch", "parse", "detect")
    ]
    size = f"{len(pages.texts[-1]) / 1000:.0f} kB"
    total, cold = (median(cost.total for cost in some) / 1e6 for some in (costs, spaced))
    return [
        Figure(f"one poll, {what}, {size}", total, "ms", most=aim_ms),
        *shares,
        Figure(f"  the same {_PAUSE_S:g} s apart, caches cold", cold, "ms"),
    ]


def _polls(url: str, pages: Recorded, polls: int, pause_s: float = 0.0) -> Iterator[_Cost]:
    clock = _Steps(pages.at)
    client = _Metered(url)
    visitor = Visitor(_TARGET, client, clock, None)
    detector = Detector(_TARGET)
    for i in range(polls):
        time.sleep(pause_s)
        clock.at = pages.at + i * _INTERVAL_S
        gpus = _gpus(pages, i, clock.at)
        client.spent_ns = 0
        began = time.process_time_ns()
        poll = visitor.poll()
        polled = time.process_time_ns()
        detector.observe(Sample(poll.at, _TARGET, poll.engines, gpus, log_facts=poll.facts, gaps=_MISSING))
        detected = time.process_time_ns()
        if poll.gap is not None:
            raise SystemExit(f"bench: poll {i} failed: {poll.gap}")
        yield _Cost(client.spent_ns, polled - began - client.spent_ns, detected - polled)
    client.close()


def _gpus(pages: Recorded, i: int, at: float) -> tuple[GpuReading, ...]:
    devices = pages.gpus[i % len(pages.gpus)].devices
    return tuple(GpuReading(at, d.gpu, d.total_bytes, d.used_bytes, d.peak_used_bytes) for d in devices)


def parse_figures(pages: Recorded, parses: int) -> list[Figure]:
    """Ours, with known line heads and without, against prometheus_client over the same pages, by turns."""
    warm_ns: list[int] = []
    cold_ns: list[int] = []
    theirs_ns: list[int] = []
    parser = Parser(wanted)
    texts = successive(pages.texts)
    _parse(parser, next(texts))
    for _ in range(parses):
        text = next(texts)
        marks = [time.process_time_ns()]
        ours = _parse(parser, text)
        marks.append(time.process_time_ns())
        _parse(Parser(wanted), text)
        marks.append(time.process_time_ns())
        theirs = _theirs(text)
        marks.append(time.process_time_ns())
        _same_values(ours, theirs)
        for times, (began, ended) in zip((warm_ns, cold_ns, theirs_ns), pairwise(marks), strict=True):
            times.append(ended - began)
    warm, cold, full = median(warm_ns) / 1e6, median(cold_ns) / 1e6, median(theirs_ns) / 1e6
    return [
        Figure("parsing a page, line heads known", warm, "ms"),
        Figure("  with a new parser", cold, "ms"),
        Figure("  by prometheus_client", full, "ms"),
        Figure("  prometheus_client / ours, heads known", full / warm, "times", least=6.0),
        Figure("  prometheus_client / ours, new parser", full / cold, "times"),
    ]


def _parse(parser: Parser, text: str) -> Page:
    page = parser.parse(Body(text, ""))
    if isinstance(page, Failure) or not read(page, 0.0, 200).engines:
        raise SystemExit("bench: a recorded page could not be read")
    return page


_Values = list[tuple[str, tuple[tuple[str, str], ...], float]]


def _theirs(text: str) -> _Values:
    """The wanted samples of a page by prometheus_client alone."""
    return [
        (kept, tuple(sample.labels.items()), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if (kept := wanted(sample.name)) is not None
    ]


def _same_values(page: Page, theirs: _Values) -> None:
    ours = [(name, tuple(row.labels.items()), row.value) for name, rows in page.families.items() for row in rows]
    if sorted(map(repr, ours)) != sorted(map(repr, theirs)):
        strange = set(map(repr, ours)) ^ set(map(repr, theirs))
        raise SystemExit(f"bench: our parser and prometheus_client differ in {sorted(strange)[:4]}")


def detect_figures(pages: Recorded, observes: int) -> list[Figure]:
    """One engine, one GPU, a sample a second; samples are made in blocks, so that parsing stays apart."""
    detector = Detector(_TARGET)
    samples = _samples(pages)
    spent_us = []
    for _ in range(observes // _BLOCK):
        for sample in list(islice(samples, _BLOCK)):
            began = time.thread_time_ns()
            detector.observe(sample)
            spent_us.append((time.thread_time_ns() - began) / 1e3)
    return [
        Figure("Detector.observe, median", median(spent_us), "us"),
        Figure("  99th percentile", quantiles(spent_us, n=100)[-1], "us", most=100.0),
    ]


def _samples(pages: Recorded) -> Iterator[Sample]:
    joiner = Joiner(_TARGET, stale_after_s=15.0)
    for i, text in enumerate(successive(pages.texts)):
        at = pages.at + i * _INTERVAL_S
        joiner.gpu(replace(pages.gpus[i % len(pages.gpus)], at=at))
        yield joiner.poll(ExpositionLine(at, text=text, health=200))
