"""Compiles the stubs of vendors' libraries that their real Python packages are run over."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_BOUND = re.compile(r"_libraries\['libamd_smi.so'\]\.(amdsmi_\w+)")


def bound_names() -> set[str]:
    """Every symbol that the installed package resolves when it is imported, read from its source."""
    found = importlib.util.find_spec("amdsmi")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the amdsmi package is not installed (pip install 'fragscope[amd]')")
    wrapper = Path(found.submodule_search_locations[0]) / "amdsmi_wrapper.py"
    return set(_BOUND.findall(wrapper.read_text()))


def compile_amd_smi(rocm: Path, without: str = "") -> Path:
    """`rocm` as ROCM_PATH, with lib/libamd_smi.so in it; `without` is a symbol that this library lacks."""
    text = (_HERE / "stub_amd_smi.c").read_text()
    ours = set(re.findall(r"^int (amdsmi_\w+)\(", text, flags=re.MULTILINE))
    rest = "".join(f"int {name}(void) {{ return 2; }}\n" for name in sorted(bound_names() - ours - {without}))
    _compile(text + rest, rocm / "lib" / "libamd_smi.so")
    return rocm


def compile_nvml(folder: Path) -> Path:
    """`folder` as LD_LIBRARY_PATH, with libnvidia-ml.so.1 in it."""
    _compile((_HERE / "stub_nvml.c").read_text(), folder / "libnvidia-ml.so.1")
    return folder


def _compile(text: str, library: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler is here (gcc)")
    library.parent.mkdir(parents=True, exist_ok=True)
    source = library.with_suffix(".c")
    source.write_text(text)
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", str(library), str(source)], check=True, timeout=60)
