"""What AMD's command-line tools print, version by version; tests/data/amd/README.md says where each file is from."""

import glob
import json
import os
import threading
import time
from pathlib import Path

import pytest

from fragscope.model import Gap, Reason
from fragscope.sources.gpu import amd_smi_cli, amdsmi, pyrsmi, rocm_smi_cli
from fragscope.sources.gpu.amd_smi_cli import AmdSmiCli
from fragscope.sources.gpu.device import Listing, WitnessError
from fragscope.sources.gpu.process import Command, Process, Ran, end
from fragscope.sources.gpu.rocm_smi_cli import RocmSmiCli
from tests.paths import DATA

AMD = DATA / "amd"
MIB = 1 << 20
TOTAL = 196592 * MIB
FIRST = ("0000:05:00.0", TOTAL, 283 * MIB)
SECOND = ("0000:15:00.0", TOTAL, 1283 * MIB)


def text_of(name: str) -> str:
    return (AMD / name).read_text()


def figures(listing: Listing) -> list[tuple[str | None, int, int]]:
    return [(device.gpu, device.total_bytes, device.used_bytes) for device in listing.devices]


def reasons(listing: Listing) -> list[Reason]:
    return [gap.reason for gap in listing.gaps]


def amd_smi(metric: str, names: str | None = None) -> Listing:
    return amd_smi_cli.parse({"metric": text_of(metric), "list": names and text_of(names)})


@pytest.mark.parametrize("release", ["6.0.0", "6.1.2", "6.2", "6.3dev", "10.1"])
def test_every_shape_of_amd_smi_is_read(release: str) -> None:
    listing = amd_smi(f"amd-smi-{release}-metric--mem-usage.json", "amd-smi-10.1-list.json")
    assert figures(listing) == [FIRST, SECOND]
    assert listing.gaps == ()


@pytest.mark.parametrize("release", ["6.1.2", "6.2", "6.3dev"])
def test_a_random_address_is_not_believed(release: str) -> None:
    listing = amd_smi(f"amd-smi-{release}-metric--mem-usage.json", f"amd-smi-{release}-list.json")
    assert [device.gpu for device in listing.devices] == [None, None]
    assert reasons(listing) == [Reason.BLIND]
    assert "renderD" in listing.gaps[0].detail


def test_without_its_list_amd_smi_names_no_gpu() -> None:
    listing = amd_smi("amd-smi-10.1-metric--mem-usage.json")
    assert [device.gpu for device in listing.devices] == [None, None]


def test_amd_smi_of_a_partitioned_gpu_is_one_gpu_with_partitions() -> None:
    listing = amd_smi("amd-smi-10.1-metric--mem-usage-cpx-nps4-no-dev-kfd.json", "amd-smi-10.1-list-e-cpx-nps4.json")
    assert figures(listing) == [FIRST]
    parts = listing.devices[0].partitions
    assert [(part.number, part.total_bytes, part.used_bytes) for part in parts] == [
        (number, 24576 * MIB, None) for number in range(1, 8)
    ]


def test_an_old_amd_smi_repeats_the_gpu_for_every_partition() -> None:
    listing = amd_smi("amd-smi-6.1.2-metric--mem-usage-cpx-nps4.json", "amd-smi-10.1-list-e-cpx-nps4.json")
    assert figures(listing) == [FIRST]
    assert listing.devices[0].partitions == ()


def test_words_before_the_document_are_passed_over() -> None:
    noise = text_of("amd-smi-10.1-metric-denied-kfd-uid1000.txt").split("{ ")[0]
    warning = "[WARNING] something in brackets\n"
    text = noise + warning + text_of("amd-smi-10.1-metric--mem-usage.json") + '\n{"another": "document"}\n'
    assert figures(amd_smi_cli.parse({"metric": text, "list": text_of("amd-smi-10.1-list.json")})) == [FIRST, SECOND]


@pytest.mark.parametrize("name", ["amd-smi-6.1.2-metric-with-leading-noise.txt", "amd-smi-10.1-metric.json"])
def test_the_whole_metric_document_is_read_too(name: str) -> None:
    assert figures(amd_smi(name, "amd-smi-10.1-list.json")) == [FIRST, SECOND]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("amd-smi-7.1.1-missing-groups-public.txt", Reason.DENIED),
        ("amd-smi-10.1-metric-denied-kfd-uid1000.txt", Reason.DENIED),
        ("amd-smi-6.0.0-monitor-v.json", Reason.UNSUPPORTED),
        ("amd-smi-7.0-static-clock-list-shape-public.json", Reason.ABSENT),
        ("amd-smi-7.2-static-limit-public.json", Reason.ABSENT),
    ],
)
def test_a_page_without_figures_says_why(name: str, reason: Reason) -> None:
    listing = amd_smi(name)
    assert listing.devices == ()
    assert reasons(listing) == [reason]


@pytest.mark.parametrize("form", ['"N/A"', '{"value": "N/A", "unit": "MB"}'])
def test_not_available_has_three_forms(form: str) -> None:
    entry = f'{{"gpu": 0, "mem_usage": {{"total_vram": {{"value": 196592, "unit": "MB"}}, "used_vram": {form}}}}}'
    assert reasons(amd_smi_cli.parse({"metric": f"[{entry}]"})) == [Reason.UNSUPPORTED]
    whole = '[{"gpu": 0, "mem_usage": "N/A"}]'
    assert reasons(amd_smi_cli.parse({"metric": whole})) == [Reason.UNSUPPORTED]


@pytest.mark.parametrize("unit", ["GB", "GiB", "B", None])
def test_a_figure_in_another_unit_is_refused(unit: str | None) -> None:
    figure = {"value": 283, "unit": unit}
    raw = json.dumps([{"gpu": 0, "mem_usage": {"total_vram": {"value": 196592, "unit": "MB"}, "used_vram": figure}}])
    listing = amd_smi_cli.parse({"metric": raw})
    assert reasons(listing) == [Reason.MALFORMED]
    assert str(unit) in listing.gaps[0].detail


@pytest.mark.parametrize("release", ["5.2.3", "6.1.2"])
def test_rocm_smi_without_addresses_names_no_gpu(release: str) -> None:
    listing = rocm_smi_cli.parse(text_of(f"rocm-smi-{release}-showmeminfo-vram.json"))
    assert figures(listing) == [(None, TOTAL, 283 * MIB), (None, TOTAL, 1283 * MIB)]


def test_rocm_smis_index_is_never_taken_for_an_address() -> None:
    text = text_of("rocm-smi-6.4.1-showmeminfo-all.json").replace(
        '"card0": {', '"card0": {"PCI Bus": "0000:C1:00.0", "Unique ID": "0xa1b2", '
    )
    listing = rocm_smi_cli.parse(text)
    assert [(device.gpu, device.unique_id) for device in listing.devices] == [("0000:c1:00.0", "a1b2"), (None, None)]


def test_a_value_that_rocm_smi_left_out_is_missing() -> None:
    listing = rocm_smi_cli.parse(text_of("rocm-smi-6.4.1-cpx-nps4-no-dev-kfd.json"))
    assert len(listing.devices) == 1
    assert reasons(listing) == [Reason.ABSENT] * 7


def test_a_radeons_page_is_read() -> None:
    (device,) = rocm_smi_cli.parse(text_of("rocm-smi-6.x-7900xt-public.json")).devices
    assert (device.name, device.used_bytes) == ("Radeon RX 7900 XT", 27856896)


@pytest.mark.parametrize(
    "name",
    [
        "rocm-smi-5.x-showmemuse-public.json",
        "rocm-smi-6.4.1-a.json",
        "rocm-smi-suspended-public.txt",
        "rocm-smi-7.1.1-lowpower-warning-public.txt",
        "rocm-smi-6.3.3-cpx-nps1-mi300x-public.txt",
    ],
)
def test_another_page_of_rocm_smi_gives_no_figure(name: str) -> None:
    listing = rocm_smi_cli.parse(text_of(name))
    assert listing.devices == ()
    assert listing.gaps


def test_rocm_smi_without_gpus_is_blind() -> None:
    assert reasons(rocm_smi_cli.parse("WARNING: No JSON data to report\n")) == [Reason.BLIND]


def test_what_the_library_answered_to_broken_files_is_never_a_number() -> None:
    cases = json.loads(text_of("amdsmi-lib-edgecases-6.1.2-and-10.1.json"))["cases"]
    for case in cases:
        used = case.get("used_10.1", case.get("used"))
        listing = amdsmi.parse({"devices": [{"bdf": "0000:05:00.0", "total": case.get("total", TOTAL), "used": used}]})
        assert listing.devices == (), case
        assert len(listing.gaps) == 1


def test_what_the_library_answered_without_a_render_node_has_no_address() -> None:
    answers = json.loads(text_of("amdsmi-no-render-node.json"))
    old, new = answers["24.5.2 (ROCm 6.1.2)"], answers["27.1.0 (ROCm 10.1)"]
    for answer, expected in ((old, [None, None]), (new, ["0000:05:00.0", "0000:15:00.0"])):
        devices = [
            {"bdf": bdf, "uuid": uuid, "hip_uuid": "GPU-a1b2c3d4e5f60700", "total": TOTAL, "used": used * MIB}
            for bdf, uuid, used in zip(answer["bdf"], answer["uuid"], (283, 284), strict=True)
        ]
        listing = amdsmi.parse({"devices": devices})
        assert [device.gpu for device in listing.devices] == expected
        assert [device.unique_id is None for device in listing.devices] == [gpu is None for gpu in expected]


@pytest.mark.parametrize(
    ("number", "gpu"),
    [
        (0xC1 << 8, "0000:c1:00.0"),
        (0xC1 << 8 | 0x1F << 3 | 7, "0000:c1:1f.7"),
        (2 << 32 | 0x15 << 8, "0002:15:00.0"),
        (3 << 28 | 0x15 << 8, "0000:15:00.0"),
        (2 << 16 | 0x15 << 8, "0002:15:00.0"),
        (-1, None),
        (0, None),
    ],
)
def test_pyrsmis_number_is_a_pci_address(number: int, gpu: str | None) -> None:
    (device,) = pyrsmi.parse({"devices": [{"pci_id": number, "total": TOTAL, "used": 283 * MIB}]}).devices
    assert device.gpu == gpu


def test_minus_one_of_pyrsmi_is_an_error() -> None:
    listing = pyrsmi.parse({"devices": [{"pci_id": 0xC100, "total": TOTAL, "used": -1}]})
    assert reasons(listing) == [Reason.UNSUPPORTED]


# The programs themselves.


def program(folder: Path, text: str) -> str:
    path = folder / "tool"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_amd_smi_is_asked_for_figures_and_then_for_names(tmp_path: Path) -> None:
    script = f"""case "$1" in
        metric) cat {AMD}/amd-smi-10.1-metric--mem-usage.json ;;
        list) cat {AMD}/amd-smi-10.1-list.json ;;
    esac"""
    assert figures(AmdSmiCli(program(tmp_path, script)).read()) == [FIRST, SECOND]


def test_a_tool_that_crashes_after_its_answer_has_answered(tmp_path: Path) -> None:
    script = f"cat {AMD}/amd-smi-6.0.0-metric--mem-usage.json; kill -SEGV $$"
    assert len(AmdSmiCli(program(tmp_path, script)).read().devices) == 2


def test_a_tool_that_only_complains_is_quoted_with_its_exit(tmp_path: Path) -> None:
    script = "echo 'PermissionError: Command requires elevation' >&2; exit 1"
    (gap,) = AmdSmiCli(program(tmp_path, script)).read().gaps
    assert gap.reason is Reason.DENIED
    assert "requires elevation" in gap.detail
    assert "exit status 1" in gap.detail


def test_a_tool_without_a_driver_says_so(tmp_path: Path) -> None:
    script = "echo 'ERROR:root:Driver not initialized (amdgpu not found in modules)' >&2"
    assert reasons(RocmSmiCli(program(tmp_path, script)).read()) == [Reason.ABSENT]


def test_a_tool_that_is_not_there_is_absent(tmp_path: Path) -> None:
    assert reasons(RocmSmiCli(str(tmp_path / "none")).read()) == [Reason.ABSENT]


def test_everything_that_a_tool_started_is_killed_at_the_deadline(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    command = Command(program(tmp_path, f"sleep 3600 & echo $! $$ > {note}; wait"), deadline_s=1.0)
    gap = command.run(())
    assert isinstance(gap, Gap)
    assert gap.reason is Reason.TIMEOUT
    for pid in note.read_text().split():
        deadline = time.monotonic() + 5
        while not ended(int(pid)):
            assert time.monotonic() < deadline, f"{pid} is still there"
            time.sleep(0.01)


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


def test_what_a_tool_left_in_the_background_is_not_waited_for(tmp_path: Path) -> None:
    ran = Command(program(tmp_path, "sleep 3600 >/dev/null 2>&1 & echo done")).run(())
    assert isinstance(ran, Ran)
    assert (ran.stdout, ran.code) == ("done\n", 0)


def test_never_more_than_one_tool_that_cannot_be_killed(tmp_path: Path) -> None:
    unkillable: list[Process] = []

    def cannot_end(process: Process) -> int | None:
        unkillable.append(process)
        return None

    command = Command(program(tmp_path, "exec sleep 3600"), deadline_s=0.2, end=cannot_end)
    first = command.run(())
    assert isinstance(first, Gap)
    assert "cannot be killed" in first.detail
    assert command.run(()) == first
    assert len(unkillable) == 1, "a second one was started"
    end(unkillable[0])
    command.run(())
    assert len(unkillable) == 2, "once the first is gone, another may be tried"
    end(unkillable[1])


def test_a_lock_that_our_own_child_left_is_not_taken_for_another_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    lying: list[str] = []
    monkeypatch.setattr(glob, "glob", lambda _: list(lying))
    amdsmi.foreign_locks.cache_clear()
    amdsmi.AmdSmi().close()
    lying.append("/dev/shm/rocm_smi_card0")  # noqa: S108
    assert not amdsmi.foreign_locks(), "a source made anew must not trip over it"
    amdsmi.foreign_locks.cache_clear()
    assert amdsmi.foreign_locks(), "what lay there before us is another's"
    amdsmi.foreign_locks.cache_clear()


def test_a_package_without_its_library_says_so_at_the_first_call() -> None:
    class Package:
        def amdsmi_get_lib_version(self) -> dict[str, int]:
            raise OSError("libamd_smi.so.27: cannot open shared object file")

    with pytest.raises(WitnessError, match=r"finds no libamd_smi\.so") as raised:
        amdsmi._library_family(Package())
    assert raised.value.reason is Reason.ABSENT


def test_a_count_of_minus_one_is_pyrsmis_error_and_not_no_gpu() -> None:
    class Package:
        def smi_get_device_count(self) -> int:
            return -1

    with pytest.raises(WitnessError, match="-1"):
        pyrsmi._raw(Package())


def test_one_gpu_repeated_without_addresses_is_never_eight_of_them() -> None:
    listing = rocm_smi_cli.parse(text_of("rocm-smi-6.1.2-cpx-nps4.json"))
    assert listing.devices == ()
    assert reasons(listing) == [Reason.BLIND]
    assert "8 entries" in listing.gaps[0].detail


def test_closing_kills_a_tool_that_runs_and_wakes_whoever_waits(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    source = AmdSmiCli(
        program(tmp_path, f"echo $$ > {note}.part; mv {note}.part {note}; exec sleep 3600"), deadline_s=60
    )
    listings: list[Listing] = []
    reader = threading.Thread(target=lambda: listings.append(source.read()))
    reader.start()
    while not note.exists():
        time.sleep(0.01)
    source.close()
    reader.join(5)
    assert "closed" in listings[0].gaps[0].detail
    assert not Path(f"/proc/{note.read_text().strip()}").exists()
    assert "closed" in source.read().gaps[0].detail


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    command = Command(program(tmp_path, "echo done"))
    command.run(())
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - Path.iterdir would hold one open itself
    for _ in range(3):
        command.run(())
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
