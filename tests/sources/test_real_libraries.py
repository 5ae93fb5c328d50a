"""AMD's real programs and packages, without a GPU: over a fake /sys, and over a stub of their library."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fragscope.model import Reason
from fragscope.sources.gpu.amdsmi import AmdSmi
from fragscope.sources.gpu.child import Child
from fragscope.sources.gpu.device import Listing
from fragscope.sources.gpu.nvml import Nvml
from fragscope.sources.gpu.pyrsmi import PyRsmi
from tests.sources.fake_sys import TOTAL_BYTES, FakeCard, build, run_over
from tests.sources.stub_library import compile_amd_smi, compile_nvml

FIRST = FakeCard("0000:05:00.0", "296747008", 0)
SECOND = FakeCard("0000:15:00.0", "1345323008", 1)
READ = """
import dataclasses, json
from fragscope.sources.gpu.{module} import {kind}
print(json.dumps(dataclasses.asdict({kind}().read())))
"""


def rocm_smi_over(tree: Path) -> dict[str, Any]:
    if shutil.which("rocm-smi") is None:
        pytest.skip("rocm-smi is not installed (Debian: apt install rocm-smi)")
    answer: dict[str, Any] = json.loads(run_over(tree, READ.format(module="rocm_smi_cli", kind="RocmSmiCli")))
    return answer


def test_the_real_rocm_smi_agrees_with_sysfs_to_the_byte(tmp_path: Path) -> None:
    tree = build(tmp_path / "sys", [FIRST, SECOND])
    by_tool = rocm_smi_over(tree)
    by_sysfs = json.loads(run_over(tree, READ.format(module="sysfs", kind="Sysfs")))
    assert by_tool["gaps"] == by_sysfs["gaps"] == []
    assert by_tool["devices"] == by_sysfs["devices"]
    assert [device["used_bytes"] for device in by_tool["devices"]] == [296747008, 1345323008]
    assert [device["gpu"] for device in by_tool["devices"]] == ["0000:05:00.0", "0000:15:00.0"]
    assert by_tool["devices"][0]["total_bytes"] == TOTAL_BYTES


def test_the_real_rocm_smis_zero_for_an_unreadable_file_is_blindness(tmp_path: Path) -> None:
    """The library says SUCCESS and 0 where `mem_info_vram_used` is empty, as on a suspended GPU."""
    answer = rocm_smi_over(build(tmp_path / "sys", [FakeCard("0000:05:00.0", "", 0), SECOND]))
    assert [device["gpu"] for device in answer["devices"]] == ["0000:15:00.0"]
    (gap,) = answer["gaps"]
    assert gap["reason"] in {Reason.BLIND, Reason.ABSENT}


def test_the_real_rocm_smi_without_a_gpu_is_a_gap(tmp_path: Path) -> None:
    answer = rocm_smi_over(build(tmp_path / "sys", []))
    assert answer["devices"] == []
    assert len(answer["gaps"]) == 1


def test_the_real_rocm_smi_without_a_driver_is_absent(tmp_path: Path) -> None:
    tree = build(tmp_path / "sys", [FIRST])
    shutil.rmtree(tree / "module")
    (gap,) = rocm_smi_over(tree)["gaps"]
    assert gap["reason"] == Reason.ABSENT


Read = Callable[..., Listing]


def package(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"the {name} package is not installed (pip install 'fragscope[amd,nvidia]')")


@pytest.fixture(scope="module")
def rocm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_amd_smi(tmp_path_factory.mktemp("rocm"))


@pytest.fixture
def read(rocm: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Reads once with the real package over the stub, with the given words in its environment."""

    def reading(kind: type[Any] = AmdSmi, *, deadline_s: float = 10.0, library: Path = rocm, **words: str) -> Listing:
        package(kind.name)
        monkeypatch.delenv("ROCM_HOME", raising=False)
        for word, value in {"ROCM_PATH": str(library), **words}.items():
            monkeypatch.setenv(word, value)
        arguments = [words.get("SHARED") == "yes"] if kind is AmdSmi else []
        source = kind(Child(kind.name, f"{kind.__module__}:open_reader", arguments, deadline_s=deadline_s))
        listing: Listing = source.read()
        source.close()
        return listing

    return reading


@pytest.mark.parametrize("kind", [AmdSmi, PyRsmi], ids=lambda kind: kind.name)
def test_the_real_package_reads_the_stub(read: Read, kind: type[Any]) -> None:
    listing = read(kind)
    assert listing.gaps == ()
    assert [(device.gpu, device.total_bytes, device.used_bytes) for device in listing.devices] == [
        ("0000:05:00.0", TOTAL_BYTES, 296747008),
        ("0000:15:00.0", TOTAL_BYTES, 1345323008),
    ]


def test_amdsmi_knows_the_gpus_unique_id(read: Read) -> None:
    assert [device.unique_id for device in read().devices] == ["a1b2c3d4e5f60700", "a1b2c3d4e5f60701"]


@pytest.mark.parametrize("kind", [AmdSmi, PyRsmi], ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("words", "reason", "sentence"),
    [
        ({"STUB_CRASH": "amdsmi_get_gpu_memory_usage"}, Reason.ABSENT, "SIGSEGV"),
        ({"STUB_CRASH": "amdsmi_init"}, Reason.ABSENT, "SIGSEGV"),
        ({"STUB_HANG": "amdsmi_get_gpu_memory_usage"}, Reason.TIMEOUT, "no answer within 2 s"),
        ({"STUB_HANG": "amdsmi_init"}, Reason.TIMEOUT, "no answer within 2 s"),
    ],
)
def test_a_library_that_hangs_or_crashes_is_a_state(
    read: Read, kind: type[Any], words: dict[str, str], reason: Reason, sentence: str
) -> None:
    listing = read(kind, deadline_s=2.0 if "STUB_HANG" in words else 10.0, **words)
    assert listing.devices == ()
    (gap,) = listing.gaps
    assert gap.reason is reason
    assert sentence in gap.detail


@pytest.mark.parametrize("kind", [AmdSmi, PyRsmi], ids=lambda kind: kind.name)
def test_a_library_that_chatters_is_not_heard(read: Read, kind: type[Any], capfd: Any) -> None:
    assert len(read(kind, STUB_CHATTER="amdsmi_init").devices) == 2
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("code", "reason"), [(10, Reason.DENIED), (8, Reason.TIMEOUT), (2, Reason.UNSUPPORTED), (34, Reason.UNSUPPORTED)]
)
def test_a_refused_value_of_amdsmi_is_a_gap_with_its_code(read: Read, code: int, reason: Reason) -> None:
    listing = read(STUB_FAIL=f"amdsmi_get_gpu_memory_usage={code}")
    assert listing.devices == ()
    assert [gap.reason for gap in listing.gaps] == [reason, reason]
    assert f"code {code}" in listing.gaps[0].detail


def test_a_refused_value_of_pyrsmi_is_minus_one_and_so_a_gap(read: Read) -> None:
    listing = read(PyRsmi, STUB_FAIL="amdsmi_get_gpu_memory_usage=2")
    assert listing.devices == ()
    assert all("-1" in gap.detail for gap in listing.gaps)


@pytest.mark.parametrize("kind", [AmdSmi, PyRsmi], ids=lambda kind: kind.name)
def test_no_device_at_all_is_a_state(read: Read, kind: type[Any]) -> None:
    listing = read(kind, STUB_COUNT="0")
    assert listing.devices == ()
    (gap,) = listing.gaps
    assert gap.reason is (Reason.BLIND if kind is AmdSmi else Reason.ABSENT)


def test_addresses_of_a_library_that_may_not_open_the_device_are_dropped(read: Read) -> None:
    listing = read(STUB_HIDDEN="1")
    assert [device.gpu for device in listing.devices] == [None, None]
    assert [gap.reason for gap in listing.gaps] == [Reason.BLIND]


def test_a_library_that_cannot_start_is_absent(read: Read) -> None:
    (gap,) = read(STUB_FAIL="amdsmi_init=34").gaps
    assert gap.reason is Reason.ABSENT
    assert "DRIVER_NOT_LOADED" in gap.detail


def test_a_package_for_another_library_is_refused(read: Read) -> None:
    (gap,) = read(STUB_FAMILY="24").gaps
    assert gap.reason is Reason.UNSUPPORTED
    assert "24.0.2" in gap.detail


def test_a_library_without_a_symbol_is_a_mismatch(read: Read, tmp_path: Path) -> None:
    package("amdsmi")
    (gap,) = read(library=compile_amd_smi(tmp_path / "rocm", without="amdsmi_set_gpu_clk_range")).gaps
    assert gap.reason is Reason.UNSUPPORTED
    assert "amdsmi_set_gpu_clk_range" in gap.detail


def test_a_package_without_its_library_is_absent(read: Read, tmp_path: Path, capfd: Any) -> None:
    (gap,) = read(library=tmp_path).gaps
    assert gap.reason is Reason.ABSENT
    assert "ROCM_PATH" in gap.detail
    assert capfd.readouterr() == ("", ""), "the package prints to stdout when it is imported"


def test_rocms_own_package_is_taken_before_any_other(read: Read, rocm: Path, tmp_path: Path) -> None:
    package("amdsmi")
    shutil.copytree(rocm / "lib", tmp_path / "lib")
    own = tmp_path / "share" / "amd_smi" / "amdsmi"
    own.mkdir(parents=True)
    (own / "__init__.py").write_text("raise AttributeError('this is the copy that ROCm ships')\n")
    (gap,) = read(library=tmp_path).gaps
    assert "the copy that ROCm ships" in gap.detail


def test_an_old_library_is_kept_out_of_a_shared_dev_shm(read: Read, rocm: Path, tmp_path: Path) -> None:
    package("amdsmi")
    shutil.copytree(rocm / "lib", tmp_path / "lib")
    found = importlib.util.find_spec("amdsmi")
    assert found is not None
    assert found.submodule_search_locations
    shutil.copytree(found.submodule_search_locations[0], tmp_path / "share" / "amd_smi" / "amdsmi")
    (gap,) = read(library=tmp_path, STUB_FAMILY="24", SHARED="yes").gaps
    assert gap.reason is Reason.UNSUPPORTED
    assert "/dev/shm" in gap.detail  # noqa: S108 - a sentence
    assert len(read(library=tmp_path, STUB_FAMILY="24", SHARED="no").devices) == 2


def test_the_real_nvml_package_without_a_driver_is_absent() -> None:
    package("pynvml")
    source = Nvml()
    listing = source.read()
    source.close()
    if listing.devices:
        assert all(device.gpu for device in listing.devices)
        return
    (gap,) = listing.gaps
    assert gap.reason is Reason.ABSENT
    assert "libnvidia-ml" in gap.detail or "NVML" in gap.detail


@pytest.fixture
def read_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Reads once with the real nvidia-ml-py over a stub of NVIDIA's library."""
    package("pynvml")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(compile_nvml(tmp_path)))

    def reading(**words: str) -> Listing:
        for word, value in words.items():
            monkeypatch.setenv(word, value)
        source = Nvml()
        listing = source.read()
        source.close()
        return listing

    return reading


def test_nvml_leaves_out_what_the_driver_reserves(read_nvml: Read) -> None:
    listing = read_nvml()
    assert listing.gaps == ()
    (device,) = listing.devices
    assert (device.gpu, device.total_bytes, device.used_bytes) == ("0000:0a:00.0", 150754820096 - (600 << 20), 5 << 30)
    assert (device.name, device.unique_id) == ("NVIDIA H200", "GPU-11111111-2222-3333-4444-555555555555")
    assert device.own_bytes_by_pid == {4242: 4 << 30}


def test_processes_whose_memory_nvml_hides_are_not_counted_as_nothing(read_nvml: Read) -> None:
    (device,) = read_nvml(STUB_NAMELESS="1").devices
    assert device.own_bytes_by_pid is None
    (device,) = read_nvml(STUB_FAIL="nvmlDeviceGetComputeRunningProcesses_v3=4").devices
    assert device.own_bytes_by_pid is None


@pytest.mark.parametrize(
    ("words", "reason", "sentence"),
    [
        ({"STUB_COUNT": "0"}, Reason.BLIND, "sees no GPU"),
        ({"STUB_MIG": "1"}, Reason.UNSUPPORTED, "MIG"),
        ({"STUB_FAIL": "nvmlDeviceGetMemoryInfo_v2=3"}, Reason.UNSUPPORTED, "Not Supported"),
        ({"STUB_FAIL": "nvmlDeviceGetHandleByIndex_v2=4"}, Reason.UNSUPPORTED, "Insufficient Permissions"),
        ({"STUB_FAIL": "nvmlInitWithFlags=9"}, Reason.ABSENT, "Driver Not Loaded"),
    ],
)
def test_what_nvml_cannot_say_is_a_state(read_nvml: Read, words: dict[str, str], reason: Reason, sentence: str) -> None:
    listing = read_nvml(**words)
    assert listing.devices == ()
    (gap,) = listing.gaps
    assert gap.reason is reason
    assert sentence in gap.detail
