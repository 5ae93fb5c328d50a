"""Whose memory it is: KFD, fdinfo and the engine's processes, on trees of files like /proc and /sys."""

import os
from pathlib import Path

import pytest

from fragscope.model import Gap, Reason
from fragscope.sources.gpu import fdinfo, kfd
from fragscope.sources.gpu.engine_processes import engine_pids, says_vllm
from fragscope.sources.gpu.holdings import Held
from fragscope.sources.gpu.render_nodes import read_render_nodes
from tests.sources.fake_proc import (
    CONTAINER,
    FDINFO_OLDER,
    OTHER_CONTAINER,
    SELF,
    FakeProc,
    add_node,
    compute,
)

GIB = 2**30
GPU, OTHER = "0000:c1:00.0", "0000:c6:00.0"
URL = "http://127.0.0.1:8000"
PUBLIC_FDINFO = """pos:    0
flags:  02104002
mnt_id: 24
ino:    614
pasid:  32784
drm-driver:     amdgpu
drm-pdev:       0000:08:00.0
drm-client-id:  217
drm-memory-vram:        2068 KiB
drm-memory-gtt:         8192 KiB
drm-memory-cpu:         0 KiB
drm-engine-gfx: 107322799 ns
"""
"""As shown in a public issue (Umio-Yasuno/amdgpu_top 87)."""


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path / "proc")


@pytest.fixture
def host(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path / "proc", host=True)


@pytest.fixture
def sys_root(tmp_path: Path) -> Path:
    return tmp_path / "sys"


def reason(found: object) -> Reason:
    assert isinstance(found, Gap)
    return found.reason


def held(found: Held | Gap) -> Held:
    assert isinstance(found, Held), found
    return found


def openings_held(proc: FakeProc, pids: set[int]) -> Held | Gap:
    openings = fdinfo.read_openings(proc.root, pids)
    return openings if isinstance(openings, Gap) else fdinfo.read_held(openings)


# The engine's processes.


@pytest.mark.parametrize(
    "line",
    [
        "vllm serve m",
        "/usr/bin/python3 /opt/venv/bin/vllm serve m --port 8000",
        "python -m vllm.entrypoints.openai.api_server --model m",
        "python -m vllm.entrypoints.cli.main serve m",
        "VLLM::EngineCore",
        "VLLM::Worker_TP3",
    ],
)
def test_a_process_says_that_it_is_vllm(line: str) -> None:
    assert says_vllm(tuple(line.split()))


@pytest.mark.parametrize(
    "line",
    [
        "grep vllm",
        "/usr/bin/python3 /usr/local/bin/vllm bench serve --port 8000",
        "vllm chat --url http://127.0.0.1:8000/v1",
        "python -m vllm.entrypoints.cli.main bench serve",
        "python -m vllm.benchmarks.serve --port 8000",
        "vim /etc/vllm",
        "docker run vllm/vllm-openai",
        "fragscope serve --target http://vllm:8000",
        "python train.py --out vllm",
        "kubectl logs vllm",
        "",
    ],
)
def test_a_process_that_only_speaks_of_vllm_is_none(line: str) -> None:
    assert not says_vllm(tuple(line.split()))


def test_the_engine_is_its_server_and_everything_below_it(proc: FakeProc) -> None:
    proc.engine(100)
    proc.add(102, "python3", "-c", "from multiprocessing.spawn import spawn_main", parent=101)
    proc.add(300, "python3", "train.py")
    assert engine_pids(proc.root, URL) == frozenset({100, 101, 102})


def test_in_one_container_other_processes_come_along(proc: FakeProc) -> None:
    proc.engine(100, container=CONTAINER)
    proc.add(150, "ray::RayWorkerWrapper", container=CONTAINER)
    proc.add(300, "python3", "train.py", container=OTHER_CONTAINER)
    assert engine_pids(proc.root, URL) == frozenset({100, 101, 150})


def test_a_login_session_is_no_container(proc: FakeProc) -> None:
    proc.engine(100)
    proc.add(300, "python3", "train.py")
    assert engine_pids(proc.root, URL) == frozenset({100, 101})


def test_two_engines_are_told_apart_by_their_ports(proc: FakeProc) -> None:
    proc.engine(100, port=8000)
    proc.engine(200, port=8001)
    for pid in (100, 200, SELF):
        path = proc.root / str(pid) / "net" / "tcp"
        proc.listen(8000, pid)
        first = path.read_text()
        proc.listen(8001, pid, inode=778)
        path.write_text(first + path.read_text())
    assert engine_pids(proc.root, URL) == frozenset({100, 101})
    assert engine_pids(proc.root, "http://127.0.0.1:8001") == frozenset({200, 201})


def test_two_engines_on_one_port_are_nobodys(proc: FakeProc) -> None:
    proc.engine(100)
    proc.engine(200)
    assert reason(engine_pids(proc.root, URL)) is Reason.UNASSIGNED


def test_an_engine_in_another_network_does_not_answer_on_our_loopback(proc: FakeProc) -> None:
    proc.engine(100)
    proc.listen(8000, 100, inode=999)
    assert reason(engine_pids(proc.root, URL)) is Reason.UNASSIGNED


def test_an_engine_is_found_by_its_pods_address(proc: FakeProc) -> None:
    for pid, address in ((100, "10.1.2.3"), (200, "10.1.2.4")):
        proc.engine(pid)
        proc.live_at(address, pid)
    assert engine_pids(proc.root, "http://10.1.2.4:8000") == frozenset({200, 201})
    assert reason(engine_pids(proc.root, "http://10.1.2.5:8000")) is Reason.UNASSIGNED
    assert reason(engine_pids(proc.root, "http://llama.prod.svc:8000")) is Reason.UNASSIGNED


def test_a_neighbour_on_the_same_address_is_not_taken_for_a_dead_engine(proc: FakeProc) -> None:
    proc.engine(200, port=8001)
    proc.live_at("10.0.0.5", 200)
    assert reason(engine_pids(proc.root, "http://10.0.0.5:8000")) is Reason.UNASSIGNED
    assert engine_pids(proc.root, "http://10.0.0.5:8001") == frozenset({200, 201})


def test_a_neighbour_on_the_loopback_is_not_taken_for_whoever_listens_there(proc: FakeProc) -> None:
    proc.add(50, "python3", "serve_llm.py")
    proc.engine(200, port=8001)
    proc.listen(8000, 50, 200, SELF)
    proc.hold(50, 777)
    assert reason(engine_pids(proc.root, URL)) is Reason.UNASSIGNED


def test_holding_the_listening_socket_counts_more_than_what_is_said(proc: FakeProc) -> None:
    proc.add(100, "vllm", "serve", "m", "--config", "server.yaml")
    proc.add(101, "VLLM::ApiServer_0", parent=100)
    proc.engine(200, port=8001)
    proc.listen(8000, 100, 200, SELF)
    assert reason(engine_pids(proc.root, URL)) is Reason.UNASSIGNED, "a file of settings may say any port"
    proc.hold(101, 777)
    assert engine_pids(proc.root, URL) == frozenset({100, 101})


def test_the_default_port_is_believed_until_another_is_seen_to_hold_it(proc: FakeProc) -> None:
    proc.add(100, "vllm", "serve", "m")
    proc.live_at("10.0.0.5", 100)
    assert engine_pids(proc.root, "http://10.0.0.5:8000") == frozenset({100})
    assert reason(engine_pids(proc.root, "http://10.0.0.5:8001")) is Reason.UNASSIGNED
    proc.listen(8000, 100)
    assert reason(engine_pids(proc.root, "http://10.0.0.5:8000")) is Reason.UNASSIGNED


def test_a_benchmark_beside_the_engine_takes_nothing_from_it(proc: FakeProc) -> None:
    proc.engine(100)
    proc.add(400, "/usr/bin/python3", "/usr/local/bin/vllm", "bench", "serve", "--port", "8000")
    proc.listen(8000, 400)
    assert engine_pids(proc.root, URL) == frozenset({100, 101})


def test_a_worker_left_behind_says_no_port(proc: FakeProc) -> None:
    proc.add(101, "VLLM::EngineCore")
    proc.live_at("10.0.0.5", 101)
    assert reason(engine_pids(proc.root, "http://10.0.0.5:8000")) is Reason.UNASSIGNED


def test_seeing_only_ourselves_is_blindness(proc: FakeProc) -> None:
    assert reason(engine_pids(proc.root, URL)) is Reason.BLIND
    proc.add(300, "/pause")
    assert reason(engine_pids(proc.root, URL)) is Reason.ABSENT


# KFD.


def test_kfd_counts_the_engines_memory_by_gpu(host: FakeProc, sys_root: Path) -> None:
    add_node(sys_root, 0, "0000:00:00.0", 0)
    add_node(sys_root, 1, GPU, 4001)
    add_node(sys_root, 2, OTHER, 4002)
    compute(sys_root, 100, vram_4001=0, vram_4002=0)
    compute(sys_root, 101, vram_4001=150 * GIB, vram_4002=2 * 2**20)
    compute(sys_root, 300, vram_4001=30 * GIB)
    assert kfd.why_not(sys_root, host.root) is None
    found = held(kfd.read_held(sys_root, {100, 101, 102}, kfd.read_topology(sys_root)))
    assert found.gpus() == {GPU}
    assert (found.own_bytes(GPU), found.own_bytes(OTHER), found.own_bytes("0000:01:00.0")) == (150 * GIB, 2 * 2**20, 0)


def test_kfd_is_blind_where_the_hosts_ids_are_not_shown(proc: FakeProc, sys_root: Path) -> None:
    add_node(sys_root, 1, GPU, 4001)
    assert reason(kfd.why_not(sys_root, proc.root)) is Reason.BLIND
    assert reason(kfd.why_not(sys_root / "none", proc.root)) is Reason.ABSENT


def test_files_that_touch_the_hardware_are_never_read(host: FakeProc, sys_root: Path) -> None:
    add_node(sys_root, 1, GPU, 4001)
    folder = compute(sys_root, 101, vram_4001=GIB)
    os.mkfifo(folder / "sdma_4001")
    (folder / "stats_4001").mkdir()
    os.mkfifo(folder / "stats_4001" / "cu_occupancy")
    assert held(kfd.read_held(sys_root, {101}, kfd.read_topology(sys_root))).own_bytes(GPU) == GIB


def test_memory_on_a_gpu_without_an_address_is_a_gap_and_not_left_out(sys_root: Path) -> None:
    add_node(sys_root, 1, GPU, 4001)
    compute(sys_root, 101, vram_4001=GIB, vram_4002=GIB)
    assert reason(kfd.read_held(sys_root, {101}, kfd.read_topology(sys_root))) is Reason.DENIED


def test_a_process_that_does_not_compute_holds_nothing_known(sys_root: Path) -> None:
    add_node(sys_root, 1, GPU, 4001)
    assert reason(kfd.read_held(sys_root, {101}, kfd.read_topology(sys_root))) is Reason.ABSENT


@pytest.mark.parametrize("text", ["", "N/A", "-1", "1e9", "12 MB", str(2**63), "\x00"])
def test_what_is_no_size_makes_the_sum_a_gap(sys_root: Path, text: str) -> None:
    add_node(sys_root, 1, GPU, 4001)
    (compute(sys_root, 101) / "vram_4001").write_text(text)
    assert reason(kfd.read_held(sys_root, {101}, kfd.read_topology(sys_root))) is Reason.MALFORMED


def test_a_denied_node_is_a_gap_and_the_others_are_read(sys_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_node(sys_root, 1, GPU, 4001)
    closed = add_node(sys_root, 2, OTHER, 4002) / "gpu_id"
    read_text = Path.read_text

    def denying(path: Path, **given: str) -> str:
        if path == closed:
            raise PermissionError(1, "Operation not permitted")
        return read_text(path, **given)

    monkeypatch.setattr(Path, "read_text", denying)
    found = kfd.read_topology(sys_root)
    assert [node.gpu for node in found.nodes] == [GPU]
    assert [gap.reason for gap in found.gaps] == [Reason.DENIED]


def test_parts_of_a_gpu_are_listed_and_never_added(sys_root: Path) -> None:
    for part in range(8):
        add_node(
            sys_root, part + 1, GPU, 5000 + part, partition=part, total=24 * GIB, used=part * GIB, minor=128 + part
        )
    add_node(sys_root, 9, OTHER, 6000, minor=140)
    found = kfd.read_topology(sys_root)
    (parts,) = found.partitions().values()
    assert [part.number for part in parts] == list(range(8))
    assert {part.total_bytes for part in parts} == {24 * GIB}
    assert parts[3].used_bytes == 3 * GIB
    assert found.gpu_of_render()["renderD131"] == GPU


def test_older_kernels_number_parts_by_function(sys_root: Path) -> None:
    for part in range(2):
        add_node(sys_root, part + 1, f"0000:c1:00.{part}", 5000 + part, total=96 * GIB)
    assert set(kfd.read_topology(sys_root, {GPU}).partitions()) == {GPU}


def test_a_function_of_its_own_is_a_gpu_of_its_own(sys_root: Path) -> None:
    add_node(sys_root, 1, "0000:c1:00.1", 5000)
    found = kfd.read_topology(sys_root, {"0000:c1:00.1"})
    assert [node.gpu for node in found.nodes] == ["0000:c1:00.1"]


# fdinfo.


def test_fdinfo_counts_each_opening_once(proc: FakeProc) -> None:
    worker = proc.engine(100)
    proc.open_gpu(worker, GPU, 150 * GIB, client=7)
    proc.open_gpu(worker, GPU, 150 * GIB, client=7)
    proc.open_gpu(100, GPU, 150 * GIB, client=7)
    proc.open_gpu(100, GPU, 1 * GIB, client=8)
    found = held(openings_held(proc, {100, worker}))
    assert found.own_bytes(GPU) == 151 * GIB
    assert found.gpus() == {GPU}


def test_an_older_kernels_figure_tells_which_gpu_but_not_how_much(proc: FakeProc) -> None:
    worker = proc.engine(100)
    proc.open_gpu(worker, GPU, 3 * GIB, form=FDINFO_OLDER)
    proc.open_gpu(worker, OTHER, 0, client=2, form=FDINFO_OLDER)
    found = held(openings_held(proc, {worker}))
    assert found.gpus() == {GPU}
    assert found.own_bytes(GPU) is None


def test_opened_gpus_without_a_model_are_not_held(proc: FakeProc) -> None:
    worker = proc.engine(100)
    proc.open_gpu(worker, GPU, 2 * 2**20)
    found = held(openings_held(proc, {worker}))
    assert (found.gpus(), found.opened, found.own_bytes(GPU)) == (frozenset(), frozenset({GPU}), None)


def test_a_real_fdinfo_is_understood() -> None:
    client = fdinfo.parse(PUBLIC_FDINFO)
    assert client == fdinfo.Client("0000:08:00.0", "217", 2068 * 1024, complete=False)


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("drm-total-vram: 4096", 4096),
        ("drm-resident-vram: 3 MiB", 3 * 2**20),
        ("drm-resident-vram: 1 KiB\ndrm-total-vram: 9 KiB", 1024),
        ("drm-memory-vram: 2 KiB\ndrm-total-vram: 9 KiB", 2048),
    ],
)
def test_sizes_have_units_or_are_bytes(line: str, size: int) -> None:
    client = fdinfo.parse(f"drm-driver: amdgpu\ndrm-pdev: {GPU}\ndrm-client-id: 1\n{line}\n")
    assert isinstance(client, fdinfo.Client)
    assert client.vram_bytes == size


@pytest.mark.parametrize("size", ["-1 KiB", "N/A", "", "12 MB", "1.5 GiB", "9" * 30, f"{2**60} KiB"])
def test_a_size_that_is_none_is_malformed(size: str) -> None:
    found = fdinfo.parse(f"drm-driver: amdgpu\ndrm-pdev: {GPU}\ndrm-client-id: 1\ndrm-total-vram: {size}\n")
    assert reason(found) is Reason.MALFORMED


def test_other_drivers_are_passed_over() -> None:
    assert fdinfo.parse("drm-driver: i915\ndrm-pdev: 0000:00:02.0\ndrm-client-id: 1\n") is None
    assert fdinfo.parse("pos: 0\n") is None


def test_a_process_of_another_user_makes_it_denied(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = proc.engine(100)
    proc.open_gpu(100, GPU, GIB)
    scandir = os.scandir

    def denying(path: str) -> object:
        if path == f"{proc.root}/{worker}/fd":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denying)
    found = openings_held(proc, {100, worker})
    assert reason(found) is Reason.DENIED
    assert isinstance(found, Gap)
    assert "no fewer capabilities" in found.detail, "the same user is not enough beside a privileged engine"


def test_a_process_that_has_ended_holds_nothing(proc: FakeProc) -> None:
    worker = proc.engine(100)
    proc.open_gpu(worker, GPU, GIB)
    assert held(openings_held(proc, {worker, 99999})).own_bytes(GPU) == GIB


# The file of render nodes.


@pytest.mark.parametrize(
    "listing",
    [
        "by-path card1 renderD129 renderD130\n",
        "/dev/dri/card1\n/dev/dri/renderD129\n/dev/dri/renderD130\n",
        "crw-rw---- 1 root render 226, 129 Nov 30 renderD129\ncrw-rw---- 1 root render 226, 130 Nov 30 renderD130\n",
    ],
)
def test_a_listing_in_any_form_names_the_render_nodes(tmp_path: Path, listing: str) -> None:
    (tmp_path / "nodes").write_text(listing)
    assert read_render_nodes(tmp_path / "nodes", tmp_path) == frozenset({"renderD129", "renderD130"})


def test_a_render_node_of_another_vendor_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("renderD128 renderD129")
    device = tmp_path / "class" / "drm" / "renderD128" / "device"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x8086\n")
    assert read_render_nodes(tmp_path / "nodes", tmp_path) == frozenset({"renderD129"})


@pytest.mark.parametrize("listing", ["", "card0\n", "\x00\xff"])
def test_a_listing_without_render_nodes_is_malformed(tmp_path: Path, listing: str) -> None:
    (tmp_path / "nodes").write_text(listing)
    assert reason(read_render_nodes(tmp_path / "nodes", tmp_path)) is Reason.MALFORMED
    assert reason(read_render_nodes(tmp_path / "none", tmp_path)) is Reason.ABSENT
