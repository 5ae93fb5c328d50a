"""What a stretch of samples was like, of each engine and each GPU: the ground that advice about them stands on.

A fold over `Sample`s from anywhere: a live target, a recording, Prometheus history. Memory depends on the time
covered (one row per ten minutes), not on the number of samples.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fragscope.model import AllocatorReading, CacheConfig, EngineReading, GpuReading, Histogram, Sample

_HOUR_S = 3600
_HOURS = 24
_ROW_S = 600.0
_BINS = 1000
_WARM_UP_S = 600.0
"""Loading, profiling and graph capture are no serving: the first ten minutes of a process tell nothing."""
_TRANSIENT_MAX_RATIO = 0.04
"""A step larger than this share of the card is a load or a wake-up, not a transient (as in the detector)."""


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
class Bins:
    """Shares 0..1 counted in thousandths."""

    counts: Counter[int] = field(default_factory=Counter)

    def add(self, share: float) -> None:
        """One more."""
        self.counts[min(_BINS, max(0, int(share * _BINS)))] += 1

    def quantile(self, q: float) -> float | None:
        """The share below which so many lie (its bin's lower edge); None without any."""
        wanted, seen = q * sum(self.counts.values()), 0
        for step, n in sorted(self.counts.items()):
            seen += n
            if seen >= wanted:
                return step / _BINS
        return None


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
    preemptions: CounterRise = field(default_factory=CounterRise)
    usage: Bins = field(default_factory=Bins)
    waiting: Series = field(default_factory=Series)
    running_sum: float = 0.0
    usage_sum: float = 0.0
    busy_polls: int = 0
    queued_polls: int = 0
    queued_not_full_polls: int = 0
    restarts: int = 0
    resized: int = 0
    """How often gpu_memory_utilization changed."""
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
        self.first_tokens.observe(reading.first_token_s)
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
            before = self.config.gpu_memory_utilization if self.config is not None else None
            self.resized += before not in (None, reading.cache_config.gpu_memory_utilization)
            self.config = reading.cache_config
            if self.config.num_gpu_blocks:
                self.pools.add(self.config.num_gpu_blocks)
        if self.started_at is not None and reading.started_at is not None:
            self.restarts += reading.started_at > self.started_at + 1
        elif self.tokens is not None and (reading.prompt_tokens_total or self.tokens) < self.tokens:
            self.restarts += 1
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
        self.queued_not_full_polls += bool(waiting) and usage < full_ratio
        if running and usage:
            self.busy_polls += 1
            self.running_sum += running
            self.usage_sum += usage


@dataclass(frozen=True, slots=True)
class GpuRow:
    """The least of ten minutes: what was used by anybody, by the engine, live in torch, and cached by torch."""

    used_bytes: float
    own_bytes: float | None
    allocated_bytes: float | None
    cached_bytes: float | None


@dataclass(slots=True)
class GpuPast:
    """What one GPU of a target was like while its engine served; `rows` are those since the last restart."""

    target: str
    gpu: str
    total_bytes: int = 0
    free: Bins = field(default_factory=Bins)
    free_lowest_bytes: float | None = None
    transient_bytes: float = 0.0
    external_lowest_bytes: float | None = None
    external_highest_bytes: float | None = None
    peaks_seen: bool = False
    first_at: float | None = None
    last_at: float = 0.0
    rows: dict[int, GpuRow] = field(default_factory=dict)
    previous: GpuReading | None = None

    @property
    def span_s(self) -> float:
        """How long it was watched while serving."""
        return self.last_at - self.first_at if self.first_at is not None else 0.0

    def observe(self, reading: GpuReading, allocator: AllocatorReading | None) -> None:
        """One reading of a warm, serving engine's GPU."""
        peak = max(reading.used_bytes, reading.peak_used_bytes or 0)
        free = max(0, reading.total_bytes - peak)
        self.total_bytes = reading.total_bytes
        self.first_at = reading.at if self.first_at is None else self.first_at
        self.last_at = reading.at
        self.peaks_seen |= reading.peak_used_bytes is not None
        self.free.add(free / max(1, reading.total_bytes))
        self.free_lowest_bytes = min(free, self.free_lowest_bytes if self.free_lowest_bytes is not None else free)
        if self.previous is not None:
            step = peak - self.previous.used_bytes
            if step <= _TRANSIENT_MAX_RATIO * reading.total_bytes:
                self.transient_bytes = max(self.transient_bytes, step)
        self.previous = reading
        self._external(reading)
        self._row(reading, allocator)

    def restart(self) -> None:
        """Another process uses the memory from here on: growth and steps begin anew."""
        self.rows.clear()
        self.previous = None

    def _external(self, reading: GpuReading) -> None:
        if reading.own_bytes is None:
            return
        external = max(0, reading.used_bytes - reading.own_bytes)
        low, high = self.external_lowest_bytes, self.external_highest_bytes
        self.external_lowest_bytes = external if low is None else min(low, external)
        self.external_highest_bytes = external if high is None else max(high, external)

    def _row(self, reading: GpuReading, allocator: AllocatorReading | None) -> None:
        now = GpuRow(
            reading.used_bytes,
            reading.own_bytes,
            allocator.allocated_bytes if allocator is not None else None,
            allocator.reserved_bytes - allocator.allocated_bytes if allocator is not None else None,
        )
        index = int(reading.at // _ROW_S)
        before = self.rows.get(index)
        self.rows[index] = now if before is None else _least(before, now)

    def points(self, what: str) -> list[tuple[float, float]]:
        """(seconds, bytes) of one column of the rows, where it is known."""
        found = []
        for index, row in sorted(self.rows.items()):
            value = getattr(row, what)
            if value is not None:
                found.append((index * _ROW_S, float(value)))
        return found


def _least(a: GpuRow, b: GpuRow) -> GpuRow:
    return GpuRow(
        min(a.used_bytes, b.used_bytes),
        _lesser(a.own_bytes, b.own_bytes),
        _lesser(a.allocated_bytes, b.allocated_bytes),
        _lesser(a.cached_bytes, b.cached_bytes),
    )


def _lesser(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else min(a, b)


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
            # What was free under another ratio says nothing of this one.
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
        for reading in sample.gpus:
            past = self.gpus.setdefault((sample.target, reading.gpu), GpuPast(sample.target, reading.gpu))
            past.observe(reading, allocators.get(reading.gpu))
        frees = [g.total_bytes - max(g.used_bytes, g.peak_used_bytes or 0) for g in sample.gpus]
        if not frees:
            return
        for reading_of in sample.engines:
            hour = self.engines[sample.target, reading_of.engine].hours[hour_of(reading_of.at)]
            lowest = float(min(frees))
            hour.free_lowest_bytes = min(lowest, hour.free_lowest_bytes or lowest)

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
