"""DRM fdinfo: what each open file of a GPU holds, from `/proc/<pid>/fdinfo`.

Needs a PID namespace shared with the engine, and its user with at least its capabilities (or SYS_PTRACE): the
kernel's rule for ptrace, `__ptrace_may_access`. Format: the kernel's
Documentation/gpu/drm-usage-stats.rst. Sums over processes do not add up to the card's total.
"""

import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fragscope.model import Gap, Part, Reason
from fragscope.sources.gpu.holdings import Held

NAME = "fdinfo"
_TAKES = "it takes its user and no fewer capabilities than it is permitted, or SYS_PTRACE"
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


def parse(text: str, gpu_of_link: Callable[[], str | None] = lambda: None) -> Client | Gap | None:
    """One fdinfo file: None where it is not amdgpu's, a gap where it is and makes no sense.

    The driver leaves `drm-pdev` out for a partition (amdgpu_xcp_N); then its descriptor's link is asked.
    """
    pairs = (line.partition(":") for line in text.splitlines())
    keys = {key.strip(): value.strip() for key, _, value in pairs}
    if keys.get("drm-driver") != "amdgpu":
        return None
    gpu, client_id = keys.get("drm-pdev", "").lower() or gpu_of_link(), keys.get("drm-client-id", "")
    if not gpu or not client_id:
        detail = "fdinfo of amdgpu without drm-client-id, or without drm-pdev and on a render node of no known GPU"
        return Gap(Part.GPU, Reason.MALFORMED, detail)
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


def read_openings(proc_root: Path, pids: Collection[int]) -> tuple[str, ...] | Gap:
    """The fdinfo files of every descriptor of these processes that leads to a GPU.

    A gap where one of them cannot be looked into, since half a sum misleads. A worker has hundreds of descriptors
    and opens its GPUs once: this walk is for now and then, `read_held` for every look.
    """
    found: list[str] = []
    for pid in sorted(pids):
        try:
            found += _openings(f"{proc_root}/{pid}")
        except PermissionError:
            detail = f"process {pid} may not be looked into: {_TAKES}"
            return Gap(Part.GPU, Reason.DENIED, detail)
        except OSError:
            continue  # it has ended
    return tuple(found)


def _openings(process: str) -> Iterator[str]:
    with os.scandir(f"{process}/fd") as links:
        for link in links:
            with suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(link.path).startswith(_DEVICES):  # noqa: PTH115 - a Path for each costs three times as much
                    yield f"{process}/fdinfo/{link.name}"


def read_held(openings: Collection[str], gpu_of_render: Callable[[str], str | None] = lambda _: None) -> Held | Gap:
    """What these openings hold by GPU; each client of the driver counts once, however many descriptors it has.

    `gpu_of_render` gives the PCI address behind a render node, for partitions.
    """
    clients: dict[tuple[str, str], Client] = {}
    for path in openings:
        client = _client(path, gpu_of_render)
        if isinstance(client, Gap):
            return client
        if client is not None:
            key = (client.gpu, client.client_id)
            before = clients.get(key)
            clients[key] = client if before is None or client.vram_bytes > before.vram_bytes else before
    if not clients:
        return Gap(Part.GPU, Reason.ABSENT, "none of the engine's processes has a GPU of amdgpu open")
    held: dict[str, int] = {}
    for client in clients.values():
        held[client.gpu] = held.get(client.gpu, 0) + client.vram_bytes
    return Held(NAME, held, frozenset(held), complete=all(client.complete for client in clients.values()))


def _client(path: str, gpu_of_render: Callable[[str], str | None]) -> Client | Gap | None:
    def gpu_of_link() -> str | None:
        process, _, number = path.rpartition("/fdinfo/")
        return gpu_of_render(Path(f"{process}/fd/{number}").readlink().name)

    try:
        return parse(Path(path).read_text(errors="replace"), gpu_of_link)
    except PermissionError:
        return Gap(Part.GPU, Reason.DENIED, f"{path} may not be read: {_TAKES}")
    except OSError:
        return None  # closed, or the process has ended
