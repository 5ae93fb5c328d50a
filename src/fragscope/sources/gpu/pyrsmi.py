"""VRAM from the `pyrsmi` package, for those who have it; read in a child process, and never chosen by `auto`.

Since 1.0 it is a layer over amdsmi or libamd_smi.so, so it adds nothing to amdsmi.py: the same counter once more.
It answers -1 for every error, so that is an error here, not a value. Its own binding cuts the library's 64-bit
handles to 32 bit and finds no GPU where Python is position-independent, as it is in most images (docs/sources.md).
"""

import importlib.util
from collections.abc import Callable
from typing import Any

from fragscope.model import Gap, Part, Reason
from fragscope.sources.gpu.amdsmi import shipped_package
from fragscope.sources.gpu.child import Child
from fragscope.sources.gpu.device import Listing, WitnessError
from fragscope.sources.gpu.library import Library
from fragscope.sources.gpu.plausible import Claim, listing, quoted

NAME = "pyrsmi"
_ERROR = -1
_NONE_SEEN = Gap(
    Part.GPU,
    Reason.BLIND,
    "pyrsmi works but sees no GPU: it needs the GPUs' device nodes in this container, and its own binding fails on "
    "many Pythons; use amdsmi",
)


class PyRsmi(Library):
    """The source; the library is loaded by the first `read`, in the child."""

    name = NAME

    def __init__(self, child: Child | None = None) -> None:
        super().__init__(child or Child(NAME, f"{__name__}:open_reader"), parse)

    def why_not(self) -> Gap | None:
        """None if the package is there."""
        if importlib.util.find_spec("pyrsmi") is not None:
            return None
        detail = "the pyrsmi package is not installed: pip install 'fragscope[amd]'"
        return Gap(Part.GPU, Reason.ABSENT, detail)


def parse(raw: object) -> Listing:
    """What `open_reader` read: `{"devices": [{"pci_id", "uuid", "total", "used"}]}`, integers; -1 is an error."""
    devices = raw.get("devices") if isinstance(raw, dict) else None
    if not isinstance(devices, list):
        return Listing(gaps=(Gap(Part.GPU, Reason.MALFORMED, f"pyrsmi answered {quoted(raw)}"),))
    return listing((_claim(number, device) for number, device in enumerate(devices)), _NONE_SEEN)


def _claim(number: int, device: object) -> Claim:
    label = f"pyrsmi GPU {number}"
    if not isinstance(device, dict):
        return Claim(label, total=device)
    return Claim(
        label,
        gpu=_address(device.get("pci_id")),
        total=_value(device.get("total"), f"the VRAM total of {label}"),
        used=_value(device.get("used"), f"the VRAM in use of {label}"),
        uuid=device.get("uuid"),
    )


def _value(value: object, what: str) -> object:
    return Gap(Part.GPU, Reason.UNSUPPORTED, f"{what} is -1, pyrsmi's error") if value == _ERROR else value


def _address(number: object) -> str | None:
    """The PCI address in pyrsmi's number: function, device and bus from the lowest bit up.

    The domain follows at bit 32 (rocm_smi, and amdsmi's package) or at bit 16 (its own binding); bits 28 to 31 may
    hold a partition in the first form.
    """
    if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < 1 << 48:
        return None
    domain = number >> 32 or (number >> 16) & 0x0FFF
    return f"{domain:04x}:{number >> 8 & 0xFF:02x}:{number >> 3 & 0x1F:02x}.{number & 7}"


# Everything below runs in the child.


def open_reader() -> Callable[[], object]:
    """Loads the package and its library, and gives back what reads it; WitnessError says what is wrong."""
    shipped = shipped_package()
    if shipped is not None:
        import sys  # noqa: PLC0415 - pyrsmi imports amdsmi, and ROCm's own copy fits its library

        sys.path.insert(0, str(shipped))
    try:
        from pyrsmi import rocml  # noqa: PLC0415 - only the child may load a vendor's library
    except ModuleNotFoundError as error:
        raise WitnessError(Reason.ABSENT, "the pyrsmi package is not installed") from error
    try:
        rocml.smi_initialize()
    except Exception as error:
        detail = f"pyrsmi cannot start ({type(error).__name__}: {' '.join(str(error).split())}); is ROCm at /opt/rocm?"
        raise WitnessError(Reason.ABSENT, detail) from error
    return lambda: _raw(rocml)


def _raw(rocml: Any) -> object:
    count = rocml.smi_get_device_count()
    if count < 0:
        raise WitnessError(
            Reason.UNSUPPORTED, f"pyrsmi counts {count} GPUs, its error: is the amdgpu driver loaded, /sys mounted?"
        )
    return {
        "devices": [
            {
                "pci_id": _asked(rocml.smi_get_device_pci_id, number),
                "uuid": _asked(rocml.smi_get_device_uuid, number, "raw"),
                "total": _asked(rocml.smi_get_device_memory_total, number),
                "used": _asked(rocml.smi_get_device_memory_used, number),
            }
            for number in range(count)
        ]
    }


def _asked(call: Callable[..., object], *arguments: object) -> object:
    try:
        return call(*arguments)
    except Exception:  # noqa: BLE001 - what it does not turn into -1 itself
        return _ERROR
