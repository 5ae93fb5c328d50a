"""What belongs together is one incident; what came first explains the rest; a busy log is no incident."""

from fragscope.explain.postmortem import evidence_of
from fragscope.model import Cause, Condition
from tests.explain.readings import cause_of, explanations, message

OOM = message("4.00 GiB", "1.00 GiB", "70.00 GiB", "8.00 GiB")
DEATH = "(APIServer pid=1) ERROR 05-08 10:00:03 [async_llm.py:1] vllm.v1.engine.exceptions.EngineDeadError: see above"
STOP = "(APIServer pid=1) INFO 05-08 10:00:00 [launcher.py:1] API server: shutdown triggered"


def worker(rank: int, text: str, at: str = "10:00:01") -> str:
    return f"(Worker_TP{rank} pid={100 + rank}) ERROR 05-08 {at} [multiproc_executor.py:9] {text}"


def stats(running: int, waiting: int, usage: float, at: int = 0, tps: float = 100.0) -> str:
    return (
        f"(APIServer pid=1) INFO 05-08 09:{at // 60:02d}:{at % 60:02d} [loggers.py:2] Engine 000: Avg prompt throughput: {tps} "
        f"tokens/s, Avg generation throughput: {tps} tokens/s, Running: {running} reqs, Waiting: {waiting} reqs, "
        f"GPU KV cache usage: {usage}%, Prefix cache hit rate: 0.0%"
    )


def test_one_failure_reported_by_eight_ranks_is_one_incident() -> None:
    (told,) = explanations("\n".join([worker(rank, OOM) for rank in range(8)] + [DEATH]))
    assert told.incident.lines == 9
    assert ("ranks", "8 processes report it: one incident.") in evidence_of(told)


def test_two_failures_far_apart_are_two() -> None:
    text = "\n".join([worker(0, OOM), worker(0, OOM, at="14:00:00")])
    assert len(explanations(text)) == 2


def test_a_new_process_ends_the_incident_before_it() -> None:
    text = f"{OOM}\nINFO Initializing a V1 LLM engine (v0.11.0) with config:\n{OOM}"
    assert len(explanations(text)) == 2


def test_a_stop_that_was_asked_for_explains_the_deaths_after_it() -> None:
    assert cause_of(f"{STOP}\n{DEATH}") == "shutdown"


def test_an_oom_explains_the_shutdown_after_it() -> None:
    assert cause_of(f"{worker(0, OOM)}\n{STOP.replace('10:00:00', '10:00:02')}\n{DEATH}") == "fragmentation"


def test_a_stop_that_broke_nothing_is_no_incident() -> None:
    assert explanations(STOP) == []


def test_a_healthy_busy_log_has_no_incident() -> None:
    lines = [stats(60, 0, 70 + i % 9, 10 * i) for i in range(50)]
    lines += ['INFO:     10.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK'] * 50
    assert explanations("\n".join(lines)) == []


def test_a_moment_of_waiting_is_no_incident() -> None:
    lines = [stats(60, 3 if i == 20 else 0, 40, 10 * i) for i in range(50)]
    assert explanations("\n".join(lines)) == []


def test_a_pool_that_stays_full_is_told_once() -> None:
    lines = [stats(60, 9 if i > 10 else 0, 99 if i > 10 else 40, 10 * i) for i in range(50)]
    (told,) = explanations("\n".join(lines))
    assert told.judged.cause == Condition.KV_EXHAUSTED
    assert told.incident.first_line == 12


def test_waiting_while_the_pool_has_room_is_the_schedulers() -> None:
    assert cause_of("\n".join(stats(1, 3, 3.1, 10 * i) for i in range(6))) == "scheduler_limit"


def test_waiting_with_nothing_running_and_an_empty_pool_is_a_standstill() -> None:
    assert cause_of("\n".join(stats(0, 5, 0.0, 10 * i, tps=0.0) for i in range(6))) == "engine_fault"


def test_waiting_at_three_quarters_is_left_open() -> None:
    (told,) = explanations("\n".join(stats(1, 14, 76.5, 10 * i, tps=5.0) for i in range(6)))
    assert told.judged.cause == Cause.UNEXPLAINED
    assert told.judged.probabilities[Condition.KV_EXHAUSTED] > 0.2


def test_sizes_with_arrows_in_a_long_log_are_no_incident() -> None:
    lines = ["INFO loading shard 1.20 GiB -> 14.40 GiB"] + ["INFO ordinary"] * 100
    assert explanations("\n".join(lines)) == []


def test_the_state_of_the_pool_at_death_is_part_of_the_facts() -> None:
    dump = (
        "(EngineCore pid=2) ERROR Dumping scheduler stats: SchedulerStats(num_running_reqs=12, kv_cache_usage=0.031, x)"
    )
    (told,) = explanations(f"{worker(0, OOM)}\n{dump}")
    assert told.incident.facts["running"] == 12
    assert told.incident.facts["kv_usage"] == 0.031
