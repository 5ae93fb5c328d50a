"""What per-process VRAM and the allocator add: what they let the detector say, and what it still may not."""

from dataclasses import replace

import pytest

from fragscope.detect.allocator import Allocators
from fragscope.detect.parameters import Parameters, Weights
from fragscope.model import AllocatorReading, Cause, Fact, Phase, Verdict
from fragscope.recording import LogLine, Tally, read_lines
from fragscope.replay import Replayer, Timeline, replay
from tests.paths import H200
from tests.stories import CARD, GIB, Story

NEED = int(0.01 * CARD)
OOM = {"tried": 2.5 * GIB, "free": 0.8 * GIB, "total": float(CARD)}


def settled(**more: object) -> Story:
    """A server past its warm-up, with the allocator and per-process VRAM heard, at 90 % of the card."""
    story = Story(used_bytes=int(0.9 * CARD), **more)  # type: ignore[arg-type]
    story.allocator = {"live": int(0.85 * CARD), "split": 0, "cache": 4 * GIB}
    story.others_bytes = GIB // 2
    story.serve(ticks=80)
    return story


def signals(verdict: Verdict) -> dict[str, float]:
    return {row.signal: row.weight for row in verdict.evidence}


def likeliest(verdict: Verdict) -> str:
    return max(verdict.probabilities, key=lambda cause: verdict.probabilities[cause])


def test_retries_and_stranded_memory_before_a_death_say_fragmentation() -> None:
    story = settled()
    assert story.allocator is not None
    story.allocator |= {"split": 9 * GIB, "cache": 0}
    story.serve(used=CARD - GIB // 2, running=12, ticks=3)
    story.allocator["retries"] = 4
    story.serve(running=12)
    verdict = story.refuse(ticks=2)
    assert verdict.phase is Phase.SUSPECTED, "nobody heard the allocator fail"
    assert verdict.cause == Cause.FRAGMENTATION
    assert signals(verdict)["allocator_retries"] == 2.5
    assert signals(verdict)["inactive_split"] == 0.8
    assert "GiB were stranded in split segments" in verdict.sentence


def test_the_same_death_with_nothing_stranded_is_a_card_that_is_too_full() -> None:
    story = settled()
    assert story.allocator is not None
    story.allocator["retries"] = 4
    story.serve(used=CARD - GIB // 2, running=12, ticks=3)
    verdict = story.refuse(ticks=2)
    assert verdict.cause == Cause.VRAM_EXHAUSTED
    assert signals(verdict)["inactive_split"] == -0.3


def test_old_retries_are_no_evidence_of_a_death() -> None:
    story = settled()
    assert story.allocator is not None
    story.allocator["retries"] = 4
    story.serve(used=CARD - GIB // 2, running=12, ticks=20)
    assert signals(story.refuse(ticks=2))["allocator_retries"] == -0.3


def test_a_counted_out_of_memory_error_confirms_without_any_log() -> None:
    story = settled()
    assert story.allocator is not None
    story.allocator |= {"split": 9 * GIB, "cache": 0}
    story.serve(used=CARD - GIB // 2, running=12, ticks=3)
    story.allocator["ooms"] = 1
    verdict = story.serve(running=12)
    assert verdict.phase is Phase.CONFIRMED
    assert verdict.cause == Cause.FRAGMENTATION
    assert signals(verdict)["allocator_ooms"] == 5.5
    assert story.refuse(ticks=2).phase is Phase.CONFIRMED


def test_errors_from_before_we_listened_confirm_nothing() -> None:
    story = Story()
    story.allocator = {"live": 100 * GIB, "split": 0, "ooms": 3}
    assert story.serve(ticks=10).phase is Phase.CLEAR


def test_a_new_process_begins_its_counters_anew() -> None:
    story = settled()
    assert story.allocator is not None
    story.allocator["ooms"] = 2
    story.serve()
    story.pid, story.allocator["ooms"] = 8, 1
    before = story.verdict.episodes
    story.serve(ticks=20)
    assert story.verdict.episodes == before, "the first reading of a worker is its baseline"


def test_an_allocator_that_counted_nothing_speaks_against_memory_while_the_engine_lives() -> None:
    story = settled()
    story.serve(used=CARD - GIB // 2, ticks=3)
    verdict = story.serve(server_errors=20, ok=5, ticks=6)
    assert verdict.cause == Cause.UNEXPLAINED
    assert signals(verdict)["allocator_ooms"] == -1.0


def test_one_huge_step_that_failed_where_there_was_room_is_a_transient_peak() -> None:
    story = settled()
    assert story.allocator is not None
    story.allocator["ooms"] = 1
    story.serve(running=12)
    verdict = story.refuse(ticks=2)
    assert verdict.phase is Phase.CONFIRMED
    assert verdict.cause == Cause.TRANSIENT_PEAK


def test_a_tenant_that_takes_the_memory_is_named() -> None:
    story = settled()
    story.allocator = None
    for _ in range(6):
        assert story.others_bytes is not None
        story.others_bytes += 3 * GIB
        story.serve(used=story.used_bytes + 3 * GIB, running=12)
    assert CARD - story.used_bytes < NEED
    verdict = story.refuse(ticks=2)
    assert verdict.phase is Phase.SUSPECTED
    assert verdict.cause == Cause.EXTERNAL_PROCESS
    assert "other processes hold" in verdict.sentence


def test_a_tenant_that_was_there_from_the_start_took_nothing() -> None:
    story = Story(used_bytes=int(0.9 * CARD), others_bytes=40 * GIB)
    story.serve(ticks=80)
    story.serve(used=CARD - GIB // 2, running=12, ticks=3)
    verdict = story.refuse(ticks=2)
    assert verdict.cause == Cause.MEMORY_UNDETERMINED


def test_what_grew_in_the_engine_itself_stays_undivided_without_the_allocator() -> None:
    story = Story(used_bytes=int(0.9 * CARD), others_bytes=GIB)
    story.serve(ticks=80)
    for _ in range(18):
        story.serve(used=story.used_bytes + GIB, running=12)
    verdict = story.refuse(ticks=2)
    assert verdict.cause == Cause.MEMORY_UNDETERMINED
    assert verdict.probabilities[Cause.FRAGMENTATION] == 0
    assert verdict.probabilities[Cause.MEMORY_GROWTH] == 0


def leaking(story: Story, minutes: int, each_bytes: int) -> None:
    """Live memory that climbs by the minute."""
    assert story.allocator is not None
    for _ in range(minutes):
        story.allocator["live"] += each_bytes
        story.serve(used=story.used_bytes + each_bytes, running=12, ticks=int(60 / story.interval_s))


def test_live_memory_that_grew_until_nothing_was_left_is_growth() -> None:
    story = settled(interval_s=15)
    leaking(story, 60, 326 * 2**20)
    assert story.verdict.phase is Phase.WATCH
    verdict = story.refuse(ticks=2)
    assert verdict.phase is Phase.SUSPECTED
    assert verdict.cause == Cause.MEMORY_GROWTH
    assert "live tensors" in verdict.sentence


def test_the_message_of_a_leak_is_growth_even_where_a_little_is_stranded() -> None:
    story = settled(interval_s=15, with_log=True)
    leaking(story, 60, 326 * 2**20)
    story.say(Fact.OOM, **OOM, reserved_unallocated=2.2 * GIB)
    verdict = story.refuse(ticks=2)
    assert verdict.phase is Phase.CONFIRMED
    assert verdict.cause == Cause.MEMORY_GROWTH


def test_a_working_set_that_rose_and_stayed_does_not_hide_that_compaction_would_have_served() -> None:
    story = settled(interval_s=15, with_log=True)
    leaking(story, 10, 3 * GIB // 2)
    story.serve(used=story.used_bytes, running=12, ticks=200)
    story.say(Fact.OOM, **OOM, reserved_unallocated=7 * GIB)
    assert story.refuse(ticks=2).cause == Cause.FRAGMENTATION


def test_a_log_alone_tells_growth_from_fragmentation() -> None:
    def ended(stranded_bytes: float) -> str:
        story = Story(interval_s=15, used_bytes=int(0.9 * CARD), with_log=True)
        story.serve(ticks=60)
        for _ in range(60):
            story.serve(used=story.used_bytes + 326 * 2**20, running=12, ticks=4)
        story.say(Fact.OOM, **OOM, reserved_unallocated=stranded_bytes)
        return story.refuse(ticks=2).cause

    assert ended(0.2 * GIB) == Cause.MEMORY_GROWTH
    assert ended(17.9 * GIB) == Cause.FRAGMENTATION


def test_a_climb_that_the_allocator_would_give_back_is_no_growth() -> None:
    def phase(*, cached: bool) -> Phase:
        story = settled(interval_s=15)
        assert story.allocator is not None
        for _ in range(45):
            story.allocator["cache" if cached else "live"] += 100 * 2**20
            story.serve(used=story.used_bytes + 100 * 2**20, ticks=4)
        return story.verdict.phase

    assert phase(cached=False) is Phase.WATCH
    assert phase(cached=True) is Phase.CLEAR


def test_a_tenants_climb_is_watched_and_called_the_tenants() -> None:
    story = Story(interval_s=15, used_bytes=int(0.9 * CARD), others_bytes=GIB)
    for _ in range(45):
        assert story.others_bytes is not None
        story.others_bytes += 100 * 2**20
        story.serve(used=story.used_bytes + 100 * 2**20, ticks=4)
    assert story.verdict.phase is Phase.WATCH
    assert "Another process" in story.verdict.sentence
    assert story.detector._growing() is False, "the engine's own memory is level"


def test_a_leak_of_days_is_seen_by_the_ring_of_hours() -> None:
    story = Story(interval_s=60, used_bytes=int(0.9 * CARD))
    phases = []
    for hour in range(26):
        step = 600 * 2**20 if hour % 2 == 0 else 0
        phases.append(story.serve(used=story.used_bytes + step, ticks=60).phase)
    assert phases[-1] is Phase.CLEAR, "more than six hours are left"
    for hour in range(30):
        step = 900 * 2**20 if hour % 2 == 0 else 0
        phases.append(story.serve(used=min(CARD - GIB, story.used_bytes + step), ticks=60).phase)
    assert Phase.WATCH in phases
    assert "an hour" in story.verdict.sentence


def test_retries_with_stranded_memory_are_a_forecast_even_in_warm_up() -> None:
    story = Story(born_s_ago=60)
    story.allocator = {"live": 150 * GIB, "split": 3 * GIB, "retries": 0}
    story.serve(ticks=4)
    story.allocator["retries"] = 1
    assert story.serve(ticks=3).phase is Phase.CLEAR, "one flush is none"
    story.allocator["retries"] = 2
    verdict = story.serve()
    assert verdict.phase is Phase.WATCH
    assert "keeps running into a full device" in verdict.sentence
    assert "restart soon" in verdict.remedy
    assert story.serve(ticks=160).phase is Phase.CLEAR


def test_retries_with_nothing_stranded_are_no_forecast() -> None:
    story = Story()
    story.allocator = {"live": 150 * GIB, "split": 0, "cache": 9 * GIB, "retries": 0}
    for _ in range(20):
        story.allocator["retries"] += 1
        assert story.serve(ticks=2).phase is not Phase.WATCH


def test_the_allocator_tells_a_real_healthy_run_from_the_ones_that_failed() -> None:
    def phases(name: str) -> set[Phase]:
        told, seen = Timeline(), set()
        for assessment in replay(read_lines(str(H200 / f"{name}.jsonl.gz"), Tally()), Replayer()):
            seen |= {verdict.phase for verdict in told.observe(assessment)}
        return seen

    assert phases("nopinned-0") == {Phase.UNKNOWN, Phase.CLEAR}
    assert Phase.WATCH in phases("frag-default-0")
    assert Phase.WATCH in phases("frag-default-1")


@pytest.mark.parametrize("tier", ["outside", "own", "log without figures"])
def test_fragmentation_never_leads_without_the_allocators_figures(tier: str) -> None:
    story = Story(with_log=tier == "log without figures", used_bytes=int(0.9 * CARD))
    story.others_bytes = GIB if tier == "own" else None
    story.serve(ticks=80)
    for _ in range(18):
        story.serve(used=story.used_bytes + GIB, running=12)
    story.serve(used=CARD - GIB // 4, running=12)
    if story.with_log:
        story.say(Fact.OOM)
    verdict = story.refuse(ticks=2)
    assert verdict.phase in (Phase.SUSPECTED, Phase.CONFIRMED)
    assert likeliest(verdict) != Cause.FRAGMENTATION
    assert verdict.cause == Cause.MEMORY_UNDETERMINED


def test_a_ticket_comes_before_a_page() -> None:
    # free < need, work lost: log-odds 1.9, that is 87 %.
    story = Story(used_bytes=int(0.9 * CARD))
    story.serve(ticks=20)
    story.serve(used=CARD - int(0.8 * NEED), running=12, ticks=3)
    verdict = story.refuse(ticks=2)
    assert verdict.phase is Phase.CLEAR
    assert verdict.ticket
    story.restart()
    assert story.serve(used=int(0.9 * CARD), ticks=100).ticket
    assert not story.serve(ticks=100).ticket, "it ends with the hold"


def test_whoever_is_paged_has_a_ticket() -> None:
    careless = Parameters(ticket_probability=0.99)
    story = Story(used_bytes=int(0.9 * CARD), parameters=careless)
    story.serve(ticks=20)
    story.serve(used=CARD - GIB // 2, running=12, ticks=3)
    verdict = story.refuse(ticks=2)
    assert verdict.phase is Phase.SUSPECTED
    assert verdict.ticket


def test_the_new_weights_can_be_set() -> None:
    story = settled(parameters=Parameters(weights=Weights(retries=0.1)))
    assert story.allocator is not None
    story.allocator["retries"] = 4
    story.serve(used=CARD - GIB // 2, running=12, ticks=3)
    assert signals(story.refuse(ticks=2))["allocator_retries"] == 0.1


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("frag-default-0", Cause.FRAGMENTATION),
        ("frag-default-1", Cause.FRAGMENTATION),
        ("frag-expandable-0", Cause.VRAM_EXHAUSTED),
        ("util95-0", Cause.VRAM_EXHAUSTED),
    ],
)
def test_a_real_allocators_counters_say_without_a_log_what_its_message_says(name: str, cause: Cause) -> None:
    told = Timeline()
    lines = (line for line in read_lines(str(H200 / f"{name}.jsonl.gz"), Tally()) if not isinstance(line, LogLine))
    for assessment in replay(lines, Replayer()):
        list(told.observe(assessment))
    ((final, _),) = told.finals()
    assert final.phase is Phase.CONFIRMED
    assert final.cause == cause


def of(gpu: str, at: float, **more: int) -> AllocatorReading:
    return AllocatorReading(at, gpu, 7, 100 * GIB, 110 * GIB, more.get("split", 0), more.get("retries", 0), 0)


def test_of_several_cards_the_one_that_ran_out_speaks() -> None:
    allocators = Allocators(Parameters())
    allocators.observe("vllm", (of("c1", 0), of("c2", 0)), 0)
    allocators.observe("vllm", (of("c1", 5), of("c2", 5, retries=2)), 5)
    held = allocators.held("c1", 10, 15)
    assert held is not None
    assert (held.gpu, held.retries) == ("c2", 2)
    later = allocators.held("c1", 15, 5)
    assert later is not None
    assert later.gpu == "c1", "nobody retried lately: the card with the least headroom"


def test_silent_workers_are_forgotten_and_many_are_bounded() -> None:
    allocators = Allocators(Parameters())
    for second in range(0, 4000, 5):
        fresh = replace(of("c1", second), pid=second)
        allocators.observe("vllm", (fresh,), second)
    assert len(allocators._workers) <= 64 + 1
    allocators.observe("vllm", (), 10_000)
    assert not allocators._workers


def test_a_request_far_beyond_any_step_ever_seen_is_a_transient_peak() -> None:
    def ended(tried_bytes: float) -> str:
        story = Story(used_bytes=int(0.93 * CARD), with_log=True)
        story.serve(ticks=20)
        story.say(Fact.OOM, tried=tried_bytes, free=0.8 * GIB, total=float(CARD), reserved_unallocated=0.0)
        return story.refuse(ticks=2).cause

    assert ended(12 * GIB) == Cause.TRANSIENT_PEAK
    assert ended(1.5 * GIB) == Cause.VRAM_EXHAUSTED


def test_memory_outside_pytorch_that_grew_is_growth_even_where_the_climb_is_over() -> None:
    story = settled()
    for _ in range(6):
        story.serve(used=story.used_bytes + GIB, running=12)
    story.serve(used=CARD - GIB // 2, running=12, ticks=20)
    verdict = story.refuse(ticks=2)
    assert verdict.cause == Cause.MEMORY_GROWTH
    assert "memory outside PyTorch" in verdict.sentence


def test_a_tenant_that_outlives_the_engine_is_the_cause_of_the_next_death_too() -> None:
    story = Story(used_bytes=int(0.9 * CARD), others_bytes=GIB)
    story.serve(ticks=80)
    story.others_bytes = 15 * GIB
    for _ in range(2):
        story.serve(used=CARD - GIB // 2, running=12, ticks=6)
        assert story.refuse(ticks=2).cause == Cause.EXTERNAL_PROCESS
        story.restart()
