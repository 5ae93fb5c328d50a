"""Every threshold of the advice, each with its default and where the default comes from."""

import math
from dataclasses import dataclass, field, fields
from typing import TypeVar

T = TypeVar("T")


def _threshold(default: T, why: str) -> T:
    """A dataclass field that carries its own explanation; typed as its default for mypy's sake."""
    return field(default=default, metadata={"why": why})


@dataclass(frozen=True, slots=True)
class AdviceParameters:
    """When a change is worth it, and how far one may go (docs/advise.md). Raises ValueError for what is no number."""

    waste_min_ratio: float = _threshold(0.03, "below this share of empty slots a block size is left alone")
    waste_gain_min_ratio: float = _threshold(0.02, "what a smaller block must give back, in shares of the used slots")
    prefill_tokens_per_s: float = _threshold(8000.0, "how fast prompts are taken in: it weighs prompts against answers")
    decode_s_per_token: float = _threshold(
        0.030, "time per generated token, likewise; both matter where prompts are long and answers short"
    )
    history_min_s: float = _threshold(86400.0, "memory advice needs a day, one traffic peak included")
    busy_min_s: float = _threshold(3600.0, "of it, how long requests must have been running: an hour is a short peak")
    horizon_s: float = _threshold(86400.0, "growth must fit for so long")
    margin_ratio: float = _threshold(0.01, "VRAM left alone besides everything known")
    move_max_ratio: float = _threshold(0.03, "gpu-memory-utilization is moved by no more at a time")
    move_min_ratio: float = _threshold(0.01, "and not for less")
    utilization_max_ratio: float = _threshold(0.95, "never advised above; 192 GiB ran without failure there (docs)")
    utilization_max_special_ratio: float = _threshold(
        0.92,
        "the same with images, LoRA, prompt_logprobs, a mixture of experts or an unknown model: vLLM's default",
    )
    utilization_min_ratio: float = _threshold(0.1, "never advised below: hardly a model would still fit")
    growth_min_bytes_per_s: float = _threshold(1000.0, "slower growth (83 MiB a day) is called none")
    blocking_min_ratio: float = _threshold(
        0.05, "share of prompts that would block the queue before a split is worth it"
    )
    queued_min_ratio: float = _threshold(
        0.05, "share of polls with a queue before a full pool: about the share of requests that meet one (Wolff 1982)"
    )
    short_min_ratio: float = _threshold(0.5, "share of traffic that must be short")
    full_ratio: float = _threshold(0.97, "a queue at a usage below this waits for something else than a full pool")
    restart_time_left_s: float = _threshold(86400.0, "a rolling restart is advised only if less time is left")
    restart_load_max_ratio: float = _threshold(0.9, "KV usage the other replicas may reach while one is away")

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not math.isfinite(value) or value <= 0:
                raise ValueError(f"advice.{item.name} is {value}; it must be a number above 0")
            if item.name.endswith("_ratio") and value > 1:
                raise ValueError(f"advice.{item.name} is {value}; it is a ratio, at most 1")
