"""What a hostile reader of this code found, each as the claim that now holds."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fragscope.cli import main
from fragscope.model import Cause, Condition
from tests.explain.readings import cause_of, explanations, findings, message

OOM = message("2.00 GiB", "489.00 MiB", "150.00 GiB", "20.00 GiB", "191.98 GiB")
P = "(EngineCore pid=7) ERROR 05-08 10:11:{:02d} [core.py:1] "
STOP = "(APIServer pid=1) INFO 05-08 10:11:14 [launcher.py:1] API server: shutdown triggered"


def stats(engine: int, usage: float, waiting: int, at: int) -> str:
    return (
        f"(APIServer pid=1) INFO 05-08 {9 + at // 3600:02d}:{at // 60 % 60:02d}:{at % 60:02d} [loggers.py:2] Engine {engine:03d}: Avg prompt throughput: "
        f"9.0 tokens/s, Avg generation throughput: 9.0 tokens/s, Running: 9 reqs, Waiting: {waiting} reqs, GPU KV cache usage: {usage}%"
    )


@pytest.mark.parametrize(
    ("death", "cause"),
    [
        ("HIP error: out of memory", "memory_undetermined"),
        ("Worker proc X died unexpectedly (exit code: -9), shutting down executor.", "host_oom"),
        ("EngineDeadError", "engine_fault"),
    ],
)
def test_a_shutdown_after_a_death_does_not_explain_it(death: str, cause: str) -> None:
    assert cause_of(f"{P.format(10)}{death}\n{STOP}") == cause


def test_docker_inspect_of_a_container_that_was_not_killed_is_nothing() -> None:
    assert explanations('        "OOMKilled": false,') == []
    assert cause_of('        "OOMKilled": true,') == "host_oom"


def test_an_engine_that_waits_is_not_calmed_by_its_neighbour() -> None:
    lines = [stats(i % 2, 20.0 if i % 2 else 99.5, 0 if i % 2 else 50, 10 * i) for i in range(40)]
    assert cause_of("\n".join(lines)) == Condition.KV_EXHAUSTED


def test_a_full_pool_that_oscillates_is_still_full() -> None:
    lines = [stats(0, (99.0, 98.5, 88.9)[i % 3], 50, 10 * i) for i in range(40)]
    (told,) = explanations("\n".join(lines))
    assert told.judged.cause == Condition.KV_EXHAUSTED


def test_a_short_queue_is_ordinary() -> None:
    assert explanations("\n".join(stats(0, 20.1, 1 if 5 <= i < 8 else 0, 10 * i) for i in range(40))) == []


@pytest.mark.parametrize("encode", [lambda text: gzip.compress(text.encode()), lambda text: text.encode("utf-16")])
def test_standard_input_may_be_gzip_or_utf_16(encode: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fragscope", "explain", "-"],
        input=encode(OOM + "\n"),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done


def test_a_json_log_with_a_kind_of_its_own_is_no_recording(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(
        json.dumps({"kind": "log", "message": OOM, "levelname": "ERROR", "asctime": "2026-05-08 10:00:00"}) + "\n"
    )
    assert main(["explain", str(path)]) == 1


def test_a_json_log_gives_its_time_and_the_stack_inside_its_message() -> None:
    stack = 'Traceback (most recent call last):\n  File "x.py", line 1, in profile_run\n' + OOM
    record = {"asctime": "2026-05-08 10:00:00", "levelname": "ERROR", "message": stack}
    found = [each for each in findings(json.dumps(record)) if each.kind == "oom"]
    assert [(each.stage, each.stamp) for each in found] == [("profiling", "2026-05-08 10:00:00")]


WRAPPED = [
    ("To serve at least one request with the model's max seq len (32768), (16.00\n GiB KV cache is needed, which is larger than "
     "the available KV cache memory (2.00 GiB).", {"kv_needed": 16 * 2**30}),
    ("The model's max seq len (131072) is larger than the maximum number of\n tokens that can be stored in KV cache (86432).",
     {"kv_tokens": 86432}),
    ("Free memory on device (67.24/79.25 GiB) on startup is less than\n desired GPU memory utilization (0.9, 71.33 GiB).",
     {"requested": round(71.33 * 2**30)}),
    ("Out of memory: Killed process 9 (VLLM::Worker) total-vm:8kB,\n anon-rss:4kB, file-rss:1kB, shmem-rss:2kB", {"shmem_rss": 2048}),
    ("HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed.\n Available Free mem : 30 MB", {"free": 30_000_000}),
    ("Avg prompt throughput: 9.0 tokens/s, Running: 9 reqs, Waiting: 5 reqs,\n GPU KV cache usage: 99.0%", {"kv_usage": 0.99}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "facts"), WRAPPED, ids=[text[:20] for text, _ in WRAPPED])
def test_other_sentences_may_be_wrapped_too(text: str, facts: dict[str, float]) -> None:
    (told,) = explanations(text)
    assert {name: told.incident.facts.get(name) for name in facts} == facts


@pytest.mark.parametrize(
    "line",
    [
        "INFO [logger.py:1] Received request cmpl-1: prompt: 'what is CUDA out of memory. Tried to allocate 2.00 GiB', params",
        "INFO [logger.py:1] Received request cmpl-1: prompt: 'Memory access fault by GPU node-3', params: SamplingParams(n=1)",
        "If you see CUDA out of memory, lower gpu_memory_utilization",
        "1 validation error: input_value='HIP out of memory. Tried to allocate 2.00 GiB.'",
    ],
)
def test_what_a_client_wrote_is_evidence_of_nothing(line: str) -> None:
    assert explanations(line) == []


def test_a_cap_that_was_not_reached_is_not_blamed() -> None:
    text = message("2.00 GiB", "0.10 GiB", "40.00 GiB", "9.00 GiB", "80.00 GiB").replace(
        "is free. ", "is free. 72.00 GiB allowed; "
    )
    (told,) = explanations(text)
    assert told.judged.cause != Cause.VRAM_EXHAUSTED
    assert "memory fraction" not in " ".join(told.advice.do)


def test_figures_within_their_rounding_decide_nothing() -> None:
    (told,) = explanations(message("2.00 GiB", "0.50 GiB", "150.00 GiB", "1.50 GiB", "191.98 GiB"))
    assert max(told.judged.probabilities.values()) < 0.8
    assert any("rounding" in reason for reason in told.judged.reasons)


def test_eight_free_megabytes_are_no_near_miss_of_two() -> None:
    assert cause_of(message("2.00 MiB", "8.00 MiB", "150.00 GiB", "30.00 GiB", "191.98 GiB")) == "memory_undetermined"


def test_it_never_says_too_little_was_stranded_where_much_was() -> None:
    others = "Process 10 has 60.00 GiB memory in use. Process 11 has 131.00 GiB memory in use. "
    (told,) = explanations(message("2.00 GiB", "0.50 GiB", "110.00 GiB", "20.00 GiB", "191.98 GiB", process=others))
    assert not any("too little was stranded" in line for line in told.advice.vain)


def test_while_a_graph_is_captured_unallocated_memory_proves_no_pieces() -> None:
    (told,) = explanations("INFO Available KV cache memory: 2.97 GiB\n" + OOM)
    assert told.judged.cause == Cause.TRANSIENT_PEAK


def test_private_pools_larger_than_what_contains_them_contradict() -> None:
    assert (
        cause_of(message("2.00 GiB", "0.50 GiB", "4.00 GiB", "1.00 GiB", private="8.00 GiB")) == "memory_undetermined"
    )


def test_npu_and_xpu_get_their_own_advice() -> None:
    npu = explanations(message("4.00 GiB", "1.00 GiB", "70.00 GiB", "8.00 GiB", backend="NPU"))[0].advice
    assert "PYTORCH_NPU_ALLOC_CONF" in npu.do[0]
    xpu = explanations(message("4.00 GiB", "1.00 GiB", "70.00 GiB", "8.00 GiB", backend="XPU"))[0].advice
    assert "expandable_segments:True" not in " ".join(xpu.do)


def test_an_option_that_is_on_is_not_advised_again() -> None:
    text = "env: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n" + message(
        "4.00 GiB", "1.00 GiB", "70.00 GiB", "8.00 GiB", backend="CUDA"
    )
    (told,) = explanations(text)
    assert "expandable_segments" not in " ".join(told.advice.do)


def test_a_warm_up_message_alone_names_its_buffer() -> None:
    assert (
        cause_of("RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests.")
        == "transient_peak"
    )


def test_the_method_a_worker_was_in_betrays_the_stage() -> None:
    text = f"Exception in worker VllmWorkerProcess while processing method determine_num_available_blocks: {OOM}"
    (told,) = explanations(text)
    assert told.incident.stage == "profiling"


def test_a_mean_over_engines_is_no_evidence_of_room() -> None:
    line = "4 Engines Aggregated: Avg prompt throughput: 9.0 tokens/s, Running: 9 reqs, Waiting: 30 reqs, GPU KV cache usage: 25.0%"
    assert explanations("\n".join([line] * 20)) == []


def test_a_refused_request_does_not_split_a_crash() -> None:
    refused = P.format(11) + "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens"
    told = explanations("\n".join([P.format(10) + OOM, refused, P.format(12) + "EngineDeadError"]))
    assert sorted(each.judged.cause for each in told) == ["fragmentation", "request_too_long"]


@pytest.mark.parametrize(
    "line",
    [
        "model weights take 18.38GiB; non_torch_memory takes 0.15GiB; PyTorch activation peak memory takes 0.79GiB;",
        "Downloading shard 3 -> 12.5 GB",
        "loading 4 ... 16 GiB of host memory",
        "To avoid OOM keep 20.00 GiB free",
    ],
)
def test_a_healthy_line_in_a_short_text_is_nothing(line: str) -> None:
    assert explanations(line) == []


def test_an_old_note_does_not_leak_into_a_late_failure() -> None:
    text = "\n".join(["pool 4.98GB -> 9.95GB", *["INFO x"] * 3000, "HIP out of memory. Tried to allocate 2.00 GiB."])
    (told,) = explanations(text)
    assert told.incident.first_line == 3002


def test_another_lines_figures_are_not_taken_for_a_cut_messages() -> None:
    cut = P.format(10) + "HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capa"
    other = "(EngineCore pid=7) INFO 05-08 10:11:10 [x.py:1] CPU: 400.00 GiB total, 12.00 GiB is free"
    (told,) = explanations(f"{cut}\n{other}")
    assert told.incident.facts == {"tried": 2 * 2**30}


def test_another_process_amid_a_wrapped_message_does_not_cut_it() -> None:
    half = OOM.index("Of the allocated")
    text = "\n".join([P.format(10) + OOM[:half], stats(0, 20.0, 0, 60), P.format(10) + OOM[half:]])
    (told,) = explanations(text)
    assert told.incident.facts["reserved_unallocated"] == 20 * 2**30


def test_ranks_figures_are_not_mixed() -> None:
    cut = OOM.replace("is free. ", "is free. 100.00 GiB allowed; ")[: OOM.index("Of the allocated")]
    (told,) = explanations(f"{P.format(10)}{cut}\n{P.format(10).replace('pid=7', 'pid=8')}{OOM}")
    assert "allowed" not in told.incident.facts


@pytest.mark.parametrize(
    "line",
    ['"exitCode": 137,', '"ExitCode": 137', "vllm-0 Exited (137) 3 minutes ago", "exited with code 137", "exit status 137",
     "Failed core proc(s): {'EngineCore_DP0': -9}"],
)  # fmt: skip
def test_exit_codes_are_read_in_every_form(line: str) -> None:
    found = findings("Engine core initialization failed. " + line if "proc(s)" in line else line)
    assert found[0].facts["exit_code"] in (137, -9)


def test_prose_about_an_exit_code_is_none() -> None:
    assert explanations("exit code: 137 means OOM") == []


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("NCCL WARN Cuda failure 2 'out of memory'", "memory_undetermined"),
        ("Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.", "engine_fault"),
        ("(raylet) 1 Workers killed due to memory pressure (OOM)", "host_oom"),
        ("VLLM::Worker invoked oom-killer: gfp_mask=0xcc0", "host_oom"),
        ("Killed process 9 (python), UID 0, total-vm:8kB, anon-rss:4kB, file-rss:0kB, shmem-rss:1kB", "host_oom"),
        ("max seq len (32768), (1.00 GiB KV cache is needed, which is larger than the available KV cache memory (-0.52 GiB)",
         "startup_no_memory"),
    ],
)  # fmt: skip
def test_lines_that_were_not_read_are_read(line: str, cause: str) -> None:
    assert cause_of(line) == cause


def test_forty_preemption_warnings_are_a_full_pool() -> None:
    line = "WARNING Sequence group 3 is preempted by PreemptionMode.RECOMPUTE mode because there is not enough KV cache space."
    assert cause_of("\n".join([line] * 40)) == Condition.KV_EXHAUSTED


@pytest.mark.parametrize(
    ("before", "after"), [("04-30 23:59:58", "05-01 00:00:01"), ("12-31 23:59:58", "01-01 00:00:01")]
)
def test_midnight_of_a_month_and_of_a_year_splits_no_incident(before: str, after: str) -> None:
    text = "\n".join(f"(Worker_TP{i} pid={i}) ERROR {at} [x.py:1] {OOM}" for i, at in enumerate((before, after)))
    assert len(explanations(text)) == 1


def test_an_engine_that_is_ready_serves() -> None:
    text = f"INFO Graph capturing finished in 9 secs\nINFO init engine (profile, create kv cache, warmup model) took 9 seconds\n{OOM}"
    assert explanations(text)[0].incident.stage == "serving"


def test_a_missing_file_among_several_is_told_before_anything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.log").write_text(OOM)
    assert main(["explain", str(tmp_path / "a.log"), str(tmp_path / "b.log"), "--format", "json"]) == 2
    assert "b.log" in capsys.readouterr().err
