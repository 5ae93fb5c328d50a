"""VRAM from the `amdsmi` Python package (ROCm's own, or PyPI's), read in a child process.

Not an independent measurement: it reads the same `mem_info_vram_used` as sysfs.py. It adds identity, and what
partitions have. It sees only GPUs whose `/dev/dri/renderD*` the container may open (KFD topology answers EPERM
for the others), so in a plain sidecar it comes up well and sees zero devices (docs/sources.md).

Only calls with scalar arguments are made: those kept their meaning from ROCm 6.0 to 10.1, while structures such as
the process list changed size and are then silently wrong.
"""

import functools
import glob
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fragscope.model import Gap, Part, Reason
from fragscope.sources.gpu.child import Child
from fragscope.sources.gpu.device import Listing, WitnessError
from fragscope.sources.gpu.library import Library
from fragscope.sources.gpu.plausible import Claim, listing, quoted

NAME = "amdsmi"
_NO_PERM = 10
_DENIED_CODES = (_NO_PERM,)
_TIMEOUT_CODES = (8,)
_LIBRARIES = {6: (24, 25), 7: (26,), 10: (27,)}
"""Which major version of libamd_smi a package of a ROCm release fits (AMD's changelogs, docs/sources.md)."""
_FIRST_WITHOUT_SHARED_LOCK = 25
"""ROCm 6.4; before it the library takes a lock in /dev/shm that all containers of a pod share."""
_NO_LIBRARY = "the amdsmi package finds no libamd_smi.so: mount ROCm at /opt/rocm or set ROCM_PATH"
_NONE_SEEN = Gap(
    Part.GPU,
    Reason.BLIND,
    "amdsmi works but sees no GPU: it needs /dev/kfd and the GPUs' /dev/dri/renderD* in this container",
)


class AmdSmi(Library):
    """The source; the library is loaded by the first `read`, in the child."""

    name = NAME

    def __init__(self, child: Child | None = None) -> None:
        super().__init__(child or Child(NAME, f"{__name__}:open_reader", [foreign_locks()]), parse)

    def why_not(self) -> Gap | None:
        """None if the package is there; whether its library is, only the child can tell."""
        if shipped_package() is not None or importlib.util.find_spec("amdsmi") is not None:
            return None
        detail = "the amdsmi package is not installed: pip install 'fragscope[amd]', or mount ROCm at /opt/rocm"
        return Gap(Part.GPU, Reason.ABSENT, detail)


def parse(raw: object) -> Listing:
    """What `open_reader` read: `{"devices": [{"bdf", "uuid", "hip_uuid", "total", "used"}]}`, bytes as integers.

    A value the library refused is `{"code": n, "error": text}`.
    """
    devices = raw.get("devices") if isinstance(raw, dict) else None
    if not isinstance(devices, list):
        return Listing(gaps=(Gap(Part.GPU, Reason.MALFORMED, f"amdsmi answered {quoted(raw)}"),))
    return listing((_claim(number, device) for number, device in enumerate(devices)), _NONE_SEEN)


def _claim(number: int, device: object) -> Claim:
    label = f"amdsmi GPU {number}"
    if not isinstance(device, dict):
        return Claim(label, total=device)
    hip = device.get("hip_uuid")
    return Claim(
        label,
        gpu=device.get("bdf"),
        total=_value(device.get("total"), f"the VRAM total of {label}"),
        used=_value(device.get("used"), f"the VRAM in use of {label}"),
        unique_id=hip.removeprefix("GPU-") if isinstance(hip, str) else None,
        uuid=device.get("uuid"),
    )


def _value(value: object, what: str) -> object:
    if not isinstance(value, dict):
        return value
    code = value.get("code")
    reason = Reason.DENIED if code in _DENIED_CODES else Reason.UNSUPPORTED
    if code in _TIMEOUT_CODES:
        reason = Reason.TIMEOUT
    return Gap(Part.GPU, reason, f"{what} is refused: {quoted(value.get('error'))} (code {quoted(code)})")


@functools.cache
def foreign_locks() -> bool:
    """Whether a lock of an old AMD library lay in /dev/shm before we made one: looked at once in our life.

    Our own child leaves one behind when it is killed, which a second look would take for another container's.
    """
    return bool(glob.glob("/dev/shm/rocm_smi_card*"))  # noqa: S108, PTH207 - where the library puts it


def shipped_package() -> Path | None:
    """The folder of ROCm's own copy of the package, which fits its library; None where there is no ROCm."""
    root = os.environ.get("ROCM_HOME") or os.environ.get("ROCM_PATH") or "/opt/rocm"
    folder = Path(root) / "share" / "amd_smi"
    return folder if (folder / "amdsmi" / "__init__.py").is_file() else None


# Everything below runs in the child.


def open_reader(shm_is_shared: bool) -> Callable[[], object]:  # noqa: FBT001 - comes as plain JSON
    """Loads the package and its library, and gives back what reads it; WitnessError says what is wrong."""
    shipped = shipped_package()
    if shipped is not None:
        sys.path.insert(0, str(shipped))
    library = _imported()
    family, version = _library_family(library)
    if shipped is None:
        with suppress(importlib.metadata.PackageNotFoundError):  # a copy on the path: its version is not known
            _must_fit(importlib.metadata.version("amdsmi"), family, version)
    if shm_is_shared and family is not None and family < _FIRST_WITHOUT_SHARED_LOCK:
        detail = (
            f"libamd_smi {version} (before ROCm 6.4) takes a lock in /dev/shm that another process here uses too, and "
            "could stall it; give this container a /dev/shm of its own"
        )
        raise WitnessError(Reason.UNSUPPORTED, detail)
    try:
        library.amdsmi_init(library.AmdSmiInitFlags.INIT_AMD_GPUS)
    except Exception as error:
        detail = f"libamd_smi {version} cannot start ({_sentence(error)}); is the amdgpu driver loaded, /sys mounted?"
        raise WitnessError(Reason.ABSENT, detail) from error
    return lambda: _raw(library)


def _imported() -> Any:
    try:
        import amdsmi  # noqa: PLC0415 - only the child may load a vendor's library
    except ModuleNotFoundError as error:
        raise WitnessError(Reason.ABSENT, "the amdsmi package is not installed") from error
    except (KeyError, OSError) as error:
        raise WitnessError(Reason.ABSENT, _NO_LIBRARY) from error
    except AttributeError as error:
        detail = (
            f"the amdsmi package does not fit its library ({_sentence(error)}); "
            "install the package that came with this ROCm"
        )
        raise WitnessError(Reason.UNSUPPORTED, detail) from error
    return amdsmi


def _library_family(library: Any) -> tuple[int | None, str]:
    """The first number of the library's version; packages before ROCm 7 call it the year."""
    try:
        version = library.amdsmi_get_lib_version()
    except OSError as error:  # packages since ROCm 10 load it at the first call
        raise WitnessError(Reason.ABSENT, _NO_LIBRARY) from error
    except Exception:  # noqa: BLE001 - then the figures speak for themselves
        return None, "of unknown version"
    numbers = [version[key] for key in ("year", "major", "minor", "release") if key in version]
    return numbers[0], ".".join(map(str, numbers))


def _must_fit(package: str, family: int | None, version: str) -> None:
    """Refuses a package made for another library: its structures would be read at the wrong places."""
    head = package.split(".", 1)[0]
    if family is None or not head.isdigit():
        return
    # Packages are numbered by ROCm release (7.0.2), ROCm's own ones like the library (26.0).
    fitting = _LIBRARIES.get(int(head), (int(head),) if int(head) >= min(min(_LIBRARIES.values())) else ())
    if fitting and family not in fitting:
        detail = (
            f"the amdsmi package {package} fits libamd_smi {' or '.join(map(str, fitting))} and meets {version}; "
            "install the package that came with this ROCm"
        )
        raise WitnessError(Reason.UNSUPPORTED, detail)


def _raw(library: Any) -> object:
    vram = library.AmdSmiMemoryType.VRAM
    return {
        "devices": [
            {
                "bdf": _asked(library.amdsmi_get_gpu_device_bdf, handle),
                "uuid": _asked(library.amdsmi_get_gpu_device_uuid, handle),
                "hip_uuid": _hip_uuid(library, handle),
                "total": _asked(library.amdsmi_get_gpu_memory_total, handle, vram),
                "used": _asked(library.amdsmi_get_gpu_memory_usage, handle, vram),
            }
            for handle in library.amdsmi_get_processor_handles()
        ]
    }


def _asked(call: Callable[..., object], *arguments: object) -> object:
    try:
        return call(*arguments)
    except Exception as error:  # noqa: BLE001 - the library's exceptions share no base with each other
        return {"code": getattr(error, "err_code", None), "error": _sentence(error)}


def _hip_uuid(library: Any, handle: object) -> object:
    """The GPU's unique_id as HIP writes it; the call is there since ROCm 6.4."""
    call = getattr(library, "amdsmi_get_gpu_enumeration_info", None)
    answer = None if call is None else _asked(call, handle)
    return answer.get("hip_uuid") if isinstance(answer, dict) else None


def _sentence(error: BaseException) -> str:
    text = getattr(error, "err_info", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())
