"""Before and after: what a change did to waste, headroom, waiting, preemptions and time to first token.

Every figure has bounds; a difference is claimed only where the bounds do not overlap.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fragscope.advise.advice import Range
from fragscope.advise.batches import error_of, together
from fragscope.advise.kv import block_of, pool_tokens
from fragscope.advise.observed import EnginePast, Observed, merged
from fragscope.advise.replicas import differences, settings_of
from fragscope.model import Histogram

_Z = 1.96
_LOAD_RATIO = 0.2


class Outcome(StrEnum):
    """What B is against A."""

    LOWER = "lower"
    HIGHER = "higher"
    SAME = "no clear difference"
    UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure before (A) and after (B); `better` says which direction is good, None: neither."""

    name: str
    unit: str
    a: Range | None
    b: Range | None
    better: Outcome | None = Outcome.LOWER

    @property
    def outcome(self) -> Outcome:
        """Only bounds that do not overlap are a difference."""
        if self.a is None or self.b is None:
            return Outcome.UNKNOWN
        if self.b.high < self.a.low:
            return Outcome.LOWER
        return Outcome.HIGHER if self.b.low > self.a.high else Outcome.SAME

    @property
    def verdict(self) -> str:
        """Better, worse, or what else there is to say."""
        if self.outcome in (Outcome.SAME, Outcome.UNKNOWN) or self.better is None:
            return str(self.outcome)
        return "better" if self.outcome is self.better else "worse"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The figures, which settings changed, and what spoils the comparison."""

    rows: tuple[Row, ...]
    changed: tuple[str, ...]
    caveats: tuple[str, ...]


def compare(a: Observed, b: Observed) -> Comparison:
    """A (before) against B (after), over all engines of each."""
    rows = [
        Row("block waste", "ratio", _waste(a), _waste(b)),
        Row("VRAM free at peaks", "bytes", _headroom(a), _headroom(b), Outcome.HIGHER),
        Row("requests waiting", "", _waiting(a), _waiting(b)),
        Row("preemptions per 1000 requests", "", _preemptions(a), _preemptions(b)),
    ]
    first = (_first_tokens(a), _first_tokens(b))
    rows.append(Row("time to first token, mean", "s", mean_of(first[0]), mean_of(first[1])))
    for share in (0.5, 0.95):
        name = f"time to first token, p{100 * share:.0f}"
        rows.append(Row(name, "s", quantile(first[0], share), quantile(first[1], share)))
    rows.extend(_loads(a, b))
    return Comparison(tuple(rows), _changed(a, b), _caveats(rows))


def _engines(observed: Observed) -> list[EnginePast]:
    return list(observed.engines.values())


def _waste(observed: Observed) -> Range | None:
    """Empty slots over used slots, all polls with work together; relative error 1.96 / sqrt(3 R)."""
    lost = used = running = polls = 0.0
    for past in _engines(observed):
        block = block_of(past.config) if past.config is not None else None
        tokens = pool_tokens(past.config, len(observed.engines_of(past.target))) if past.config is not None else None
        if block is None or tokens is None:
            continue
        lost += past.running_sum * (block - 1) / 2
        used += past.usage_sum * tokens
        running += past.running_sum
        polls += past.busy_polls
    if not used or not polls:
        return None
    point, error = lost / used, _Z / math.sqrt(3 * running / polls)
    return Range(point * max(0.0, 1 - error), point, min(1.0, point * (1 + error)))


def _headroom(observed: Observed) -> Range | None:
    """The tightest GPU: the least seen, the first and the fifth percentile."""
    rooms = []
    for past in observed.gpus.values():
        p01, p05 = past.free.quantile(0.01), past.free.quantile(0.05)
        if p01 is not None and p05 is not None and past.free_lowest_bytes is not None:
            total = past.total_bytes
            # Percentiles come in thousandths of the card.
            low = min(past.free_lowest_bytes, p01 * total)
            rooms.append(Range(low, p01 * total, (p05 + 0.001) * total))
    return min(rooms, key=lambda room: room.point, default=None)


def _waiting(observed: Observed) -> Range | None:
    parts = [batch_mean(past.waiting.means()) for past in _engines(observed)]
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return Range(max(0.0, sum(p.low for p in known)), sum(p.point for p in known), sum(p.high for p in known))


def batch_mean(values: Sequence[float]) -> Range | None:
    """The mean with 95 % bounds from batch means, which allow for neighbours that are alike; None below two values."""
    error = error_of(values, [1.0] * len(values))
    if error is None:
        return None
    mean = sum(values) / len(values)
    return Range(mean - error, mean, mean + error)


def _preemptions(observed: Observed) -> Range | None:
    """Per 1000 finished requests, with Byar's bounds for a Poisson count."""
    counted = [past.preemptions.total for past in _engines(observed) if past.preemptions.total is not None]
    requests = _finished(observed)
    if not counted or requests <= 0:
        return None
    low, high = poisson(sum(counted))
    return Range(low, sum(counted), high).scaled(1000 / requests)


def poisson(count: float) -> tuple[float, float]:
    """Byar's approximate 95 % bounds of a Poisson count."""
    high = (count + 1) * (1 - 1 / (9 * (count + 1)) + _Z / (3 * math.sqrt(count + 1))) ** 3
    if count <= 0:
        return 0.0, high
    return count * max(0.0, 1 - 1 / (9 * count) - _Z / (3 * math.sqrt(count))) ** 3, high


def _finished(observed: Observed) -> float:
    rises = [past.prompts.since_first for past in _engines(observed)]
    return sum(rise.count for rise in rises if rise is not None)


def _first_tokens(observed: Observed) -> list[Histogram]:
    """By slices of time, of all engines together."""
    return [rise for rise in together([past.first_token_slices for past in _engines(observed)]) if rise.count > 0]


def mean_of(slices: Sequence[Histogram]) -> Range | None:
    """`_sum / _count`, with bounds for the mean of such traffic; None below two slices.

    They come from batches of slices, since requests wait for each other.
    """
    error = error_of([rise.sum for rise in slices], [rise.count for rise in slices])
    if error is None:
        return None
    mean = sum(rise.sum for rise in slices) / sum(rise.count for rise in slices)
    return Range(max(0.0, mean - error), mean, mean + error)


def quantile(slices: Sequence[Histogram], share: float) -> Range | None:
    """A quantile between bucket edges; None without a slice.

    From the first edge at which that share may have been reached to the first at which it surely was, by the wider of
    batches of slices and independent draws.
    """
    histogram = merged(slices)
    if histogram is None or not histogram.buckets or histogram.count <= 0:
        return None
    draws = _Z * math.sqrt(share * (1 - share) / histogram.count)
    low, high, edge = None, None, 0.0
    for i, (bound, count) in enumerate(histogram.buckets):
        alike = error_of([rise.buckets[i][1] for rise in slices], [rise.count for rise in slices]) or 0.0
        reached, doubt = count / histogram.count, max(draws, alike)
        if low is None and reached + doubt >= share and count:
            low = edge
        if high is None and reached - doubt >= share:
            high = bound
        edge = bound
    last = 2 * histogram.buckets[-1][0]
    point = _bucket(histogram, share)[1]
    return Range(min(point, edge if low is None else low), point, max(point, last if high is None else high))


def _bucket(histogram: Histogram, share: float) -> tuple[float, float, float]:
    """(lower edge, linear point inside, upper edge) of the bucket that holds a share of all values."""
    wanted = max(0.0, min(1.0, share)) * histogram.count
    edge = seen = 0.0
    for bound, count in histogram.buckets:
        if count >= wanted and count > seen:
            return edge, edge + (bound - edge) * max(0.0, wanted - seen) / (count - seen), bound
        edge, seen = bound, count
    return edge, edge, 2 * edge


def _loads(a: Observed, b: Observed) -> list[Row]:
    rows = []
    for name, unit, of in (
        ("requests per second", "", _request_rate),
        ("prompt tokens, mean", "tokens", _prompt_mean),
        ("KV usage, p95", "ratio", _usage_p95),
    ):
        x, y = of(a), of(b)
        rows.append(Row(name, unit, _exactly(x), _exactly(y), None))
    return rows


def _exactly(value: float | None) -> Range | None:
    return Range(value, value, value) if value is not None else None


def _request_rate(observed: Observed) -> float | None:
    span = max((past.span_s for past in _engines(observed)), default=0.0)
    return _finished(observed) / span if span else None


def _prompt_mean(observed: Observed) -> float | None:
    prompts = merged(past.prompts.since_first for past in _engines(observed))
    return prompts.sum / prompts.count if prompts is not None and prompts.count else None


def _usage_p95(observed: Observed) -> float | None:
    found = [usage for past in _engines(observed) if (usage := past.usage.quantile(0.95)) is not None]
    return max(found, default=None)


def _changed(a: Observed, b: Observed) -> tuple[str, ...]:
    """Settings of the first engine of each side that differ."""
    before, after = _engines(a), _engines(b)
    if not before or not after:
        return ()
    found = differences({"A": settings_of(before[0]), "B": settings_of(after[0])})
    return tuple(f"{name}: {values['A']} -> {values['B']}" for name, values in found.items())


def _caveats(rows: Sequence[Row]) -> tuple[str, ...]:
    said = []
    for row in rows:
        if row.better is not None or row.a is None or row.b is None or row.name.startswith("KV"):
            continue
        if abs(row.b.point - row.a.point) > _LOAD_RATIO * max(row.a.point, 1e-9):
            said.append(f"the load differed too: {row.name} {row.a.point:.3g} before, {row.b.point:.3g} after")
    said.append(
        "bounds of waiting and of times to first token come from slices of time: windows should be many times as "
        "long as a queue takes to fill and empty, and see the same hours"
    )
    said.append("preemptions come in bursts, so their bounds are too narrow")
    return tuple(said)
