"""What every source of GPU memory figures answers with, whatever tool it asks."""

from dataclasses import dataclass
from typing import Protocol

from fragscope.model import Gap, Reason


@dataclass(frozen=True, slots=True)
class Partition:
    """A part of a GPU in CPX, DPX or QPX mode, numbered as the tool numbers it.

    Its bytes are inside the physical GPU's and must not be added to them or to each other (docs/sources.md).
    `used_bytes` is None where it cannot be read, which is usual without /dev/kfd.
    """

    number: int
    total_bytes: int
    used_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """One physical GPU as one source sees it; `gpu` is its PCI address (BDF), None where the source hides it.

    `own_bytes_by_pid` is VRAM per process as the source counts it, None where it cannot see processes.
    `partitions` are those whose own size the source tells; the figures of the device are the whole package's.
    """

    gpu: str | None
    total_bytes: int
    used_bytes: int
    unique_id: str | None = None
    name: str | None = None
    own_bytes_by_pid: dict[int, int] | None = None
    partitions: tuple[Partition, ...] = ()


@dataclass(frozen=True, slots=True)
class Listing:
    """The devices a source could read, and why others could not be."""

    devices: tuple[Device, ...] = ()
    gaps: tuple[Gap, ...] = ()


class WitnessError(Exception):
    """Raised in a child: why its library cannot be asked, as a reason word and a sentence."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Source(Protocol):
    """A witness of GPU memory. `read` may block up to its own deadline and never raises for what it meets outside."""

    @property
    def name(self) -> str:
        """The word used in `gpu_sources`, metrics and docs."""

    def why_not(self) -> Gap | None:
        """A cheap look, without reading: None where it can be tried, else what is missing and how to get it."""

    def read(self) -> Listing:
        """What it sees now."""

    def rest(self) -> None:
        """Ends what only the next read needs; a child that cannot be ended is remembered: none is started beside it."""

    def close(self) -> None:
        """Ends children and handles for good; may be called twice."""
