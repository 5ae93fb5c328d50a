"""DRM fdinfo: what each open file of a GPU holds, from `/proc/<pid>/fdinfo`.

Needs a PID namespace shared with the engine, and its user (or SYS_PTRACE). Format: the kernel's
Documentation/gpu/drm-usage-stats.rst. Sums over processes do not add up to the card's total.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from fragscope.model import Gap, Part, Reason
from fragscope.sources.gpu.holdings import Held

NAME = "fdinfo"
_DEVICES = "/dev/dri/"
_SIZE = re.compile(r"([0-9]{1,19})(?:\s+(KiB|MiB|GiB))?")
_UNITS = {None: 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_MOST_BYTES = 2**50
_NEWER = ("drm-resident-vram", "drm-total-vram")
"""Kernels that print these count compute memory too; older ones leave part of it out (ROCm/amdsmi issue 130)."""
_KEYS = ("drm-resident-vram", "drm-memory-vram", "drm-total-vram")


@dataclass(frozen=True, slots=True)
class Client:
    """One opening of one GPU; several descriptors and processes can share it."""

    gpu: str
    client_id: str
    vram_bytes: int
    complete: bool


def parse(text: str) -> Client | Gap | None:
    """One fdinfo file: None where it is not amdgpu's, a gap where it is and makes no sense."""
    pairs = (line.partition(":") for line in text.splitlines())
    keys = {key.strip(): value.strip() for key, _, value in pairs}
    if keys.get("drm-driver") != "amdgpu":
        return None
    gpu, client_id = keys.get("drm-pdev", "").lower(), keys.get("drm-client-id", "")
    if not gpu or not client_id:
        return Gap(Part.GPU, Reason.MALFORMED, "fdinfo of amdgpu without drm-pdev or drm-client-id")
    name = next((key for key in _KEYS if key in keys), None)
    if name is None:
        return Client(gpu, client_id, 0, complete=False)
    size = _bytes(keys[name])
    if size is None:
        return Gap(Part.GPU, Reason.MALFORMED, f"fdinfo has {name} {keys[name][:20]!r}, not a size")
    return Client(gpu, client_id, size, complete=any(key in keys for key in _NEWER))


def _bytes(text: str) -> int | None:
    """`2068 KiB` and the like; a bare number is bytes."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    size = int(match[1]) * _UNITS[match[2]]
    return size if size < _MOST_BYTES else None


def read_held(proc_root: Path, pids: Collection[int]) -> Held | Gap:
    """VRAM of these processes by GPU; a gap where one of them cannot be looked into, since half a sum misleads."""
    clients: dict[tuple[str, str], Client] = {}
    for pid in sorted(pids):
        try:
            for text in _files(proc_root / str(pid)):
                client = parse(text)
                if isinstance(client, Gap):
                    return client
                if client is not None:
                    key = (client.gpu, client.client_id)
                    before = clients.get(key)
                    clients[key] = client if before is None or client.vram_bytes > before.vram_bytes else before
        except PermissionError:
            detail = f"process {pid} may not be looked into: it takes its user, or SYS_PTRACE"
            return Gap(Part.GPU, Reason.DENIED, detail)
        except OSError:
            continue  # it has ended
    if not clients:
        return Gap(Part.GPU, Reason.ABSENT, "none of the engine's processes has a GPU of amdgpu open")
    held: dict[str, int] = {}
    for client in clients.values():
        held[client.gpu] = held.get(client.gpu, 0) + client.vram_bytes
    return Held(NAME, held, frozenset(held), complete=all(client.complete for client in clients.values()))


def _files(process: Path) -> Iterator[str]:
    """The fdinfo of every descriptor that leads to a GPU."""
    for link in (process / "fd").iterdir():
        try:
            if str(link.readlink()).startswith(_DEVICES):
                yield (process / "fdinfo" / link.name).read_text(errors="replace")
        except FileNotFoundError:
            continue  # closed meanwhile
