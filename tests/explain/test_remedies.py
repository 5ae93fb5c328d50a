"""Advice is gated on what is known of the stack; what would not help is said."""

from fragscope.detect.parameters import Parameters
from fragscope.explain.findings import Finding, Kind
from fragscope.explain.postmortem import Explanation, PostMortem
from tests.explain.readings import explanations, message

FRAGMENTED = {"tried": "4.00 GiB", "free": "1.00 GiB", "allocated": "70.00 GiB", "unallocated": "8.00 GiB"}
ROCM = "PyTorch version: {torch}+rocm{rocm}"


def told(text: str, backend: str = "HIP") -> tuple[str, str]:
    (each,) = explanations(f"{text}\n" + message(**FRAGMENTED, backend=backend))
    return " ".join(each.advice.do), " ".join(each.advice.vain)


def test_on_rocm_expandable_segments_are_advised_only_where_they_exist() -> None:
    do, vain = told(ROCM.format(torch="2.11.0", rocm="7.0"))
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in do
    assert "not verified" in do
    do, vain = told(ROCM.format(torch="2.9.1", rocm="6.4"))
    assert "expandable_segments" not in do
    assert "PyTorch 2.9 with ROCm 6.4, which only prints a warning" in vain


def test_on_an_unknown_rocm_stack_the_condition_is_told_instead() -> None:
    do, vain = told("")
    assert "this log does not say" in do
    assert "not verified" in do
    assert vain == ""


def test_a_fact_without_its_backend_is_advised_as_rocm_is() -> None:
    finding = Finding(
        Kind.OOM, 1, 1, facts={"tried": 4e9, "free": 1e9, "total": 8e10, "allocated": 7e10, "reserved_unallocated": 8e9}
    )
    (each,) = closed(finding)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in " ".join(each.advice.do)
    assert "PyTorch 2.11" in " ".join(each.advice.do)


def closed(finding: Finding) -> list[Explanation]:
    mortem = PostMortem(Parameters())
    return [*mortem.take(finding), *mortem.close()]


def test_it_does_not_send_people_to_the_log_they_have_just_given() -> None:
    (each,) = explanations("HIP error: out of memory")
    assert "Read the engine's log around that time" not in " ".join(each.advice.do)


def test_with_sleep_mode_they_are_never_advised() -> None:
    do, vain = told(ROCM.format(torch="2.11.0", rocm="7.0") + "\nargs: enable_sleep_mode=True")
    assert "expandable_segments" not in do
    assert "sleep mode" in vain


def test_on_cuda_they_are_advised_under_the_name_of_the_version() -> None:
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable" in told("", "CUDA")[0]
    assert "PYTORCH_ALLOC_CONF=expandable" in told("PyTorch version: 2.10.0+cu128", "CUDA")[0]


def test_on_a_full_card_the_printed_hint_is_said_to_be_vain() -> None:
    (each,) = explanations(message("500.00 MiB", "136.00 MiB", "79.50 GiB", "1.21 MiB"))
    assert any("expandable_segments" in line for line in each.advice.vain)


def test_a_driver_fault_is_not_cured_by_memory_settings() -> None:
    (each,) = explanations("Memory access fault by GPU node-3 (Agent handle: 0x0) on address 0x7.")
    assert any("--gpu-memory-utilization" in line for line in each.advice.vain)
