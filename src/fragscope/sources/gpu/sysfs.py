"""VRAM from sysfs: the one AMD source that works in an unprivileged container without a GPU of its own.

`mem_info_vram_used` is a counter of the kernel's memory manager: reading it takes about 11 us, wakes no
GPU, touches no register and cannot wait for a reset (docs/sources.md). Every other AMD tool reads the
same file first.
"""

import errno
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fragscope.model import Gap, Part, Reason
from fragscope.sources.gpu.device import Device, Listing
from fragscope.sources.gpu.plausible import MAX_BYTES, address

NAME = "sysfs"
_AMD = "0x1002"
_MI300A = "0x74a0"
"""An APU: kernels before late 2025 can crash on a read of its VRAM attributes, so it is not read."""
_NVIDIA = "0x10de"
_DISPLAY = "0x03"
"""PCI's base class of display controllers, compute accelerators with a GPU included."""
INTEGRATED_BYTES = 8 * 2**30
"""Less VRAM than this is the GPU of a desktop processor: vLLM's ROCm build supports no GPU with less than 16 GiB."""
_CARD = re.compile(r"card[0-9]+")
_USED_OVER_TOTAL = 1.05
_READ = os.O_RDONLY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Card:
    """One AMD GPU as sysfs names it; `gpu` is its PCI address (BDF).

    The files are plain strings: joining a path twenty times a second would cost more than the read.
    """

    gpu: str
    card: str
    used_file: str
    gtt_file: str
    total_bytes: int
    unique_id: str | None = None
    render: str | None = None


@dataclass(frozen=True, slots=True)
class Enumeration:
    """The GPUs that can be read, and why others cannot; `others` are NVIDIA's beside a single card, by address.

    `listed` is False where not even the names of the cards can be seen.
    """

    cards: tuple[Card, ...]
    gaps: tuple[Gap, ...]
    others: tuple[str, ...] = ()
    listed: bool = True

    @property
    def beside_the_point(self) -> bool:
        """Whether all that can be read is a desktop processor's own GPU beside NVIDIA's, which the engine is on."""
        small = all(card.total_bytes < INTEGRATED_BYTES for card in self.cards)
        return bool(self.cards and self.others) and small and not self.gaps


class Sysfs:
    """sysfs as one source among others, for cross-checks and `check`; the feed reads the cards directly."""

    name = NAME

    def __init__(self, root: Path = Path("/sys")) -> None:
        self._root = root

    def why_not(self) -> Gap | None:
        """None if the kernel shows graphics cards at all."""
        drm = self._root / "class" / "drm"
        if drm.is_dir():
            return None
        return Gap(Part.GPU, Reason.ABSENT, f"{drm} is not there: no GPU driver is loaded, or /sys is not the host's")

    def read(self) -> Listing:
        """Every AMD card that shows plausible figures now."""
        found = enumerate_cards(self._root)
        devices: list[Device] = []
        gaps = list(found.gaps)
        for card in found.cards:
            used = read_used_bytes(card)
            if isinstance(used, Gap):
                gaps.append(used)
            else:
                devices.append(Device(card.gpu, card.total_bytes, used, card.unique_id))
        return Listing(tuple(devices), tuple(gaps))

    def rest(self) -> None:
        """Nothing is held between two reads."""

    def close(self) -> None:
        """Nothing is held between two reads: an open file would block a partition change."""


def enumerate_cards(root: Path) -> Enumeration:
    """Every AMD card under `root` (normally /sys) that shows a VRAM total, by PCI address.

    Card numbers have gaps and change after a driver reload: the address is the identity.
    """
    drm = root / "class" / "drm"
    try:
        names = sorted(path.name for path in drm.iterdir() if _CARD.fullmatch(path.name))
    except OSError as error:
        return Enumeration((), (_gap(error, f"{drm} cannot be listed"),), listed=False)
    cards: list[Card] = []
    gaps: list[Gap] = []
    for name in names:
        found = _card(drm / name / "device", name)
        if isinstance(found, Card):
            cards.append(found)
        elif found is not None:
            gaps.append(found)
    if not cards and not gaps:
        gaps.append(Gap(Part.GPU, Reason.ABSENT, f"no AMD GPU under {drm}"))
    # Only beside a single card does it matter, and a large node has hundreds of devices to look at.
    others = _nvidia(root, names) if len(cards) == 1 else ()
    return Enumeration(tuple(sorted(cards, key=lambda card: card.gpu)), tuple(gaps), others)


def _nvidia(root: Path, names: Sequence[str]) -> tuple[str, ...]:
    """NVIDIA's GPUs by PCI address; they have a DRM card only where its display driver is loaded."""
    shown = [Path(os.path.realpath(root / "class" / "drm" / name / "device")) for name in names]
    found = {device.name for device in shown if _text(device / "vendor") == _NVIDIA}
    with suppress(OSError):
        for device in (root / "bus" / "pci" / "devices").iterdir():
            if _text(device / "vendor") == _NVIDIA and (_text(device / "class") or "").startswith(_DISPLAY):
                found.add(device.name)
    return tuple(sorted(found))


def _card(device: Path, name: str) -> Card | Gap | None:
    if _text(device / "vendor") != _AMD:
        return None
    gpu = os.path.realpath(device).rsplit("/", 1)[-1]
    if _text(device / "device") == _MI300A:
        detail = f"{gpu} is an APU whose VRAM attributes are not safe to read on older kernels"
        return Gap(Part.GPU, Reason.UNSUPPORTED, detail)
    total = _bytes(str(device / "mem_info_vram_total"))
    if isinstance(total, Gap):
        # A partition (amdgpu_xcp_N) has no such file: its physical GPU counts the whole package.
        return None if total.reason is Reason.ABSENT and address(gpu) is None else total
    if total == 0:
        return Gap(Part.GPU, Reason.BLIND, f"{gpu} shows a VRAM total of 0 bytes")
    if total > MAX_BYTES:
        return Gap(Part.GPU, Reason.MALFORMED, f"{gpu} shows a VRAM total of {total} bytes, which no GPU has")
    files = (str(device / "mem_info_vram_used"), str(device / "mem_info_gtt_used"))
    return Card(gpu, name, *files, total, _text(device / "unique_id"), _render(device))


def _render(device: Path) -> str | None:
    try:
        names = [path.name for path in (device / "drm").iterdir()]
    except OSError:
        return None
    return next((name for name in sorted(names) if name.startswith("renderD")), None)


def read_used_bytes(card: Card) -> int | Gap:
    """VRAM in use now. 0 is blindness: a booted card never shows it."""
    used = _bytes(card.used_file)
    if isinstance(used, Gap):
        return used
    if used == 0:
        return Gap(Part.GPU, Reason.BLIND, f"{card.gpu} shows 0 bytes in use, which a booted card never does")
    if used > card.total_bytes * _USED_OVER_TOTAL:
        return Gap(Part.GPU, Reason.MALFORMED, f"{card.gpu} shows {used} bytes in use of {card.total_bytes}")
    return used


class Glance:
    """VRAM in use by the shortest way, for a loop that does nothing else twenty times a second.

    After 50 ms asleep the walk along the path costs most of a read, so the card's folder is held by an O_PATH
    handle: it keeps the way, opens nothing of the driver's, and therefore blocks nothing. The file itself is
    opened anew each time.
    """

    __slots__ = ("_folder", "_limit", "_name")

    def __init__(self, card: Card) -> None:
        folder, _, self._name = card.used_file.rpartition("/")
        self._limit = int(card.total_bytes * _USED_OVER_TOTAL)
        try:
            self._folder: int | None = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            self._folder = None

    def used_bytes(self) -> int | None:
        """Bytes; None where they are not plausible, which `read_used_bytes` can explain."""
        if self._folder is None:
            return None
        try:
            handle = os.open(self._name, _READ, dir_fd=self._folder)
            try:
                used = int(os.read(handle, 64))
            finally:
                os.close(handle)
        except (OSError, ValueError):
            return None
        return used if 0 < used <= self._limit else None

    def close(self) -> None:
        """Lets the folder go; may be called twice."""
        folder, self._folder = self._folder, None
        if folder is not None:
            os.close(folder)


def read_gtt_used_bytes(card: Card) -> int | None:
    """Host memory mapped for the GPU; None where the kernel does not say."""
    gtt = _bytes(card.gtt_file)
    return None if isinstance(gtt, Gap) else gtt


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip() or None
    except OSError:
        return None


def _bytes(path: str) -> int | Gap:
    """A decimal number of bytes; opened anew each time, since a held file blocks a partition change."""
    try:
        handle = os.open(path, _READ)
        try:
            raw = os.read(handle, 64)
        finally:
            os.close(handle)
    except OSError as error:
        return _gap(error, f"{path} cannot be read")
    text = raw.strip()
    if not text.isdigit():
        return Gap(Part.GPU, Reason.MALFORMED, f"{path} holds {text[:20]!r}, not a number")
    return int(text)


def _gap(error: OSError, what: str) -> Gap:
    if error.errno in (errno.EACCES, errno.EPERM):
        return Gap(Part.GPU, Reason.DENIED, f"{what}: {error.strerror}")
    return Gap(Part.GPU, Reason.ABSENT, f"{what}: {error.strerror}")
