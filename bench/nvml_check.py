"""On a machine with an NVIDIA GPU: does the nvml source say what the framework that allocates says?

    python -m bench.nvml_check [--device 0] [--gib 1,8,32]

Allocates known amounts with torch, or without it with the CUDA driver itself, and sets NVML's figure beside the
framework's own, total minus free. Where those include what the driver reserves, NVML's second structure does not:
the difference must lie between nothing and that reserve. Needs nvidia-ml-py; nothing is fetched. Exit status 1 if they
disagree.
"""

import argparse
import ctypes
import datetime as dt
import importlib.metadata
import platform
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any, Protocol

from fragscope.model import Gap
from fragscope.sources.gpu.device import Device
from fragscope.sources.gpu.nvml import Nvml, open_reader
from fragscope.sources.gpu.plausible import address

GIB = 1 << 30
MIB = 1 << 20
PAGE_BYTES = 2 * MIB
"""CUDA maps device memory in pages of 2 MiB, so an allocation may be rounded up by one."""
SETTLE_BYTES = 32 * MIB
"""What a context may still take for itself between two readings."""
READS = 200


class Framework(Protocol):
    """Who allocates."""

    words: str

    def allocate(self, size_bytes: int) -> None:
        """Adds so much, in one piece."""

    def free_and_total_bytes(self) -> tuple[int, int]:
        """Its own figures for the device."""


class Driver:
    """The CUDA driver itself; there wherever a GPU can be used at all."""

    def __init__(self, ordinal: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._ordinal = ordinal
        self._call("cuInit", 0)
        version = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        self.words = f"CUDA driver API {version.value // 1000}.{version.value % 1000 // 10}"

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} answered {status}")

    def pci_address(self) -> str | None:
        """Where the device sits, as sysfs writes it."""
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), self._ordinal)
        text = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", text, 32, device)
        return address(text.value.decode())

    def open_context(self) -> None:
        """Makes the context that allocations live in."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), self._ordinal)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def allocate(self, size_bytes: int) -> None:
        """Adds so much, in one piece."""
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size_bytes))

    def free_and_total_bytes(self) -> tuple[int, int]:
        """Its own figures for the device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value


class Torch:
    """torch, as vLLM uses it."""

    def __init__(self, torch: Any, ordinal: int) -> None:
        self._torch = torch
        self._ordinal = ordinal
        self._kept = [torch.zeros(1, device=f"cuda:{ordinal}")]
        torch.cuda.synchronize()
        self.words = f"torch {torch.__version__}, {torch.cuda.get_device_name(ordinal)}"

    def allocate(self, size_bytes: int) -> None:
        """Adds so much, in one piece."""
        self._kept.append(self._torch.empty(size_bytes, dtype=self._torch.uint8, device=f"cuda:{self._ordinal}"))
        self._torch.cuda.synchronize()

    def free_and_total_bytes(self) -> tuple[int, int]:
        """Its own figures for the device."""
        free, total = self._torch.cuda.mem_get_info(self._ordinal)
        return int(free), int(total)


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison."""

    allocated_bytes: int
    nvml_used_bytes: int
    reserved_bytes: int
    framework_used_bytes: int

    @property
    def apart_bytes(self) -> int:
        """What the framework counts and NVML does not."""
        return self.framework_used_bytes - self.nvml_used_bytes

    @property
    def agrees(self) -> bool:
        """Whether the reserve explains the difference."""
        return -PAGE_BYTES <= self.apart_bytes <= self.reserved_bytes + PAGE_BYTES


def main() -> int:
    """Prints the table and says whether they agree."""
    parser = argparse.ArgumentParser(description="compares the nvml source with the framework's own figure")
    parser.add_argument("--device", type=int, default=0, help="the framework's number of the GPU")
    parser.add_argument("--gib", default="1,8,32", help="how much is allocated at each step")
    options = parser.parse_args()
    driver = Driver(options.device)
    gpu = driver.pci_address()
    framework = _framework(driver, options.device)
    source = Nvml()
    try:
        _print_versions(framework, gpu)
        rows = _rows(source, framework, gpu, [int(float(step) * GIB) for step in options.gib.split(",")])
        _print_cost(source)
    finally:
        source.close()
    first, last = rows[0], rows[-1]
    grown = last.nvml_used_bytes - first.nvml_used_bytes
    added = last.allocated_bytes - first.allocated_bytes
    exact = added <= grown <= added + len(rows) * PAGE_BYTES + SETTLE_BYTES
    print(f"allocated {added / MIB:.1f} MiB, nvml grew by {grown / MIB:.1f} MiB: {'agrees' if exact else 'DISAGREES'}")
    agrees = exact and all(row.agrees for row in rows)
    print("agrees within the driver's reserve" if agrees else "DISAGREES")
    return 0 if agrees else 1


def _framework(driver: Driver, ordinal: int) -> Framework:
    try:
        import torch  # noqa: PLC0415 - not everywhere
    except ModuleNotFoundError:
        driver.open_context()
        return driver
    return Torch(torch, ordinal)


def _rows(source: Nvml, framework: Framework, gpu: str | None, steps: list[int]) -> list[Row]:
    reader = open_reader()  # the reserve is in the raw values only
    rows: list[Row] = []
    print(f"{'allocated':>12} {'nvml used':>12} {'reserved':>12} {'framework':>12} {'apart':>12}  (MiB)")
    total = 0
    for step in [0, *steps]:
        if step:
            framework.allocate(step)
            total += step
        device = _device(source, gpu)
        free_bytes, total_bytes = framework.free_and_total_bytes()
        row = Row(total, device.used_bytes, _reserved(reader(), gpu), total_bytes - free_bytes)
        rows.append(row)
        figures = (row.allocated_bytes, row.nvml_used_bytes, row.reserved_bytes, row.framework_used_bytes)
        cells = " ".join(f"{value / MIB:12.1f}" for value in (*figures, row.apart_bytes))
        print(f"{cells}  {'agrees' if row.agrees else 'DISAGREES'}")
        print(f"{'':12} nvml total {device.total_bytes / MIB:.1f}, framework total {total_bytes / MIB:.1f} MiB")
    return rows


def _device(source: Nvml, gpu: str | None) -> Device:
    listing = source.read()
    for device in listing.devices:
        if device.gpu == gpu:
            return device
    why = "; ".join(gap.detail for gap in listing.gaps) or f"seen: {[device.gpu for device in listing.devices]}"
    raise SystemExit(f"the nvml source does not see {gpu}: {why}")


def _reserved(raw: Any, gpu: str | None) -> int:
    return next(int(device["reserved"]) for device in raw["devices"] if address(device["bus"]) == gpu)


def _print_versions(framework: Framework, gpu: str | None) -> None:
    import pynvml  # noqa: PLC0415 - the check is for those who have it

    pynvml.nvmlInit()
    now = dt.datetime.now(tz=dt.UTC)
    print(f"{now:%Y-%m-%d %H:%M} UTC, Python {platform.python_version()}, kernel {platform.release()}")
    try:
        package = importlib.metadata.version("nvidia-ml-py")
    except importlib.metadata.PackageNotFoundError:
        package = "of unknown version"
    driver, library = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetNVMLVersion()
    print(f"nvidia-ml-py {package}, driver {driver}, NVML {library}")
    print(f"{framework.words}, at {gpu}")


def _print_cost(source: Nvml) -> None:
    """What a reading through the child costs us, and what it costs the child."""
    took_ms: list[float] = []
    ours_s = time.process_time()
    for _ in range(READS):
        begun = time.perf_counter()
        listing = source.read()
        took_ms.append((time.perf_counter() - begun) * 1000)
        if any(isinstance(gap, Gap) for gap in listing.gaps):
            print(f"a gap while timing: {listing.gaps}")
    ours_ms = (time.process_time() - ours_s) * 1000 / READS
    source.close()
    theirs = resource.getrusage(resource.RUSAGE_CHILDREN)
    theirs_ms = (theirs.ru_utime + theirs.ru_stime) * 1000
    print(
        f"a reading takes {statistics.median(took_ms):.2f} ms (median of {READS}), {ours_ms:.3f} ms of our CPU; "
        f"the child used {theirs_ms:.0f} ms of CPU in all, its start included"
    )


if __name__ == "__main__":
    sys.exit(main())
