"""The words of fragscope: what witnesses say (readings), what it adds up to (verdicts).

Everything here is a frozen dataclass or a closed list. Ratios are 0..1, bytes are bytes, times are
unix seconds; None always means *not known*, never zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Phase(StrEnum):
    """How sure we are that a pseudo-OOM is going on."""

    UNKNOWN = "unknown"
    CLEAR = "clear"
    WATCH = "watch"
    SUSPECTED = "suspected"
    CONFIRMED = "confirmed"


class Cause(StrEnum):
    """What explains an episode (a burst of failures, or the death of an engine)."""

    NONE = "none"
    FRAGMENTATION = "fragmentation"
    MEMORY_GROWTH = "memory_growth"
    EXTERNAL_PROCESS = "external_process"
    TRANSIENT_PEAK = "transient_peak"
    VRAM_EXHAUSTED = "vram_exhausted"
    MEMORY_UNDETERMINED = "memory_undetermined"
    SHUTDOWN = "shutdown"
    ENGINE_FAULT = "engine_fault"
    DRIVER_FAULT = "driver_fault"
    HOST_OOM = "host_oom"
    STARTUP_NO_MEMORY = "startup_no_memory"
    REQUEST_TOO_LONG = "request_too_long"
    UNEXPLAINED = "unexplained"


MEMORY_CAUSES = (
    Cause.FRAGMENTATION,
    Cause.MEMORY_GROWTH,
    Cause.EXTERNAL_PROCESS,
    Cause.TRANSIENT_PEAK,
    Cause.VRAM_EXHAUSTED,
    Cause.MEMORY_UNDETERMINED,
)
"""A pseudo-OOM is an episode with one of these: a failure for lack of memory outside the KV pool."""


class Condition(StrEnum):
    """What is true now; any number of them can hold at once. The order is strongest first."""

    ENGINE_DOWN = "engine_down"
    STARTING = "starting"
    SLEEPING = "sleeping"
    STALLED = "stalled"
    ADMISSION_LIMIT = "admission_limit"
    KV_EXHAUSTED = "kv_exhausted"
    SCHEDULER_LIMIT = "scheduler_limit"
    CLIENT_ERRORS = "client_errors"
    CLIENT_ABORTS = "client_aborts"


class Part(StrEnum):
    """Which witness a gap speaks of."""

    ENGINE = "engine"
    GPU = "gpu"
    ALLOCATOR = "allocator"
    LOG = "log"


class Reason(StrEnum):
    """Why a witness has nothing to say."""

    ABSENT = "absent"
    STALE = "stale"
    TIMEOUT = "timeout"
    REFUSED = "refused"
    HTTP_ERROR = "http_error"
    DENIED = "denied"
    UNSUPPORTED = "unsupported"
    MALFORMED = "malformed"
    BLIND = "blind"
    UNASSIGNED = "unassigned"


class Outcome(StrEnum):
    """How a request ended, as far as the server's counters tell."""

    OK = "ok"
    SERVER_ERROR = "server_error"
    ADMISSION_REJECTED = "admission_rejected"
    CLIENT_ERROR = "client_error"
    ABORTED = "aborted"
    LOST = "lost"


class Band(StrEnum):
    """The KV cache usage at which an outcome happened: low < 0.85, high >= 0.95."""

    LOW = "low"
    MID = "mid"
    HIGH = "high"


@dataclass(frozen=True, slots=True)
class Histogram:
    """A cumulative histogram; `buckets` are (upper bound, count at or below), ascending."""

    count: float
    sum: float
    buckets: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What vLLM says of its KV pool; `num_gpu_blocks` is the sum over the engines of one server."""

    block_size: int | None = None
    num_gpu_blocks: int | None = None
    gpu_memory_utilization: float | None = None
    cache_dtype: str | None = None
    kv_cache_size_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EngineReading:
    """One engine's answer to one poll of `/metrics` and `/health`.

    `http_total`, `admission_rejections_total`, `started_at` and `healthy` belong to the server and are
    repeated on each of its engines; `http_total` counts completion requests by class ("2xx", ...).
    """

    at: float
    engine: str
    model_name: str
    version: str | None = None
    kv_usage_ratio: float | None = None
    running: float | None = None
    waiting: float | None = None
    waiting_by_reason: Mapping[str, float] | None = None
    preemptions_total: float | None = None
    prompt_tokens_total: float | None = None
    generation_tokens_total: float | None = None
    first_tokens_total: float | None = None
    finished_total: Mapping[str, float] | None = None
    http_total: Mapping[str, float] | None = None
    admission_rejections_total: float | None = None
    prompt_tokens: Histogram | None = None
    output_tokens: Histogram | None = None
    cache_config: CacheConfig | None = None
    sleeping: bool | None = None
    healthy: bool | None = None
    started_at: float | None = None


@dataclass(frozen=True, slots=True)
class GpuReading:
    """VRAM of one GPU; `peak_used_bytes` is the highest since the reading before, `own_bytes` the engine's."""

    at: float
    gpu: str
    total_bytes: int
    used_bytes: int
    peak_used_bytes: int | None = None
    own_bytes: int | None = None
    gtt_used_bytes: int | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class AllocatorReading:
    """What the caching allocator inside one worker says of itself."""

    at: float
    gpu: str
    pid: int
    allocated_bytes: int
    reserved_bytes: int
    inactive_split_bytes: int
    retries_total: int
    ooms_total: int
    largest_free_bytes: int | None = None
    config: str | None = None


@dataclass(frozen=True, slots=True)
class Gap:
    """A witness that said nothing this time, and why."""

    part: Part
    reason: Reason
    detail: str = ""


class Fact(StrEnum):
    """What a log line (or the planned-stop marker) establishes."""

    OOM = "oom"
    SHUTDOWN = "shutdown"
    ENGINE_DEATH = "engine_death"
    PLANNED_STOP = "planned_stop"
    REFUSAL = "refusal"
    DRIVER_FAULT = "driver_fault"
    HOST_OOM = "host_oom"
    REQUEST_TOO_LONG = "request_too_long"
    WORKER_DEATH = "worker_death"
    STATS = "stats"


@dataclass(frozen=True, slots=True)
class LogFact:
    """One thing a log established; `facts` holds its numbers (bytes unless named otherwise)."""

    at: float
    target: str
    what: Fact
    facts: Mapping[str, float] = field(default_factory=dict)
    words: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """Everything the witnesses of one target said since the sample before."""

    at: float
    target: str
    engines: tuple[EngineReading, ...] = ()
    gpus: tuple[GpuReading, ...] = ()
    allocators: tuple[AllocatorReading, ...] = ()
    log_facts: tuple[LogFact, ...] = ()
    gaps: tuple[Gap, ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """One thing that spoke for (weight > 0) or against (< 0) a cause, in nats of log-odds."""

    signal: str
    value: float | None
    unit: str
    weight: float
    cause: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What fragscope says of one engine at one time; `engine` is None while none has ever answered."""

    at: float
    target: str
    engine: str | None
    model_name: str | None
    phase: Phase
    cause: str
    conditions: tuple[Condition, ...]
    since: float
    probabilities: Mapping[str, float]
    sentence: str
    remedy: str
    evidence: tuple[Evidence, ...] = ()
    missing: tuple[str, ...] = ()
    episodes: int = 0
    fragmentation_suspected: bool = False
    ticket: bool = False
    """Likely enough for a look by day, if not for waking somebody (`ticket_probability`)."""


@dataclass(frozen=True, slots=True)
class Failures:
    """Server-side failures over outcomes (half-life 300 s) with their Wilson bounds; ratios are 0..1."""

    ratio: float
    lower_ratio: float
    upper_ratio: float


@dataclass(frozen=True, slots=True)
class LogOdds:
    """Failures against KV usage as a log odds ratio with 95 % bounds; negative: they go with a full pool."""

    value: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True)
class GpuMeasure:
    """What the window knows of one GPU; growth and time left are None while it does not grow."""

    gpu: str
    total_bytes: int
    used_bytes: int
    peak_used_bytes: int
    own_bytes: int | None
    growth_bytes_per_s: float | None
    exhaustion_s: float | None


@dataclass(frozen=True, slots=True)
class EngineMeasure:
    """What the window knows of one engine's pool; waste is the share of used KV slots without a token."""

    engine: str
    model_name: str
    kv_usage_ratio: float | None
    kv_usage_peak_ratio: float | None
    block_waste_ratio: float | None


@dataclass(frozen=True, slots=True)
class Measures:
    """The numbers behind the verdicts of one target, for dashboards; absent evidence is None or left out."""

    at: float
    target: str
    engine_up: bool | None
    version: str | None
    outcomes: Mapping[tuple[Band, Outcome], float]
    failures: Failures | None
    log_odds: LogOdds | None
    gpus: tuple[GpuMeasure, ...]
    engines: tuple[EngineMeasure, ...]
    available: Mapping[str, bool]
    memory_failures: Mapping[Cause, int]
    restarts: Mapping[str, int]
    lost_total: float


@dataclass(frozen=True, slots=True)
class Assessment:
    """The answer to one sample: a verdict per engine (at least one) and the measures behind them."""

    verdicts: tuple[Verdict, ...]
    measures: Measures
