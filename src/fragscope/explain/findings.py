"""The words of `explain`: what a stretch of log establishes, before anyone judges it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """What a line, or several joined, says."""

    OOM = "oom"
    RUNTIME_OOM = "runtime_oom"
    """Out of memory outside the caching allocator, without its figures."""
    REFUSAL = "refusal"
    HOST_OOM = "host_oom"
    DRIVER_FAULT = "driver_fault"
    ENGINE_ERROR = "engine_error"
    ENGINE_DEATH = "engine_death"
    WORKER_DEATH = "worker_death"
    SHUTDOWN = "shutdown"
    REQUEST_TOO_LONG = "request_too_long"
    STATS = "stats"
    DUMP = "dump"
    """The scheduler's state at the moment a step failed."""
    STARTUP = "startup"
    PREEMPTION = "preemption"
    MEASURED = "measured"
    """Figures that a person or a script wrote down, without a failure of their own."""
    SERIES = "series"
    SMI = "smi"
    HINT = "hint"
    """A symptom named around the failure: a warm-up, an option that is not supported, a version."""


class Stage(StrEnum):
    """How far the engine had come."""

    UNKNOWN = "unknown"
    STARTUP = "startup"
    LOADING = "loading"
    PROFILING = "profiling"
    CAPTURE = "capture"
    SERVING = "serving"


FAILURES = frozenset(
    {
        Kind.OOM,
        Kind.RUNTIME_OOM,
        Kind.REFUSAL,
        Kind.HOST_OOM,
        Kind.DRIVER_FAULT,
        Kind.ENGINE_ERROR,
        Kind.ENGINE_DEATH,
        Kind.WORKER_DEATH,
        Kind.SHUTDOWN,
        Kind.REQUEST_TOO_LONG,
    }
)
"""What opens an incident; the rest only describes one, or the pressure that no failure belongs to."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing a log established, and where: line numbers count from 1, `facts` are bytes unless named otherwise."""

    kind: Kind
    first_line: int
    last_line: int
    facts: Mapping[str, float] = field(default_factory=dict)
    words: str = ""
    stage: Stage | None = None
    one_off: str | None = None
    """The buffer that the stack names, where it is one a single unusual request or step asks for."""
    stamp: str | None = None
    at: float | None = None
    process: str | None = None
    backend: str | None = None
    uncertainties: Mapping[str, float] = field(default_factory=dict)
    processes: tuple[int, ...] = ()
    missing: tuple[str, ...] = ()
    variable: str | None = None
    """The allocator's environment variable as the message itself names it."""
