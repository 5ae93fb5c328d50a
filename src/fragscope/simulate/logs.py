"""What vLLM and PyTorch print when something happens, line by line, with the delay of each line in seconds."""

import time
from dataclasses import dataclass

from fragscope.simulate.allocator import GIB, MIB, OutOfMemoryError

_HINT = (
    "If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation.  See documentation for Memory Management  "
    "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)

Lines = list[tuple[float, str]]
"""(seconds after the first, line)"""


@dataclass(frozen=True, slots=True)
class Pids:
    """The processes of one server."""

    api: int
    core: int
    worker: int
    rank: int = 0
    ranks: int = 1

    @property
    def worker_name(self) -> str:
        """How the worker signs its lines."""
        return f"Worker_TP{self.rank} pid={self.worker}" if self.ranks > 1 else f"Worker pid={self.worker}"


def size(number: int) -> str:
    """A size as the allocator prints it: two decimals, in the largest unit that fits."""
    if number <= 1024:
        return f"{number} bytes"
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if number > unit:
            return f"{number / unit:.2f} {name}"
    return f"{number / 1024:.2f} KiB"


def oom_message(oom: OutOfMemoryError, gpu: int) -> str:
    """The exception's text on ROCm, which has no clause about processes."""
    return (
        f"HIP out of memory. Tried to allocate {size(oom.tried_bytes)}. GPU {gpu} has a total capacity of "
        f"{size(oom.total_bytes)} of which {size(oom.free_bytes)} is free. Of the allocated memory "
        f"{size(oom.allocated_bytes)} is allocated by PyTorch, and {size(oom.stranded_bytes)} is reserved by PyTorch "
        f"but unallocated. {_HINT}"
    )


class Scribe:
    """Writes one server's lines."""

    def __init__(self, pids: Pids) -> None:
        self.pids = pids

    def _api(self, at: float, level: str, where: str, text: str) -> str:
        return f"(APIServer pid={self.pids.api}) {level} {_stamp(at)} [{where}] {text}"

    def _core(self, at: float, level: str, where: str, text: str) -> str:
        return f"(EngineCore pid={self.pids.core}) {level} {_stamp(at)} [{where}] {text}"

    def _worker(self, at: float, text: str) -> str:
        return f"({self.pids.worker_name}) ERROR {_stamp(at)} [multiproc_executor.py:1063] {text}"

    def stats(self, at: float, engine: int, figures: tuple[float, float, int, int, float]) -> str:
        """The line every ten seconds; `figures`: prompt and generation tokens/s, running, waiting, usage."""
        prompt, generation, running, waiting, usage = figures
        return self._api(
            at,
            "INFO",
            "loggers.py:335",
            f"Engine {engine:03d}: Avg prompt throughput: {prompt:.1f} tokens/s, Avg generation throughput: "
            f"{generation:.1f} tokens/s, Running: {running} reqs, Waiting: {waiting} reqs, "
            f"GPU KV cache usage: {100 * usage:.1f}%, Prefix cache hit rate: 0.0%",
        )

    def failed_step(self, at: float, error: str, running: int, usage: float) -> Lines:
        """A worker raises in a step: everything that follows until the server is gone."""
        name, _, message = error.partition(": ")
        return [
            (0.0, self._worker(at, "WorkerProc hit an exception.")),
            (0.0, self._worker(at, "Traceback (most recent call last):")),
            (0.0, self._worker(at, error)),
            (0.01, self._worker(at, error)),
            (
                0.02,
                self._core(
                    at,
                    "ERROR",
                    "dump_input.py:81",
                    f"Dumping scheduler stats: SchedulerStats(num_running_reqs={running}, kv_cache_usage={usage!r})",
                ),
            ),
            (0.02, self._core(at, "ERROR", "core.py:1512", "EngineCore encountered a fatal error.")),
            (
                0.03,
                self._core(
                    at,
                    "ERROR",
                    "core.py:1512",
                    f"RuntimeError: Worker failed with error '{message or name}', "
                    "please check the stack trace above for the root cause",
                ),
            ),
            *self._engine_dead(at, 0.05),
            *self.server_ends(0.15),
        ]

    def core_vanished(self, at: float) -> Lines:
        """The engine core is killed: the server notices and cleans up."""
        text = "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup"
        return [
            (0.0, self._api(at, "WARNING", "core_client.py:817", text)),
            (0.02, self._api(at, "INFO", "core_client.py:772", "[shutdown] MPClient: stopping engine manager")),
            *self._engine_dead(at, 0.05),
        ]

    def worker_fault(self, at: float, node: int) -> Lines:
        """The driver reports a fault; the worker aborts and takes the engine with it."""
        address = f"0x7f{(int(at) * 2654435761) % 2**32:08x}000"
        fault = f"Memory access fault by GPU node-{node} (Agent handle: 0x55d0c0de0000) on address {address}. "
        dead = f"Worker proc VllmWorker-{self.pids.rank} died unexpectedly (exit code: -6), shutting down executor."
        return [
            (0.0, fault + "Reason: Page not present or supervisor privilege."),
            (0.1, self._core(at, "ERROR", "multiproc_executor.py:230", dead)),
            (0.1, self._core(at, "ERROR", "core.py:1512", "EngineCore encountered a fatal error.")),
            *self._engine_dead(at, 0.12),
            *self.server_ends(0.2),
        ]

    def host_killed(self, at: float, *, with_kernel: bool) -> Lines:
        """The host's OOM killer takes the worker; the kernel's own line is in the log only where it is collected."""
        dead = f"Worker proc VllmWorker-{self.pids.rank} died unexpectedly (exit code: -9), shutting down executor."
        kernel = (
            f"Memory cgroup out of memory: Killed process {self.pids.worker} (VLLM::Worker_TP) total-vm:402653184kB, "
            "anon-rss:63912116kB, file-rss:1204kB, shmem-rss:20971520kB, UID:0 pgtables:311296kB oom_score_adj:987"
        )
        return [
            *([(0.0, kernel)] if with_kernel else []),
            (0.1, self._core(at, "ERROR", "multiproc_executor.py:230", dead)),
            (0.1, self._core(at, "ERROR", "core.py:1512", "EngineCore encountered a fatal error.")),
            *self._engine_dead(at, 0.12),
            *self.server_ends(0.2),
        ]

    def shutdown(self, at: float, *, in_flight: bool) -> Lines:
        """SIGTERM: the order to stop comes first, whatever breaks after it."""
        lines = [
            (0.0, self._api(at, "INFO", "launcher.py:254", "[shutdown] API server: shutdown triggered")),
            (0.02, self._core(at, "INFO", "core.py:1454", "[shutdown] EngineCore: trigger received signal=SIGTERM")),
            (0.03, self._api(at, "INFO", "utils.py:628", _SIGTERM)),
        ]
        if in_flight:
            lines += self._engine_dead(at, 0.1)
        return lines + self.server_ends(0.4)

    def no_room(self, at: float, free: int, total: int, utilization: float) -> Lines:
        """The start that fails for want of free memory."""
        wanted = utilization * total
        text = (
            f"ValueError: Free memory on device cuda:0 ({free / GIB:.2f}/{total / GIB:.2f} GiB) on startup is less "
            f"than desired GPU memory utilization ({utilization}, {wanted / GIB:.2f} GiB). Decrease GPU memory "
            "utilization or reduce GPU memory used by other processes."
        )
        failed = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
        return [
            (0.0, self._core(at, "ERROR", "core.py:1100", "EngineCore failed to start.")),
            (0.0, self._core(at, "ERROR", "core.py:1100", text)),
            (0.2, self._api(at, "ERROR", "api_server.py:90", failed)),
        ]

    def started(self, tokens: int) -> Lines:
        """The last lines of a start."""
        text = f"GPU KV cache size: {tokens:,} tokens"
        return [
            (0.0, f"(EngineCore pid={self.pids.core}) INFO [kv_cache_utils.py:1290] {text}"),
            (0.5, f"INFO:     Started server process [{self.pids.api}]"),
            (0.5, "INFO:     Application startup complete."),
        ]

    def _engine_dead(self, at: float, delay: float) -> Lines:
        text = (
            "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. "
            "See stack trace (above) for the root cause."
        )
        return [
            (delay, self._api(at, "ERROR", "async_llm.py:906", "AsyncLLM output_handler failed.")),
            (delay, self._api(at, "ERROR", "async_llm.py:906", text)),
        ]

    def server_ends(self, delay: float) -> Lines:
        """The last words of the HTTP server."""
        return [
            (delay, "INFO:     Shutting down"),
            (delay, "INFO:     Application shutdown complete."),
            (delay, f"INFO:     Finished server process [{self.pids.api}]"),
        ]


_SIGTERM = "[shutdown] Process manager: send sigterm to process EngineCore"


def _stamp(at: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.gmtime(at))
