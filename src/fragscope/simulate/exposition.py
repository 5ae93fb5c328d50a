"""The engine's state as vLLM 0.32 would show it on /metrics."""

from bisect import bisect_right
from collections.abc import Iterable

from fragscope.simulate.engine import Engine

VERSION = "0.32.0"
MODEL = "demo-llama"
_LABELS = f'engine="0",model_name="{MODEL}"'
_BOUNDS = tuple(m * 10**e for e in range(4) for m in (1, 2, 5))


def render(engine: Engine, started_at: float) -> str:
    """The page, with its newline at the end."""
    counters, shape = engine.counters, engine.shape
    waiting, running = len(engine.waiting), len(engine.running)
    lines = _family("process_start_time_seconds", "gauge", [("", started_at)])
    lines += _family("vllm:num_requests_running", "gauge", [(_LABELS, running)])
    lines += _family("vllm:num_requests_waiting", "gauge", [(_LABELS, waiting)])
    by_reason = [(f'{_LABELS},reason="capacity"', waiting), (f'{_LABELS},reason="deferred"', 0)]
    lines += _family("vllm:num_requests_waiting_by_reason", "gauge", by_reason)
    states = (("awake", 1), ("weights_offloaded", 0), ("discard_all", 0))
    lines += _family("vllm:engine_sleep_state", "gauge", [(f'{_LABELS},sleep_state="{s}"', v) for s, v in states])
    lines += _family("vllm:kv_cache_usage_perc", "gauge", [(_LABELS, engine.usage_ratio)])
    lines += _family("vllm:num_preemptions_total", "counter", [(_LABELS, counters.preemptions)])
    lines += _family("vllm:prompt_tokens_total", "counter", [(_LABELS, counters.prompt_tokens)])
    lines += _family("vllm:generation_tokens_total", "counter", [(_LABELS, counters.generation_tokens)])
    finished = (("stop", counters.finished), ("length", 0), ("abort", 0), ("error", 0))
    lines += _family(
        "vllm:request_success_total",
        "counter",
        [(f'{_LABELS},finished_reason="{r}"', n) for r, n in finished],
    )
    rejected = [(f'model_name="{MODEL}",reason="max_num_queued_reqs"', counters.rejected)]
    lines += _family("vllm:admission_rejections_total", "counter", rejected)
    lines += _histogram("vllm:request_prompt_tokens", counters.prompts)
    lines += _histogram("vllm:request_generation_tokens", counters.outputs)
    first = counters.first_tokens
    lines += _family("vllm:time_to_first_token_seconds", "histogram", [])
    lines += [f'vllm:time_to_first_token_seconds_bucket{{{_LABELS},le="+Inf"}} {float(first)}']
    lines += [f"vllm:time_to_first_token_seconds_count{{{_LABELS}}} {float(first)}"]
    lines += [f"vllm:time_to_first_token_seconds_sum{{{_LABELS}}} {0.05 * first}"]
    pool = (
        f'block_size="{shape.block_size}",cache_dtype="auto",engine="0",gpu_memory_utilization="0.92",'
        f'kv_cache_size_tokens="{shape.num_blocks * shape.block_size}",num_cpu_blocks="None",'
        f'num_gpu_blocks="{shape.num_blocks}"'
    )
    lines += _family("vllm:cache_config_info", "gauge", [(pool, 1)])
    handler = 'handler="/v1/completions",method="POST"'
    answers = [(f'{handler},status="2xx"', counters.finished), (f'{handler},status="5xx"', counters.rejected)]
    lines += _family("http_requests_total", "counter", [(labels, n) for labels, n in answers if n])
    return "\n".join(lines) + "\n"


def _family(name: str, kind: str, rows: Iterable[tuple[str, float]]) -> list[str]:
    head = [f"# HELP {name} Simulated.", f"# TYPE {name} {kind}"]
    return head + [
        f"{name}{{{labels}}} {float(value)}" if labels else f"{name} {float(value)}" for labels, value in rows
    ]


def _histogram(name: str, values: list[int]) -> list[str]:
    ordered = sorted(values)
    lines = _family(name, "histogram", [])
    for bound in _BOUNDS:
        lines.append(f'{name}_bucket{{{_LABELS},le="{float(bound)}"}} {float(bisect_right(ordered, bound))}')
    lines.append(f'{name}_bucket{{{_LABELS},le="+Inf"}} {float(len(ordered))}')
    lines.append(f"{name}_count{{{_LABELS}}} {float(len(ordered))}")
    lines.append(f"{name}_sum{{{_LABELS}}} {float(sum(ordered))}")
    return lines
