"""What an observer sees of a server between two steps: its page, its cards, its allocators, its statistics line."""

from fragscope.model import AllocatorReading, CacheConfig, EngineReading, Histogram
from fragscope.simulate.pool import Pool
from fragscope.simulate.served import Life, Server


def readings(server: Server, at: float) -> tuple[EngineReading, ...]:
    """The page's figures, one reading per engine; `at` is the poll's time."""
    return tuple(_reading(server, at, engine, pool) for engine, pool in enumerate(server.pools))


def _reading(server: Server, at: float, engine: int, pool: Pool) -> EngineReading:
    c, dialect = pool.counters, server.plan.dialect
    finished = {"stop": float(c.stopped), "length": float(c.cut_at_length), "abort": 0.0, "error": 0.0}
    return EngineReading(
        at=at,
        engine=str(engine),
        model_name=server.plan.build.model.name,
        kv_usage_ratio=0.0 if server.sleeping else pool.usage_ratio,
        running=float(pool.running),
        waiting=float(pool.waiting),
        waiting_by_reason=({"capacity": float(pool.waiting), "deferred": 0.0} if dialect.waiting_by_reason else None),
        preemptions_total=float(c.preemptions),
        prompt_tokens_total=float(c.prompt_tokens),
        generation_tokens_total=float(int(c.generation_tokens)),
        first_tokens_total=float(c.first_tokens),
        finished_total={reason: finished[reason] for reason in dialect.reasons},
        http_total={name: float(count) for name, count in server.http.items()},
        admission_rejections_total=float(server.refused_total) if dialect.rejections else None,
        prompt_tokens=Histogram(float(pool.prompts.count), float(pool.prompts.total), pool.prompts.buckets()),
        output_tokens=Histogram(float(pool.outputs.count), float(pool.outputs.total), pool.outputs.buckets()),
        cache_config=_cache_config(server, pool),
        sleeping=server.sleeping if dialect.sleep_state else None,
        healthy=server.life is Life.UP,
        started_at=server.started_at if dialect.process_start else None,
    )


def _cache_config(server: Server, pool: Pool) -> CacheConfig:
    build, dialect = server.plan.build, server.plan.dialect
    total = sum(each.capacity.num_blocks for each in server.pools)
    tokens = pool.capacity.num_blocks * build.block_size
    return CacheConfig(
        block_size=build.block_size,
        num_gpu_blocks=total if dialect.num_blocks else None,
        gpu_memory_utilization=build.utilization,
        cache_dtype="auto",
        kv_cache_size_tokens=tokens if dialect.pool_tokens else None,
    )


def gpus(server: Server) -> list[tuple[str, int, int, int, int]]:
    """(gpu, total, used, highest since the last call, own) of every card."""
    rows = []
    for gpu, device, worker in zip(server.plan.gpus, server.devices, server.all_workers(), strict=True):
        rows.append((gpu, device.total_bytes, device.used_bytes, device.peak_bytes, worker.own_bytes))
        device.peak_bytes = device.used_bytes
    return rows


def allocators(server: Server, at: float) -> list[AllocatorReading]:
    """What every worker that lives says of its allocator."""
    if server.life is not Life.UP:
        return []
    rows = []
    for gpu, worker in zip(server.plan.gpus, server.all_workers(), strict=True):
        torch = worker.torch
        rows.append(
            AllocatorReading(
                at,
                gpu,
                worker.pid,
                torch.allocated_bytes,
                torch.reserved_bytes,
                torch.inactive_split_bytes(),
                torch.retries_total,
                torch.ooms_total,
                torch.largest_free_bytes(),
                "expandable_segments:True" if server.plan.build.expandable else None,
            )
        )
    return rows


class Statistics:
    """Makes the line that vLLM logs every ten seconds while it is not idle."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, int, float]] = {}

    def lines(self, server: Server, at: float) -> list[str]:
        """One line per engine."""
        rows = []
        for engine, pool in enumerate(server.pools):
            c = pool.counters
            then, prompts, made = self._last.get(engine, (at - 10, 0, 0.0))
            self._last[engine] = (at, c.prompt_tokens, c.generation_tokens)
            seconds = max(1.0, at - then)
            rates = max(0.0, (c.prompt_tokens - prompts) / seconds), max(0.0, (c.generation_tokens - made) / seconds)
            if pool.running or pool.waiting or any(rates):
                rows.append(server.scribe.stats(at, engine, (*rates, pool.running, pool.waiting, pool.usage_ratio)))
        return rows
