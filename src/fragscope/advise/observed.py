"""What a stretch of samples was like, of each engine and each GPU: the ground that advice about them stands on.

A fold over `Sample`s from anywhere: a live target, a recording, Prometheus history. Memory depends on the time
covered (one row per ten minutes), not on the number of samples.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fragscope.advise.batches import Slices
from fragscope.advise.gpu_past import Bins, GpuPast
from fragscope.model import CacheConfig, EngineReading, Histogram, Sample

_HOUR_S = 3600
_HOURS = 24
_WARM_UP_S = 600.0
"""Loading, profiling and graph capture are no serving: the first ten minutes of a process tell nothing."""


def budget_of(config: CacheConfig) -> tuple[float | None, ...]:
    """What sizes the pool: the ratio, and the two flags that replace it."""
    return config.gpu_memory_utilization, config.kv_cache_memory_bytes, config.num_gpu_blocks_override


def hour_of(at: float) -> int:
    """The hour of the day in UTC, 0..23."""
    return int(at // _HOUR_S) % _HOURS


class Rise:
    """How much a cumulative histogram rose; a count that falls is a restart, and its new value the rise."""

    def __init__(self) -> None:
        self._last: Histogram | None = None
        self.since_first: Histogram | None = None
        self.lifetime: Histogram | None = None
        """With what was there at the first look."""

    def observe(self, now: Histogram | None) -> Histogram | None:
        """The rise since the look before; None at the first."""
        if now is None:
            return None
        last, self._last = self._last, now
        if last is None or _bounds(last) != _bounds(now):
            self.lifetime, self.since_first = now, None
            return None
        rise = now if now.count < last.count else _minus(now, last)
        self.since_first = _plus(self.since_first, rise)
        self.lifetime = _plus(self.lifetime, rise)
        return rise


def _bounds(histogram: Histogram) -> tuple[float, ...]:
    return tuple(bound for bound, _ in histogram.buckets)


def _minus(a: Histogram, b: Histogram) -> Histogram:
    buckets = tuple((bound, n - m) for (bound, n), (_, m) in zip(a.buckets, b.buckets, strict=True))
    return Histogram(a.count - b.count, a.sum - b.sum, buckets)


def _plus(a: Histogram | None, b: Histogram) -> Histogram:
    """The sum of two histograms with the same bounds; where they differ, the newer one alone."""
    if a is None or _bounds(a) != _bounds(b):
        return b
    buckets = tuple((bound, n + m) for (bound, n), (_, m) in zip(a.buckets, b.buckets, strict=True))
    return Histogram(a.count + b.count, a.sum + b.sum, buckets)


def merged(histograms: Iterable[Histogram | None]) -> Histogram | None:
    """The sum over several engines; None without any."""
    total: Histogram | None = None
    for histogram in histograms:
        total = total if histogram is None else _plus(total, histogram)
    return total


@dataclass(slots=True)
class CounterRise:
    """How much a counter rose; None until it was seen twice."""

    last: float | None = None
    total: float | None = None

    def observe(self, now: float | None) -> None:
        """One more look."""
        if now is None:
            return
        if self.last is not None:
            self.total = (self.total or 0.0) + (now if now < self.last else now - self.last)
        self.last = now


@dataclass(slots=True)
class HourPast:
    """One hour of the day over all days; sums over `polls`."""

    polls: int = 0
    running: float = 0.0
    waiting: float = 0.0
    usage: float = 0.0
    usage_highest: float = 0.0
    free_lowest_bytes: float | None = None
    prompts: Histogram | None = None

    @property
    def load(self) -> float:
        """Mean requests in the engine, running or waiting."""
        return (self.running + self.waiting) / self.polls if self.polls else 0.0


@dataclass(slots=True)
class Series:
    """Means of one quantity over minutes, for bounds that know that neighbours are alike."""

    rows: dict[int, list[float]] = field(default_factory=dict)

    def add(self, at: float, value: float, width_s: float = 60.0) -> None:
        """One more value."""
        row = self.rows.setdefault(int(at // width_s), [0.0, 0.0])
        row[0] += value
        row[1] += 1

    def means(self) -> list[float]:
        """The mean of each stretch, in order of time."""
        return [total / n for _, (total, n) in sorted(self.rows.items())]


@dataclass(slots=True)
class EnginePast:
    """What one engine did; figures it never showed are None."""

    target: str
    engine: str
    model_name: str = ""
    version: str | None = None
    config: CacheConfig | None = None
    pools: set[int] = field(default_factory=set)
    first_at: float = 0.0
    last_at: float = 0.0
    polls: int = 0
    prompts: Rise = field(default_factory=Rise)
    outputs: Rise = field(default_factory=Rise)
    first_tokens: Rise = field(default_factory=Rise)
    first_token_slices: Slices = field(default_factory=Slices)
    preemptions: CounterRise = field(default_factory=CounterRise)
    usage: Bins = field(default_factory=Bins)
    waiting: Series = field(default_factory=Series)
    running_sum: float = 0.0
    usage_sum: float = 0.0
    busy_polls: int = 0
    queued_polls: int = 0
    queued_full_polls: int = 0
    queued_not_full_polls: int = 0
    """Both of polls that showed usage."""
    restarts: int = 0
    resized: int = 0
    """How often what sizes the pool changed: the ratio, or the flags that replace it."""
    started_at: float | None = None
    tokens: float | None = None
    hours: dict[int, HourPast] = field(default_factory=dict)

    @property
    def span_s(self) -> float:
        """From its first to its last answer."""
        return self.last_at - self.first_at

    @property
    def names(self) -> str:
        """target/engine, as people see it."""
        return f"{self.target}/{self.engine}"

    def observe(self, reading: EngineReading, full_ratio: float) -> None:
        """One poll."""
        if not self.polls:
            self.first_at = reading.at
        self.last_at = reading.at
        self.polls += 1
        self._identify(reading)
        rise = self.prompts.observe(reading.prompt_tokens)
        self.outputs.observe(reading.output_tokens)
        first = self.first_tokens.observe(reading.first_token_s)
        if first is not None and first.count > 0:
            self.first_token_slices.add(reading.at, first)
        self.preemptions.observe(reading.preemptions_total)
        hour = self.hours.setdefault(hour_of(reading.at), HourPast())
        if rise is not None and rise.count:
            hour.prompts = _plus(hour.prompts, rise)
        if not reading.sleeping:
            self._load(reading, hour, full_ratio)

    def _identify(self, reading: EngineReading) -> None:
        self.model_name = reading.model_name or self.model_name
        self.version = reading.version or self.version
        if reading.cache_config is not None:
            before = budget_of(self.config) if self.config is not None else None
            self.resized += before not in (None, budget_of(reading.cache_config))
            self.config = reading.cache_config
            if self.config.num_gpu_blocks:
                self.pools.add(self.config.num_gpu_blocks)
        if self.started_at is not None and reading.started_at is not None:
            self.restarts += reading.started_at > self.started_at + 1
        elif self.tokens is not None and reading.prompt_tokens_total is not None:
            # A counter falls only with a new process, also to 0.
            self.restarts += reading.prompt_tokens_total < self.tokens
        self.started_at = reading.started_at or self.started_at
        self.tokens = reading.prompt_tokens_total if reading.prompt_tokens_total is not None else self.tokens

    def _load(self, reading: EngineReading, hour: HourPast, full_ratio: float) -> None:
        usage, running, waiting = reading.kv_usage_ratio, reading.running, reading.waiting
        hour.polls += 1
        hour.running += running or 0.0
        hour.waiting += waiting or 0.0
        if waiting is not None:
            self.waiting.add(reading.at, waiting)
            self.queued_polls += waiting > 0
        if usage is None:
            return
        self.usage.add(usage)
        hour.usage += usage
        hour.usage_highest = max(hour.usage_highest, usage)
        self.queued_full_polls += bool(waiting) and usage >= full_ratio
        self.queued_not_full_polls += bool(waiting) and usage < full_ratio
        if running and usage:
            self.busy_polls += 1
            self.running_sum += running
            self.usage_sum += usage


class Observed:
    """Everything that was seen; feed it samples in order of time."""

    def __init__(self, full_ratio: float = 0.97) -> None:
        self._full_ratio = full_ratio
        self.engines: dict[tuple[str, str], EnginePast] = {}
        self.gpus: dict[tuple[str, str], GpuPast] = {}
        self.samples = 0

    def observe(self, sample: Sample) -> None:
        """One sample of any target."""
        self.samples += 1
        restarted = resized = False
        for reading in sample.engines:
            key = (sample.target, reading.engine)
            past = self.engines.setdefault(key, EnginePast(sample.target, reading.engine))
            restarts, resizes = past.restarts, past.resized
            past.observe(reading, self._full_ratio)
            restarted |= past.restarts > restarts
            resized |= past.resized > resizes
        if resized:
            # What was free under another budget says nothing of this one.
            self.gpus = {key: past for key, past in self.gpus.items() if key[0] != sample.target}
        if restarted:
            for gpu_past in self._gpus_of(sample.target):
                gpu_past.restart()
        if _serving(sample):
            self._observe_gpus(sample)

    def _gpus_of(self, target: str) -> Iterator[GpuPast]:
        return (past for (name, _), past in self.gpus.items() if name == target)

    def _observe_gpus(self, sample: Sample) -> None:
        allocators = {allocator.gpu: allocator for allocator in sample.allocators}
        busy = any(engine.running for engine in sample.engines)
        for reading in sample.gpus:
            past = self.gpus.setdefault((sample.target, reading.gpu), GpuPast(sample.target, reading.gpu))
            past.observe(reading, allocators.get(reading.gpu), busy=busy)
        frees = [g.total_bytes - max(g.used_bytes, g.peak_used_bytes or 0) for g in sample.gpus]
        if not frees:
            return
        for reading_of in sample.engines:
            hour = self.engines[sample.target, reading_of.engine].hours[hour_of(reading_of.at)]
            lowest = float(min(frees))
            known = hour.free_lowest_bytes
            hour.free_lowest_bytes = lowest if known is None else min(lowest, known)

    def engines_of(self, target: str) -> list[EnginePast]:
        """The engines of one target."""
        return [past for (name, _), past in self.engines.items() if name == target]

    def gpus_of(self, target: str) -> list[GpuPast]:
        """The GPUs of one target."""
        return list(self._gpus_of(target))


def _serving(sample: Sample) -> bool:
    """Whether every engine of the sample is awake and past its warm-up, as far as it says."""
    if not sample.engines:
        return False
    return all(
        not e.sleeping and (e.started_at is None or sample.at - e.started_at >= _WARM_UP_S) for e in sample.engines
    )
