"""A tree like /sys with AMD GPUs, complete enough for AMD's own libraries, and how to run a program over it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.paths import REPOSITORY

TOTAL_BYTES = 206141652992
"""An MI300X: 196592 MiB."""


@dataclass(frozen=True, slots=True)
class FakeCard:
    gpu: str
    used: str
    card: int
    total: str = str(TOTAL_BYTES)

    @property
    def unique_id(self) -> str:
        return f"a1b2c3d4e5f607{self.card:02x}"


def build(root: Path, cards: Sequence[FakeCard]) -> Path:
    """The tree under `root`: PCI devices, DRM cards, KFD topology nodes and the driver's state."""
    _write(root / "module" / "amdgpu" / "initstate", "live")
    _node(root, 0, gpu_id="0", properties={"cpu_cores_count": 64, "simd_count": 0})
    for number, card in enumerate(cards, start=1):
        _device(root, card)
        domain, bus, rest = card.gpu.split(":")
        location = int(bus, 16) << 8 | int(rest[:2], 16) << 3 | int(rest[-1])
        properties = {
            "simd_count": 1216,
            "simd_per_cu": 4,
            "simd_arrays_per_engine": 1,
            "cu_per_simd_array": 10,
            "array_count": 32,
            "gfx_target_version": 90402,
            "hive_id": 0,
            "domain": int(domain, 16),
            "location_id": location,
            "drm_render_minor": 128 + card.card,
            "vendor_id": 4098,
            "device_id": 29857,
            "unique_id": int(card.unique_id, 16),
        }
        _node(root, number, gpu_id=str(51000 + number), properties=properties)
    return root


def _device(root: Path, card: FakeCard) -> None:
    device = root / "devices" / "pci0000:00" / card.gpu
    files = {
        "vendor": "0x1002",
        "device": "0x74a1",
        "subsystem_vendor": "0x1002",
        "subsystem_device": "0x74a1",
        "revision": "0x00",
        "unique_id": card.unique_id,
        "vbios_version": "113-M3000100-102",
        "mem_info_vram_total": card.total,
        "mem_info_vram_used": card.used,
        "mem_info_gtt_total": "540000000000",
        "mem_info_gtt_used": "15728640",
    }
    for name, text in files.items():
        _write(device / name, text)
    for name in (f"card{card.card}", f"renderD{128 + card.card}"):
        (device / "drm" / name).mkdir(parents=True)
        (device / "drm" / name / "device").symlink_to("../..")
        link = root / "class" / "drm" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"../../devices/pci0000:00/{card.gpu}/drm/{name}")


def _node(root: Path, number: int, gpu_id: str, properties: dict[str, int]) -> None:
    node = root / "class" / "kfd" / "kfd" / "topology" / "nodes" / str(number)
    (node / "io_links").mkdir(parents=True)
    _write(node / "gpu_id", gpu_id)
    _write(node / "name", "aqua_vanjaram" if gpu_id != "0" else "")
    (node / "properties").write_text("".join(f"{key} {value}\n" for key, value in properties.items()))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def run_over(tree: Path, code: str) -> str:
    """What a Python program prints that sees `tree` as /sys, in a mount namespace of its own."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("unshare is not here (util-linux)")
    words = [unshare, "--mount"] if os.geteuid() == 0 else [unshare, "--mount", "--map-root-user"]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine allows no mount namespace")
    # The old library leaves locks in /dev/shm, which is none of the machine's business.
    script = f'mount --make-rprivate / && mount -t tmpfs none /dev/shm && mount --bind "{tree}" /sys && exec "$@"'
    ran = subprocess.run(
        [*words, "sh", "-c", script, "sh", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"},
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
