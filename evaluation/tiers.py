"""What a deployment can see: each tier hides some witnesses of a sample, as if they were never configured."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from fragscope.model import Gap, Part, Reason, Sample

LOST_SHARE = 0.1
"""The share of log facts that the last tier loses."""

Mask = Callable[[Sample], Sample]


@dataclass(frozen=True, slots=True)
class Tier:
    """A set of witnesses; `mask_of` gives the mask for a seed."""

    name: str
    words: str
    mask_of: Callable[[int], Mask]
    tells_fragmentation: bool
    """Whether it has what it takes to call something fragmentation: allocator readings or logs."""


def without_own_bytes(sample: Sample) -> Sample:
    """No VRAM per process: what the device reports is all."""
    return replace(sample, gpus=tuple(replace(gpu, own_bytes=None) for gpu in sample.gpus))


def without_allocators(sample: Sample) -> Sample:
    """No plugin inside the workers."""
    return replace(sample, allocators=(), gaps=_absent(sample, Part.ALLOCATOR))


def without_log(sample: Sample) -> Sample:
    """No log; the planned-stop marker goes with it."""
    return replace(sample, log_facts=(), gaps=_absent(sample, Part.LOG))


def losing(seed: int, share: float = LOST_SHARE) -> Mask:
    """A log that loses `share` (0..1) of what it would establish; the same ones for the same seed."""

    def mask(sample: Sample) -> Sample:
        if not sample.log_facts:
            return sample
        kept = [fact for i, fact in enumerate(sample.log_facts) if _draw(seed, sample.at, i, fact.words) >= share]
        return replace(sample, log_facts=tuple(kept))

    return mask


def _draw(seed: int, at: float, index: int, words: str) -> float:
    """Uniform in 0..1, and the same in every process."""
    return random.Random(f"{seed} {at!r} {index} {words}").random()  # noqa: S311 - a simulation is meant to be repeatable


def _absent(sample: Sample, part: Part) -> tuple[Gap, ...]:
    return (*(gap for gap in sample.gaps if gap.part is not part), Gap(part, Reason.ABSENT, "hidden by the tier"))


def _outside(sample: Sample) -> Sample:
    return without_own_bytes(without_allocators(without_log(sample)))


def _own(sample: Sample) -> Sample:
    return without_allocators(without_log(sample))


def _everything(sample: Sample) -> Sample:
    return sample


TIERS = (
    Tier("T0", "outside only: /metrics and VRAM of the device", lambda _: _outside, tells_fragmentation=False),
    Tier("T1", "and VRAM per process", lambda _: _own, tells_fragmentation=False),
    Tier("T2", "and the allocator's figures", lambda _: without_log, tells_fragmentation=True),
    Tier("T3", "and the log", lambda _: _everything, tells_fragmentation=True),
    Tier("T3-lossy", "the same, a tenth of the log lost", losing, tells_fragmentation=True),
)


def tiers_named(names: str) -> tuple[Tier, ...]:
    """Tiers from a list with commas. Raises ValueError."""
    known = {tier.name: tier for tier in TIERS}
    for name in names.split(","):
        if name not in known:
            raise ValueError(f"tier {name!r} is unknown; there are {', '.join(known)}")
    return tuple(known[name] for name in names.split(","))
