"""Every threshold of the detector, each with its default and where the default comes from.

The texts are data: `docs/configuration.md` lists them and a test compares the two.
"""

import math
from dataclasses import dataclass, field, fields
from typing import TypeVar

T = TypeVar("T")

MIB = 2**20
GIB = 2**30


def threshold(default: T, why: str) -> T:
    """A dataclass field that carries its own explanation; typed as its default for mypy's sake."""
    return field(default=default, metadata={"why": why})


@dataclass(frozen=True, slots=True)
class Weights:
    """Log-odds (nats) that each circumstance adds to "a memory failure outside the KV pool".

    Hand-set from a public base rate and checked on simulated runs (docs/detector.md); naive-Bayes in
    style and correlated, hence the clip of an episode's sum.
    """

    prior: float = threshold(-1.0, "27 %: 6 of 19 complete public vLLM out-of-memory messages fit fragmentation")
    clip_low: float = threshold(-4.0, "one episode never counts for less")
    clip_high: float = threshold(6.0, "one episode never counts for more")
    usage_low: float = threshold(0.8, "death at KV usage < band_mid_ratio: the pool was not the limit")
    usage_high: float = threshold(-0.8, "death at KV usage >= band_high_ratio")
    headroom_half: float = threshold(2.6, "free < 0.5 of the largest transient seen")
    headroom_one: float = threshold(1.6, "free < 1 of it: an ordinary step can fail")
    headroom_two: float = threshold(0.6, "free < 2 of it")
    headroom_five: float = threshold(-0.6, "free < 5 of it")
    headroom_ample: float = threshold(-1.8, "free >= 5 of it")
    growing: float = threshold(1.4, "VRAM climbs in steps and does not come back")
    not_growing: float = threshold(-0.2, "VRAM is level")
    lost_work: float = threshold(0.5, "requests were in flight")
    lost_idle: float = threshold(-1.5, "nothing was in flight and no token moved")
    drained: float = threshold(-3.0, "the engine was emptied first: somebody stopped it")
    log_oom: float = threshold(6.0, "the allocator's own words")
    log_shutdown: float = threshold(-6.0, "the log shows that a stop was asked for first")
    log_fault: float = threshold(-6.0, "a driver fault, the host's own lack of memory or a refused start came first")
    log_request: float = threshold(-3.0, "requests longer than the model allows: the clients' limit")
    log_silent: float = threshold(-4.0, "the log was there and names neither")
    marker: float = threshold(-6.0, "a preStop hook touched the planned-stop file")
    retries: float = threshold(2.5, "the allocator flushed its cache in the last seconds: the device was full")
    no_retries: float = threshold(-0.3, "it did not")
    split: float = threshold(0.8, "more is stranded than a step needs, and less is free")
    no_split: float = threshold(-0.3, "that is not so")
    allocator_oom: float = threshold(5.5, "the allocator counted an out-of-memory error: an episode's sum")
    earlier_crash: float = threshold(0.7, "an earlier undrained crash, times its decay, if headroom was short")
    alive: float = threshold(-2.0, "the engine survived: an out-of-memory error in a step kills vLLM V1")
    alive_usage_low: float = threshold(0.4, "failures without a crash at low KV usage")
    alive_headroom_one: float = threshold(1.5, "failures without a crash, free < 1 of the need")
    alive_headroom_two: float = threshold(0.8, "the same, free < 2 of the need")
    alive_headroom_ample: float = threshold(-1.0, "the same, free >= 2 of the need")
    alive_growing: float = threshold(0.8, "failures without a crash while VRAM climbs")
    alive_queue: float = threshold(-1.5, "requests wait: the scheduler or a queue limit is the likelier reason")
    alive_no_ooms: float = threshold(-1.0, "the allocator counted no out-of-memory error while requests failed")
    alive_log_silent: float = threshold(-3.0, "the log was there and has no out-of-memory message")


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What the signals compare with; durations in seconds, ratios 0..1, sizes in bytes."""

    crash_half_life_s: float = threshold(21600.0, "the same for 'it crashed before'")

    window_s: float = threshold(15.0, "a failure lags the usage that caused it by up to a scrape")
    window_polls: int = threshold(3, "at slow polling the window reaches back this many polls instead")
    drain_window_s: float = threshold(60.0, "a drain is judged against the load of the last minute")
    drained_ratio: float = threshold(0.15, "in-flight work at or below this share of that load is drained")
    planned_stop_valid_s: float = threshold(120.0, "a planned-stop marker older than this says nothing")
    headroom_history_s: float = threshold(180.0, "VRAM readings kept for the judgement of a death")

    band_mid_ratio: float = threshold(0.85, "below: low usage; between: where both causes mix")
    band_high_ratio: float = threshold(0.95, "at or above: vLLM preempts")
    failures_half_life_s: float = threshold(300.0, "failure ratio: five minutes")
    correlation_half_life_s: float = threshold(1800.0, "log odds ratio: half an hour")
    baseline_half_life_s: float = threshold(86400.0, "a server's own background of failures: a day")
    gate_min_failures: float = threshold(5.0, "one failure is never enough: up to 2.7 false alarms a day at k >= 1")
    gate_z: float = threshold(3.3, "the test repeats every poll; 1.96 gave 5 false alarms a day in simulation")
    gate_ratio: float = threshold(0.005, "failures below half a percent are background")
    gate_baseline_factor: float = threshold(3.0, "or three times the server's own background")
    baseline_min_outcomes: float = threshold(1000.0, "fewer outcomes make no baseline")
    baseline_min_s: float = threshold(3600.0, "less history makes no baseline")

    kv_full_share: float = threshold(0.20, "share of busy polls at a full pool; the gauge oscillates between polls")
    kv_window_s: float = threshold(1800.0, "over this long, of what was seen")
    kv_recent_s: float = threshold(300.0, "and full at least once in this time")
    kv_min_seen_s: float = threshold(15.0, "and seen for at least this long")
    scheduler_min_s: float = threshold(10.0, "waiting at every poll for this long")
    scheduler_usage_ratio: float = threshold(0.9, "while the pool has room")
    stalled_s: float = threshold(120.0, "vllm#39734, #45414: running 0, waiting, no token for minutes")
    stalled_usage_ratio: float = threshold(0.05, "while the pool is empty")
    admission_ratio: float = threshold(0.005, "rejections by a queue limit, share of outcomes")
    client_errors_ratio: float = threshold(0.05, "4xx, share of outcomes")
    client_aborts_ratio: float = threshold(0.05, "hang-ups, share of outcomes")
    condition_linger_s: float = threshold(60.0, "a condition stays true this long after it last held")
    starting_s: float = threshold(600.0, "a process without a token is starting this long")

    trend_bucket_s: float = threshold(60.0, "minimum per minute: saw-teeth vanish, retained memory stays")
    trend_long_bucket_s: float = threshold(3600.0, "a second ring of hours: leaks that take days (vllm#28230)")
    trend_buckets: int = threshold(30, "half an hour of minutes, thirty hours")
    trend_min_buckets: int = threshold(10, "fewer say nothing")
    trend_tie_bytes: int = threshold(16 * MIB, "smaller differences are ties (Mann-Kendall)")
    trend_step_bytes: int = threshold(32 * MIB, "a step is larger than a small allocator segment")
    trend_z: float = threshold(2.6, "one-sided 0.5 %")
    trend_min_steps: int = threshold(4, "a single step is an adapter or a graph, not a leak")
    trend_min_late_steps: int = threshold(2, "growth that stopped has saturated")
    trend_max_drops: int = threshold(1, "memory that comes back is a cache")
    warmup_s: float = threshold(600.0, "healthy servers are flat after the first minutes")
    vram_drop_ratio: float = threshold(0.20, "a fall this large is a death or a sleeping engine, not a free")
    watch_enter_s: float = threshold(21600.0, "watch when exhaustion is nearer than 6 h")
    watch_leave_s: float = threshold(43200.0, "and leave it beyond 12 h")
    watch_absent_s: float = threshold(120.0, "or when there has been no growth for this long")

    baseline_span_s: float = threshold(300.0, "growth is counted from the first minutes after warm-up")
    growth_bytes: int = threshold(1 * GIB, "smaller growth of a part of VRAM names no cause")
    growth_large_ratio: float = threshold(0.04, "growth of this share of the card needs no staircase to be believed")
    forecast_window_s: float = threshold(600.0, "allocator retries in this time make a forecast")
    forecast_retries: int = threshold(2, "at least so many: one is a flush of the cache")
    forecast_split_ratio: float = threshold(0.01, "with this share of the card stranded; a healthy run had none")

    need_min_bytes: int = threshold(64 * MIB, "smaller VRAM steps are noise")
    need_max_ratio: float = threshold(0.04, "larger ones are loads, not transients")
    need_default_ratio: float = threshold(0.01, "with no step seen, 1 % of the card")
    headroom_back: float = threshold(2.0, "headroom is back at twice the need")
    headroom_back_s: float = threshold(120.0, "held for this long")

    mixed_low_ratio: float = threshold(0.01, "stranded below 1 % of the card: fragmentation is the lesser part")
    mixed_high_ratio: float = threshold(0.04, "stranded from 4 % on: fragmentation")
    share_below: float = threshold(0.35, "fragmentation's share of the memory causes below mixed_low_ratio")
    share_low: float = threshold(0.50, "at mixed_low_ratio")
    share_high: float = threshold(0.95, "from mixed_high_ratio on; linear between")
    share_unknown: float = threshold(0.05, "without the allocator's arithmetic")
    share_expandable: float = threshold(0.10, "with expandable segments and nothing stranded, at most")
    share_transient: float = threshold(0.80, "out of memory although twice the largest step was free: one huge step")
    fragmentation_probability: float = threshold(0.25, "enough to raise fragscope_fragmentation_suspected")

    weights: Weights = field(default_factory=Weights)


@dataclass(frozen=True, slots=True)
class Parameters(Thresholds):
    """Everything the detector is set by: the times and the probability people tune, and the thresholds."""

    suspected_probability: float = threshold(0.90, "page: 9:1 before anyone is woken")
    ticket_probability: float = threshold(0.75, "ticket: 3:1 is worth a look by day; at most the page's")
    hold_s: float = threshold(900.0, "a verdict stays at least this long after its last memory episode")
    forget_s: float = threshold(3600.0, "a gone engine's verdict stays published this long")
    episode_gap_s: float = threshold(60.0, "failures closer than this are one episode")
    half_life_s: float = threshold(14400.0, "how fast an earlier episode stops counting")
    stale_after_s: float = threshold(15.0, "older readings are no evidence; at least three intervals")
    peak_window_s: float = threshold(60.0, "exported peaks look back this long")

    def __post_init__(self) -> None:
        """Raises ValueError with the offending name and value."""
        for item in fields(self):
            if item.name != "weights":
                _check(item.name, getattr(self, item.name))
        if not 0.5 <= self.suspected_probability < 1:
            raise ValueError(f"suspected_probability is {self.suspected_probability}, but must lie in 0.5..1")
        if not 0 < self.ticket_probability < 1:
            raise ValueError(f"ticket_probability is {self.ticket_probability}, but must lie in 0..1")
        if not self.band_mid_ratio <= self.band_high_ratio:
            raise ValueError(f"band_mid_ratio {self.band_mid_ratio} is above band_high_ratio {self.band_high_ratio}")
        for item in fields(self.weights):
            if not math.isfinite(getattr(self.weights, item.name)):
                raise ValueError(f"weights.{item.name} is {getattr(self.weights, item.name)}, but must be a number")


_POSITIVE = (
    "half_life_s",
    "trend_bucket_s",
    "trend_long_bucket_s",
    "trend_buckets",
    "window_polls",
    "need_default_ratio",
)


def _check(name: str, value: float) -> None:
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value}, but must be a number that is not negative")
    if value == 0 and name.endswith(_POSITIVE):
        raise ValueError(f"{name} is 0, but must be above 0")
