"""The numbers behind the verdicts, for dashboards: read off the window's parts, judged by nobody."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fragscope.detect.correlation import Correlation
from fragscope.detect.engine import EngineWindow
from fragscope.detect.episodes import Docket
from fragscope.detect.vram import Vram
from fragscope.detect.window import Answer, TargetWindow
from fragscope.model import EngineMeasure, GpuMeasure, GpuReading, Measures

EVIDENCE = ("engine", "gpu", "own_bytes", "allocator", "log")
"""The kinds of evidence a verdict can rest on."""


@dataclass(slots=True)
class Tallies:
    """What only ever rises: restarts by kind, requests lost."""

    restarts: dict[str, int] = field(default_factory=lambda: {"planned": 0, "unplanned": 0, "unknown": 0})
    lost_total: float = 0.0


def measures_of(
    at: float,
    target: str,
    window: TargetWindow,
    vram: Vram,
    correlation: Correlation,
    docket: Docket,
    tallies: Tallies,
    available: Mapping[str, bool],
) -> Measures:
    """The measures of one target as of `at`; `available` says which kinds of evidence are fresh."""
    alive = not window.dead and available["engine"]
    return Measures(
        at=at,
        target=target,
        engine_up=None if window.last_polled is None else window.last_polled is Answer.GOOD,
        version=window.version,
        outcomes=correlation.outcomes(),
        failures=None if window.dead else correlation.failures(at),
        log_odds=correlation.log_odds(at),
        gpus=tuple(_gpu(vram, gpu, at) for gpu in vram.readings()) if available["gpu"] else (),
        engines=tuple(_engine(at, engine, len(window.engines), alive=alive) for engine in window.engines.values()),
        available=available,
        memory_failures=dict(docket.memory_failures),
        restarts=dict(tallies.restarts),
        lost_total=tallies.lost_total,
    )


def _gpu(vram: Vram, gpu: GpuReading, at: float) -> GpuMeasure:
    growth = vram.growth(gpu.gpu)
    return GpuMeasure(
        gpu=gpu.gpu,
        total_bytes=gpu.total_bytes,
        used_bytes=gpu.used_bytes,
        peak_used_bytes=vram.peak_bytes(gpu.gpu, at),
        own_bytes=gpu.own_bytes,
        growth_bytes_per_s=growth[0] if growth is not None else None,
        exhaustion_s=growth[1] if growth is not None else None,
    )


def _engine(at: float, engine: EngineWindow, engines: int, *, alive: bool) -> EngineMeasure:
    reading, last = engine.reading, engine.polls.last()
    return EngineMeasure(
        engine=reading.engine if reading is not None else "",
        model_name=reading.model_name if reading is not None else "",
        kv_usage_ratio=last.usage_ratio if last is not None and alive else None,
        kv_usage_peak_ratio=engine.peak_usage.value(at) if alive else None,
        block_waste_ratio=block_waste_ratio(engine, engines) if alive else None,
    )


def block_waste_ratio(engine: EngineWindow, engines: int) -> float | None:
    """Internal fragmentation: the share of used KV slots that hold no token, 0..1.

    R running sequences leave (B - 1) / 2 slots of their last block empty on average, of usage * N * B used
    slots (docs/detector.md). None without a pool's geometry, without work, or at usage 0.
    `num_gpu_blocks` is the sum over the server's engines.
    """
    reading = engine.reading
    if reading is None or reading.cache_config is None or not reading.running or not reading.kv_usage_ratio:
        return None
    block, blocks = reading.cache_config.block_size, reading.cache_config.num_gpu_blocks
    if not block or not blocks:
        return None
    used_slots = reading.kv_usage_ratio * blocks / engines * block
    return min(1.0, reading.running * (block - 1) / 2 / used_slots)
