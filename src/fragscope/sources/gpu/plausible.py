"""From what a tool claims to devices that can be believed; everything else becomes a gap.

AMD's tools answer with a zero where they could not read, with a random PCI address where they may not open
the device, with the whole GPU once per partition, and with N/A in several forms (docs/sources.md). Here each
of these turns into missing evidence, never into a number.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fragscope.model import Gap, Part, Reason
from fragscope.sources.gpu.device import Device, Listing, Partition

MAX_BYTES = 1 << 44
"""16 TiB, fifty times the largest GPU of 2026: beyond it a figure is a marker such as 2^32-1 MiB or 2^64-1."""
USED_OVER_TOTAL = 1.05
"""Counters of one tool may be read a moment apart; more than this over the total is nonsense (as in sysfs.py)."""
REPEAT_RATIO = 0.01
"""How far two readings of one GPU in the same answer may differ, as a share of its total, and still be one."""

NO_UUID = "ffff0000-0000-1000-80ff-ffffffffffff"
"""What AMD's library before ROCm 7.1 gives for every GPU whose render node it may not open; the PCI address beside
it is then whatever lay in memory."""

_ADDRESS = re.compile(r"(?:0{0,4}([0-9a-f]{4}):)?([0-9a-f]{2}:[01][0-9a-f])\.([0-7])")
_QUOTED = 60
_HIDDEN = Gap(
    Part.GPU,
    Reason.BLIND,
    "without access to /dev/dri/renderD* this library (before ROCm 7.1) gives random PCI addresses; they are not used",
)


@dataclass(frozen=True, slots=True)
class Claim:
    """One entry of a tool's list, not yet believed: any field may hold anything, a Gap where the tool gave an error."""

    label: str
    gpu: object = None
    total: object = None
    used: object = None
    unique_id: object = None
    name: object = None
    uuid: object = None
    own_bytes_by_pid: dict[int, int] | None = None


def listing(claims: Iterable[Claim], none_seen: Gap, *, zero_is_blind: bool = True) -> Listing:
    """The devices among `claims`, one per physical GPU, and a gap for each that cannot be believed.

    `none_seen` stands for an empty list. `zero_is_blind` is for AMD, where a booted card never shows 0 bytes.
    """
    seen = list(claims)
    if not seen:
        return Listing(gaps=(none_seen,))
    by_package: dict[str, list[Claim]] = {}
    for number, claim in enumerate(seen):
        known = None if claim.uuid == NO_UUID else address(claim.gpu)
        believed = (
            claim if known else replace(claim, gpu=None, unique_id=None if claim.uuid == NO_UUID else claim.unique_id)
        )
        by_package.setdefault(known[:-2] if known else f"#{number}", []).append(believed)
    devices: list[Device] = []
    gaps = [_HIDDEN] if any(claim.uuid == NO_UUID for claim in seen) else []
    for group in by_package.values():
        for found in _package(group, zero_is_blind=zero_is_blind):
            if isinstance(found, Device):
                devices.append(found)
            else:
                gaps.append(found)
    told, repeated = _told_apart(devices)
    return Listing(told, (*gaps, *repeated))


def _told_apart(devices: list[Device]) -> tuple[tuple[Device, ...], tuple[Gap, ...]]:
    """Without those that nothing tells apart: older tools repeat a GPU once per partition, without an address."""
    alike: dict[tuple[int, int], int] = {}
    for device in devices:
        if _nameless(device):
            figures = (device.total_bytes, device.used_bytes)
            alike[figures] = alike.get(figures, 0) + 1
    told = [d for d in devices if not _nameless(d) or alike[d.total_bytes, d.used_bytes] == 1]
    detail = "entries without an address show the same figures: one GPU repeated for its partitions, or as many GPUs"
    return tuple(told), tuple(Gap(Part.GPU, Reason.BLIND, f"{n} {detail}") for n in alike.values() if n > 1)


def _nameless(device: Device) -> bool:
    return device.gpu is None and device.unique_id is None


def address(text: object) -> str | None:
    """A PCI address in the form of sysfs (`0000:c1:00.0`); None for what is none."""
    if not isinstance(text, str):
        return None
    match = _ADDRESS.fullmatch(text.strip().lower())
    return f"{match[1] or '0000'}:{match[2]}.{match[3]}" if match else None


def size_bytes(value: object, what: str) -> int | Gap:
    """A plausible number of bytes, zero included, else the gap that says why not."""
    if isinstance(value, Gap):
        return value
    if value is None:
        return Gap(Part.GPU, Reason.ABSENT, f"{what} is missing")
    if isinstance(value, str) and value.strip().upper() == "N/A":
        return Gap(Part.GPU, Reason.UNSUPPORTED, f"{what} is N/A")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_BYTES:
        return Gap(Part.GPU, Reason.MALFORMED, f"{what} is {quoted(value)}, not a number of bytes")
    return value


def quoted(value: object) -> str:
    """A value that came from outside, short enough for a sentence.

    A number that cannot be printed is told by its kind: Python refuses integers of more than 4300 digits.
    """
    try:
        text = repr(value)
    except ValueError:
        return f"a {type(value).__name__} too long to print"
    return text if len(text) <= _QUOTED else text[: _QUOTED - 3] + "..."


def _package(group: list[Claim], *, zero_is_blind: bool) -> list[Device | Gap]:
    """What one physical GPU is: its function 0, with the partitions that the other functions stand for."""
    by_function: dict[str, list[Claim]] = {}
    for claim in group:
        by_function.setdefault(address(claim.gpu) or "", []).append(claim)
    whole = next((name for name in by_function if name.endswith(".0")), None)
    if whole is None:
        return [_one(claims, zero_is_blind=zero_is_blind) for claims in by_function.values()]
    device = _one(by_function.pop(whole), zero_is_blind=zero_is_blind)
    if isinstance(device, Gap) or not by_function:
        return [device]
    parts = (_partition(claims[-1], device.total_bytes) for _, claims in sorted(by_function.items()))
    return [replace(device, partitions=tuple(part for part in parts if part is not None))]


def _one(claims: list[Claim], *, zero_is_blind: bool) -> Device | Gap:
    """The device behind entries with one address; two that differ are nobody's figure."""
    found = [_device(claim, zero_is_blind=zero_is_blind) for claim in claims]
    devices = [device for device in found if isinstance(device, Device)]
    if len(devices) < len(found):
        return next(gap for gap in found if isinstance(gap, Gap))
    last = devices[-1]
    for device in devices:
        apart = abs(device.used_bytes - last.used_bytes)
        if device.total_bytes != last.total_bytes or apart > REPEAT_RATIO * last.total_bytes:
            detail = (
                f"{last.gpu or claims[0].label} is listed {len(devices)} times with different figures: "
                f"{device.used_bytes} of {device.total_bytes} and {last.used_bytes} of {last.total_bytes} bytes"
            )
            return Gap(Part.GPU, Reason.MALFORMED, detail)
    return last


def _device(claim: Claim, *, zero_is_blind: bool) -> Device | Gap:
    gpu = address(claim.gpu)
    label = gpu or claim.label
    total = size_bytes(claim.total, f"the VRAM total of {label}")
    if isinstance(total, Gap):
        return total
    used = size_bytes(claim.used, f"the VRAM in use of {label}")
    if isinstance(used, Gap):
        return used
    if total == 0:
        return Gap(Part.GPU, Reason.BLIND, f"{label} shows a VRAM total of 0 bytes")
    if used == 0 and zero_is_blind:
        return Gap(Part.GPU, Reason.BLIND, f"{label} shows 0 bytes in use, which a booted card never does")
    if used > total * USED_OVER_TOTAL:
        return Gap(Part.GPU, Reason.MALFORMED, f"{label} shows {used} bytes in use of {total}")
    return Device(gpu, total, used, _word(claim.unique_id), _word(claim.name), claim.own_bytes_by_pid)


def _partition(claim: Claim, whole_bytes: int) -> Partition | None:
    """A partition with a size of its own; tools before ROCm 6.4.1 repeat the whole GPU, which says nothing."""
    total = size_bytes(claim.total, "")
    if isinstance(total, Gap) or not 0 < total < whole_bytes:
        return None
    used = size_bytes(claim.used, "")
    plausible = not isinstance(used, Gap) and 0 < used <= total * USED_OVER_TOTAL
    number = int((address(claim.gpu) or "0")[-1])
    return Partition(number, total, used if plausible and not isinstance(used, Gap) else None)


def _word(value: object) -> str | None:
    if not isinstance(value, str):
        return None
    plain = value.strip()
    return plain if plain and plain.upper() != "N/A" and len(plain) <= 128 and plain.isprintable() else None
