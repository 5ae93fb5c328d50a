"""Compiles the stub of libamd_smi.so that the real `amdsmi` package can be run over."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_name("stub_amd_smi.c")
_BOUND = re.compile(r"_libraries\['libamd_smi.so'\]\.(amdsmi_\w+)")


def bound_names() -> set[str]:
    """Every symbol that the installed package resolves when it is imported, read from its source."""
    found = importlib.util.find_spec("amdsmi")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the amdsmi package is not installed (pip install 'fragscope[amd]')")
    wrapper = Path(found.submodule_search_locations[0]) / "amdsmi_wrapper.py"
    return set(_BOUND.findall(wrapper.read_text()))


def compile_stub(rocm: Path, without: str = "") -> Path:
    """`rocm` as ROCM_PATH, with lib/libamd_smi.so in it; `without` is a symbol that this library lacks."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler is here (gcc)")
    text = _SOURCE.read_text()
    ours = set(re.findall(r"^int (amdsmi_\w+)\(", text, flags=re.MULTILINE))
    rest = "".join(f"int {name}(void) {{ return 2; }}\n" for name in sorted(bound_names() - ours - {without}))
    (rocm / "lib").mkdir(parents=True)
    whole = rocm / "stub.c"
    whole.write_text(text + rest)
    library = rocm / "lib" / "libamd_smi.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", str(library), str(whole)], check=True, timeout=60)
    return rocm
