"""The advice gauges: 0 is no change, absent is not known, and a tick hardly notices them."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from fragscope.advise.live import EngineAdvice, LiveAdvisor
from fragscope.detect.detector import Detector
from fragscope.model import Assessment, CacheConfig, Histogram, Sample
from tests.advise.past import CARD, DAY, GIB, HOUR, POOL, Life, samples
from tests.advise.traces import histogram, histogram_of


def lengths(prompts: list[int], outputs: list[int]) -> tuple[Histogram, Histogram]:
    return histogram_of(prompts), histogram_of(outputs)


def with_lengths(sample: Sample, pair: tuple[Histogram, Histogram]) -> Sample:
    engine = replace(sample.engines[0], prompt_tokens=pair[0], output_tokens=pair[1])
    return replace(sample, engines=(engine,))


def assess(sample: Sample) -> Assessment:
    return Detector("vllm").observe(sample)


def last(life: Life, seconds: float, pair: tuple[Histogram, Histogram] | None = None) -> EngineAdvice:
    """A sample every five minutes, and what the gauges show at the end."""
    advisor, detector = LiveAdvisor(), Detector("vllm")
    advice: tuple[EngineAdvice, ...] = ()
    for made in samples(life, seconds, 300):
        sample = with_lengths(made, pair) if pair is not None else made
        advice = advisor.observe(sample, detector.observe(sample))
    return advice[0]


AZURE = (histogram("azure_conv", "prompt"), histogram("azure_conv", "output"))


def test_ordinary_traffic_shows_no_change_in_every_gauge() -> None:
    gauges = last(Life(used=lambda _: 0.96 * CARD, peak=lambda _: 0.975 * CARD), 1.1 * DAY, AZURE)
    assert gauges == EngineAdvice("0", "llama", 0.0, 0.0, 0.0, 0.0, 0.0)


def test_nothing_is_claimed_before_there_is_evidence() -> None:
    gauges = last(Life(used=lambda _: 0.8 * CARD), HOUR)
    assert (gauges.block_size_tokens, gauges.utilization_change_ratio, gauges.split) == (None, None, None)


def test_short_requests_at_64_are_advised_16() -> None:
    gauges = last(Life(config=replace(POOL, block_size=64)), HOUR, lengths([32] * 50, [1] * 50))
    assert gauges.block_size_tokens == 16


def test_a_hybrid_is_never_sent_elsewhere() -> None:
    config = replace(POOL, effective_attention_block_size=800)
    assert last(Life(config=config), HOUR, lengths([32] * 50, [1] * 50)).block_size_tokens == 0


def test_a_block_of_800_without_a_word_of_its_rise_is_a_hybrids_too() -> None:
    config = CacheConfig(800, 400, 0.9, "auto")
    assert last(Life(config=config), HOUR, lengths([32] * 50, [1] * 50)).block_size_tokens == 0


@pytest.mark.parametrize(("used", "change"), [(lambda _: 0.85 * CARD, 0.02), (lambda _: 0.999 * CARD, -0.02)])
def test_a_day_of_room_or_of_want_moves_the_ratio(used: Callable[[float], float], change: float) -> None:
    assert last(Life(used=used), 1.1 * DAY).utilization_change_ratio == pytest.approx(change)


def test_a_day_without_requests_gives_no_gauge() -> None:
    idle = Life(used=lambda _: 0.85 * CARD, usage=lambda _: 0.0, running=lambda _: 0.0)
    assert last(idle, 1.1 * DAY).utilization_change_ratio is None


def test_a_gap_of_a_day_between_two_samples_is_no_day_seen() -> None:
    advisor, shown = LiveAdvisor(), None
    for sample in samples(Life(used=lambda _: 0.85 * CARD), 3 * DAY, 25 * HOUR):
        shown = advisor.observe(sample, assess(sample))[0].utilization_change_ratio
    assert shown is None


def test_a_leak_of_a_quarter_gib_an_hour_is_not_raised_for_although_there_is_room() -> None:
    leaking = Life(used=lambda t: 0.80 * CARD + t / HOUR * 0.25 * GIB)
    assert last(leaking, 1.1 * DAY).utilization_change_ratio == 0


def test_a_pool_sized_by_a_flag_shows_no_change_of_the_ratio() -> None:
    for config in (replace(POOL, kv_cache_memory_bytes=100 * GIB), replace(POOL, num_gpu_blocks_override=20_000)):
        assert last(Life(used=lambda _: 0.85 * CARD, config=config), 1.1 * DAY).utilization_change_ratio == 0


def test_a_model_that_the_daemon_does_not_know_is_not_raised_above_092() -> None:
    config = replace(POOL, gpu_memory_utilization=0.92)
    assert last(Life(used=lambda _: 0.85 * CARD, config=config), 1.1 * DAY).utilization_change_ratio == 0


def test_a_ratio_that_was_changed_begins_a_new_day() -> None:
    advisor = LiveAdvisor()
    for sample in samples(Life(used=lambda _: 0.85 * CARD), 1.1 * DAY, 300):
        advisor.observe(sample, assess(sample))
    after = Life(used=lambda _: 0.88 * CARD, config=replace(POOL, gpu_memory_utilization=0.93))
    shown = [advisor.observe(s, assess(s))[0] for s in samples(after, HOUR, 300, 1.1 * DAY)]
    assert shown[-1].utilization_change_ratio is None


def test_documents_among_chats_are_split_while_requests_wait_before_the_pool_is_full() -> None:
    mixed = lengths([200] * 80 + [40_000] * 20, [100] * 100)
    gauges = last(Life(usage=lambda _: 0.95, waiting=lambda _: 3.0), HOUR, mixed)
    assert gauges.split == 1
    assert gauges.blocking_ratio == pytest.approx(0.2)
    assert last(Life(usage=lambda _: 0.95), HOUR, mixed).split == 0


def test_an_engine_that_does_not_answer_gets_no_advice() -> None:
    advisor = LiveAdvisor()
    silent = Sample(1.0, "vllm")
    assert advisor.observe(silent, assess(silent)) == ()


def test_an_engine_that_shows_nothing_gets_unknown() -> None:
    assert last(Life(config=CacheConfig()), HOUR).utilization_change_ratio is None


def test_a_tick_costs_less_than_a_tenth_of_a_millisecond() -> None:
    advisor = LiveAdvisor()
    made = [with_lengths(sample, AZURE) for sample in samples(Life(), 4 * HOUR, 5)]
    assessment = assess(made[0])
    for sample in made[:200]:
        advisor.observe(sample, assessment)
    began = time.process_time()
    for sample in made:
        advisor.observe(sample, assessment)
    assert (time.process_time() - began) / len(made) < 1e-4
