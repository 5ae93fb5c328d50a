"""The rules people use without fragscope, as folds over the same samples; what must be beaten.

N1 to N5 are what one would write by hand: "requests fail although the cache is not full, so it is
fragmentation", a threshold on it, a staircase of VRAM, and a restart at low cache use.
"""

from collections import deque
from itertools import pairwise
from typing import Protocol

from fragscope.model import EngineReading, Sample

MIB = 2**20
USAGE_RATIO = 0.9
"""Below, the cache is "not full"."""
RECENT_S = 300.0
MIN_FAILURES = 5
MIN_FAILURE_RATIO = 0.01
RISE_BYTES = 32 * MIB
RISES = 3
STAIRCASE_S = 1800.0
BUCKET_S = 60.0
RESTART_HELD_S = 900.0
"""How long a rule on an event goes on: as long as a verdict of fragscope is held."""
MERGED_S = 900.0
"""Alarms of a rule that are closer than this count as one, as a verdict of fragscope is held this long."""
_USAGE_WINDOW_S = 15.0


class Rule(Protocol):
    """A fold over the samples of one target: whether the rule is in alarm now."""

    def observe(self, sample: Sample) -> bool:
        """Takes the next sample; True while in alarm."""


class Counters:
    """Increases of counters across resets: after one, the new value is the increase."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def rise(self, name: str, value: float | None) -> float:
        """The increase since the last call with this name; 0 the first time or without a value."""
        if value is None:
            return 0.0
        last = self._last.get(name)
        self._last[name] = value
        if last is None:
            return 0.0
        return value - last if value >= last else value


class FailuresAtLowUsage:
    """N1 to N3: requests failed in the last five minutes, and the cache is not full."""

    def __init__(self, classes: tuple[str, ...], *, aborts: bool, min_failures: float, min_ratio: float) -> None:
        self._classes = classes
        self._aborts = aborts
        self._min_failures = min_failures
        self._min_ratio = min_ratio
        self._counters = Counters()
        self._recent: deque[tuple[float, float, float]] = deque()
        self._usage_ratio: float | None = None

    def observe(self, sample: Sample) -> bool:
        """In alarm while enough failed lately and the last known usage is low."""
        if sample.engines:
            self._recent.append((sample.at, *self._counted(sample.engines)))
            self._usage_ratio = _usage(sample.engines)
        while self._recent and self._recent[0][0] < sample.at - RECENT_S:
            self._recent.popleft()
        failed = sum(row[1] for row in self._recent)
        answered = failed + sum(row[2] for row in self._recent)
        enough = failed >= self._min_failures and failed > self._min_ratio * answered
        return enough and self._usage_ratio is not None and self._usage_ratio < USAGE_RATIO

    def _counted(self, engines: tuple[EngineReading, ...]) -> tuple[float, float]:
        http = next((engine.http_total for engine in engines if engine.http_total is not None), None)
        failed = ok = 0.0
        if http is not None:
            failed = sum(self._counters.rise(name, http.get(name, 0.0)) for name in self._classes)
            ok = self._counters.rise("2xx", http.get("2xx", 0.0))
        for engine in engines:
            finished = engine.finished_total
            if finished is not None:
                failed += self._counters.rise(f"error {engine.engine}", finished.get("error", 0.0))
                aborts = self._counters.rise(f"abort {engine.engine}", finished.get("abort", 0.0))
                failed += aborts if self._aborts else 0.0
        return failed, ok


class Staircase:
    """N4: in half an hour VRAM rose at least three times and never fell."""

    def __init__(self) -> None:
        self._lows: dict[str, deque[tuple[int, int]]] = {}

    def observe(self, sample: Sample) -> bool:
        """In alarm while any GPU shows a staircase."""
        bucket = int(sample.at // BUCKET_S)
        for gpu in sample.gpus:
            lows = self._lows.setdefault(gpu.gpu, deque(maxlen=int(STAIRCASE_S / BUCKET_S)))
            if lows and lows[-1][0] == bucket:
                lows[-1] = (bucket, min(lows[-1][1], gpu.used_bytes))
            else:
                lows.append((bucket, gpu.used_bytes))
        return any(_climbs([low for _, low in lows]) for lows in self._lows.values())


def _climbs(lows: list[int]) -> bool:
    changes = [after - before for before, after in pairwise(lows)]
    return sum(change > RISE_BYTES for change in changes) >= RISES and min(changes) >= -RISE_BYTES


class RestartAtLowUsage:
    """N5: the engine is a new process, and the old one's cache was not full."""

    def __init__(self) -> None:
        self._usages: deque[tuple[float, float]] = deque()
        self._started_at: float | None = None
        self._tokens: float | None = None
        self._alarm_at = float("-inf")

    def observe(self, sample: Sample) -> bool:
        """In alarm for a quarter of an hour after such a restart."""
        if not sample.engines:
            return sample.at - self._alarm_at < RESTART_HELD_S
        if self._is_new(sample.engines):
            usage = max((usage for _, usage in self._usages), default=1.0)
            self._alarm_at = sample.at if usage < USAGE_RATIO else self._alarm_at
            self._usages.clear()
        usage_now = _usage(sample.engines)
        if usage_now is not None:
            self._usages.append((sample.at, usage_now))
        while self._usages and self._usages[0][0] < sample.at - _USAGE_WINDOW_S:
            self._usages.popleft()
        return sample.at - self._alarm_at < RESTART_HELD_S

    def _is_new(self, engines: tuple[EngineReading, ...]) -> bool:
        started_at = next((engine.started_at for engine in engines if engine.started_at is not None), None)
        tokens = sum(engine.generation_tokens_total or 0.0 for engine in engines)
        later = started_at is not None and self._started_at is not None and started_at > self._started_at + 1.0
        fell = started_at is None and self._tokens is not None and tokens < self._tokens
        self._started_at, self._tokens = started_at, tokens
        return later or fell


def _usage(engines: tuple[EngineReading, ...]) -> float | None:
    return max((engine.kv_usage_ratio for engine in engines if engine.kv_usage_ratio is not None), default=None)


def n1() -> Rule:
    """Any failure at all, clients' own included."""
    return FailuresAtLowUsage(("4xx", "5xx"), aborts=True, min_failures=1, min_ratio=0.0)


def n2() -> Rule:
    """Any server error."""
    return FailuresAtLowUsage(("5xx",), aborts=False, min_failures=1, min_ratio=0.0)


def n3() -> Rule:
    """At least five server errors, and more than one in a hundred."""
    return FailuresAtLowUsage(("5xx",), aborts=False, min_failures=MIN_FAILURES, min_ratio=MIN_FAILURE_RATIO)


NAIVE = {"N1": n1, "N2": n2, "N3": n3, "N4": Staircase, "N5": RestartAtLowUsage}
NAIVE_WORDS = {
    "N1": "cache below 0.9 and any failure (4xx, 5xx, abort) in 5 min",
    "N2": "cache below 0.9 and any 5xx in 5 min",
    "N3": "N2 with at least 5 of them and above 1 %",
    "N4": "VRAM rose 3 times and never fell in 30 min",
    "N5": "restart, and the cache was below 0.9",
}
