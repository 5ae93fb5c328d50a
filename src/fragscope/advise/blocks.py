"""Block size: what each size wastes here, what it costs, and whether another one is worth it.

For ordinary requests it is not: on six public traces going from 16 to 8 could buy 0.7 % at most (docs/advise.md).
"""

import math
from dataclasses import dataclass

from fragscope.advise.advice import Advice, Effect, Range, Topic, gib, percent
from fragscope.advise.backends import COMMON_SIZES, UNKNOWN, BackendRule
from fragscope.advise.lengths import Lengths, Waste, waste_at
from fragscope.advise.parameters import AdviceParameters

_TABLE_ENTRY_BYTES = 4
STALE_BLOCK_VERSIONS = ((0, 18, 0), (0, 23, 0))
"""From 0.18 to 0.22 `cache_config_info` may show the block size of before vLLM changed it."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a block size costs besides waste; `recompute_tokens` is lost per prefix-cache hit on average."""

    block_table_bytes: int
    blocks: float | None
    recompute_tokens: float


def costs(block_size: int, pool_tokens: float | None, sequences: int, max_model_len: int) -> Costs:
    """Block table of `sequences` rows of int32, blocks to keep and hash, half a block recomputed per hit."""
    table = sequences * math.ceil(max_model_len / block_size) * _TABLE_ENTRY_BYTES
    blocks = pool_tokens / block_size if pool_tokens is not None else None
    return Costs(table, blocks, (block_size - 1) / 2)


@dataclass(frozen=True, slots=True)
class Live:
    """Waste from running sequences and usage alone, with its 95 % bounds (docs/advise.md)."""

    ratio: Range
    running: float


def live_waste(block_size: int, running: float, used_tokens: float) -> Live | None:
    """`R (B - 1) / 2 / used slots`, relative error 1.96 / sqrt(3 R); None without work.

    Prefix sharing does not break it: shared blocks are full, and each tail is private.
    """
    if running <= 0 or used_tokens <= 0:
        return None
    point = min(1.0, running * (block_size - 1) / 2 / used_tokens)
    error = 1.96 / math.sqrt(3 * running)
    return Live(Range(point * max(0.0, 1 - error), point, min(1.0, point * (1 + error))), running)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The pool as it stands: the block size in effect, and what is known around it."""

    block_size: int
    hybrid: bool = False
    mla: bool | None = None
    pool_tokens: float | None = None
    step_tokens: float | None = None
    """What one hundredth of gpu-memory-utilization adds to the pool."""


def concurrency_gain(lengths: Lengths, before: int, after: int) -> Range:
    """How many more sequences fit, as a ratio: `(1 - W') / (1 - W) - 1`, at the bounds of the waste."""
    w, w2 = waste_at(lengths, before).ratio, waste_at(lengths, after).ratio
    gains = [(1 - b) / (1 - a) - 1 for a, b in ((w.low, w2.low), (w.point, w2.point), (w.high, w2.high))]
    return Range(min(gains), gains[1], max(gains))


def table(lengths: Lengths, sizes: tuple[int, ...]) -> list[Waste]:
    """The waste of each size."""
    return [waste_at(lengths, size) for size in sizes]


def advise(
    lengths: Lengths, geometry: Geometry, rule: BackendRule, parameters: AdviceParameters, live: Live | None = None
) -> Advice:
    """Whether another `--block-size` is worth it: only if all conditions of docs/advise.md hold.

    Hybrid models choose their block themselves, MLA kernels may take only one size; both are said.
    """
    now = waste_at(lengths, geometry.block_size)
    caveats = _caveats(geometry, rule, now, live)
    numbers = {"waste_ratio": now.ratio.point, "context_tokens": lengths.context_tokens.point}
    if geometry.hybrid or geometry.block_size > max(COMMON_SIZES):
        return Advice(Topic.BLOCK_SIZE, False, _hybrid_words(geometry, now), caveats=caveats, numbers=numbers)
    if geometry.mla and rule is UNKNOWN:
        words = f"{_waste_words(now)}; MLA backends differ in what they take, so name yours with --backend."
        return Advice(Topic.BLOCK_SIZE, None, words, caveats=caveats, missing=("backend",), numbers=numbers)
    better = _better(lengths, now, rule, parameters)
    if better is None:
        words = _keep_words(lengths, now, geometry, rule, parameters)
        return Advice(Topic.BLOCK_SIZE, False, words, caveats=caveats, numbers=numbers)
    return _change(lengths, now, better, rule, caveats, numbers)


def _better(lengths: Lengths, now: Waste, rule: BackendRule, parameters: AdviceParameters) -> Waste | None:
    """The largest permitted size that ends the matter, of those the backend is fast at if there are any.

    Else the smallest that gives enough back; None without one.
    """
    if now.ratio.point < parameters.waste_min_ratio:
        return None
    smaller = [size for size in COMMON_SIZES if size < now.block_size and rule.accepts(size)]
    good = [w for w in _enough(lengths, now, smaller, parameters) if w.ratio.point < parameters.waste_min_ratio]
    liked = (rule.prefers,) if rule.prefers is not None else rule.fast
    fast = [w for w in good if w.block_size in liked]
    if fast or good:
        return (fast or good)[-1]
    return next(iter(_enough(lengths, now, smaller, parameters)), None)


def _enough(lengths: Lengths, now: Waste, smaller: list[int], parameters: AdviceParameters) -> list[Waste]:
    """The sizes that give enough back."""
    wastes = [waste_at(lengths, size) for size in smaller]
    return [w for w in wastes if now.ratio.point - w.ratio.point >= parameters.waste_gain_min_ratio]


def _change(
    lengths: Lengths, now: Waste, better: Waste, rule: BackendRule, caveats: tuple[str, ...], numbers: dict[str, float]
) -> Advice:
    gain = concurrency_gain(lengths, now.block_size, better.block_size)
    words = (
        f"{_waste_words(now)}; {better.block_size} would waste {_interval(better)}, so up to {percent(gain.high)} more "
        "sequences fit, where the pool is what limits them."
    )
    backend = f"{rule.backend} accepts {rule.words()} ({rule.source})"
    return Advice(
        Topic.BLOCK_SIZE,
        True,
        words,
        flags=(f"--block-size {better.block_size}",),
        effect=Effect("sequences that fit in the pool", gain, "ratio"),
        caveats=(*caveats, backend),
        numbers={**numbers, "advised_block_size": better.block_size, "advised_waste_ratio": better.ratio.point},
    )


def _interval(waste: Waste) -> str:
    ratio = waste.ratio
    if ratio.high - ratio.low < 1e-5:
        return percent(ratio.point)
    return f"{percent(ratio.point)} ({percent(ratio.low)} to {percent(ratio.high)})"


def _waste_words(now: Waste) -> str:
    return f"Blocks of {now.block_size} leave {_interval(now)} of the used slots empty, at most {percent(now.ceiling)}"


def _hybrid_words(geometry: Geometry, now: Waste) -> str:
    if geometry.block_size <= max(COMMON_SIZES):
        return (
            "A hybrid model: vLLM raises the attention block by itself, and to how many tokens is not shown here "
            "(cache_config_info: effective_attention_block_size). --block-size is only a floor and would not help."
        )
    return (
        f"A hybrid model: vLLM raised the attention block to {geometry.block_size} tokens by itself, which leaves "
        f"about {percent(now.ratio.point)} of the used slots empty. --block-size is only a floor there and would not "
        "help; look at --mamba-cache-dtype, --mamba-cache-mode, prefix caching, the TP size or another vLLM version."
    )


def _keep_words(
    lengths: Lengths, now: Waste, geometry: Geometry, rule: BackendRule, parameters: AdviceParameters
) -> str:
    words = _waste_words(now)
    if now.ratio.point >= parameters.waste_min_ratio:
        if not any(size < now.block_size and rule.accepts(size) for size in COMMON_SIZES):
            return (
                f"{words}. Requests are short here, but {rule.backend} accepts no smaller block ({rule.words()}). "
                f"{_instead(geometry)}"
            )
        return f"{words}; no permitted size gives {percent(parameters.waste_gain_min_ratio)} back. {_instead(geometry)}"
    smaller = [size for size in COMMON_SIZES if size < now.block_size and rule.accepts(size)]
    if not smaller:
        return f"{words}: nothing to gain. {_instead(geometry)}"
    gain = concurrency_gain(lengths, now.block_size, smaller[0])
    return (
        f"{words}: another --block-size would not help ({smaller[0]} fits up to {percent(gain.high)} more sequences). "
        f"{_instead(geometry)}"
    )


def _instead(geometry: Geometry) -> str:
    if geometry.step_tokens and geometry.pool_tokens:
        share = geometry.step_tokens / geometry.pool_tokens
        return f"One step of 0.01 in --gpu-memory-utilization is worth {percent(share)} of the pool."
    return (
        "What one step of 0.01 in --gpu-memory-utilization is worth instead takes --model-config and the size of the "
        "card to say (2 % of a 96 GiB pool on a 192 GiB card)."
    )


def _caveats(geometry: Geometry, rule: BackendRule, now: Waste, live: Live | None) -> tuple[str, ...]:
    said = []
    slow = bool(rule.fast) and geometry.block_size not in rule.fast and not geometry.hybrid
    if rule.note and (slow or not rule.fast):
        said.append(f"{rule.backend}: {rule.note}")
    if not geometry.hybrid and not rule.accepts(geometry.block_size):
        said.append(
            f"{rule.backend} accepts {rule.words()}, not {geometry.block_size} ({rule.source}): is the name right?"
        )
    elif slow:
        said.append(
            f"{rule.backend} is fast at {' and '.join(map(str, rule.fast))} only; --block-size 16 may be faster"
        )
    if live is not None:
        apart = live.ratio.high < now.ratio.low or live.ratio.low > now.ratio.high
        verdict = "which does not fit: lengths or pool differ from what the histograms say" if apart else "which fits"
        bounds = f"{percent(live.ratio.low)} to {percent(live.ratio.high)}"
        said.append(f"running sequences and usage say {percent(live.ratio.point)} ({bounds}), {verdict}")
    return tuple(said)


def costs_words(cost: Costs) -> str:
    """The costs on one line."""
    table_size = (
        gib(cost.block_table_bytes) if cost.block_table_bytes >= 2**30 else f"{cost.block_table_bytes / 1e6:.1f} MB"
    )
    blocks = "" if cost.blocks is None else f", {cost.blocks:,.0f} blocks"
    return f"block table {table_size}{blocks}, {cost.recompute_tokens:g} tokens recomputed per prefix hit"
