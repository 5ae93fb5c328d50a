"""Outcomes, headroom, staircases and the little statistics."""

import random

import pytest

from fragscope.detect.allocator import Allocators
from fragscope.detect.correlation import Correlation
from fragscope.detect.outcomes import Increments, Ledger
from fragscope.detect.parameters import Parameters
from fragscope.detect.staircase import Staircase
from fragscope.detect.statistics import Decayed, Highest, kendall_z, log_odds_ratio, theil_sen_slope, wilson
from fragscope.detect.vram import Vram
from fragscope.model import Band, EngineReading, GpuReading, Outcome
from tests.stories import CARD, GIB, GPU

MIB = 2**20
NOBODY = Allocators(Parameters())


def reading(at: float = 0, **counters: float) -> tuple[EngineReading, ...]:
    http = {"2xx": counters.get("ok", 0), "4xx": counters.get("bad", 0), "5xx": counters.get("failed", 0)}
    return (
        EngineReading(
            at=at,
            engine="0",
            model_name="m",
            running=counters.get("running", 0),
            waiting=0,
            first_tokens_total=counters.get("first", 0),
            finished_total={"stop": counters.get("finished", 0), "error": counters.get("errors", 0)},
            http_total=http,
            admission_rejections_total=counters.get("rejected", 0),
        ),
    )


def advance(ledger: Ledger, **counters: float) -> Increments:
    return ledger.advance(reading(**counters), restarted=False, counting=True)


def test_the_first_reading_only_sets_the_baseline() -> None:
    assert advance(Ledger(), ok=1000, failed=50) == Increments()


def test_rejections_that_lead_their_503_by_a_poll_invent_no_failure() -> None:
    ledger = Ledger()
    advance(ledger)
    first = advance(ledger, rejected=10, failed=4)
    second = advance(ledger, rejected=10, failed=10)
    assert first.server_error == second.server_error == 0
    assert first.admission_rejected == 10


def test_rejected_streams_that_answered_200_are_no_successes_and_no_hang_ups() -> None:
    ledger = Ledger()
    advance(ledger)
    seen = advance(ledger, ok=13, finished=10, first=10, rejected=7, failed=4)
    assert seen.ok == 10
    assert seen.aborted == 0
    assert seen.server_error == 0


def test_errors_that_no_rejection_explains_are_failures() -> None:
    ledger = Ledger()
    advance(ledger)
    assert advance(ledger, rejected=4, failed=9).server_error == 5


def test_streamed_errors_are_failures_too() -> None:
    ledger = Ledger()
    advance(ledger)
    assert advance(ledger, ok=3, finished=3, errors=2).server_error == 2


def test_a_restart_counts_the_new_processs_numbers_from_zero() -> None:
    ledger = Ledger()
    advance(ledger, ok=1000, finished=1000, first=1000)
    advance(ledger, ok=1010, finished=1010, first=1010)
    seen = ledger.advance(reading(ok=7, finished=7, first=7), restarted=True, counting=True)
    assert seen.ok == 7


def test_a_family_that_is_missing_from_one_page_makes_no_burst() -> None:
    ledger = Ledger()
    advance(ledger, ok=1000, finished=1000, first=1000)
    bare = (EngineReading(at=1, engine="0", model_name="m", running=0, waiting=0),)
    ledger.advance(bare, restarted=False, counting=True)
    assert advance(ledger, ok=1001, finished=1001, first=1001).ok == 1


def test_hang_ups_are_the_larger_of_both_lower_bounds() -> None:
    ledger = Ledger()
    advance(ledger)
    assert advance(ledger, ok=10, finished=6, first=8, running=0).aborted == 4


def test_running_requests_are_no_hang_ups() -> None:
    ledger = Ledger()
    advance(ledger)
    assert advance(ledger, ok=2, finished=2, first=10, running=8).aborted == 0


def test_wilsons_bounds_hold_the_published_example() -> None:
    # Newcombe (1998), Statistics in Medicine 17: 81 of 263 gives 0.2553 to 0.3662.
    lower, upper = wilson(81, 263, 1.959964)
    assert lower == pytest.approx(0.2553, abs=5e-4)
    assert upper == pytest.approx(0.3662, abs=5e-4)


def test_wilson_says_nothing_of_nothing() -> None:
    assert wilson(0, 0, 1.96) == (0.0, 1.0)


def test_failures_that_go_with_a_full_cache_have_negative_log_odds() -> None:
    value, _, upper = log_odds_ratio((2, 1000), (200, 1000))
    assert value < 0
    assert upper < 0


def test_a_decayed_sum_halves_in_its_half_life() -> None:
    total = Decayed(300)
    total.add(1000, 8)
    assert total.value(1300) == pytest.approx(4)
    assert total.value(1600) == pytest.approx(2)


def test_a_strict_climb_has_the_z_of_its_formula() -> None:
    # n = 10, S = 45: z = 44 / sqrt(10 * 9 * 25 / 18).
    assert kendall_z(45, 10) == pytest.approx(44 / (10 * 9 * 25 / 18) ** 0.5)
    assert kendall_z(0, 10) == 0


def test_the_score_that_is_kept_is_the_score_of_all_pairs() -> None:
    noise, parameters = random.Random(3), Parameters()
    stair = Staircase(parameters, 60.0)
    values: list[float] = []
    for minute in range(200):
        value = 100 * GIB + noise.choice((0, 8, 16, 17, 64, 200)) * MIB
        stair.add(minute * 60.0, value)
        kept = values[-parameters.trend_buckets :]
        pairs = [b - a for i, a in enumerate(kept) for b in kept[i + 1 :]]
        tie = parameters.trend_tie_bytes
        assert stair._score == sum(d > tie for d in pairs) - sum(d < -tie for d in pairs)
        values.append(value)


def test_the_highest_of_the_window_is_the_highest_of_all_its_rows() -> None:
    noise, highest = random.Random(5), Highest(60.0)
    rows: list[tuple[float, float]] = []
    for second in range(0, 2000, 7):
        rows.append((second, noise.random()))
        highest.add(*rows[-1])
        assert highest.value(second) == max(value for at, value in rows if at >= second - 60)
    assert highest.value(10_000) is None


def test_one_wild_point_does_not_move_the_slope() -> None:
    points = [(float(x), 2.0 * x) for x in range(20)]
    points[7] = (7.0, 1e9)
    assert theil_sen_slope(points) == pytest.approx(2.0, rel=0.01)


def climb(values: list[int]) -> Staircase:
    stair = Staircase(Parameters(), 60.0)
    for minute, value in enumerate([*values, values[-1]]):
        stair.add(minute * 60.0, value)
    stair.judge()
    return stair


def test_steps_that_stay_are_growth() -> None:
    stair = climb([100 * GIB + minute * 64 * MIB for minute in range(30)])
    assert stair.trend is not None
    assert stair.trend.growing
    assert stair.trend.slope_bytes_per_s == pytest.approx(64 * MIB / 60)


def test_steps_that_stopped_have_saturated() -> None:
    stair = climb([100 * GIB + min(minute, 10) * 64 * MIB for minute in range(30)])
    assert stair.trend is not None
    assert not stair.trend.growing


def test_memory_that_comes_back_is_a_cache() -> None:
    stair = climb([100 * GIB + (minute % 8) * 64 * MIB for minute in range(30)])
    assert stair.trend is not None
    assert not stair.trend.growing


def test_noise_is_no_growth() -> None:
    noise = random.Random(7)
    for _ in range(200):
        stair = climb([100 * GIB + int(noise.gauss(0, 200 * MIB)) for _ in range(30)])
        assert stair.trend is not None
        assert not stair.trend.growing


def test_a_short_ring_says_nothing() -> None:
    assert climb([100 * GIB + minute * 64 * MIB for minute in range(8)]).trend is None


def gpu(at: float, used: int, peak: int | None = None, name: str = GPU) -> GpuReading:
    return GpuReading(at, name, CARD, used, peak)


def test_headroom_counts_the_peak_and_not_the_last_value() -> None:
    vram = Vram(Parameters())
    vram.observe(0, (gpu(0, 170 * GIB, 191 * GIB),), NOBODY, serving=False, warm=False)
    room = vram.headroom_now()
    assert room is not None
    assert room.free_bytes == GIB


def test_the_need_is_the_largest_transient_seen_while_serving() -> None:
    vram = Vram(Parameters())
    vram.observe(0, (gpu(0, 170 * GIB),), NOBODY, serving=False, warm=False)
    vram.observe(5, (gpu(5, 175 * GIB),), NOBODY, serving=False, warm=False)
    assert vram.need_bytes(gpu(5, 0)) == pytest.approx(0.01 * CARD), "loading weights is no transient"
    vram.observe(10, (gpu(10, 175 * GIB, 178 * GIB),), NOBODY, serving=True, warm=False)
    assert vram.need_bytes(gpu(10, 0)) == 3 * GIB


def test_what_the_death_itself_freed_is_no_headroom() -> None:
    vram = Vram(Parameters())
    vram.observe(0, (gpu(0, 190 * GIB),), NOBODY, serving=True, warm=False)
    vram.observe(5, (gpu(5, GIB // 4),), NOBODY, serving=True, warm=False)
    room = vram.headroom_before_death(-15, 10)
    assert room is not None
    assert room.free_bytes == 2 * GIB


def test_a_peak_between_the_last_poll_and_the_death_still_counts() -> None:
    vram = Vram(Parameters())
    vram.observe(0, (gpu(0, 180 * GIB),), NOBODY, serving=True, warm=False)
    vram.observe(15, (gpu(15, GIB // 4, 192 * GIB - MIB),), NOBODY, serving=True, warm=False)
    room = vram.headroom_before_death(-15, 20)
    assert room is not None
    assert room.free_bytes == MIB


def test_the_worst_gpu_of_a_group_speaks() -> None:
    vram = Vram(Parameters())
    group = (gpu(0, 150 * GIB), gpu(0, 191 * GIB, name="0000:c6:00.0"), gpu(0, 150 * GIB, name="0000:c7:00.0"))
    vram.observe(0, group, NOBODY, serving=False, warm=False)
    room = vram.headroom_now()
    assert room is not None
    assert room.gpu == "0000:c6:00.0"


def test_a_gpu_that_vanishes_is_forgotten() -> None:
    vram = Vram(Parameters())
    vram.observe(0, (gpu(0, 150 * GIB), gpu(0, 191 * GIB, name="0000:c6:00.0")), NOBODY, serving=False, warm=False)
    vram.observe(5, (gpu(5, 150 * GIB),), NOBODY, serving=False, warm=False)
    assert [seen.gpu for seen in vram.readings()] == [GPU]


def test_outcomes_are_attributed_to_the_usage_they_happened_at() -> None:
    seen = Correlation(Parameters())
    seen.count(0, 0.3, Increments(ok=10))
    seen.count(1, 0.9, Increments(ok=20, server_error=1))
    seen.count(2, 0.97, Increments(ok=30, server_error=9))
    totals = seen.outcomes()
    assert totals[Band.LOW, Outcome.OK] == 10
    assert totals[Band.MID, Outcome.SERVER_ERROR] == 1
    assert totals[Band.HIGH, Outcome.SERVER_ERROR] == 9
    odds = seen.log_odds(3)
    assert odds is not None
    assert odds.value < 0


def test_without_a_usage_nothing_is_attributed_to_a_band() -> None:
    seen = Correlation(Parameters())
    seen.count(0, None, Increments(ok=10))
    assert sum(seen.outcomes().values()) == 0
    assert seen.failures(0) is not None


def test_a_storm_does_not_become_its_own_background() -> None:
    seen = Correlation(Parameters())
    at = 0.0
    for _ in range(2000):
        at += 5
        seen.count(at, 0.3, Increments(ok=10))
    for _ in range(200):
        at += 5
        seen.count(at, 0.3, Increments(ok=5, server_error=5))
    assert seen.failing(at)


def test_a_servers_steady_background_is_not_failing() -> None:
    seen = Correlation(Parameters())
    at = 0.0
    for i in range(4000):
        at += 5
        seen.count(at, 0.3, Increments(ok=50, server_error=1 if i % 10 == 0 else 0))
    assert not seen.failing(at)
