"""Draws a server from a seed: model, card, pool, pace, release, and the load that fills its pool as asked."""

import random
from dataclasses import dataclass

from fragscope.simulate.allocator import GIB, MIB
from fragscope.simulate.dialect import DIALECTS
from fragscope.simulate.happenings import Demand, Plan
from fragscope.simulate.lengths import TRACES, Lengths
from fragscope.simulate.pool import Capacity
from fragscope.simulate.worker import MODELS, Build

_HIGHEST_RATE = 6.0
"""Arrivals per second of the busiest server: what a run of hours can afford to simulate."""


@dataclass(frozen=True, slots=True)
class Cast:
    """What a scenario asks of its server."""

    usage: float = 0.3
    utilization: float = 0.92
    tensor_parallel: int = 1
    engines: int = 1
    roomy_batch: bool = False
    small_pool: bool = False
    big_steps: bool = False
    low_rate: bool = False


def gpu_names(rng: random.Random, count: int) -> tuple[str, ...]:
    """PCI addresses of a node's cards."""
    first = rng.choice((0x05, 0x15, 0x75, 0xC1))
    return tuple(f"0000:{(first + 0x10 * number) % 256:02x}:00.0" for number in range(count))


def cast(rng: random.Random, asked: Cast) -> Plan:
    """A server as asked, the rest by chance."""
    models = MODELS[-2:] if asked.small_pool else MODELS
    model = models[rng.randrange(len(models))]
    ranks = asked.tensor_parallel
    # Attention beside a state-space model: pages are aligned, blocks are huge, states take whole ones.
    hybrid = not asked.small_pool and rng.random() < 0.07
    build = Build(
        model=model,
        utilization=asked.utilization,
        tensor_parallel=ranks,
        non_torch_bytes=int(rng.uniform(600, 1800)) * MIB,
        graph_bytes=int(rng.uniform(0.4, 2.4) * GIB),
        max_num_batched_tokens=rng.choice((16384, 32768)) if asked.big_steps else rng.choice((2048, 8192, 8192, 16384)),
        max_num_seqs=1024 if asked.roomy_batch else rng.choice((128, 256, 256, 512)),
        block_size=528 if hybrid else rng.choice((16, 16, 16, 32, 64)),
    )
    trace = rng.choice(("mooncake_conv", "servegen_r1", "azure_conv")) if asked.small_pool else rng.choice(TRACES)
    shares = not hybrid and rng.random() < 0.4
    capacity = Capacity(
        num_blocks=0,
        block_size=build.block_size,
        max_num_seqs=build.max_num_seqs,
        max_num_batched_tokens=build.max_num_batched_tokens,
        prefill_pace=rng.uniform(12000, 40000),
        decode_pace=rng.uniform(25, 70),
        state_blocks=3 if hybrid else 0,
        prefix_groups=rng.randint(2, 20) if shares else 0,
        prefix_tokens=64 * rng.randint(2, 16) if shares else 0,
    )
    per_s = _rate(rng, build, capacity, trace, asked)
    return Plan(
        target="vllm",
        build=build,
        capacity=capacity,
        demand=Demand(per_s, trace, daily_swing=rng.uniform(0, 0.4)),
        dialect=DIALECTS[rng.randrange(len(DIALECTS))],
        engines=asked.engines,
        gpus=gpu_names(rng, ranks * asked.engines),
        background_errors=rng.choice((0.0, 0.0, 0.0005, 0.002)),
        missed_polls=rng.choice((0.0, 0.0, 0.001, 0.005)),
        restart_s=(rng.uniform(60, 120), rng.uniform(120, 300)),
    )


def _rate(rng: random.Random, build: Build, capacity: Capacity, trace: str, asked: Cast) -> float:
    """Arrivals per second that hold about `usage` of the pool, within what the engine and we can do."""
    lengths = Lengths(trace, build.model.max_model_len, rng)
    prompt, output, context = lengths.mean()
    weights = build.model.weights_bytes // build.tensor_parallel
    pool_bytes = build.utilization * build.total_bytes - weights - 4 * GIB
    tokens = pool_bytes / (build.model.kv_bytes_per_token // build.tensor_parallel)
    running = min(asked.usage * tokens / context, 0.6 * capacity.max_num_seqs)
    service_s = output * (1 + running / capacity.half_pace_seqs) / capacity.decode_pace + prompt / capacity.prefill_pace
    # Beyond a third of what prefill or decode can do, queues would form that nobody asked for.
    most = 0.35 * min(capacity.prefill_pace / prompt, capacity.decode_pace * capacity.half_pace_seqs / output)
    highest = 0.5 * _HIGHEST_RATE if asked.low_rate else _HIGHEST_RATE
    return asked.engines * min(running / service_s, most, highest / asked.engines)
