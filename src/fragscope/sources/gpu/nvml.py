"""VRAM from NVIDIA's NVML (`nvidia-ml-py`), so that the same sidecar works beside vLLM on NVIDIA; in a child process.

The second form of the memory structure is read, whose `used` leaves out what the driver keeps for itself
(`reserved`). No process can have that reserve, so it is taken off the total as well, which then is the framework's
own (docs/verified.md). NVML sees the GPUs of the container, and lists no process of another PID namespace.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

from fragscope.model import Gap, Part, Reason
from fragscope.sources.gpu.child import Child
from fragscope.sources.gpu.device import Listing, WitnessError
from fragscope.sources.gpu.library import Library
from fragscope.sources.gpu.plausible import Claim, listing, quoted, size_bytes

NAME = "nvml"
_MIG = "is split by MIG, and what it has in use as a whole is not what one instance has"
_NONE_SEEN = Gap(Part.GPU, Reason.BLIND, "NVML works but sees no GPU: give this container the engine's GPUs")


class Nvml(Library):
    """The source; the library is loaded by the first `read`, in the child."""

    name = NAME

    def __init__(self, child: Child | None = None) -> None:
        super().__init__(child or Child(NAME, f"{__name__}:open_reader"), parse)

    def why_not(self) -> Gap | None:
        """None if the package is there; whether libnvidia-ml.so.1 is, only the child can tell."""
        if importlib.util.find_spec("pynvml") is not None:
            return None
        detail = "the nvidia-ml-py package is not installed: pip install 'fragscope[nvidia]'"
        return Gap(Part.GPU, Reason.ABSENT, detail)


def parse(raw: object) -> Listing:
    """What `open_reader` read: `{"devices": [{"bus", "uuid", "name", "total", "used", "reserved", ...}]}`.

    Bytes as integers, `processes` as pairs of pid and bytes or None. The device's total is total - reserved. An idle
    GPU may show 0 bytes in use here.
    """
    devices = raw.get("devices") if isinstance(raw, dict) else None
    if not isinstance(devices, list):
        return Listing(gaps=(Gap(Part.GPU, Reason.MALFORMED, f"NVML answered {quoted(raw)}"),))
    claims = (_claim(number, device) for number, device in enumerate(devices))
    return listing(claims, _NONE_SEEN, zero_is_blind=False)


def _claim(number: int, device: object) -> Claim:
    label = f"NVML GPU {number}"
    if not isinstance(device, dict):
        return Claim(label, total=device)
    used = _value(device.get("used"), f"the VRAM in use of {label}")
    if device.get("mig"):
        used = Gap(Part.GPU, Reason.UNSUPPORTED, f"{label} {_MIG}")
    return Claim(
        label,
        gpu=device.get("bus"),
        total=_usable(device, label),
        used=used,
        unique_id=device.get("uuid"),
        name=device.get("name"),
        own_bytes_by_pid=_processes(device.get("processes")),
    )


def _usable(device: dict[str, object], label: str) -> object:
    """The total without the driver's reserve: counted in, a full GPU would show that much headroom."""
    total = _value(device.get("total"), f"the VRAM total of {label}")
    reserved = size_bytes(device.get("reserved", 0), f"the VRAM reserved of {label}")
    if isinstance(reserved, Gap) or isinstance(size_bytes(total, ""), Gap) or not isinstance(total, int):
        return total if not isinstance(reserved, Gap) else reserved
    return total - reserved


def _value(value: object, what: str) -> object:
    if not isinstance(value, dict):
        return value
    return Gap(Part.GPU, Reason.UNSUPPORTED, f"{what} is refused: {quoted(value.get('error'))}")


def _processes(pairs: object) -> dict[int, int] | None:
    """VRAM per process; an empty list says nothing, since other PID namespaces are left out of it."""
    if not isinstance(pairs, list) or not pairs:
        return None
    own: dict[int, int] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            return None
        pid, used = pair
        if isinstance(pid, bool) or not isinstance(pid, int) or isinstance(size_bytes(used, ""), Gap):
            return None
        own[pid] = used
    return own


# Everything below runs in the child.


def open_reader() -> Callable[[], object]:
    """Loads NVML and gives back what reads it; WitnessError says what is wrong."""
    try:
        import pynvml  # noqa: PLC0415 - only the child may load a vendor's library
    except ModuleNotFoundError as error:
        raise WitnessError(Reason.ABSENT, "the nvidia-ml-py package is not installed") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        missing = isinstance(error, pynvml.NVMLError_LibraryNotFound)
        hint = "libnvidia-ml.so.1 is not here; run the container with the NVIDIA runtime and the `utility` capability"
        detail = hint if missing else f"NVML cannot start: {error}"
        raise WitnessError(Reason.ABSENT, detail) from error
    return lambda: _raw(pynvml)


def _raw(nvml: Any) -> object:
    return {"devices": [_device(nvml, number) for number in range(nvml.nvmlDeviceGetCount())]}


def _device(nvml: Any, number: int) -> object:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
    except nvml.NVMLError as error:
        return {"total": {"error": str(error)}}
    answer: dict[str, object] = {
        "bus": _asked(lambda: nvml.nvmlDeviceGetPciInfo(handle).busId),
        "uuid": _asked(lambda: nvml.nvmlDeviceGetUUID(handle)),
        "name": _asked(lambda: nvml.nvmlDeviceGetName(handle)),
        "mig": _asked(lambda: nvml.nvmlDeviceGetMigMode(handle)[0]) == 1,
        "processes": _asked(lambda: _running(nvml, handle)),
    }
    memory = _asked(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2))
    if isinstance(memory, dict):
        return {**answer, "total": memory, "used": memory}
    return {**answer, "total": memory.total, "used": memory.used, "reserved": memory.reserved}


def _running(nvml: Any, handle: object) -> list[list[int | None]]:
    return [[process.pid, process.usedGpuMemory] for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]


def _asked(call: Callable[[], Any]) -> Any:
    """What the call gives, texts as text (older packages give bytes), or the error in its place."""
    try:
        answer = call()
    except Exception as error:  # noqa: BLE001 - NVMLError, and what the package raises where it does not fit the driver
        return {"error": str(error)}
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer
