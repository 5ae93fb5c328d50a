"""What a set of processes holds of each GPU, as one source counts it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fragscope.model import Gap

HELD_BYTES = 256 * 2**20
"""Less than this on a GPU is an open device, not a model: a ROCm process opens every GPU it is shown."""


@dataclass(frozen=True, slots=True)
class Held:
    """VRAM of an engine's processes by PCI address (BDF); GPUs that were only opened are in `opened`.

    `complete` is False where the kernel is known to leave compute memory out: such bytes tell which GPUs are
    held, not how much.
    """

    source: str
    bytes_by_gpu: Mapping[str, int] = field(default_factory=dict)
    opened: frozenset[str] = frozenset()
    complete: bool = True

    def gpus(self) -> frozenset[str]:
        """The GPUs on which the processes hold what only a model needs; anything at all where that is undercounted."""
        least = HELD_BYTES if self.complete else 1
        return frozenset(gpu for gpu, held in self.bytes_by_gpu.items() if held >= least)

    def surely(self) -> frozenset[str]:
        """Those of them with a model's worth of memory, however it is counted."""
        return frozenset(gpu for gpu, held in self.bytes_by_gpu.items() if held >= HELD_BYTES)

    def own_bytes(self, gpu: str) -> int | None:
        """What they hold on one GPU; None where the source cannot count it all, or has seen no model anywhere."""
        if not self.complete or not self.gpus():
            return None
        return self.bytes_by_gpu.get(gpu, 0)


@dataclass(frozen=True, slots=True)
class Owned:
    """What is known of one engine's share of the GPUs.

    `held` is what its processes hold now (at `at`), None with a `gap` where that cannot be told. `holding` is the
    last time that they held a model: a dead engine's GPUs are still its own. `render_nodes` is what a file says,
    None where none is configured.
    """

    at: float
    held: Held | None = None
    holding: Held | None = None
    gap: Gap | None = None
    render_nodes: frozenset[str] | Gap | None = None
