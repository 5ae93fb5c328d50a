"""What one log line establishes, in the allocator's and vLLM's own words."""

import pytest

from fragscope.explain.lines import read_line
from fragscope.explain.oom import read_oom
from fragscope.model import Fact

GIB, MIB = 2**30, 2**20
HIP = (
    "(Worker pid=1) ERROR 11-30 15:00:17 [multiproc_executor.py:1063] torch.OutOfMemoryError: HIP out of memory. "
    "Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 191.98 GiB of which 830.00 MiB is free. "
    "Of the allocated memory 181.29 GiB is allocated by PyTorch, and 9.87 GiB is reserved by PyTorch but unallocated. "
    "If reserved but unallocated memory is large try setting PYTORCH_HIP_ALLOC_CONF=expandable_segments:True"
)


def test_the_hip_message_gives_its_figures_in_bytes() -> None:
    assert read_oom(HIP) == {
        "tried": round(2.5 * GIB),
        "total": round(191.98 * GIB),
        "free": 830 * MIB,
        "allocated": round(181.29 * GIB),
        "reserved_unallocated": round(9.87 * GIB),
    }


def test_the_cuda_message_with_its_clauses_is_read_too() -> None:
    message = (
        "CUDA out of memory. Tried to allocate 20.00 MiB. "
        "GPU 1 has a total capacty of 79.15 GiB of which 0 bytes is free. "
        "Including non-PyTorch memory, this process has 79.10 GiB memory in use. 40.00 GiB allowed; "
        "Of the allocated memory 70.00 GiB is allocated by PyTorch, with 1.50 GiB allocated in private pools "
        "(e.g., CUDA Graphs), and 512.00 KiB is reserved by PyTorch but unallocated."
    )
    facts = read_oom(message)
    assert facts is not None
    assert facts["free"] == 0
    assert facts["private_pools"] == 1.5 * GIB
    assert facts["allowed"] == 40 * GIB
    assert facts["in_use"] == round(79.1 * GIB)
    assert facts["reserved_unallocated"] == 512 * 2**10


def test_a_message_without_figures_has_none() -> None:
    assert read_oom("RuntimeError: HIP out of memory.") == {}


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (HIP, Fact.OOM),
        ("(APIServer pid=1) INFO API server: shutdown triggered", Fact.SHUTDOWN),
        ("(EngineCore pid=2) INFO EngineCore: trigger received signal=SIGTERM", Fact.SHUTDOWN),
        ("[shutdown] MPClient: engine core exited unexpectedly", Fact.ENGINE_DEATH),
        ("(EngineCore pid=2) ERROR EngineCore encountered a fatal error.", Fact.ENGINE_DEATH),
        ("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.", Fact.ENGINE_DEATH),
    ],
)
def test_a_telling_line_is_a_fact(line: str, what: Fact) -> None:
    fact = read_line(1.0, "vllm", line)
    assert fact is not None
    assert fact.what is what


@pytest.mark.parametrize(
    "line",
    [
        "[shutdown] Process manager: send sigterm to process EngineCore",
        "[shutdown] MPClient: start timeout=0s",
        "Killed process 12 (python): out of memory",
        "INFO:     Shutting down",
        "",
    ],
)
def test_lines_that_also_follow_crashes_prove_nothing(line: str) -> None:
    assert read_line(1.0, "vllm", line) is None
