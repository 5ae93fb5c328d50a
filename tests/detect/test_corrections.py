"""Faults found by reviewing the detector with hostile stories, each told once more with its right end."""

import json
from collections.abc import Iterator

import pytest

from fragscope.detect.correlation import Correlation
from fragscope.detect.outcomes import Increments
from fragscope.detect.parameters import Parameters
from fragscope.model import Cause, Condition, EngineReading, Fact, Gap, LogFact, Part, Phase, Reason, Sample
from fragscope.recording import Line, Tally, parse_line
from fragscope.replay import Replayer, Timeline, replay
from tests.stories import CARD, GIB, START, Story, crash_without_room

OOM = {"tried": 2.5 * GIB, "free": 0.8 * GIB, "total": float(CARD), "reserved_unallocated": 9.9 * GIB}


def test_a_shutdown_of_an_earlier_process_hides_no_later_failure() -> None:
    story = Story(with_log=True)
    story.say(Fact.SHUTDOWN)
    story.refuse(ticks=2)
    story.serve(ticks=40)
    story.say(Fact.OOM, **OOM)
    assert story.refuse(ticks=2).phase is Phase.CONFIRMED


def test_a_shutdown_line_that_arrives_after_the_restart_hides_no_later_failure() -> None:
    story = Story(with_log=True)
    story.serve(ticks=10)
    story.refuse(ticks=2)
    story.restart()
    story.serve(ticks=4)
    story.say(Fact.SHUTDOWN)
    story.serve(ticks=60)
    story.say(Fact.OOM, **OOM)
    assert story.refuse(ticks=2).phase is Phase.CONFIRMED


@pytest.mark.parametrize("first", [Fact.OOM, Fact.SHUTDOWN])
def test_a_flood_of_death_notices_evicts_nothing(first: Fact) -> None:
    story = Story(with_log=True)
    story.serve(ticks=10)
    story.say(first, **(OOM if first is Fact.OOM else {}))
    story.facts += [LogFact(story.at + 0.01 * i, "vllm", Fact.ENGINE_DEATH) for i in range(200)]
    verdict = story.refuse(ticks=2)
    assert verdict.cause == (Cause.FRAGMENTATION if first is Fact.OOM else Cause.SHUTDOWN)


def test_the_hold_counts_from_the_last_memory_episode() -> None:
    story = Story(with_log=True)
    story.serve(ticks=5)
    story.say(Fact.OOM, **OOM)
    story.refuse(ticks=3)
    story.restart()
    story.serve(ticks=130)
    story.with_log = False
    crash_without_room(story)
    story.restart()
    verdict = story.serve(used=int(0.905 * CARD), ticks=100)
    assert verdict.phase is Phase.CONFIRMED, "the second episode is not eight minutes old"
    assert story.serve(ticks=100).phase is Phase.CLEAR


def test_a_death_long_after_the_message_does_not_take_its_words_back() -> None:
    story = Story(with_log=True)
    story.serve(ticks=5)
    story.say(Fact.OOM, **OOM)
    story.serve(server_errors=20, ok=0, ticks=20)
    assert story.refuse(ticks=2).phase is Phase.CONFIRMED


def test_a_marker_touched_after_the_death_announces_nothing() -> None:
    story = Story()
    assert crash_without_room(story).phase is Phase.SUSPECTED
    story.say(Fact.PLANNED_STOP)
    assert story.refuse(ticks=2).phase is Phase.SUSPECTED


def test_a_start_time_that_went_back_is_a_restart_and_no_return() -> None:
    story = Story()
    crash_without_room(story)
    assert story.started_at is not None
    story.restart()
    story.started_at -= 90_000
    verdict = story.serve(used=int(0.905 * CARD))
    assert verdict.phase is Phase.SUSPECTED


def test_time_outs_do_not_end_a_suspicion() -> None:
    story = Story()
    crash_without_room(story)
    story.restart()
    story.serve(used=int(0.905 * CARD), ticks=3)
    assert story.time_out(ticks=250).phase is Phase.SUSPECTED


def test_a_blind_gpu_is_no_headroom() -> None:
    story = Story()
    crash_without_room(story)
    story.restart()
    story.serve(ticks=3)
    story.with_gpu = False
    assert story.serve(ticks=250).phase is Phase.SUSPECTED


def test_without_a_look_at_the_gpus_no_kill_is_called_memory() -> None:
    story = Story(with_gpu=False)
    story.serve(running=12, ticks=20)
    verdict = story.refuse(ticks=2)
    assert verdict.cause == Cause.UNEXPLAINED
    assert verdict.phase is Phase.UNKNOWN
    assert "memory is not ruled out" in verdict.sentence
    assert "do not tune memory" not in verdict.remedy


def test_a_row_that_is_missing_from_one_page_makes_no_burst() -> None:
    story = Story()
    story.counters["5xx"] = 5000.0
    story.serve(ticks=5)
    story.counters["5xx"] = 0.0
    story.serve()
    story.counters["5xx"] = 5000.0
    assert story.serve(ticks=3).episodes == 0


def test_a_family_that_appears_late_only_sets_its_baseline() -> None:
    story = Story()
    bare = EngineReading(START - 5, "0", "llama", kv_usage_ratio=0.2, running=1, waiting=0)
    story.detector.observe(Sample(START - 5, "vllm", (bare,), gaps=(Gap(Part.LOG, Reason.ABSENT),)))
    story.counters["5xx"] = 5000.0
    assert story.serve(ticks=3).episodes == 0


def test_an_engine_that_was_dead_when_first_seen_is_down() -> None:
    story = Story()
    verdict = story.serve(healthy=False, ticks=3)
    assert verdict.conditions == (Condition.ENGINE_DOWN,)
    assert verdict.cause == Cause.ENGINE_FAULT
    assert verdict.engine == "0"


def test_a_forgotten_engine_is_down_and_not_starting() -> None:
    story = Story()
    story.serve(ticks=5)
    verdict = story.refuse(ticks=800)
    assert verdict.engine is None
    assert verdict.conditions == (Condition.ENGINE_DOWN,)


def test_one_long_gap_does_not_make_stale_evidence_fresh() -> None:
    story = Story()
    story.serve(ticks=10)
    story.at += 1000
    assert story.time_out().phase is Phase.UNKNOWN


def test_growth_is_not_watched_through_a_blind_gpu() -> None:
    story = Story(interval_s=15, with_log=True)
    for minute in range(45):
        story.serve(used=int(0.905 * CARD) + minute * 100 * 2**20, ticks=4)
    assert story.verdict.phase is Phase.WATCH
    story.with_gpu = False
    assert story.serve(ticks=30).phase is Phase.CLEAR


def test_a_servers_steady_one_percent_becomes_its_background() -> None:
    seen = Correlation(Parameters())
    at = 0.0
    for _ in range(4000):
        at += 5
        seen.count(at, 0.3, Increments(ok=99, server_error=1))
    assert not seen.failing(at)
    for _ in range(60):
        at += 5
        seen.count(at, 0.3, Increments(ok=90, server_error=10))
    assert seen.failing(at), "ten times the background is not background"


def test_a_server_that_was_only_cut_off_has_lost_nothing() -> None:
    story = Story()
    for _ in range(5):
        story.serve(running=6, ticks=5)
        story.refuse(ticks=3)
        story.serve(running=6)
    assert story.last is not None
    assert story.last.measures.lost_total == 0
    assert story.last.measures.failures is not None
    assert story.last.measures.failures.ratio == 0


def test_an_idle_server_that_is_killed_was_not_drained() -> None:
    story = Story()
    story.serve(running=0, ok=0, tokens=0, ticks=20)
    verdict = story.refuse(ticks=2)
    assert "drained" not in {row.signal for row in verdict.evidence}
    story.restart()
    story.serve(ticks=2)
    assert story.last is not None
    assert story.last.measures.restarts["planned"] == 0


def test_a_message_while_loading_is_forgotten_with_its_engine() -> None:
    story = Story(with_log=True)
    story.say(Fact.OOM, **OOM)
    assert story.refuse().phase is Phase.CONFIRMED
    assert story.refuse(ticks=800).phase is not Phase.CONFIRMED


def test_two_refusals_with_time_outs_between_are_not_in_a_row() -> None:
    story = Story()
    story.serve(ticks=10)
    story.refuse()
    story.time_out(ticks=10)
    assert story.refuse().episodes == 0


def test_engines_with_ever_new_names_leave_nothing_behind() -> None:
    story = Story()
    for i in range(50):
        reading = EngineReading(story.at, f"e{i}", "m", kv_usage_ratio=0.1, running=1, waiting=0)
        story.last = story.detector.observe(Sample(story.at, "vllm", (reading,), gaps=(Gap(Part.LOG, Reason.ABSENT),)))
        story.at += 5
    assert len(story.detector._engine_lingering) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("half_life_s", 0.0), ("failures_half_life_s", 0.0), ("gate_z", float("nan")), ("hold_s", float("inf"))],
)
def test_settings_that_would_break_the_arithmetic_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Parameters(**{name: value})  # type: ignore[arg-type]


PAGE = 'vllm:num_requests_running{engine="0"} 5\nvllm:kv_cache_usage_perc{engine="0"} 0.2\n'


def line(kind: str, at: float, **more: object) -> Line:
    parsed = parse_line(json.dumps({"kind": kind, "at": at, **more}).encode(), Tally())
    assert parsed is not None
    return parsed


def gpus(at: float, *used: float) -> Line:
    devices = [{"gpu": f"0000:c{i}:00.0", "total_bytes": CARD, "used_bytes": int(u)} for i, u in enumerate(used, 1)]
    return line("gpu", at, source="x", devices=devices)


def samples(lines: Iterator[Line] | list[Line]) -> list[Sample]:
    seen: list[Sample] = []
    list(replay(lines, Replayer(tap=seen.append)))
    return seen


def test_in_replay_a_vanishing_gpu_is_missing_evidence_and_no_relief() -> None:
    seen = samples([gpus(1, 0.5 * CARD, 0.99 * CARD), line("exposition", 2, text=PAGE), gpus(3, 0.5 * CARD),
                    line("exposition", 4, text=PAGE)])  # fmt: skip
    assert len(seen[0].gpus) == 2
    assert seen[1].gpus == ()
    assert "1 of 2 GPUs" in next(gap.detail for gap in seen[1].gaps if gap.part is Part.GPU)


def test_in_replay_one_peak_belongs_to_one_sample() -> None:
    lines = [gpus(1, 0.9 * CARD), line("exposition", 2, text=PAGE), line("exposition", 3, text=PAGE)]
    assert [sample.gpus[0].peak_used_bytes is not None for sample in samples(lines)] == [True, False]


def test_slow_polling_with_gpu_lines_just_behind_the_polls_is_not_stale() -> None:
    lines: list[Line] = []
    for i in range(8):
        lines += [line("exposition", 30.0 * i, text=PAGE), gpus(30.0 * i + 0.05, 0.9 * CARD)]
    told = Timeline()
    for assessment in replay(lines, Replayer()):
        list(told.observe(assessment))
    assert told.finals()[0][0].phase is Phase.CLEAR


def test_log_lines_without_a_target_reach_one_that_is_met_later() -> None:
    said = line("log", 2, line="HIP out of memory. Tried to allocate 1.00 GiB.")
    lines = [line("exposition", 1, target="a", text=PAGE), said, line("exposition", 3, target="b", text=PAGE)]
    facts = {sample.target: sample.log_facts for sample in samples(lines) if sample.log_facts}
    assert set(facts) == {"a", "b"}


def test_log_lines_beside_ready_made_samples_are_heard() -> None:
    ready = {"kind": "sample", "target": "vllm", "engines": [{"at": 1, "engine": "0", "model_name": "m"}]}
    lines = [line(**{**ready, "at": 1}), line("log", 2, line="HIP out of memory."), line(**{**ready, "at": 3})]  # type: ignore[arg-type]
    assert [fact.what for fact in samples(lines)[1].log_facts] == [Fact.OOM]


def test_the_final_verdict_of_a_forgotten_engine_is_the_one_at_the_last_line() -> None:
    lines = [gpus(0, 0.5 * CARD), *(line("exposition", 5.0 * i, text=PAGE, health=200) for i in range(5))]
    lines += [line("exposition", 25 + 5.0 * i, error="Connection refused", health=0) for i in range(800)]
    told = Timeline()
    for assessment in replay(lines, Replayer()):
        list(told.observe(assessment))
    ((final, seen),) = told.finals()
    assert final.engine is None
    assert final.phase is Phase.UNKNOWN
    assert "engine_down" in seen


def corrections(story: Story) -> list[str]:
    return [row.sentence for row in story.verdict.evidence if row.signal == "correction"]


def died_without_room(**more: object) -> Story:
    story = Story(**more)  # type: ignore[arg-type]
    assert crash_without_room(story).phase is Phase.SUSPECTED
    assert corrections(story) == [], "what is said in the same breath corrects nothing"
    return story


def test_a_message_that_comes_twenty_seconds_late_corrects_the_cause_and_says_so() -> None:
    story = died_without_room()
    died_at = story.at - 10
    story.refuse(ticks=3)
    story.facts.append(LogFact(died_at, "vllm", Fact.OOM, OOM))
    verdict = story.refuse()
    assert verdict.phase is Phase.CONFIRMED
    assert verdict.cause == Cause.FRAGMENTATION
    assert verdict.episodes == 1
    (said,) = corrections(story)
    assert said.startswith("corrected 20 s after it was first said: memory_undetermined (95 % sure")
    assert said.endswith("until the allocator's own words came in")
    assert "Corrected 20 s after" in verdict.sentence


def test_a_message_that_comes_after_the_restart_corrects_the_closed_episode() -> None:
    story = died_without_room()
    died_at = story.at - 10
    story.restart()
    story.serve(used=int(0.905 * CARD), ticks=3)
    story.facts.append(LogFact(died_at, "vllm", Fact.OOM, OOM))
    verdict = story.serve()
    assert verdict.phase is Phase.CONFIRMED
    assert verdict.episodes == 1, "the message is about the death, not a new failure"
    assert len(corrections(story)) == 1
    assert story.last is not None
    assert sum(story.last.measures.memory_failures.values()) == 1, "one failure, counted once"


def test_a_shutdown_line_that_comes_after_the_restart_ends_the_suspicion_and_says_so() -> None:
    story = died_without_room()
    died_at = story.at - 10
    story.restart()
    story.serve(used=int(0.905 * CARD), ticks=3)
    story.facts.append(LogFact(died_at, "vllm", Fact.SHUTDOWN))
    verdict = story.serve()
    assert verdict.phase is Phase.CLEAR
    assert verdict.cause == Cause.SHUTDOWN
    assert "until the log shows that a shutdown was asked for" in verdict.sentence


def test_a_line_about_the_new_process_corrects_nothing() -> None:
    story = died_without_room()
    story.restart()
    story.serve(used=int(0.905 * CARD), ticks=3)
    story.say(Fact.SHUTDOWN)
    verdict = story.serve()
    assert verdict.phase is Phase.SUSPECTED
    assert corrections(story) == []


def test_a_server_that_was_cut_off_for_minutes_takes_its_death_back_and_says_so() -> None:
    story = died_without_room()
    story.refuse(ticks=40)
    verdict = story.serve(used=CARD - GIB // 2)
    assert verdict.phase is Phase.CLEAR
    assert verdict.cause == Cause.UNEXPLAINED
    assert "the same process answers again: it was cut off, not dead" in verdict.sentence
    story.refuse(ticks=2)
    assert story.verdict.probabilities[Cause.MEMORY_UNDETERMINED] < 1


def test_a_death_that_was_taken_back_does_not_weigh_on_the_next_one() -> None:
    story = died_without_room()
    story.serve(used=int(0.905 * CARD), ticks=40)
    assert "earlier_crash" not in {row.signal for row in story.refuse(ticks=2).evidence}


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        (Fact.DRIVER_FAULT, Cause.DRIVER_FAULT),
        (Fact.HOST_OOM, Cause.HOST_OOM),
        (Fact.WORKER_DEATH, Cause.ENGINE_FAULT),
        (Fact.ENGINE_DEATH, Cause.ENGINE_FAULT),
    ],
)
def test_what_the_log_names_first_explains_a_death_without_room(what: Fact, cause: Cause) -> None:
    story = Story(with_log=True)
    story.serve(ticks=6)
    story.serve(used=CARD - GIB // 2, running=12, ticks=4)
    story.say(what)
    story.facts += [LogFact(story.at + 1, "vllm", Fact.ENGINE_DEATH), LogFact(story.at + 2, "vllm", Fact.SHUTDOWN)]
    verdict = story.refuse(ticks=2)
    assert verdict.phase is Phase.CLEAR
    assert verdict.cause == cause


def test_a_death_notice_that_overtakes_the_reason_does_not_hide_it() -> None:
    story = Story(with_log=True)
    story.serve(ticks=6)
    story.say(Fact.WORKER_DEATH)
    story.facts.append(LogFact(story.at + 2, "vllm", Fact.DRIVER_FAULT))
    assert story.refuse(ticks=2).cause == Cause.DRIVER_FAULT


def test_a_start_that_was_refused_is_named_although_nothing_ever_answered() -> None:
    story = Story(with_log=True)
    story.refuse(ticks=3)
    story.say(Fact.REFUSAL)
    verdict = story.refuse()
    assert verdict.cause == Cause.STARTUP_NO_MEMORY
    assert verdict.phase is Phase.UNKNOWN or verdict.phase is Phase.CLEAR


def test_a_driver_message_of_an_engine_that_lives_is_no_failure() -> None:
    story = Story(with_log=True)
    story.serve(ticks=6)
    story.say(Fact.DRIVER_FAULT)
    assert story.serve(ticks=3).episodes == 0


def test_requests_that_are_too_long_explain_errors_and_never_a_death() -> None:
    story = Story(with_log=True)
    story.serve(ticks=6)
    story.say(Fact.REQUEST_TOO_LONG)
    assert story.serve(server_errors=20, ok=5, ticks=3).cause == Cause.REQUEST_TOO_LONG
    other = Story(with_log=True)
    other.serve(ticks=6)
    other.say(Fact.REQUEST_TOO_LONG)
    assert other.refuse(ticks=2).cause == Cause.UNEXPLAINED


def test_statistics_lines_say_nothing() -> None:
    story = Story(with_log=True)
    story.serve(ticks=6)
    story.say(Fact.STATS)
    assert story.refuse(ticks=2).cause == Cause.UNEXPLAINED
