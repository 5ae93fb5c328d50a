"""A tree of files like /proc and KFD's part of /sys, for tests of whose memory it is."""

from pathlib import Path

SELF = 4242
CONTAINER = "ab" * 32
OTHER_CONTAINER = "cd" * 32
LISTENER = "  0: 00000000:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000  0        0 {inode} 1\n"
TCP_HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
FDINFO_NEWER = "drm-driver:\tamdgpu\ndrm-pdev:\t{gpu}\ndrm-client-id:\t{client}\ndrm-resident-vram:\t{kib} KiB\n"
FDINFO_OLDER = "drm-driver:\tamdgpu\ndrm-pdev:\t{gpu}\ndrm-client-id:\t{client}\ndrm-memory-vram:\t{kib} KiB\n"


class FakeProc:
    """Grows a process at a time; everything lives in one network unless told otherwise."""

    def __init__(self, root: Path, *, host: bool = False) -> None:
        self.root = root
        self.add(SELF, "/opt/fragscope/bin/python", "-m", "fragscope", "serve")
        (root / "self").symlink_to(str(SELF))
        if host:
            self.add(2)
            (root / "2" / "comm").write_text("kthreadd\n")

    def add(self, pid: int, *arguments: str, parent: int = 1, container: str | None = None) -> Path:
        folder = self.root / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "fdinfo").mkdir()
        (folder / "net").mkdir()
        (folder / "cmdline").write_bytes("\0".join(arguments).encode() + (b"\0" if arguments else b""))
        (folder / "stat").write_text(f"{pid} (a (strange) name) S {parent} 1 1 0 -1 4194560\n")
        cgroup = f"0::/kubepods.slice/cri-containerd-{container}.scope\n" if container else "0::/user.slice/session-1\n"
        (folder / "cgroup").write_text(cgroup)
        return folder

    def listen(self, port: int, *pids: int, inode: int = 777) -> None:
        """The socket as the network of these processes shows it."""
        for pid in pids:
            (self.root / str(pid) / "net" / "tcp").write_text(TCP_HEAD + LISTENER.format(port=port, inode=inode))

    def hold(self, pid: int, inode: int) -> None:
        """A socket that the process has open."""
        (self.root / str(pid) / "fd" / "3").symlink_to(f"socket:[{inode}]")

    def live_at(self, address: str, *pids: int) -> None:
        """The address is local in the network of these processes."""
        route = f"Local:\n  +-- 10.0.0.0/8 2 0 2\n     |-- {address}\n        /32 host LOCAL\n"
        for pid in pids:
            (self.root / str(pid) / "net" / "fib_trie").write_text(route)

    def open_gpu(
        self,
        pid: int,
        gpu: str,
        held_bytes: int,
        *,
        client: int = 1,
        form: str = FDINFO_NEWER,
        node: str = "renderD128",
    ) -> None:
        number = str(10 + len(list((self.root / str(pid) / "fd").iterdir())))
        (self.root / str(pid) / "fd" / number).symlink_to(f"/dev/dri/{node}")
        text = form.format(gpu=gpu, client=client, kib=held_bytes // 1024)
        (self.root / str(pid) / "fdinfo" / number).write_text(text)

    def engine(self, pid: int = 100, *, port: int = 8000, container: str | None = None) -> int:
        """A server and its worker, which holds the memory; returns the worker."""
        self.add(pid, "/usr/bin/python3", "/usr/local/bin/vllm", "serve", "m", "--port", str(port), container=container)
        self.add(pid + 1, "VLLM::Worker_TP0", parent=pid, container=container)
        self.listen(port, pid, SELF)
        return pid + 1


def location(gpu: str, partition: int = 0) -> int:
    """KFD's location_id of a PCI address."""
    _, bus, rest = gpu.split(":")
    device, function = rest.split(".")
    return int(bus, 16) << 8 | int(device, 16) << 3 | int(function) | partition << 28


def add_node(
    root: Path,
    number: int,
    gpu: str,
    kfd_id: int,
    *,
    partition: int = 0,
    total: int = 206141652992,
    used: int | None = None,
    minor: int = 128,
) -> Path:
    """A GPU, or a part of one, as KFD's topology lists it; id 0 is a CPU."""
    node = root / "class" / "kfd" / "kfd" / "topology" / "nodes" / str(number)
    bank = node / "mem_banks" / "0"
    bank.mkdir(parents=True)
    (root / "class" / "kfd" / "kfd" / "proc").mkdir(exist_ok=True)
    (node / "gpu_id").write_text(f"{kfd_id}\n")
    properties = f"cpu_cores_count 0\ndrm_render_minor {minor}\ndomain 0\nlocation_id {location(gpu, partition)}\n"
    (node / "properties").write_text(properties)
    (bank / "properties").write_text(f"heap_type 1\nsize_in_bytes {total}\nflags 0\n")
    if used is not None:
        (bank / "used_memory").write_text(f"{used}\n")
    return node


def compute(root: Path, pid: int, **held_bytes: int) -> Path:
    """A process that computes: `vram_<kfd_id>=bytes`."""
    folder = root / "class" / "kfd" / "kfd" / "proc" / str(pid)
    folder.mkdir(parents=True)
    for name, size in held_bytes.items():
        (folder / name).write_text(f"{size}\n")
    return folder
