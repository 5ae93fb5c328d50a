"""vLLM's periodic statistics, scheduler dump and start-up figures, part by part: versions order them differently."""

import re
from collections.abc import Mapping

from fragscope.explain.oom import figure

_PARTS = re.compile(
    r"(prompt throughput|generation throughput|Running|Waiting|Pending|Swapped|Deferred|Preemptions): "
    r"(\d{1,9}(?:\.\d{1,9})?)"
)
_NAMES = {
    "prompt throughput": "prompt_tps",
    "generation throughput": "gen_tps",
    "Running": "running",
    "Waiting": "waiting",
    "Pending": "waiting",
    "Swapped": "swapped",
    "Deferred": "deferred",
    "Preemptions": "preemptions",
}
_ENGINE = re.compile(r"\bEngine (\d{1,4}):")
_KV = re.compile(r"([A-Z]+) KV cache usage: (\d{1,9}(?:\.\d{1,9})?)%")
_DUMPED = {
    "running": re.compile(r"num_running_reqs=(\d{1,15})"),
    "waiting": re.compile(r"num_waiting_reqs=(\d{1,15})"),
    "kv_usage": re.compile(r"kv_cache_usage=(\d{1,3}(?:\.\d{1,30})?(?:e-\d{1,3})?)"),
}
_GIB = r"(\d{1,9}(?:\.\d{1,9})?) ?Gi?B"
_STARTUP = {
    "weights": re.compile(rf"(?:[Mm]odel loading took|model weights took|model weights take) {_GIB}"),
    "kv_available": re.compile(rf"Available KV cache memory: {_GIB}"),
    "kv_tokens": re.compile(r"KV cache size: (\d[\d,]{0,18}) tokens"),
    "kv_bytes": re.compile(rf"kv_cache_size={_GIB}"),
    "total": re.compile(rf"total_gpu_memory={_GIB}"),
    "peak_torch": re.compile(rf"peak_torch_memory={_GIB}"),
    "gpu_memory_utilization": re.compile(r"gpu_memory_utilization=(\d{1,9}(?:\.\d{1,9})?)"),
    "gpu_blocks": re.compile(r"# GPU blocks: (\d{1,15})"),
    "max_model_len": re.compile(r"concurrency for (\d[\d,]{0,18}) tokens per request"),
}
_SIZES = frozenset({"weights", "kv_available", "kv_bytes", "total", "peak_torch"})
_RATIO_DECIMALS = 4
"""The periodic line prints a thousandth; the dump's sixteen digits say no more than this."""


def read_stats(text: str) -> Mapping[str, float] | None:
    """The parts of a periodic line: requests, tokens per second, usage as a ratio; None where it is none."""
    facts = {_NAMES[name]: float(number) for name, number in _PARTS.findall(text)}
    if "running" not in facts and "Iteration(" not in text:
        return None
    engine = _ENGINE.search(text)
    if engine is not None:
        facts["engine"] = float(engine[1])
    if "Aggregated" in text:
        facts["aggregated"] = 1.0
    usages = {device: round(float(percent) / 100, _RATIO_DECIMALS) for device, percent in _KV.findall(text)}
    device = next((name for name in usages if name != "CPU"), None)
    if device is None:
        return facts | ({"kv_usage": usages["CPU"]} if usages else {})
    facts["kv_usage"] = usages[device]
    return facts | ({"cpu_kv_usage": usages["CPU"]} if "CPU" in usages else {})


def read_dump(text: str) -> Mapping[str, float] | None:
    """The scheduler's state when a step failed: the best evidence of the KV pool at a death."""
    facts = {name: round(float(match[1]), _RATIO_DECIMALS) for name, match in _search(_DUMPED, text)}
    return facts or None


def read_startup(text: str) -> Mapping[str, float] | None:
    """The sizes an engine prints while it starts: bytes, tokens, blocks."""
    facts: dict[str, float] = {}
    for name, match in _search(_STARTUP, text):
        number = match[1].replace(",", "")
        facts[name] = float(figure(number, "GiB").value_bytes) if name in _SIZES else float(number)
    return facts or None


def _search(patterns: Mapping[str, re.Pattern[str]], text: str) -> list[tuple[str, re.Match[str]]]:
    found = ((name, pattern.search(text)) for name, pattern in patterns.items())
    return [(name, match) for name, match in found if match is not None]
