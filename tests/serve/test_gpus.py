"""All GPU sources together: who speaks, who checks, whose memory it is. Fakes for sources, a fake clock for time."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fragscope.app import build_core
from fragscope.model import Gap, GpuReading, Part, Reason
from fragscope.serve.board import Board, View
from fragscope.serve.clock import Clock
from fragscope.serve.feeds import EngineFeed
from fragscope.serve.gpu_feed import GpuSnapshot
from fragscope.serve.gpus import Gpus, Wanted, gpus_of, lasting, note
from fragscope.serve.ownership import Tenant
from fragscope.serve.poller import Poller
from fragscope.settings import load
from fragscope.sources.gpu.assignment import Claimed, Named
from fragscope.sources.gpu.child import Child
from fragscope.sources.gpu.crosscheck import Difference
from fragscope.sources.gpu.device import Device, Listing, Partition
from fragscope.sources.gpu.nvml import Nvml
from fragscope.sources.gpu.process import Process, end
from tests.paths import REPOSITORY
from tests.serve.test_daemon import FakeClock, FakeVisitor, eventually, good, watch_of
from tests.sources.fake_proc import FakeProc, add_node, compute
from tests.sources.test_gpu_child import stop as halt
from tests.sources.test_sysfs import TOTAL, USED, add_card, add_pci

GIB = 2**30
MIB = 2**20
GPU, OTHER = "0000:c1:00.0", "0000:c6:00.0"
NEVER = float("-inf")
BLIND = Gap(Part.GPU, Reason.BLIND, "sees no GPU")


class FakeSource:
    """Says what it was told to say."""

    def __init__(self, name: str, *listings: Listing, missing: Gap | None = None) -> None:
        self.name = name
        self.listings = list(listings)
        self.missing = missing
        self.reads = 0
        self.rests = 0
        self.closed = 0

    def __call__(self) -> "FakeSource":
        return self

    def why_not(self) -> Gap | None:
        return self.missing

    def read(self) -> Listing:
        self.reads += 1
        return self.listings[min(self.reads, len(self.listings)) - 1] if self.listings else Listing(gaps=(BLIND,))

    def rest(self) -> None:
        self.rests += 1

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


class Machine:
    """A node: its /sys and /proc, and the sources that were asked for."""

    def __init__(self, folder: Path, stop: threading.Event) -> None:
        self.sys, self.proc, self.stop = folder / "sys", folder / "proc", stop
        self.sys.mkdir()
        self.clock = FakeClock()
        self.url = "http://127.0.0.1:8000"

    def gpus(self, *sources: FakeSource, names: tuple[str, ...] = (), **given: object) -> Gpus:
        tenants = (Tenant("vllm", self.url, **given),)  # type: ignore[arg-type]
        wanted = Wanted(names, self.sys, self.proc, tolerance_bytes=21 * MIB, tenants=tenants)
        absent = Gap(Part.GPU, Reason.ABSENT, "not installed")
        vendors = {name: FakeSource(name, missing=absent) for name in ("amdsmi", "nvml")}
        return Gpus(wanted, self.clock, self.stop, {**vendors, **{source.name: source for source in sources}})

    def look(self, gpus: Gpus, seconds: float = 11.0) -> None:
        """Every feed once, some time after the last."""
        self.clock.at += seconds
        gpus.sysfs.step()
        for feed in gpus.slow.values():
            feed.step()
        gpus.ownership.step()


@pytest.fixture
def machine(tmp_path: Path, stop: threading.Event) -> Machine:
    return Machine(tmp_path, stop)


def device(gpu: str = GPU, used: int = USED, total: int = TOTAL, **given: object) -> Listing:
    return Listing((Device(gpu, total, used, **given),))  # type: ignore[arg-type]


def only(gpus: Gpus, claimed: Claimed | None = None) -> tuple[str, object]:
    """The rule and the one reading, or the gap."""
    assigned, readings, gaps = gpus_of(gpus.take(), "vllm", claimed or Claimed(), NEVER)
    return assigned.rule, readings[0] if readings else gaps[0]


# Who speaks.


def test_sysfs_speaks_and_a_library_is_held_against_it(machine: Machine) -> None:
    add_card(machine.sys, 1, GPU)
    library = FakeSource("amdsmi", device(used=USED + 500 * MIB))
    gpus = machine.gpus(library)
    machine.look(gpus)
    (first,) = gpus.take().differences
    assert (first.difference_bytes, first.lasting) == (500 * MIB, False)
    machine.look(gpus)
    snapshot = gpus.take()
    assert snapshot.readings[GPU].used_bytes == USED, "not an average"
    assert snapshot.readings[GPU].source == "sysfs"
    assert snapshot.differences[0].lasting
    (found,) = lasting(snapshot.differences, [snapshot.readings[GPU]])
    assert "amdsmi shows 0.49 GiB more in use on 0000:c1:00.0 than sysfs" in note(found).sentence
    assert note(found).weight == 0
    assert [status.source for status in gpus.statuses] == ["sysfs", "amdsmi"]


def test_rounding_to_mib_is_no_disagreement(machine: Machine) -> None:
    add_card(machine.sys, 1, GPU)
    gpus = machine.gpus(FakeSource("amdsmi", device(used=USED - MIB + 1)))
    machine.look(gpus)
    machine.look(gpus)
    snapshot = gpus.take()
    assert not snapshot.differences[0].lasting
    assert lasting(snapshot.differences, list(snapshot.readings.values())) == ()


def test_another_total_means_another_thing_and_is_not_compared(machine: Machine) -> None:
    add_card(machine.sys, 1, GPU)
    gpus = machine.gpus(FakeSource("amdsmi", device(total=TOTAL // 8, used=5)))
    machine.look(gpus)
    assert gpus.take().differences == ()


def test_an_address_that_sysfs_does_not_know_is_no_device(machine: Machine) -> None:
    add_card(machine.sys, 1, GPU)
    gpus = machine.gpus(FakeSource("amdsmi", device("6372:61:1e.7")))
    machine.look(gpus)
    status = gpus.statuses[1]
    assert (status.up, status.failures) == (False, {Reason.MALFORMED: 1})


def test_where_sysfs_has_no_card_nvml_speaks_and_its_peaks_are_kept(machine: Machine) -> None:
    (machine.sys / "class" / "drm").mkdir(parents=True)
    nvml = FakeSource("nvml", device(used=5 * GIB), device(used=70 * GIB), device(used=6 * GIB))
    gpus = machine.gpus(nvml)
    for _ in range(3):
        machine.look(gpus, 1.0)
    rule, reading = only(gpus)
    assert rule == "only_card"
    assert (reading.used_bytes, reading.peak_used_bytes, reading.source) == (6 * GIB, 70 * GIB, "nvml")  # type: ignore[attr-defined]
    _, again = only(gpus)
    assert again.peak_used_bytes == 6 * GIB  # type: ignore[attr-defined]


def test_where_nothing_sees_a_gpu_the_first_source_says_why(machine: Machine) -> None:
    gpus = machine.gpus(FakeSource("nvml"))
    machine.look(gpus)
    _, gap = only(gpus)
    assert isinstance(gap, Gap)
    assert "class/drm cannot be listed" in gap.detail
    assert [(status.source, status.up) for status in gpus.statuses] == [("sysfs", False), ("nvml", False)]


NVIDIA = "0000:01:00.0"


def test_beside_a_desktop_processors_gpu_nvml_speaks_and_the_other_library_sleeps(machine: Machine) -> None:
    add_card(machine.sys, 1, GPU, mem_info_vram_total=str(512 * MIB))
    for address in (GPU, NVIDIA):
        add_pci(machine.sys, address, "0x10de" if address == NVIDIA else "0x1002", "0x030000")
    amdsmi = FakeSource("amdsmi", device(total=512 * MIB))
    gpus = machine.gpus(amdsmi, FakeSource("nvml", device(NVIDIA, used=70 * GIB)))
    machine.look(gpus)
    rule, reading = only(gpus)
    assert (rule, reading.gpu, reading.source) == ("only_card", NVIDIA, "nvml")  # type: ignore[attr-defined]
    assert amdsmi.reads == 0


@pytest.mark.parametrize("size", [512 * MIB, TOTAL])
def test_an_amd_card_beside_nvidias_is_never_the_only_one(machine: Machine, size: int) -> None:
    add_card(machine.sys, 1, GPU, mem_info_vram_total=str(size))
    add_pci(machine.sys, NVIDIA, "0x10de", "0x030000")
    gpus = machine.gpus()
    machine.look(gpus)
    rule, gap = only(gpus)
    assert rule == "none"
    assert isinstance(gap, Gap)
    assert gap.reason is Reason.UNASSIGNED
    assert only(gpus, Claimed((GPU,)))[0] == "configured"


def test_an_apu_is_not_read_by_a_library_either(machine: Machine) -> None:
    add_card(machine.sys, 1, GPU, device="0x74a0")
    library = FakeSource("amdsmi", device())
    gpus = machine.gpus(library)
    machine.look(gpus)
    assert library.reads == 0


@pytest.mark.parametrize("name", ["amdsmi", "nvml"])
def test_a_listing_that_is_denied_puts_no_library_to_sleep(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    drm = machine.sys / "class" / "drm"
    drm.mkdir(parents=True)
    iterdir = Path.iterdir

    def denying(path: Path) -> Iterator[Path]:
        if path == drm:
            raise PermissionError(13, "Permission denied")
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", denying)
    gpus = machine.gpus(FakeSource(name, device(used=7 * GIB)))
    machine.look(gpus)
    assert [gap.reason for gap in gpus.sysfs.gaps or ()] == [Reason.DENIED]
    assert only(gpus)[1].source == name  # type: ignore[attr-defined]


def test_a_list_without_sysfs_is_obeyed(machine: Machine) -> None:
    add_card(machine.sys, 1, GPU)
    gpus = machine.gpus(FakeSource("amdsmi", device(used=7 * GIB)), names=("amdsmi",))
    gpus.slow["amdsmi"].step()
    _, reading = only(gpus)
    assert (reading.source, reading.used_bytes) == ("amdsmi", 7 * GIB)  # type: ignore[attr-defined]
    assert [status.source for status in gpus.statuses] == ["amdsmi"]


def test_a_source_that_sees_nothing_is_let_go_and_asked_ever_more_rarely(machine: Machine) -> None:
    add_card(machine.sys, 1, GPU)
    library = FakeSource("amdsmi")
    gpus = machine.gpus(library)
    gpus.sysfs.step()
    closed = library.closed
    delays = [gpus.slow["amdsmi"].step() for _ in range(9)]
    assert delays[:3] == [20.0, 40.0, 80.0]
    assert delays[-1] == 600.0
    assert library.rests == 9
    assert library.closed == closed


def test_never_more_than_one_stuck_child_however_often_a_source_is_asked(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY / 'src'}:{REPOSITORY}")
    stuck: list[Process] = []

    def cannot_end(process: Process) -> int | None:
        halt(process.pid)  # else it leaves by itself when its stdin is closed
        stuck.append(process)
        return None

    def make() -> Nvml:
        return Nvml(Child("nvml", "tests.sources.gpu_readers:sleeps", deadline_s=0.3, rest_s=0.0, end=cannot_end))

    (machine.sys / "class" / "drm").mkdir(parents=True)
    gpus = Gpus(Wanted(("nvml",), machine.sys, machine.proc), machine.clock, machine.stop, {"nvml": make})
    for _ in range(3):
        gpus.slow["nvml"].step()
    assert len({process.pid for process in stuck}) == 1
    assert "cannot be killed" in gpus.slow["nvml"].gaps[0].detail
    for process in stuck:
        end(process)


def test_a_source_that_hangs_delays_no_tick(tmp_path: Path, stop: threading.Event) -> None:
    add_card(tmp_path / "sys", 1, GPU)
    FakeProc(tmp_path / "proc")
    release = threading.Event()

    class Hanging(FakeSource):
        def read(self) -> Listing:
            release.wait(10)
            return super().read()

    flags = {"sysfs_root": tmp_path / "sys", "proc_root": tmp_path / "proc", "interval_s": 0.05}
    settings = load(flags={**flags, "gpu_sources": "sysfs,amdsmi"})
    core = build_core(settings, Clock(), stop, vendors={"amdsmi": Hanging("amdsmi")})
    core.start()
    eventually(lambda: core.board.view.ticks > 10)
    began = time.monotonic()
    eventually(lambda: core.board.view.targets[0].gpus != ())
    assert time.monotonic() - began < 2
    release.set()


# Whose memory it is.


def test_fdinfo_tells_the_engines_share_and_its_gpus(machine: Machine) -> None:
    for number, gpu in ((1, GPU), (2, OTHER)):
        add_card(machine.sys, number, gpu, mem_info_vram_used=str(180 * GIB))
    proc = FakeProc(machine.proc)
    proc.open_gpu(proc.engine(100), OTHER, 150 * GIB)
    gpus = machine.gpus()
    machine.look(gpus)
    rule, reading = only(gpus)
    assert rule == "fdinfo"
    assert (reading.gpu, reading.used_bytes, reading.own_bytes) == (OTHER, 180 * GIB, 150 * GIB)  # type: ignore[attr-defined]


def test_a_partitions_fdinfo_is_its_gpus_by_the_link_of_its_descriptor(machine: Machine) -> None:
    add_card(machine.sys, 1, GPU, mem_info_vram_used=str(180 * GIB))
    add_node(machine.sys, 1, GPU, 5000, minor=129)
    proc = FakeProc(machine.proc)
    worker = proc.engine(100)
    form = "drm-driver:\tamdgpu\ndrm-client-id:\t9\ndrm-resident-vram:\t{kib} KiB\n"
    proc.open_gpu(worker, "", 100 * GIB, form=form, node="renderD129")
    gpus = machine.gpus()
    machine.look(gpus)
    rule, reading = only(gpus)
    assert (rule, reading.own_bytes) == ("fdinfo", 100 * GIB)  # type: ignore[attr-defined]
    proc.open_gpu(worker, "", GIB, form=form, node="renderD200")
    machine.look(gpus, 31)
    assert only(gpus)[1].own_bytes is None, "half a sum misleads"  # type: ignore[attr-defined]


def test_kfd_is_believed_before_fdinfo(machine: Machine) -> None:
    add_card(machine.sys, 1, GPU, mem_info_vram_used=str(180 * GIB))
    proc = FakeProc(machine.proc, host=True)
    worker = proc.engine(100)
    proc.open_gpu(worker, GPU, 1 * GIB)
    add_node(machine.sys, 1, GPU, 4001)
    compute(machine.sys, worker, vram_4001=150 * GIB)
    gpus = machine.gpus()
    machine.look(gpus)
    rule, reading = only(gpus)
    assert (rule, reading.own_bytes) == ("kfd", 150 * GIB)  # type: ignore[attr-defined]
    assert all(status.up for status in gpus.statuses)


def test_the_engines_share_is_never_more_than_is_in_use(machine: Machine) -> None:
    add_card(machine.sys, 1, GPU, mem_info_vram_used=str(100 * GIB))
    proc = FakeProc(machine.proc)
    worker = proc.engine(100)
    for client in (1, 2):
        proc.open_gpu(worker, GPU, 90 * GIB, client=client)
    gpus = machine.gpus()
    machine.look(gpus)
    assert only(gpus)[1].own_bytes == 100 * GIB  # type: ignore[attr-defined]


def test_a_dead_engines_gpus_are_still_its_own_but_not_its_memory(machine: Machine) -> None:
    for number, gpu in ((1, GPU), (2, OTHER)):
        add_card(machine.sys, number, gpu)
    proc = FakeProc(machine.proc)
    worker = proc.engine(100)
    proc.open_gpu(worker, GPU, USED)
    gpus = machine.gpus()
    machine.look(gpus)
    assert only(gpus)[1].own_bytes == USED  # type: ignore[attr-defined]
    for pid in (100, worker):
        (machine.proc / str(pid)).rename(machine.proc / f"gone-{pid}")
    machine.look(gpus)
    rule, reading = only(gpus)
    assert (rule, reading.gpu, reading.own_bytes) == ("fdinfo", GPU, None)  # type: ignore[attr-defined]


def test_a_dead_engine_never_takes_its_neighbours_gpu(machine: Machine) -> None:
    for number, gpu in ((1, GPU), (2, OTHER)):
        add_card(machine.sys, number, gpu, mem_info_vram_used=str(180 * GIB))
        add_node(machine.sys, number, gpu, 4000 + number)
    proc = FakeProc(machine.proc, host=True)
    ours, theirs = proc.engine(200, port=8000), proc.engine(300, port=8001)
    proc.live_at("10.0.0.5", 200, 300)
    compute(machine.sys, ours, vram_4001=140 * GIB)
    compute(machine.sys, theirs, vram_4002=150 * GIB)
    machine.url = "http://10.0.0.5:8000"
    gpus = machine.gpus()
    machine.look(gpus)
    assert only(gpus)[1].own_bytes == 140 * GIB  # type: ignore[attr-defined]
    for pid in (200, ours):
        (machine.proc / str(pid)).rename(machine.proc / f"gone-{pid}")
    (machine.sys / "class/kfd/kfd/proc" / str(ours)).rename(machine.sys / "class/kfd/kfd/proc/gone")
    machine.look(gpus)
    rule, reading = only(gpus)
    assert (rule, reading.gpu, reading.own_bytes) == ("kfd", GPU, None)  # type: ignore[attr-defined]


def test_a_restarted_engine_on_another_gpu_is_followed(machine: Machine) -> None:
    for number, gpu in ((1, GPU), (2, OTHER)):
        add_card(machine.sys, number, gpu)
    proc = FakeProc(machine.proc)
    proc.open_gpu(proc.engine(100), GPU, GIB)
    gpus = machine.gpus()
    machine.look(gpus)
    for pid in (100, 101):
        (machine.proc / str(pid)).rename(machine.proc / f"gone-{pid}")
    proc.open_gpu(proc.engine(500), OTHER, GIB)
    machine.look(gpus)
    assert only(gpus)[1].gpu == OTHER  # type: ignore[attr-defined]


def test_nvmls_processes_count_only_where_the_hosts_ids_are_shown(machine: Machine) -> None:
    (machine.sys / "class" / "drm").mkdir(parents=True)
    proc = FakeProc(machine.proc)
    worker = proc.engine(100)
    nvml = FakeSource("nvml", device(used=90 * GIB, own_bytes_by_pid={worker: 70 * GIB, 9: 10 * GIB}))
    gpus = machine.gpus(nvml)
    machine.look(gpus)
    assert only(gpus)[1].own_bytes is None  # type: ignore[attr-defined]
    (proc.add(2) / "comm").write_text("kthreadd\n")
    machine.look(gpus)
    rule, reading = only(gpus)
    assert (rule, reading.own_bytes) == ("nvml", 70 * GIB)  # type: ignore[attr-defined]


def test_an_unshared_namespace_leaves_the_sources_out(machine: Machine) -> None:
    add_card(machine.sys, 1, GPU)
    FakeProc(machine.proc)
    gpus = machine.gpus()
    assert gpus.choice.attribution == ()
    machine.look(gpus)
    assert [status.source for status in gpus.statuses] == ["sysfs"]
    listed = machine.gpus(names=("sysfs", "fdinfo"))
    machine.look(listed)
    assert [(s.source, s.up, dict(s.failures)) for s in listed.statuses][1] == ("fdinfo", False, {Reason.BLIND: 1})


def test_the_file_of_render_nodes_is_read_anew(machine: Machine, tmp_path: Path) -> None:
    for number, gpu in ((1, GPU), (2, OTHER)):
        add_card(machine.sys, number, gpu)
    gpus = machine.gpus(render_nodes_file=tmp_path / "nodes")
    machine.look(gpus)
    assert only(gpus)[0] == "none"
    for node, gpu in (("renderD128", GPU), ("renderD129", OTHER)):
        (tmp_path / "nodes").write_text(node)
        machine.look(gpus)
        rule, reading = only(gpus)
        assert (rule, reading.gpu) == ("render_nodes", gpu)  # type: ignore[attr-defined]


def test_an_old_share_is_not_shown(machine: Machine) -> None:
    add_card(machine.sys, 1, GPU)
    proc = FakeProc(machine.proc)
    proc.open_gpu(proc.engine(100), GPU, GIB)
    gpus = machine.gpus()
    machine.look(gpus)
    machine.clock.at += 60
    gpus.sysfs.step()
    _, readings, _ = gpus_of(gpus.take(), "vllm", Claimed(), machine.clock.at - 15)
    assert readings[0].own_bytes is None


def test_scanning_everything_is_for_when_something_changed(machine: Machine) -> None:
    add_card(machine.sys, 1, GPU)
    proc = FakeProc(machine.proc)
    proc.open_gpu(proc.engine(100), GPU, GIB)
    gpus = machine.gpus()
    machine.look(gpus)
    machine.look(gpus, 200)
    proc.add(102, "VLLM::Worker_TP1", parent=100)
    proc.open_gpu(102, GPU, GIB, client=2)
    machine.look(gpus, 5)
    held: Callable[[], object] = lambda: gpus.ownership.owned["vllm"].held.bytes_by_gpu[GPU]  # type: ignore[union-attr]  # noqa: E731
    assert held() == GIB
    machine.look(gpus, 31)
    assert held() == 2 * GIB


def test_a_lasting_difference_is_a_line_of_the_verdicts_evidence(stop: threading.Event) -> None:
    clock = FakeClock()
    far = Difference(GPU, "amdsmi", "sysfs", 5 * GIB, lasting=True)
    snapshot = GpuSnapshot(
        (Named(GPU),),
        {GPU: GpuReading(clock.at, GPU, 192 * GIB, 100 * GIB)},
        differences=(far, replace(far, gpu=OTHER)),
    )

    class Told:
        statuses = ()

        def take(self) -> GpuSnapshot:
            return snapshot

    feed = EngineFeed("vllm", FakeVisitor([good(clock.at), good(clock.at)]), 5.0, clock, stop)
    board = Board(View(0.0))
    poller = Poller([watch_of(feed)], Told(), board, clock, stop, interval_s=5.0)
    for _ in range(2):
        feed.step()
        poller.tick()
    target = board.view.targets[0]
    assert target.assessment is not None
    (verdict,) = target.assessment.verdicts
    rows = [row for row in verdict.evidence if row.signal == "gpu_source_difference"]
    assert [(row.value, row.weight) for row in rows] == [(5.0 * GIB, 0.0)], "only of the target's own GPU"
    assert verdict.phase == "clear"
    assert target.gpus[0].differences == (far,)


def test_on_nvidia_nobody_misses_an_amd_card(machine: Machine) -> None:
    (machine.sys / "class" / "drm").mkdir(parents=True)
    gpus = machine.gpus(FakeSource("nvml", device()))
    machine.look(gpus)
    assert [status.source for status in gpus.statuses] == ["nvml"]


def test_parts_are_told_by_kfd_or_else_by_a_library(machine: Machine) -> None:
    add_card(machine.sys, 1, GPU)
    FakeProc(machine.proc, host=True)
    part = Partition(0, TOTAL // 8, GIB)
    gpus = machine.gpus(FakeSource("amdsmi", device(partitions=(part,))), names=("sysfs", "amdsmi", "kfd"))
    machine.look(gpus)
    assert gpus.take().partitions == {GPU: (part,)}
    for number in range(2):
        add_node(machine.sys, number + 1, GPU, 5000 + number, partition=number, total=TOTAL // 2)
    machine.look(gpus, 31)
    assert [p.total_bytes for p in gpus.take().partitions[GPU]] == [TOTAL // 2] * 2


def test_parts_and_render_nodes_are_told_without_the_hosts_process_ids(machine: Machine, tmp_path: Path) -> None:
    for number, gpu in ((1, GPU), (2, OTHER)):
        add_card(machine.sys, number, gpu)
    FakeProc(machine.proc).engine(100)
    for number in range(2):
        add_node(machine.sys, number, GPU, 5000 + number, partition=number, total=TOTAL // 2, minor=140 + number)
    (tmp_path / "nodes").write_text("renderD141")
    gpus = machine.gpus(render_nodes_file=tmp_path / "nodes")
    assert "kfd" not in gpus.choice.attribution
    machine.look(gpus)
    assert len(gpus.take().partitions[GPU]) == 2
    assert only(gpus)[0] == "render_nodes"
    listed = machine.gpus(names=("sysfs",))
    machine.look(listed)
    assert listed.take().partitions == {}, "a list is obeyed"


def test_kfd_that_appears_after_the_start_is_asked(machine: Machine) -> None:
    add_card(machine.sys, 1, GPU, mem_info_vram_used=str(180 * GIB))
    worker = FakeProc(machine.proc, host=True).engine(100)
    gpus = machine.gpus()
    machine.look(gpus)
    assert only(gpus)[1].own_bytes is None  # type: ignore[attr-defined]
    add_node(machine.sys, 1, GPU, 4001)
    compute(machine.sys, worker, vram_4001=150 * GIB)
    machine.look(gpus, 31)
    assert only(gpus)[1].own_bytes == 150 * GIB  # type: ignore[attr-defined]
    assert "kfd" in [status.source for status in gpus.statuses]


def test_while_there_is_no_engine_not_every_look_is_a_scan(machine: Machine) -> None:
    add_card(machine.sys, 1, GPU)
    proc = FakeProc(machine.proc)
    proc.add(300, "/pause")
    gpus = machine.gpus()
    machine.look(gpus)
    proc.open_gpu(proc.engine(100), GPU, GIB)
    machine.look(gpus, 5)
    assert gpus.ownership.owned["vllm"].held is None
    machine.look(gpus, 11)
    assert gpus.ownership.owned["vllm"].held is not None
