"""Days of samples in a few lines: an engine and its GPU under a load that follows the clock."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fragscope.advise.observed import Observed
from fragscope.model import AllocatorReading, CacheConfig, EngineReading, GpuReading, Histogram, Sample

GIB = 2**30
HOUR = 3600.0
DAY = 24 * HOUR
CARD = 192 * GIB
GPU = "0000:c1:00.0"
MIDNIGHT = 20_000 * DAY
POOL = CacheConfig(16, 20_000, 0.90, "auto", 320_000)


@dataclass(frozen=True)
class Life:
    """What holds at a time (seconds since midnight of the first day)."""

    used: Callable[[float], float] = lambda _: 0.92 * CARD
    peak: Callable[[float], float] = lambda _: 0.0
    own: Callable[[float], float] | None = None
    allocated: Callable[[float], float] | None = None
    cached: Callable[[float], float] = lambda _: GIB
    usage: Callable[[float], float] = lambda _: 0.5
    running: Callable[[float], float] = lambda _: 20.0
    waiting: Callable[[float], float] = lambda _: 0.0
    prompts: Callable[[float], Histogram] | None = None
    config: CacheConfig = POOL
    total: int = CARD
    started_at: float = MIDNIGHT - DAY
    target: str = "vllm"
    version: str | None = "0.32.0"


def samples(life: Life, seconds: float, step_s: float = 60.0, begin_s: float = 0.0) -> Iterator[Sample]:
    """Samples over so long a time."""
    for i in range(int(seconds / step_s)):
        t = begin_s + i * step_s
        at = MIDNIGHT + t
        gpu = GpuReading(at, GPU, life.total, int(life.used(t)))
        if life.peak(t):
            gpu = replace(gpu, peak_used_bytes=int(life.peak(t)))
        if life.own is not None:
            gpu = replace(gpu, own_bytes=int(life.own(t)))
        yield Sample(at, life.target, (_reading(life, t, at),), (gpu,), _allocators(life, t, at))


def _reading(life: Life, t: float, at: float) -> EngineReading:
    return EngineReading(
        at,
        "0",
        "llama",
        life.version,
        life.usage(t),
        life.running(t),
        life.waiting(t),
        prompt_tokens=life.prompts(t) if life.prompts is not None else None,
        cache_config=life.config,
        started_at=life.started_at,
    )


def _allocators(life: Life, t: float, at: float) -> tuple[AllocatorReading, ...]:
    if life.allocated is None:
        return ()
    allocated = int(life.allocated(t))
    return (AllocatorReading(at, GPU, 1, allocated, allocated + int(life.cached(t)), 0, 0, 0),)


def observed(life: Life, seconds: float, step_s: float = 60.0) -> Observed:
    """What these samples come to."""
    past = Observed()
    for sample in samples(life, seconds, step_s):
        past.observe(sample)
    return past
