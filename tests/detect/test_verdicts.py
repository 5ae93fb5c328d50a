"""What the detector says, told as stories: in pairs of what it must call a pseudo-OOM and what it must not."""

import pytest

from fragscope.detect.parameters import Parameters
from fragscope.detect.words import REMEDIES, SENTENCES
from fragscope.model import MEMORY_CAUSES, Cause, Condition, Fact, Phase, Verdict
from tests.stories import CARD, GIB, GPU, Story, crash_without_room

OOM_FRAGMENTED = {"tried": 2.5 * GIB, "free": 0.8 * GIB, "total": CARD, "reserved_unallocated": 9.9 * GIB}
OOM_EXHAUSTED = {"tried": 2.5 * GIB, "free": 0.8 * GIB, "total": CARD, "reserved_unallocated": 0.5 * GIB}


def memory_probability(verdict: Verdict) -> float:
    return sum(verdict.probabilities[cause] for cause in MEMORY_CAUSES)


def test_a_death_with_work_in_flight_and_no_room_is_suspected() -> None:
    verdict = crash_without_room(Story())
    assert verdict.phase is Phase.SUSPECTED
    assert verdict.cause == Cause.MEMORY_UNDETERMINED
    assert memory_probability(verdict) >= 0.9
    assert Condition.ENGINE_DOWN in verdict.conditions


def test_from_outside_alone_the_word_fragmentation_never_leads() -> None:
    verdict = crash_without_room(Story())
    assert verdict.cause != Cause.FRAGMENTATION
    assert verdict.probabilities[Cause.FRAGMENTATION] == 0
    assert "fragmentation and growth look the same" in verdict.sentence
    assert verdict.fragmentation_suspected, "yet it may be: the gauge for 'may be' is up"


def test_the_same_death_with_ample_room_is_not_memory() -> None:
    story = Story()
    story.serve(ticks=20)
    verdict = story.refuse(ticks=2)
    assert verdict.phase is Phase.CLEAR
    assert verdict.cause == Cause.UNEXPLAINED


def test_a_drained_engine_without_room_was_stopped_on_purpose() -> None:
    story = Story()
    story.serve(used=CARD - GIB // 2, running=12, ticks=12)
    story.serve(running=0, ok=0, tokens=0, ticks=5)
    verdict = story.refuse(ticks=2)
    assert verdict.phase is Phase.CLEAR
    assert verdict.cause not in MEMORY_CAUSES


def test_a_full_pool_with_preemptions_is_load_and_no_alarm() -> None:
    story = Story()
    for _ in range(30):
        story.serve(usage=0.97, waiting=10, preempted=3)
        story.serve(usage=0.7, waiting=10)
    assert story.verdict.phase is Phase.CLEAR
    assert story.verdict.cause == Condition.KV_EXHAUSTED


def test_a_queue_limit_at_an_empty_cache_is_no_alarm() -> None:
    story = Story()
    verdict = story.serve(usage=0.006, running=4, waiting=4, ok=2, rejected=100, ticks=20)
    assert verdict.phase is Phase.CLEAR
    assert verdict.cause == Condition.ADMISSION_LIMIT
    assert story.last is not None
    assert story.last.measures.failures is not None
    assert story.last.measures.failures.ratio == 0, "explained refusals are no server failures"


def test_server_errors_of_a_living_engine_are_unexplained_not_memory() -> None:
    story = Story()
    story.serve(ticks=5)
    verdict = story.serve(usage=0.1, ok=5, server_errors=5, ticks=12)
    assert verdict.phase is Phase.CLEAR
    assert verdict.cause == Cause.UNEXPLAINED
    assert verdict.episodes == 1


def test_four_failures_are_too_few_to_say_anything() -> None:
    story = Story()
    story.serve(ticks=5)
    story.serve(ok=0, server_errors=4)
    verdict = story.serve(ticks=3)
    assert verdict.episodes == 0


def test_a_dead_engine_behind_a_living_server_is_an_engine_fault() -> None:
    story = Story()
    story.serve(ticks=5)
    verdict = story.serve(healthy=False, ok=0, tokens=0, server_errors=500, ticks=4)
    assert verdict.cause == Cause.ENGINE_FAULT
    assert Condition.ENGINE_DOWN in verdict.conditions
    assert story.last is not None
    assert story.last.measures.failures is None, "what a dead engine's front end answers is not counted"


def test_a_time_out_is_no_death() -> None:
    story = Story()
    story.serve(used=CARD - GIB // 2, running=12, ticks=10)
    verdict = story.time_out(ticks=2)
    assert verdict.episodes == 0
    assert Condition.ENGINE_DOWN not in verdict.conditions


def test_one_refused_poll_is_no_death() -> None:
    story = Story()
    story.serve(used=CARD - GIB // 2, running=12, ticks=10)
    story.refuse()
    verdict = story.serve()
    assert verdict.episodes == 0


def test_missing_gpus_are_unknown_and_never_clear() -> None:
    story = Story(with_gpu=False)
    verdict = story.serve(ticks=5)
    assert verdict.phase is Phase.UNKNOWN
    assert "gpu" in verdict.missing


def test_two_polls_with_enough_evidence_make_it_clear() -> None:
    story = Story()
    assert story.serve().phase is Phase.UNKNOWN
    assert story.serve().phase is Phase.CLEAR


def test_an_engine_that_never_answered_is_starting_not_down() -> None:
    story = Story()
    verdict = story.refuse(ticks=10)
    assert verdict.conditions == (Condition.STARTING,)
    assert verdict.engine is None
    assert verdict.phase is Phase.UNKNOWN


def test_evidence_that_goes_missing_makes_the_phase_unknown_again() -> None:
    story = Story()
    story.serve(ticks=5)
    verdict = story.time_out(ticks=5)
    assert verdict.phase is Phase.UNKNOWN


def test_the_allocators_words_confirm_at_once() -> None:
    story = Story(with_log=True)
    story.serve(ticks=5)
    story.say(Fact.OOM, **OOM_FRAGMENTED)
    verdict = story.serve()
    assert verdict.phase is Phase.CONFIRMED
    assert verdict.cause == Cause.FRAGMENTATION
    assert verdict.probabilities[Cause.FRAGMENTATION] > 0.9


def test_the_allocators_arithmetic_can_say_that_it_was_not_fragmentation() -> None:
    story = Story(with_log=True)
    story.serve(ticks=5)
    story.say(Fact.OOM, **OOM_EXHAUSTED)
    verdict = story.serve()
    assert verdict.phase is Phase.CONFIRMED
    assert verdict.cause == Cause.VRAM_EXHAUSTED
    assert not verdict.fragmentation_suspected


def test_a_message_without_numbers_names_no_cause_it_cannot_know() -> None:
    story = Story(with_log=True)
    story.serve(ticks=5)
    story.say(Fact.OOM)
    verdict = story.serve()
    assert verdict.phase is Phase.CONFIRMED
    assert verdict.cause == Cause.MEMORY_UNDETERMINED


def test_a_shutdown_in_the_log_explains_the_death_that_follows() -> None:
    story = Story(with_log=True)
    story.serve(used=CARD - GIB // 2, running=12, ticks=12)
    story.say(Fact.SHUTDOWN)
    story.say(Fact.ENGINE_DEATH)
    verdict = story.refuse(ticks=2)
    assert verdict.cause == Cause.SHUTDOWN
    assert verdict.phase is Phase.CLEAR


def test_what_came_first_explains_the_rest() -> None:
    story = Story(with_log=True)
    story.serve(ticks=5)
    story.say(Fact.OOM, **OOM_FRAGMENTED)
    story.refuse()
    story.say(Fact.ENGINE_DEATH)
    story.say(Fact.SHUTDOWN)
    verdict = story.refuse()
    assert verdict.cause == Cause.FRAGMENTATION


def test_a_log_that_is_there_and_silent_speaks_against_memory() -> None:
    verdict = crash_without_room(Story(with_log=True))
    assert verdict.phase is Phase.CLEAR
    assert memory_probability(verdict) < 0.5


def test_a_log_line_that_comes_late_corrects_the_verdict() -> None:
    story = Story(with_log=True)
    assert crash_without_room(story).phase is Phase.CLEAR
    story.say(Fact.OOM, **OOM_FRAGMENTED)
    verdict = story.refuse()
    assert verdict.phase is Phase.CONFIRMED
    assert verdict.episodes == 1, "the message and the death are one episode"


def test_a_planned_stop_marker_makes_the_death_a_shutdown() -> None:
    story = Story()
    story.serve(used=CARD - GIB // 2, running=12, ticks=12)
    story.say(Fact.PLANNED_STOP)
    verdict = story.refuse(ticks=2)
    assert verdict.cause == Cause.SHUTDOWN
    assert verdict.phase is Phase.CLEAR


def test_an_old_marker_says_nothing() -> None:
    story = Story()
    story.say(Fact.PLANNED_STOP)
    verdict = crash_without_room(story)
    story.serve(used=int(0.93 * CARD), ticks=60)
    assert verdict.phase is Phase.CLEAR, "touched less than two minutes before"
    late = Story()
    late.say(Fact.PLANNED_STOP)
    late.serve(ticks=30)
    assert crash_without_room(late).phase is Phase.SUSPECTED


def test_the_same_process_answering_again_takes_the_death_back() -> None:
    story = Story()
    assert crash_without_room(story).phase is Phase.SUSPECTED
    verdict = story.serve(used=CARD - GIB // 2)
    assert verdict.phase is Phase.CLEAR
    assert verdict.cause == Cause.UNEXPLAINED


def test_a_restart_that_fell_between_two_polls_is_judged_when_it_is_seen() -> None:
    story = Story()
    crash = Story()
    assert crash_without_room(crash).phase is Phase.SUSPECTED
    story.serve(ticks=6)
    for step in range(12):
        story.serve(used=int(0.93 * CARD) + step * GIB)
    story.serve(used=CARD - GIB // 2, ticks=3, running=12)
    story.restart()
    verdict = story.serve(used=int(0.93 * CARD))
    assert verdict.phase is Phase.SUSPECTED


def test_a_restart_without_a_start_time_is_seen_by_counters_that_fall() -> None:
    story = Story()
    story.started_at = None
    story.serve(ticks=10)
    story.counters = dict.fromkeys(story.counters, 0.0)
    story.tokens = 0.0
    verdict = story.serve(ticks=2)
    assert verdict.episodes == 1
    assert story.last is not None
    assert sum(story.last.measures.restarts.values()) == 1


def test_suspicion_lasts_until_the_hold_is_over_and_headroom_is_back() -> None:
    story = Story()
    crash_without_room(story)
    story.refuse(ticks=6)
    story.restart()
    verdict = story.serve(used=int(0.905 * CARD), ticks=int(900 / 5) - 10)
    assert verdict.phase is Phase.SUSPECTED, "the hold is not over"
    verdict = story.serve(ticks=12)
    assert verdict.phase is Phase.CLEAR
    assert verdict.probabilities[Cause.NONE] == 1


def test_suspicion_does_not_end_while_headroom_is_short() -> None:
    story = Story()
    crash_without_room(story)
    story.restart()
    verdict = story.serve(used=CARD - GIB // 2, ticks=400)
    assert verdict.phase is Phase.SUSPECTED


def test_a_gone_engine_keeps_its_verdict_for_an_hour_and_no_longer() -> None:
    story = Story()
    crash_without_room(story)
    verdict = story.refuse(ticks=int(3500 / 5))
    assert verdict.phase is Phase.SUSPECTED
    assert verdict.engine == "0"
    verdict = story.refuse(ticks=30)
    assert verdict.engine is None
    assert verdict.phase is Phase.UNKNOWN


def test_a_rollout_an_hour_after_a_real_failure_is_not_another_one() -> None:
    story = Story(with_log=True)
    story.serve(ticks=5)
    story.say(Fact.OOM, **OOM_FRAGMENTED)
    story.refuse(ticks=2)
    story.restart()
    story.serve(used=int(0.905 * CARD), ticks=800)
    assert story.verdict.phase is Phase.CLEAR
    story.say(Fact.SHUTDOWN)
    verdict = story.refuse(ticks=2)
    assert verdict.cause == Cause.SHUTDOWN
    assert verdict.phase is Phase.CLEAR


def test_probabilities_always_sum_to_one() -> None:
    story = Story()
    verdicts = [story.serve(ticks=3), crash_without_room(story)]
    story.restart()
    verdicts += [story.serve(ticks=5), story.serve(server_errors=50, ticks=5)]
    for verdict in verdicts:
        assert set(verdict.probabilities) == {str(cause) for cause in Cause}
        assert sum(verdict.probabilities.values()) == pytest.approx(1)


def test_memory_failures_are_counted_when_the_episode_closes() -> None:
    story = Story()
    crash_without_room(story)
    assert story.last is not None
    assert story.last.measures.memory_failures[Cause.MEMORY_UNDETERMINED] == 0
    story.restart()
    story.serve(used=int(0.905 * CARD))
    assert story.last.measures.memory_failures[Cause.MEMORY_UNDETERMINED] == 1
    assert story.last.measures.lost_total == 12
    assert story.last.measures.restarts["unplanned"] == 1


def test_growth_towards_exhaustion_is_watched_and_pages_nobody() -> None:
    story = Story(interval_s=15)
    for minute in range(45):
        story.serve(used=int(0.905 * CARD) + minute * 100 * 2**20, ticks=4)
    assert story.verdict.phase is Phase.WATCH
    assert "climbs" in story.verdict.sentence
    assert story.last is not None
    (gpu,) = story.last.measures.gpus
    assert gpu.gpu == GPU
    assert gpu.growth_bytes_per_s == pytest.approx(100 * 2**20 / 60, rel=0.05)
    assert gpu.exhaustion_s is not None
    assert 0 < gpu.exhaustion_s < 6 * 3600


def test_a_single_step_is_no_growth() -> None:
    story = Story(interval_s=15)
    story.serve(ticks=80)
    story.serve(used=story.used_bytes + 4 * GIB, ticks=80)
    assert story.verdict.phase is Phase.CLEAR


def test_warm_up_is_no_growth() -> None:
    story = Story(interval_s=15, born_s_ago=0)
    phases = set()
    for quarter in range(50):
        phases.add(story.serve(used=int(0.905 * CARD) + quarter * GIB // 4).phase)
    assert Phase.WATCH not in phases
    old = Story(interval_s=15, parameters=Parameters(warmup_s=0.0))
    for quarter in range(50):
        phases.add(old.serve(used=int(0.905 * CARD) + quarter * GIB // 4).phase)
    assert Phase.WATCH in phases, "the same climb of an old process is growth"


def test_a_sleeping_engine_is_neither_down_nor_out_of_memory() -> None:
    story = Story()
    story.serve(ticks=20)
    verdict = story.serve(usage=0.0, running=0, ok=0, tokens=0, sleeping=True, used=20 * GIB, ticks=20)
    assert verdict.cause == Condition.SLEEPING
    assert verdict.phase is Phase.CLEAR
    assert verdict.episodes == 0


def test_a_stalled_scheduler_is_named_after_two_minutes() -> None:
    story = Story()
    story.serve(ticks=5)
    verdict = story.serve(usage=0.0, running=0, waiting=6, ok=0, tokens=0, ticks=20)
    assert Condition.STALLED not in verdict.conditions
    verdict = story.serve(usage=0.0, running=0, waiting=6, ok=0, tokens=0, ticks=10)
    assert verdict.cause == Condition.STALLED
    assert verdict.phase is Phase.CLEAR


def test_a_first_request_after_an_idle_night_is_no_stall() -> None:
    story = Story()
    story.serve(usage=0.0, running=0, ok=0, tokens=0, ticks=1000)
    verdict = story.serve(usage=0.0, running=0, waiting=1, ok=0, tokens=0)
    assert Condition.STALLED not in verdict.conditions


def test_hang_ups_are_found_although_vllm_counts_them_as_successes() -> None:
    story = Story()
    story.serve(ticks=5)
    verdict = story.serve(ok=5, hang_ups=5, ticks=5)
    assert Condition.CLIENT_ABORTS in verdict.conditions


def test_client_errors_are_the_clients_fault() -> None:
    story = Story()
    story.serve(ticks=5)
    verdict = story.serve(client_errors=10, ticks=5)
    assert verdict.cause == Condition.CLIENT_ERRORS
    assert verdict.phase is Phase.CLEAR


def test_a_condition_lingers_a_minute_and_then_goes() -> None:
    story = Story()
    story.serve(ticks=5)
    story.serve(client_errors=10, ticks=5)
    # The window of 15 s still holds the last of them three ticks long; from then on it lingers for 60 s.
    assert Condition.CLIENT_ERRORS in story.serve(ticks=3 + 11).conditions
    assert Condition.CLIENT_ERRORS not in story.serve(ticks=4).conditions


def test_a_pool_that_was_full_long_ago_is_not_full_now() -> None:
    story = Story()
    story.serve(usage=0.97, waiting=10, preempted=3, ticks=60)
    assert Condition.KV_EXHAUSTED in story.verdict.conditions
    story.serve(usage=0.3, ticks=90)
    assert Condition.KV_EXHAUSTED not in story.verdict.conditions


def test_thresholds_can_be_set() -> None:
    careful = crash_without_room(Story(parameters=Parameters(suspected_probability=0.99)))
    assert careful.phase is Phase.CLEAR
    assert careful.cause == Cause.MEMORY_UNDETERMINED


def test_time_that_goes_back_does_not_stop_the_detector() -> None:
    story = Story()
    story.serve(ticks=10)
    story.at -= 3600
    verdict = story.serve(ticks=10)
    assert verdict.phase is Phase.CLEAR
    assert verdict.episodes == 0


def test_every_verdict_has_a_sentence_and_something_to_do() -> None:
    names = {*map(str, Cause), *map(str, Condition), "unknown", "watch", "cornered", "blind"}
    assert set(map(str, SENTENCES)) == names
    assert set(map(str, REMEDIES)) == names
