"""What single lines establish, in vLLM's, the runtimes' and the kernel's own words."""

import pytest

from fragscope.explain.findings import Kind
from fragscope.explain.witness import LineReader
from fragscope.model import Fact
from tests.explain.readings import findings, message

GIB = 2**30
OOM = message("2.50 GiB", "830.00 MiB", "181.29 GiB", "9.87 GiB", "191.98 GiB")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (OOM, Fact.OOM),
        ("(APIServer pid=1) INFO API server: shutdown triggered", Fact.SHUTDOWN),
        ("(EngineCore pid=2) INFO EngineCore: trigger received signal=SIGTERM", Fact.SHUTDOWN),
        ("[shutdown] MPClient: engine core exited unexpectedly", Fact.ENGINE_DEATH),
        ("(EngineCore pid=2) ERROR EngineCore encountered a fatal error.", Fact.ENGINE_DEATH),
        ("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.", Fact.ENGINE_DEATH),
        ("Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.", Fact.WORKER_DEATH),
        (
            "Memory access fault by GPU node-3 (Agent handle: 0x0) on address 0x77d4. Reason: Unknown.",
            Fact.DRIVER_FAULT,
        ),
        ("RuntimeError: HIP error: out of memory", Fact.OOM),
        ("Memory cgroup out of memory: Killed process 12 (VLLM::Worker) total-vm:4kB, anon-rss:4kB", Fact.HOST_OOM),
        ("ValueError: No available memory for the cache blocks. Try increasing", Fact.REFUSAL),
        (
            "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens",
            Fact.REQUEST_TOO_LONG,
        ),
    ],
)
def test_a_telling_line_is_a_fact(line: str, what: Fact) -> None:
    reader = LineReader("vllm")
    (fact,) = [*reader.feed(1.0, line), *reader.flush()]
    assert fact.what is what
    assert (fact.at, fact.target) == (1.0, "vllm")


@pytest.mark.parametrize(
    "line",
    [
        "[shutdown] Process manager: send sigterm to process EngineCore",
        "[shutdown] MPClient: start timeout=0s",
        "Killed process 12 (python): out of memory",
        "INFO:     Shutting down",
        'INFO:     10.0.0.1:5 - "POST /v1/completions HTTP/1.1" 200 OK',
        "If reserved but unallocated memory is large try setting PYTORCH_HIP_ALLOC_CONF",
        "",
    ],
)
def test_lines_that_also_follow_crashes_prove_nothing(line: str) -> None:
    reader = LineReader("vllm")
    assert [*reader.feed(1.0, line), *reader.flush()] == []


def test_a_wrapped_message_is_one_fact_at_the_time_of_its_first_line() -> None:
    reader = LineReader("vllm")
    facts = [fact for at, part in ((1.0, OOM[:90]), (1.2, OOM[90:])) for fact in reader.feed(at, part)]
    assert [(fact.at, fact.facts["tried"]) for fact in facts] == [(1.0, 2.5 * GIB)]


def test_a_message_whose_rest_never_comes_is_told_when_the_log_goes_quiet() -> None:
    reader = LineReader("vllm")
    assert reader.feed(1.0, OOM[:90]) == ()
    assert reader.flush(1.5) == ()
    assert [fact.what for fact in reader.flush(2.5)] == [Fact.OOM]


STATS = {
    "V0": (
        "INFO 01-01 00:00:00 metrics.py:161] Avg prompt throughput: 642.0 tokens/s, Avg generation throughput: 61.0 tokens/s, "
        "Running: 2 reqs, Swapped: 0 reqs, Pending: 20 reqs, GPU KV cache usage: 98.7%, CPU KV cache usage: 1.0%.",
        {"running": 2, "swapped": 0, "waiting": 20, "kv_usage": 0.987, "cpu_kv_usage": 0.01, "prompt_tps": 642.0},
    ),
    "V1": (
        "(APIServer pid=1) INFO 11-30 15:00:01 [loggers.py:335] Engine 000: Avg prompt throughput: 1.5 tokens/s, Avg "
        "generation throughput: 5.4 tokens/s, Running: 1 reqs, Waiting: 14 reqs, Preemptions: 3, GPU KV cache usage: 76.5%",
        {"running": 1, "waiting": 14, "preemptions": 3, "kv_usage": 0.765, "gen_tps": 5.4},
    ),
    "V1 on a CPU": (
        "Engine 000: Avg prompt throughput: 1.5 tokens/s, Running: 1 reqs, Waiting: 0 reqs, CPU KV cache usage: 3.2%",
        {"kv_usage": 0.032},
    ),
    "custom handler": (
        "01-01 00:00:00 - vllm.engine.metrics - INFO - Avg prompt throughput: 0.0 tokens/s, Running: 1 reqs, "
        "Swapped: 0 reqs, Pending: 3 reqs, GPU KV cache usage: 3.1%, CPU KV cache usage: 0.0%",
        {"waiting": 3, "kv_usage": 0.031},
    ),
    "dump": (
        "Dumping scheduler stats: SchedulerStats(num_running_reqs=809, num_waiting_reqs=0, step_counter=0, "
        "kv_cache_usage=0.47516605700935377, prefix)",
        {"running": 809, "waiting": 0, "kv_usage": 0.4752},
    ),
}


@pytest.mark.parametrize("name", STATS)
def test_statistics_are_read_part_by_part(name: str) -> None:
    line, wanted = STATS[name]
    (found,) = findings(line)
    assert {key: found.facts.get(key) for key in wanted} == wanted
    assert "cpu_kv_usage" in wanted or found.facts.get("cpu_kv_usage") in (None, 0.0)


NUMBERS = [
    (
        "ValueError: To serve at least one request with the model's max seq len (1048576), (22.5 GiB KV cache is needed, which "
        "is larger than the available KV cache memory (17.39 GiB). Based on",
        {"kv_needed": 22.5 * GIB, "kv_available": round(17.39 * GIB), "max_model_len": 1048576},
    ),
    (
        "To serve at least one request with the models's max seq len (32768), 4.0 GiB KV cache is needed, which is larger than "
        "the available KV cache memory (2.0 GiB).",
        {"kv_needed": 4 * GIB, "kv_available": 2 * GIB},
    ),
    (
        "The model's max seq len (29000) is larger than the maximum number of tokens that can be stored in KV cache (23648).",
        {"max_model_len": 29000, "kv_tokens": 23648},
    ),
    (
        "ValueError: Free memory on device cuda:1 (19.77/22.05 GiB) on startup is less than desired GPU memory utilization "
        "(0.9, 19.84 GiB). Decrease",
        {"free": round(19.77 * GIB), "total": round(22.05 * GIB), "requested": round(19.84 * GIB)},
    ),
    ("INFO Available KV cache memory: 2.97 GiB", {"kv_available": round(2.97 * GIB)}),
    ("INFO GPU KV cache size: 150,745 tokens, Maximum concurrency for 124,000 tokens", {"kv_tokens": 150745}),
    (
        "Out of memory: Killed process 9 (VLLM::Worker_TP) total-vm:231892748kB, anon-rss:1117884kB, file-rss:1kB, "
        "shmem-rss:90272184kB, UID:0",
        {"total_vm": 231892748 * 1024, "anon_rss": 1117884 * 1024, "shmem_rss": 90272184 * 1024},
    ),
    ("Task killed=1 EXIT 137", {"exit_code": 137}),
    ("HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed. Available Free mem : 30 MB", {"free": 30_000_000}),
    (
        "maximum context length is 8192 tokens. However, your prompt contains at least 9001 input tokens",
        {"requested": 9001},
    ),
]


@pytest.mark.parametrize(("line", "wanted"), NUMBERS, ids=[line[:30] for line, _ in NUMBERS])
def test_numbers_come_in_bytes_and_tokens(line: str, wanted: dict[str, float]) -> None:
    (found,) = findings(line)
    assert {key: found.facts.get(key) for key in wanted} == wanted


def test_an_exit_code_that_is_no_kill_is_no_finding() -> None:
    assert findings("process exited with code 0") == []


@pytest.mark.parametrize(
    "line",
    ["RuntimeError: NCCL error: unhandled cuda error", "RuntimeError: HIP error: invalid argument"],
)
def test_a_runtime_error_that_is_no_shortage_is_told_apart(line: str) -> None:
    assert [each.kind for each in findings(line)] == [Kind.ENGINE_ERROR]
