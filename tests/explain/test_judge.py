"""From facts to a cause: each test is one step of the arithmetic or one trap of the folk rule."""

import pytest

from fragscope.arithmetic import account, memory_shares
from fragscope.detect.parameters import Parameters
from fragscope.model import Cause
from tests.explain.readings import cause_of, explanations, message

GIB = 2**30


def shares(**facts: float) -> dict[Cause, float]:
    return memory_shares({name: value * GIB for name, value in facts.items()}, Parameters())


def test_compaction_that_would_have_served_it_is_fragmentation() -> None:
    assert cause_of(message("4.00 GiB", "1.00 GiB", "70.00 GiB", "8.00 GiB")) == "fragmentation"


def test_compaction_that_would_not_have_served_it_is_a_shortage() -> None:
    assert shares(tried=5, free=1, total=80, allocated=76, reserved_unallocated=2)[Cause.VRAM_EXHAUSTED] == 0.95


def test_free_blocks_of_private_pools_are_stranded_too() -> None:
    assert cause_of(message("4.00 GiB", "1.00 GiB", "76.00 GiB", "1.00 GiB", private="7.00 GiB")) == "fragmentation"


@pytest.mark.parametrize(("stranded", "share"), [(0.5, 0.35), (0.8, 0.50), (2.0, 0.725), (3.2, 0.95), (9.0, 0.95)])
def test_the_share_grows_with_the_stranded_part_of_the_card(stranded: float, share: float) -> None:
    got = shares(tried=0.4, free=0.1, total=80, allocated=79 - stranded, reserved_unallocated=stranded)
    assert got[Cause.FRAGMENTATION] == pytest.approx(share)


def test_a_thin_share_is_called_mixed() -> None:
    (told,) = explanations(message("1.00 GiB", "0.30 GiB", "76.00 GiB", "1.20 GiB", private="1.00 MiB"))
    assert told.judged.cause == Cause.FRAGMENTATION
    assert told.sentence.startswith("Mixed")


def test_the_printed_hint_is_no_evidence() -> None:
    text = message("500.00 MiB", "136.00 MiB", "79.50 GiB", "1.21 MiB")
    assert "expandable_segments" in text
    assert cause_of(text) == "startup_no_memory"


def test_free_beyond_the_card_is_refused_not_judged() -> None:
    (told,) = explanations(message("16.00 GiB", "84.98 GiB", "1.67 GiB", "8.08 GiB", "15.49 GiB"))
    assert told.judged.cause == Cause.MEMORY_UNDETERMINED
    assert "contradict" in told.judged.reasons[0]
    assert told.division == ()


@pytest.mark.parametrize(
    "facts",
    [
        {"free": 90, "total": 80, "allocated": 10, "reserved_unallocated": 1},
        {"free": 1, "total": 80, "allocated": 90, "reserved_unallocated": 1},
        {"free": 40, "total": 80, "allocated": 40, "reserved_unallocated": 10},
        {"free": 1, "total": 80, "allocated": 10, "reserved_unallocated": 1, "in_use": 100},
    ],
)
def test_figures_that_cannot_all_be_true_contradict(facts: dict[str, float]) -> None:
    assert account({name: value * GIB for name, value in facts.items()}).contradiction is not None


def test_more_free_than_asked_for_is_no_shortage_and_no_fragmentation() -> None:
    assert cause_of(message("2.00 MiB", "203.49 GiB", "68.63 GiB", "14.93 GiB", "287.98 GiB")) == "memory_undetermined"


def test_more_free_than_asked_for_beside_a_fault_is_the_drivers() -> None:
    text = message("2.00 MiB", "203.49 GiB", "68.63 GiB", "14.93 GiB", "287.98 GiB")
    assert cause_of(text + "\namdgpu: VM_L2_PROTECTION_FAULT_STATUS:0x00341051") == "driver_fault"


def test_a_cap_is_what_was_hit_however_free_the_card() -> None:
    text = message("2.00 MiB", "244.65 GiB", "1017.01 MiB", "54.99 MiB", "255.98 GiB").replace(
        "is free. ", "is free. 1.05 GiB allowed; "
    )
    (told,) = explanations(text)
    assert told.judged.cause == Cause.VRAM_EXHAUSTED
    assert "memory fraction" in told.advice.do[0]


def test_another_process_on_the_card_is_named() -> None:
    others = "Process 10 has 50.52 GiB memory in use. Process 11 has 28.19 GiB memory in use. "
    assert cause_of(message("448.00 MiB", "391.12 MiB", "27.48 GiB", "1.98 MiB", "79.11 GiB", process=others)) == (
        "external_process"
    )


def test_our_own_process_under_a_foreign_id_is_not_another() -> None:
    own = "Process 10 has 78.90 GiB memory in use. "
    (told,) = explanations(message("448.00 MiB", "391.12 MiB", "78.00 GiB", "1.98 MiB", "79.40 GiB", process=own))
    assert Cause.EXTERNAL_PROCESS not in told.judged.probabilities


def test_on_hip_what_lies_outside_the_allocator_points_to_another_process_when_it_is_most_of_the_card() -> None:
    assert cause_of(message("52.00 MiB", "8.56 MiB", "343.74 MiB", "64.26 MiB", "23.70 GiB")) == "external_process"


def test_one_request_for_a_third_of_the_card_is_a_one_off_buffer() -> None:
    assert cause_of(message("16.00 GiB", "187.94 MiB", "43.67 GiB", "335.07 MiB", "44.53 GiB")) == "transient_peak"


def test_a_stack_that_names_the_logits_makes_it_a_peak() -> None:
    frame = "Traceback (most recent call last)\n    logits = logits.to(torch.float32)\n"
    text = frame + message("786.00 MiB", "140.75 MiB", "68.83 GiB", "331.08 MiB", "79.11 GiB", private="660.00 MiB")
    (told,) = explanations(text)
    assert told.judged.cause == Cause.TRANSIENT_PEAK
    assert told.judged.probabilities[Cause.FRAGMENTATION] > 0.2


def test_while_loading_a_full_card_means_that_the_weights_do_not_fit() -> None:
    text = "INFO Starting to load model big...\n" + message("80.00 MiB", "60.69 MiB", "70.00 GiB", "12.81 MiB")
    assert cause_of(text) == "startup_no_memory"


def test_while_capturing_graphs_it_is_a_peak() -> None:
    text = "INFO Available KV cache memory: 2.97 GiB\n" + message("136.00 MiB", "120.88 MiB", "70.00 GiB", "1.00 MiB")
    assert cause_of(text) == "transient_peak"


def test_once_it_serves_the_missing_room_was_a_steps() -> None:
    stats = "Avg prompt throughput: 1.0 tokens/s, Running: 2 reqs, Waiting: 0 reqs, GPU KV cache usage: 41.7%\n"
    (told,) = explanations(stats + message("2.00 GiB", "0.50 GiB", "76.00 GiB", "0.20 GiB"))
    assert told.judged.cause == Cause.TRANSIENT_PEAK
    assert told.judged.probabilities[Cause.VRAM_EXHAUSTED] > 0.3
    assert told.incident.facts["kv_usage"] == 0.417


def test_a_title_alone_leaves_fragmentation_open() -> None:
    (told,) = explanations("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB.")
    assert told.judged.cause in (Cause.MEMORY_UNDETERMINED, Cause.VRAM_EXHAUSTED)
    assert told.incident.oom is not None
    assert "reserved_unallocated" in told.incident.oom.missing


REFUSALS = [
    ("Free memory on device (67.24/79.25 GiB) on startup is less than desired GPU memory utilization (0.9, 71.33 GiB).",
     "external_process"),
    ("Free memory on device cuda:1 (19.77/22.05 GiB) on startup is less than desired GPU memory utilization (0.9, 19.84 GiB).",
     "startup_no_memory"),
    ("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", "startup_no_memory"),
    ("Error in memory profiling. Initial free memory 70.1 GiB, current free memory 75.0 GiB. isolate vLLM in its own container",
     "external_process"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "cause"), REFUSALS, ids=[cause for _, cause in REFUSALS])
def test_a_refusal_to_start_names_what_lacked(line: str, cause: str) -> None:
    assert cause_of(f"(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1100] ValueError: {line}") == cause


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("Memory access fault by GPU node-3 (Agent handle: 0x0) on address 0x7. Reason: Unknown.", "driver_fault"),
        ("Out of memory: Killed process 9 (VLLM::Worker_TP) total-vm:9kB, anon-rss:1kB, shmem-rss:7kB", "host_oom"),
        ("RuntimeError: NCCL error: unhandled cuda error", "engine_fault"),
        ("RuntimeError: HIP error: invalid argument", "engine_fault"),
        ("Error code: 400 - {'message': 'max_tokens must be at least 1, got -186.'}", "request_too_long"),
        ("HSA_STATUS_ERROR_OUT_OF_RESOURCES: failed. Available Free mem : 30 MB", "vram_exhausted"),
        ("(EngineCore pid=1) ERROR EngineCore encountered a fatal error.", "engine_fault"),
    ],
)
def test_what_is_no_shortage_of_gpu_memory_is_named_for_what_it_is(text: str, cause: str) -> None:
    assert cause_of(text) == cause


def test_an_exit_code_alone_proves_nobody() -> None:
    (told,) = explanations("Task killed=1 EXIT 137")
    assert told.judged.cause == Cause.HOST_OOM
    assert told.judged.probability < 0.6


def test_probabilities_sum_to_one() -> None:
    for text in (message("1.00 GiB", "0.30 GiB", "76.00 GiB", "1.20 GiB"), "Task killed=1 EXIT 137"):
        for told in explanations(text):
            assert sum(told.judged.probabilities.values()) == pytest.approx(1)
