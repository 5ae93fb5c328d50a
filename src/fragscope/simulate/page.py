"""Readings as the page that would have led to them, in the names of a release."""

from collections.abc import Iterable

from fragscope.model import EngineReading, Histogram
from fragscope.simulate.dialect import Dialect


def page(readings: tuple[EngineReading, ...], dialect: Dialect) -> str:
    """The exposition with its newline at the end."""
    lines: list[str] = []
    first = readings[0]
    if first.started_at is not None:
        lines += _family("process_start_time_seconds", "gauge", [("", first.started_at)])
    gauges = (("num_requests_running", "running"), ("num_requests_waiting", "waiting"))
    for name, field in gauges:
        lines += _family(f"vllm:{name}", "gauge", [(_of(r), getattr(r, field)) for r in readings])
    rows = [(f'{_of(r)},reason="{why}"', n) for r in readings for why, n in (r.waiting_by_reason or {}).items()]
    lines += _family("vllm:num_requests_waiting_by_reason", "gauge", rows)
    lines += _sleep(readings)
    lines += _family(f"vllm:{dialect.usage_name}", "gauge", [(_of(r), r.kv_usage_ratio or 0.0) for r in readings])
    counters = (
        ("num_preemptions", "preemptions_total"),
        ("prompt_tokens", "prompt_tokens_total"),
        ("generation_tokens", "generation_tokens_total"),
    )
    for name, field in counters:
        lines += _family(f"vllm:{name}_total", "counter", [(_of(r), getattr(r, field)) for r in readings])
    rows = [(f'{_of(r)},finished_reason="{why}"', n) for r in readings for why, n in (r.finished_total or {}).items()]
    lines += _family("vllm:request_success_total", "counter", rows)
    lines += _rejections(first)
    for r in readings:
        lines += _histogram("vllm:request_prompt_tokens", _of(r), r.prompt_tokens)
        lines += _histogram("vllm:request_generation_tokens", _of(r), r.output_tokens)
        total = r.first_tokens_total or 0.0
        lines += _histogram("vllm:time_to_first_token_seconds", _of(r), Histogram(total, round(0.07 * total, 3)))
        lines += _family("vllm:cache_config_info", "gauge", [(_cache_labels(r), 1.0)])
    return "\n".join([*lines, *_http(first)]) + "\n"


def _of(reading: EngineReading) -> str:
    return f'engine="{reading.engine}",model_name="{reading.model_name}"'


def _sleep(readings: tuple[EngineReading, ...]) -> list[str]:
    rows: list[tuple[str, float]] = []
    for r in readings:
        if r.sleeping is not None:
            awake = 0.0 if r.sleeping else 1.0
            states = (("awake", awake), ("weights_offloaded", 1.0 - awake), ("discard_all", 0.0))
            rows += [(f'{_of(r)},sleep_state="{state}"', value) for state, value in states]
    return _family("vllm:engine_sleep_state", "gauge", rows)


def _rejections(reading: EngineReading) -> list[str]:
    if reading.admission_rejections_total is None:
        return []
    model = f'model_name="{reading.model_name}"'
    rows = [
        (f'{model},reason="max_num_queued_reqs"', reading.admission_rejections_total),
        (f'{model},reason="max_num_queued_tokens"', 0.0),
    ]
    return _family("vllm:admission_rejections_total", "counter", rows)


def _cache_labels(reading: EngineReading) -> str:
    config = reading.cache_config
    labels = [f'engine="{reading.engine}"']
    if config is not None:
        tokens = config.kv_cache_size_tokens
        labels += [
            f'block_size="{config.block_size}"',
            f'cache_dtype="{config.cache_dtype}"',
            f'gpu_memory_utilization="{config.gpu_memory_utilization}"',
            f'num_gpu_blocks="{config.num_gpu_blocks}"',
        ]
        labels += [f'kv_cache_size_tokens="{tokens}"'] if tokens is not None else []
    return ",".join(labels)


def _http(reading: EngineReading) -> list[str]:
    handler = 'handler="/v1/chat/completions",method="POST"'
    rows = [(f'{handler},status="{status}"', n) for status, n in (reading.http_total or {}).items() if n]
    rows.append(('handler="/health",method="GET",status="2xx"', 7.0))
    return _family("http_requests_total", "counter", rows)


def _family(name: str, kind: str, rows: Iterable[tuple[str, float]]) -> list[str]:
    lines = [f"{name}{{{labels}}} {value!r}" if labels else f"{name} {value!r}" for labels, value in rows]
    return [f"# TYPE {name} {kind}", *lines] if lines else []


def _histogram(name: str, labels: str, of: Histogram | None) -> list[str]:
    if of is None:
        return []
    rows = [f'{name}_bucket{{{labels},le="{bound}"}} {count}' for bound, count in of.buckets]
    return [
        f"# TYPE {name} histogram",
        *rows,
        f'{name}_bucket{{{labels},le="+Inf"}} {of.count}',
        f"{name}_count{{{labels}}} {of.count}",
        f"{name}_sum{{{labels}}} {of.sum}",
    ]
