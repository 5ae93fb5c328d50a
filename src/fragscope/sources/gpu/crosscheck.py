"""Holds one source against another. They are never averaged: one speaks, and a difference is told."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fragscope.model import Gap, Part, Reason
from fragscope.sources.gpu.device import Device

TOLERANCE_BYTES = 21 * 2**20
"""Rounding down to MiB (under 1 MiB), and one step of PyTorch's allocator (20 MiB) between two reads."""
TOTAL_TOLERANCE_BYTES = 2**20
"""Totals do not change: only rounding. A larger difference means that two different things are counted."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a source is from the speaking one on a GPU: 0 between what that showed before and after the read."""

    gpu: str
    source: str
    against: str
    difference_bytes: int
    lasting: bool = False


def located(
    devices: Collection[Device], known: Collection[str], by_unique_id: Mapping[str, str]
) -> tuple[tuple[Device, ...], tuple[Gap, ...]]:
    """The devices with an address that sysfs knows (any, where sysfs shows none), and a gap for each other.

    Libraries have given random memory as addresses (docs/sources.md).
    """
    found: dict[str, Device] = {}
    gaps: list[Gap] = []
    for device in devices:
        gpu = device.gpu or by_unique_id.get(device.unique_id or "")
        if gpu is None:
            gaps.append(Gap(Part.GPU, Reason.BLIND, "a GPU without an address cannot be told from the others"))
        elif known and gpu not in known:
            gaps.append(Gap(Part.GPU, Reason.MALFORMED, f"{gpu} is named, and /sys knows no such device"))
        elif gpu in found:
            gaps.append(Gap(Part.GPU, Reason.MALFORMED, f"{gpu} is named twice"))
        else:
            found[gpu] = replace(device, gpu=gpu)
    return tuple(found.values()), tuple(gaps)


def difference_bytes(device: Device, before: int, after: int) -> int:
    """Signed bytes outside of what the speaking source showed before and after."""
    low, high = min(before, after), max(before, after)
    return min(0, device.used_bytes - low) or max(0, device.used_bytes - high)


def known_addresses(root: Path) -> frozenset[str]:
    """Every PCI address that sysfs shows; empty where it shows none."""
    try:
        return frozenset(path.name for path in (root / "bus" / "pci" / "devices").iterdir())
    except OSError:
        return frozenset()
