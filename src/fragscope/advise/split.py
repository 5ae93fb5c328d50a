"""Do two length populations share one pool, and would splitting them help?

A prompt of L tokens is refused while `(1 - u) * pool < L`, and first-come-first-served stops behind it (vllm#31731):
the share of prompts that would block at usage u is `1 - F((1 - u) * pool)`. Internal fragmentation is no reason.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fragscope.advise.advice import Advice, Effect, Range, Topic, percent
from fragscope.advise.lengths import Steps, steps_of
from fragscope.advise.observed import EnginePast, HourPast
from fragscope.advise.parameters import AdviceParameters

SHORT_PART = 4.0
"""Short is a prompt that would have fitted four times over where a long one blocked."""
_LOST_MULTIPLEXING = math.sqrt(2)
"""Two pools with independent peaks need this much more headroom each, relative to their size."""
_MIN_POLLS = 3
PRIORITY = "--scheduling-policy priority"
TRY_FIRST = (
    f"{PRIORITY} (with a priority per request)",
    "--long-prefill-token-threshold 2048 or a lower --max-num-batched-tokens",
    "--kv-cache-dtype fp8, or a larger pool",
)
"""The compromise where there are no resources for two pools."""


_MISSING = {
    "lengths": "prompt lengths (vllm:request_prompt_tokens, once a request has finished)",
    "kv_usage": "the usage of the pool (vllm:kv_cache_usage_perc)",
    "pool_tokens": "the pool's size (cache_config_info: kv_cache_size_tokens; before vLLM 0.24 --model-config)",
}


@dataclass(frozen=True, slots=True)
class Queue:
    """One engine's pool and queue; ratios are of polls, `replicas` counts the engines of the model, None: not known."""

    pool_tokens: float
    usage_p95_ratio: float
    usage_mean_ratio: float
    queued_ratio: float
    queued_not_full_ratio: float
    replicas: int | None = None


def queue_of(past: EnginePast, pool_tokens: float | None, replicas: int) -> Queue | None:
    """The queue as it was seen; None without the pool's size or usage."""
    usage = past.usage.quantile(0.95)
    if pool_tokens is None or usage is None:
        return None
    polls = max(1, past.polls)
    mean = past.usage_sum / max(1, past.busy_polls)
    return Queue(pool_tokens, usage, mean, past.queued_polls / polls, past.queued_not_full_polls / polls, replicas)


def blocking(prompts: Steps, pool_tokens: float, usage_ratio: float) -> Range:
    """The share 0..1 of prompts that would block the queue at this usage, with the bounds of the buckets."""
    return prompts.share_above((1 - usage_ratio) * pool_tokens)


@dataclass(frozen=True, slots=True)
class HourRow:
    """One hour of the day in UTC: load (mean requests in the engine), peak usage, blocking at that usage."""

    hour: int
    load: float
    usage_highest_ratio: float
    blocking: Range | None
    prompt_mean_tokens: float | None
    free_lowest_bytes: float | None


def by_hour(hours: Mapping[int, HourPast], pool_tokens: float | None) -> list[HourRow]:
    """A row per hour of the day that was seen."""
    return [_hour_row(hour, past, pool_tokens) for hour, past in sorted(hours.items()) if past.polls]


def _hour_row(hour: int, past: HourPast, pool_tokens: float | None) -> HourRow:
    prompts, found = past.prompts, None
    if prompts is not None and prompts.count and pool_tokens:
        found = blocking(steps_of(prompts), pool_tokens, past.usage_highest)
    mean = prompts.sum / prompts.count if prompts is not None and prompts.count else None
    return HourRow(hour, past.load, past.usage_highest, found, mean, past.free_lowest_bytes)


def advise(
    prompts: Steps | None,
    queue: Queue | None,
    hours: list[HourRow],
    parameters: AdviceParameters,
    *,
    pool_known: bool = True,
) -> Advice:
    """Whether to split; only if blocking, enough short requests and a queue before a full pool come together.

    `pool_known` False: the queue is not known because the pool's size in tokens is not.
    """
    if prompts is None or queue is None:
        gap = "lengths" if prompts is None else "kv_usage" if pool_known else "pool_tokens"
        words = f"Without {_MISSING[gap]} nobody can say who waits behind whom."
        return Advice(Topic.SPLIT, None, words, missing=(gap,))
    # Fuller than this the pool itself is short, and everything waits.
    usage = min(queue.usage_p95_ratio, parameters.full_ratio)
    free = (1 - usage) * queue.pool_tokens
    before = blocking(prompts, queue.pool_tokens, usage)
    short = 1 - prompts.share_above(free / SHORT_PART).point
    numbers = {
        "blocking_ratio": before.point,
        "blocking_low_ratio": before.low,
        "blocking_high_ratio": before.high,
        "free_tokens": free,
        "short_ratio": short,
        "queued_not_full_ratio": queue.queued_not_full_ratio,
    }
    bounds = f"{percent(before.low)} to {percent(before.high)}"
    facts = (
        f"At a usage of {percent(usage)} (95th percentile: {percent(queue.usage_p95_ratio)}) {free:,.0f} tokens are "
        f"free, and {percent(before.point)} of the prompts ({bounds}) would block the queue"
    )
    against = _against(before, short, queue, parameters)
    if against is not None:
        return Advice(Topic.SPLIT, False, f"{facts}; a split would not help: {against}.", numbers=numbers)
    return _change(prompts, queue, hours, facts, before, numbers, parameters)


def _against(before: Range, short: float, queue: Queue, parameters: AdviceParameters) -> str | None:
    if before.point <= parameters.blocking_min_ratio:
        return f"that is not more than {percent(parameters.blocking_min_ratio)}"
    if short <= parameters.short_min_ratio:
        return f"only {percent(short)} are short, so there is one population, and it is long"
    if queue.queued_not_full_ratio <= 0:
        return "no request was seen waiting while the pool had room"
    if queue.queued_not_full_ratio < parameters.queued_min_ratio:
        share, least = percent(queue.queued_not_full_ratio), percent(parameters.queued_min_ratio)
        return f"requests waited while the pool had room in {share} of the polls only (from {least} on it is worth it)"
    return None


def _change(
    prompts: Steps,
    queue: Queue,
    hours: list[HourRow],
    facts: str,
    before: Range,
    numbers: dict[str, float],
    parameters: AdviceParameters,
) -> Advice:
    free = numbers["free_tokens"]
    share = _token_share_above(prompts, free)
    numbers = {**numbers, "long_token_ratio": share}
    effect = Effect("short prompts behind a blocked one", Range(-before.high, -before.point, -before.low), "ratio")
    caveats = [
        "two static pools lose multiplexing: each needs its own peak, sqrt(2) more headroom relative to its size"
    ]
    quiet = _quiet_words(hours)
    if quiet is not None:
        caveats.append(quiet)
    if queue.replicas == 1:
        words = (
            f"{facts}, with requests waiting before the pool is full. One engine has nothing to split: let short "
            "requests pass with priority scheduling (and a priority per request)."
        )
        given = Advice(Topic.SPLIT, True, words, (PRIORITY,), effect, numbers=numbers)
        return given if quiet is None else replace(given, caveats=(quiet,))
    apart = _replicas_for_long(share, queue, parameters)
    if apart is None:
        words = (
            f"{facts}, with requests waiting before the pool is full. There are no replicas to spare for a pool of "
            f"their own ({queue.replicas or 'an unknown number of'} engines), so try in this order: "
            f"{'; '.join(TRY_FIRST)}."
        )
        return Advice(Topic.SPLIT, True, words, effect=effect, caveats=tuple(caveats), numbers=numbers)
    words = (
        f"{facts}, with requests waiting before the pool is full. Send prompts above {free:,.0f} tokens "
        f"({percent(share)} of all prompt tokens) to {apart} of the {queue.replicas} engines: for the others blocking "
        f"falls from {percent(before.point)} to about 0. First try: {'; '.join(TRY_FIRST)}."
    )
    flags = (f"router: prompts > {free:.0f} tokens to {apart} of {queue.replicas} engines",)
    return Advice(Topic.SPLIT, True, words, flags, effect, tuple(caveats), numbers=numbers)


def _token_share_above(prompts: Steps, tokens: float) -> float:
    """The share of all prompt tokens that lies in prompts longer than this; buckets count with their middle."""
    middles = [(math.sqrt(a * b), n) for a, b, n in prompts.rows]
    total = sum(middle * n for middle, n in middles)
    return sum(middle * n for middle, n in middles if middle > tokens) / total if total else 0.0


def _replicas_for_long(share: float, queue: Queue, parameters: AdviceParameters) -> int | None:
    """How many engines the long prompts would get; None where either pool would then run too full on average."""
    if queue.replicas is None or queue.replicas < 2:
        return None
    apart = min(queue.replicas - 1, max(1, round(share * queue.replicas)))
    long_usage = queue.usage_mean_ratio * share * queue.replicas / apart
    short_usage = queue.usage_mean_ratio * (1 - share) * queue.replicas / (queue.replicas - apart)
    highest = 1 - (1 - parameters.restart_load_max_ratio) * _LOST_MULTIPLEXING
    return apart if max(long_usage, short_usage) <= highest else None


def _quiet_words(hours: list[HourRow]) -> str | None:
    """Whether the clock already separates the populations, or could; None without enough of the day."""
    known = [row for row in hours if row.prompt_mean_tokens is not None]
    if len(known) < _MIN_POLLS:
        return None
    blocked = [row for row in known if row.blocking is not None and row.blocking.point > 0.05]
    free = [row for row in known if row not in blocked]
    if not blocked:
        return "no single hour blocks at its own peak usage: the populations meet only at the peaks of the whole day"
    if not free:
        quietest = min(known, key=lambda row: row.load)
        return f"every hour blocks; long prompts disturb least at {quietest.hour:02d}:00 UTC"
    names = ", ".join(f"{row.hour:02d}" for row in blocked)
    best = min(free, key=lambda row: row.load)
    worst = max(row.blocking.point for row in blocked if row.blocking is not None)
    return (
        f"by hour: blocking happens at {names} h UTC (up to {percent(worst)}); sending long prompts at "
        f"{best.hour:02d}:00 UTC instead would bring these hours to about 0"
    )
