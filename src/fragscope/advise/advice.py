"""What a piece of advice is: change or not, by which flags, to what effect, and how sure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

GIB = 2**30


class Topic(StrEnum):
    """What the advice is about."""

    BLOCK_SIZE = "block_size"
    MEMORY = "gpu_memory_utilization"
    SPLIT = "split"
    FP8 = "fp8"
    REPLICAS = "replicas"
    RESTART = "rolling_restart"


@dataclass(frozen=True, slots=True)
class Range:
    """A figure with the bounds it is known to lie in; the unit is the owner's."""

    low: float
    point: float
    high: float

    def scaled(self, factor: float) -> "Range":
        """The same range in another unit; `factor` is positive."""
        return Range(self.low * factor, self.point * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class Effect:
    """What a change is expected to do, from `value.low` to `value.high`; ratios are 0..1."""

    what: str
    value: Range
    unit: str


@dataclass(frozen=True, slots=True)
class Advice:
    """One answer; `change` is None where the evidence does not reach, and False where a change would not help."""

    topic: Topic
    change: bool | None
    sentence: str
    flags: tuple[str, ...] = ()
    effect: Effect | None = None
    caveats: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)


def gib(value_bytes: float) -> str:
    """Bytes as GiB with one or two decimals."""
    amount = value_bytes / GIB
    return f"{amount:.1f} GiB" if abs(amount) >= 10 else f"{amount:.2f} GiB"


def percent(ratio: float) -> str:
    """A ratio 0..1 as per cent, with more digits where it is small."""
    value = 100 * ratio
    if abs(value) >= 10:
        return f"{value:.0f} %"
    return f"{value:.1f} %" if abs(value) >= 1 else f"{value:.2f} %"
