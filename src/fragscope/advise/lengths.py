"""Request lengths: moments with bounds from vLLM's histograms, exact ones from a list, and what blocks waste.

Formulas and how well they do on public traces: docs/advise.md.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fragscope.advise.advice import Range
from fragscope.advise.parameters import AdviceParameters
from fragscope.model import Histogram

_BEYOND_LAST = 2.5
"""vLLM's buckets go 1-2-5 up to max_model_len: what lies beyond the last is at most 2.5 times its bound."""
_PACE_DOUBT = 4.0
"""A list's waste is bounded by prompts taken in at once, and four times slower than assumed."""


@dataclass(frozen=True, slots=True)
class Steps:
    """How many requests have lengths from `low` to `high` tokens: rows of (low, high, count), ascending."""

    rows: tuple[tuple[float, float, float], ...]

    @property
    def count(self) -> float:
        """All requests."""
        return sum(count for _, _, count in self.rows)

    def share_above(self, tokens: float) -> Range:
        """The share longer than so many tokens: 0..1; inside a bucket the point is log-linear."""
        low = point = high = 0.0
        for a, b, count in self.rows:
            if b <= tokens:
                continue
            high += count
            if a > tokens:
                low += count
                point += count
            else:
                begin = max(a - 1, 0.5)
                point += count * math.log(b / max(tokens, begin)) / math.log(b / begin)
        total = self.count or 1.0
        return Range(low / total, min(high, max(low, point)) / total, high / total)

    def quantile(self, share: float) -> Range:
        """The length below which so large a share lies, with its bucket's edges."""
        wanted, seen = share * self.count, 0.0
        for a, b, count in self.rows:
            if seen + count >= wanted:
                return Range(a, math.sqrt(a * b), b)
            seen += count
        a, b, _ = self.rows[-1]
        return Range(a, b, b)


@dataclass(frozen=True, slots=True)
class Lengths:
    """What a workload's lengths come to; `context_tokens` is the mean context held, weighted by how long it is held.

    `exact` is the waste by block size where every length is known, with bounds for the pace of prefill.
    """

    count: float
    prompt_mean_tokens: float
    output_mean_tokens: float
    context_tokens: Range
    prompts: Steps
    prefill_ratio: float = 0.0
    """Share 0..1 of the time held that goes into prefill, where a sequence's length does not move."""
    exact: Mapping[int, Range] | None = None


@dataclass(frozen=True, slots=True)
class Waste:
    """The share 0..1 of used slots without a token at a block size; `ceiling` if every tail were as bad as can be."""

    block_size: int
    ratio: Range
    ceiling: float


def waste_at(lengths: Lengths, block_size: int) -> Waste:
    """`h / (C + h)` with h = (B - 1) / 2, or the exact share where the lengths are known.

    The interval comes from the bounds of C and of the mean tail; the ceiling is `(B - 1) / (C + B - 1)` at
    the lower bound of C, whatever the tails are. No sequence uses less than one block.
    """
    half, context = (block_size - 1) / 2, lengths.context_tokens
    most = max(context.low, 1.0)
    ceiling = (block_size - 1) / (most + block_size - 1)
    known = lengths.exact.get(block_size) if lengths.exact is not None else None
    if known is not None:
        return Waste(block_size, known, max(ceiling, known.high))
    doubt = half * _tail_doubt(lengths, block_size)
    low = max((half - doubt) / (max(context.high, 1.0) + half - doubt), 1 - context.high / block_size, 0.0)
    high = min((half + doubt) / (most + half + doubt), ceiling)
    point = half / (max(context.point, 1.0) + half)
    low = min(low, high)
    return Waste(block_size, Range(low, min(max(point, low), high), high), ceiling)


def _tail_doubt(lengths: Lengths, block_size: int) -> float:
    """How far the mean tail may be from half a block, in shares of it: 0..1.

    A prompt may always end at the same place in its block, and stays there during prefill. Then each token moves it on;
    over any number of tokens the tails sum up to at most B^2/8 more or less than half a block each.
    """
    if block_size < 2:
        return 0.0
    swept = block_size**2 / (4 * (block_size - 1)) / max(lengths.output_mean_tokens, 1e-9)
    return lengths.prefill_ratio + (1 - lengths.prefill_ratio) * min(1.0, swept)


def steps_of(histogram: Histogram) -> Steps:
    """The rows of a cumulative histogram of whole tokens; empty buckets are left out."""
    rows, last_bound, last_count = [], 0.0, 0.0
    for bound, count in histogram.buckets:
        if math.isfinite(bound) and count > last_count:
            rows.append((last_bound + 1, max(bound, last_bound + 1), count - last_count))
            last_count = count
        last_bound = bound if math.isfinite(bound) else last_bound
    beyond = histogram.count - last_count
    if beyond > 0:
        rows.append((last_bound + 1, max(last_bound + 1, last_bound * _BEYOND_LAST), beyond))
    return Steps(tuple(rows))


def _least(edge: float) -> float:
    """The lower edge as a bound: answers of no token are counted up to 1."""
    return edge if edge > 1 else 0.0


def second_moment(steps: Steps) -> Range:
    """E[X^2] by the buckets' lower edges, geometric middles and upper edges."""
    total = steps.count
    low = sum(_least(a) ** 2 * n for a, _, n in steps.rows) / total
    point = sum(a * b * n for a, b, n in steps.rows) / total
    high = sum(b * b * n for _, b, n in steps.rows) / total
    return Range(low, point, high)


def from_histograms(
    prompts: Histogram | None, outputs: Histogram | None, parameters: AdviceParameters
) -> Lengths | None:
    """Lengths as vLLM's two histograms tell them; None without a finished request.

    Means are exact (`_sum`, `_count`), second moments have the buckets' bounds; prompt and answer lengths are
    taken as uncorrelated for the point, and as matched in either order for the bounds, since the histograms cannot say.
    """
    if prompts is None or outputs is None or prompts.count <= 0 or outputs.count <= 0:
        return None
    if not prompts.buckets or not outputs.buckets:
        return None
    if not any(math.isfinite(bound) for histogram in (prompts, outputs) for bound, _ in histogram.buckets):
        return None
    steps, answers = steps_of(prompts), steps_of(outputs)
    p, o = prompts.sum / prompts.count, outputs.sum / outputs.count
    squares_p, squares_o = _at_least(second_moment(steps), p), _at_least(second_moment(answers), o)
    products = product(steps, answers, p * o)
    context = Range(
        _context(p, o, squares_p.low, squares_o.low, products.low, parameters),
        _context(p, o, squares_p.point, squares_o.point, products.point, parameters),
        _context(p, o, squares_p.high, squares_o.high, products.high, parameters),
    )
    return Lengths(prompts.count, p, o, context, steps, _prefill_ratio(p, o, parameters))


def _at_least(square: Range, mean: float) -> Range:
    """No second moment is below the square of the mean."""
    least = mean * mean
    return Range(max(square.low, least), max(square.point, least), max(square.high, least))


def product(prompts: Steps, outputs: Steps, uncorrelated: float) -> Range:
    """E[P O]: uncorrelated, and between the longest prompts with the shortest answers and with the longest."""
    low = _coupled(prompts.rows, outputs.rows[::-1], 0)
    high = _coupled(prompts.rows, outputs.rows, 1)
    return Range(min(low, uncorrelated), uncorrelated, max(high, uncorrelated))


def _coupled(
    rows: tuple[tuple[float, float, float], ...], others: tuple[tuple[float, float, float], ...], edge: int
) -> float:
    """The mean product where the rows of both are matched in their order, by share of requests."""
    total, others_total = sum(row[2] for row in rows), sum(row[2] for row in others)
    i = j = 0
    left, right, found = rows[0][2] / total, others[0][2] / others_total, 0.0
    while True:
        share = min(left, right)
        x, y = rows[i][edge], others[j][edge]
        found += share * (x * y if edge else _least(x) * _least(y))
        left, right = left - share, right - share
        if left <= 1e-12:
            i += 1
            if i == len(rows):
                return found
            left = rows[i][2] / total
        if right <= 1e-12:
            j += 1
            if j == len(others):
                return found
            right = others[j][2] / others_total


def _prefill_ratio(p: float, o: float, parameters: AdviceParameters) -> float:
    prefill, decode = p / parameters.prefill_tokens_per_s, o * parameters.decode_s_per_token
    return prefill / (prefill + decode) if prefill + decode else 1.0


def _context(
    p: float, o: float, square_p: float, square_o: float, product_po: float, parameters: AdviceParameters
) -> float:
    """`(E[P^2]/v + T (E[PO] + E[O(O+1)]/2)) / (E[P]/v + T E[O])`."""
    v, t = parameters.prefill_tokens_per_s, parameters.decode_s_per_token
    held = square_p / v + t * (product_po + (square_o + o) / 2)
    return held / (p / v + t * o) if p or o else 0.0


class LengthCounter:
    """Counts (prompt, output) pairs as they stream by; memory depends on the longest length, not on their number."""

    def __init__(self) -> None:
        self._prompts: Counter[int] = Counter()
        self._totals: Counter[int] = Counter()
        self.count = 0

    def add(self, prompt_tokens: int, output_tokens: int) -> None:
        """One request."""
        self._prompts[prompt_tokens] += 1
        self._totals[prompt_tokens + output_tokens] += 1
        self.count += 1

    def lengths(self, block_sizes: Iterable[int], parameters: AdviceParameters) -> Lengths | None:
        """What they come to, with the exact waste of these block sizes; None before the first request.

        What a sequence holds over its life is a sum over its prompt's length and over prompt + output, so the
        two counts are all that is needed, and correlation between them is included.
        """
        if not self.count:
            return None
        p = sum(n * k for n, k in self._prompts.items()) / self.count
        o = sum(n * k for n, k in self._totals.items()) / self.count - p
        tokens = self._held(lambda n: n, lambda n: n * (n + 1) // 2)
        time = self._held(lambda _: 1, lambda n: n)
        contexts = [_at(pace, tokens) / _at(pace, time) if _at(pace, time) else 0.0 for pace in _paces(parameters)]
        exact = {size: self._exact(size, tokens, parameters) for size in block_sizes}
        steps = Steps(tuple((float(n), float(n), float(k)) for n, k in sorted(self._prompts.items())))
        return Lengths(self.count, p, o, _range(contexts), steps, _prefill_ratio(p, o, parameters), exact)

    def _held(self, at: Callable[[int], int], up_to: Callable[[int], int]) -> tuple[float, float]:
        """(slots x prefill steps, slots x decode steps) of all requests together.

        A prompt of P tokens is held for P prefill steps; then each generated token adds one for one decode step.
        `at(n)` are the slots at n tokens, `up_to(n)` their sum over 1..n.
        """
        prefill = sum(n * at(n) * k for n, k in self._prompts.items())
        ends = sum(up_to(n) * k for n, k in self._totals.items())
        return float(prefill), float(ends - sum(up_to(n) * k for n, k in self._prompts.items()))

    def _exact(self, block_size: int, tokens: tuple[float, float], parameters: AdviceParameters) -> Range:
        empty = self._held(lambda n: -n % block_size, lambda n: _tails_up_to(n, block_size))
        shares = []
        for pace in _paces(parameters):
            lost, held = _at(pace, empty), _at(pace, tokens)
            shares.append(lost / (lost + held) if lost + held else 0.0)
        return _range(shares)


def _tails_up_to(tokens: int, block_size: int) -> int:
    """The sum of empty slots over lengths 1..tokens."""
    whole, rest = divmod(tokens, block_size)
    return whole * block_size * (block_size - 1) // 2 + rest * block_size - rest * (rest + 1) // 2


def _paces(parameters: AdviceParameters) -> tuple[tuple[float, float], ...]:
    """(seconds per prefill token, per decode token): prompts at once, as assumed, and several times slower."""
    prefill = 1 / parameters.prefill_tokens_per_s
    return tuple((prefill * factor, parameters.decode_s_per_token) for factor in (0.0, 1.0, _PACE_DOUBT))


def _at(pace: tuple[float, float], steps: tuple[float, float]) -> float:
    return pace[0] * steps[0] + pace[1] * steps[1]


def _range(values: list[float]) -> Range:
    return Range(min(values), values[1], max(values))
