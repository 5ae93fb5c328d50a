"""The allocator under the load that a real GPU's allocator was measured under, to compare the two.

One weights tensor and one pool, together a fixed share of the card; then steps whose activations follow
their token count (mostly a few hundred, one in ten 8 to 32 thousand, drifting longer) and are freed at
the step's end; and, in most runs, irregular buffers that outlive the step. What the real runs did is in
docs/simulator.md beside what this does.
"""

import random
from dataclasses import dataclass
from heapq import heappop, heappush

from fragscope.simulate.allocator import (
    GIB,
    MIB,
    Block,
    CachingAllocator,
    Device,
    ExpandableAllocator,
    OutOfMemoryError,
)

TOTAL_BYTES = 150109880320
NON_TORCH_BYTES = 1141 * MIB
WEIGHTS_BYTES = 16 * GIB
_KEPT_BACK_BYTES = int(1.2 * GIB)
_PER_TOKEN = (16384, 16384, 57344, 57344)
_LOGITS_BYTES = 1024 * 128256 * 2


@dataclass(frozen=True, slots=True)
class Setting:
    """One run: share of the card for weights and pool, options, and how often a buffer stays."""

    utilization: float = 0.90
    expandable: bool = False
    pinned_share: float = 0.06
    steps: int = 9000
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it; steps are None where it never happened, sizes in bytes."""

    first_retry_step: int | None
    first_oom_step: int | None
    retries_before_oom: int
    tried_bytes: int
    free_bytes: int
    stranded_bytes: int
    split_bytes: int
    largest_gap_bytes: int
    largest_split_bytes: int
    used_ratio: float


def run(setting: Setting) -> Outcome:
    """Steps until the allocator gives up or the run is over."""
    rng = random.Random(f"calibration/{setting.seed}")  # noqa: S311 - repeatable on purpose
    device = Device(TOTAL_BYTES, NON_TORCH_BYTES)
    torch = ExpandableAllocator(device) if setting.expandable else CachingAllocator(device)
    torch.alloc(WEIGHTS_BYTES)
    torch.alloc(int(setting.utilization * TOTAL_BYTES) - WEIGHTS_BYTES - _KEPT_BACK_BYTES)
    pinned: list[tuple[int, int, Block]] = []
    first_retry: int | None = None
    gap = split = 0
    for step in range(setting.steps):
        try:
            _step(torch, rng, step, setting, pinned)
        except OutOfMemoryError as oom:
            return Outcome(
                first_retry,
                step,
                torch.retries_total,
                oom.tried_bytes,
                oom.free_bytes,
                oom.stranded_bytes,
                torch.inactive_split_bytes(),
                gap,
                split,
                device.used_bytes / device.total_bytes,
            )
        if torch.retries_total and first_retry is None:
            first_retry = step
        gap = max(gap, torch.reserved_bytes - torch.allocated_bytes)
        if step % 40 == 0:
            split = max(split, torch.inactive_split_bytes())
    used = device.used_bytes / device.total_bytes
    return Outcome(first_retry, None, torch.retries_total, 0, 0, 0, torch.inactive_split_bytes(), gap, split, used)


def _tokens(rng: random.Random, step: int) -> int:
    kind = rng.random()
    if kind < 0.65:
        return 8 + int(rng.random() * 249)
    if kind < 0.93:
        return 256 + int(rng.random() * 3840)
    longest = min(32768, 8192 + step * 1.6)
    return 4096 + int(rng.random() * (longest - 4096))


def _step(
    torch: CachingAllocator, rng: random.Random, step: int, setting: Setting, pinned: list[tuple[int, int, Block]]
) -> None:
    while pinned and pinned[0][0] <= step:
        torch.free(heappop(pinned)[2])
    tokens = _tokens(rng, step)
    held = [torch.alloc(per_token * tokens) for per_token in _PER_TOKEN[:3]]
    if rng.random() < setting.pinned_share:
        block = torch.alloc(MIB + int(rng.random() * 159 * MIB))
        heappush(pinned, (step + 50 + int(rng.random() * 3950), block.number, block))
    held.append(torch.alloc(_PER_TOKEN[3] * tokens))
    held.append(torch.alloc(min(tokens, 1024) * _LOGITS_BYTES // 1024))
    for block in held:
        torch.free(block)
