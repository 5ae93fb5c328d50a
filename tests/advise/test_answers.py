"""All advice about one engine, put together: the field's own examples from samples to sentences."""

from dataclasses import replace

import pytest

from fragscope.advise.advice import Advice, Topic
from fragscope.advise.answers import EngineAnswer, Question, engine_answer, fleet_answer, lengths_answer
from fragscope.advise.observed import Observed
from fragscope.advise.shape import shape_of, special_load
from fragscope.model import CacheConfig
from tests.advise.configs import DEEPSEEK_V3, GPT_OSS_120B, LLAMA_8B, LLAMA_70B, MAMBA2, QWEN3_NEXT
from tests.advise.past import CARD, DAY, GIB, HOUR, POOL, Life, samples
from tests.advise.traces import PARAMETERS, counter, histogram_of

NOTHING = Question()
LLAMA = shape_of(LLAMA_8B)


def answer(
    life: Life,
    pairs: list[tuple[int, int]],
    question: Question = NOTHING,
    seconds: float = 1.2 * DAY,
    cause: str = "none",
) -> EngineAnswer:
    """What is said of an engine that has served these requests."""
    past = Observed()
    prompts, outputs = histogram_of(p for p, _ in pairs), histogram_of(o for _, o in pairs)
    for sample in samples(life, seconds, 300):
        engine = replace(sample.engines[0], prompt_tokens=prompts, output_tokens=outputs)
        past.observe(replace(sample, engines=(engine,)))
    return engine_answer(past.engines["vllm", "0"], past, question, cause, PARAMETERS)


def about(found: EngineAnswer, topic: Topic) -> Advice:
    return next(advice for advice in found.advice if advice.topic is topic)


CHATS = [(200, 128)] * 80 + [(200, 600)] * 15 + [(400, 3000)] * 5


def test_chats_of_128_tokens_with_a_tail_are_told_to_leave_the_block_and_use_the_room_instead() -> None:
    found = answer(Life(used=lambda _: 0.9 * CARD), CHATS, Question(LLAMA, (), backend="ROCM_ATTN"))
    assert about(found, Topic.BLOCK_SIZE).change is False
    assert about(found, Topic.MEMORY).flags == ("--gpu-memory-utilization 0.93",)
    assert about(found, Topic.SPLIT).change is False
    assert about(found, Topic.RESTART).change is False


def test_documents_of_32_thousand_tokens_in_a_small_pool_are_told_of_fp8_and_not_of_blocks() -> None:
    told = Question(shape=shape_of(LLAMA_70B), weights_bytes=131.4 * GIB)
    full = Life(usage=lambda _: 0.96, waiting=lambda _: 2.0)
    found = answer(full, [(32_000, 500)] * 50, told)
    assert about(found, Topic.BLOCK_SIZE).change is False
    assert about(found, Topic.FP8).change is True
    assert about(found, Topic.SPLIT).change is False
    assert "one population" in about(found, Topic.SPLIT).sentence


def test_a_hybrid_is_read_from_its_effective_block_and_its_capacity_in_tokens() -> None:
    pool = CacheConfig(16, 9_000, 0.9, "auto", 400_000, effective_attention_block_size=800)
    found = answer(Life(config=pool), CHATS, Question(shape=shape_of(QWEN3_NEXT)))
    assert (found.block_size, found.pool_tokens) == (800, 400_000)
    assert "only a floor" in about(found, Topic.BLOCK_SIZE).sentence
    assert any("36 layers keep a fixed state" in fact for fact in found.facts)


def test_aiter_mla_stays_at_block_1_on_old_versions_and_new() -> None:
    pool = replace(POOL, block_size=1, num_gpu_blocks=320_000)
    told = Question(shape=shape_of(DEEPSEEK_V3), backend="ROCM_AITER_MLA", tensor_parallel=8)
    for version in ("0.17.1", "0.33.0"):
        found = answer(Life(config=pool, version=version), CHATS, told)
        assert about(found, Topic.BLOCK_SIZE).change is False
        assert about(found, Topic.BLOCK_SIZE).numbers["waste_ratio"] == 0


def test_a_config_of_another_model_is_noticed_by_the_size_of_the_pool() -> None:
    pool = replace(POOL, kv_cache_memory_bytes=320_000 * 131_072)
    right = answer(Life(config=pool), CHATS, Question(shape=shape_of(LLAMA_8B)), HOUR)
    wrong = answer(Life(config=pool), CHATS, Question(shape=shape_of(LLAMA_70B)), HOUR)
    assert any("cache_config_info agrees" in fact for fact in right.facts)
    assert any("is it the model's config.json" in fact for fact in wrong.facts)


def test_images_keep_the_ratio_at_092() -> None:
    config = {"text_config": LLAMA_8B, "vision_config": {"hidden_size": 1024}}
    told = Question(shape=shape_of(config), special=special_load(config))
    roomy = Life(used=lambda _: 0.5 * CARD, config=replace(POOL, gpu_memory_utilization=0.91))
    given = about(answer(roomy, CHATS, told), Topic.MEMORY)
    assert given.flags == ("--gpu-memory-utilization 0.92",)
    assert any("images or sound never above 0.92" in caveat for caveat in given.caveats)


def test_growth_over_a_day_asks_for_a_restart_although_the_detector_saw_no_failure() -> None:
    climbing = Life(used=lambda t: 0.94 * CARD + t / HOUR * 0.25 * GIB)
    given = about(answer(climbing, CHATS), Topic.RESTART)
    assert given.change is True
    assert given.numbers["time_left_s"] < DAY
    assert any("cannot be told from outside" in caveat for caveat in given.caveats)
    elsewhere = Life(used=climbing.used, own=lambda _: 0.9 * CARD)
    assert about(answer(elsewhere, CHATS), Topic.RESTART).change is False


def test_an_engine_of_a_version_that_may_lie_about_its_block_is_marked() -> None:
    stale = answer(Life(version="0.20.2"), CHATS, seconds=HOUR)
    assert any("may show the block size of before" in fact for fact in stale.facts)
    assert not any("may show" in fact for fact in answer(Life(version="0.32.0"), CHATS, seconds=HOUR).facts)


def test_lengths_alone_say_nothing_of_memory_or_queues() -> None:
    listed = counter(CHATS).lengths((16,), PARAMETERS)
    found = lengths_answer(Question(lengths=listed), PARAMETERS)
    assert [advice.topic for advice in found.advice] == [Topic.BLOCK_SIZE]
    assert lengths_answer(NOTHING, PARAMETERS).advice[0].missing == ("lengths",)


def test_one_engine_is_no_fleet() -> None:
    assert fleet_answer(Observed()).change is None


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), 1.5])
def test_a_threshold_that_is_no_ratio_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"advice\.waste_min_ratio"):
        replace(PARAMETERS, waste_min_ratio=value)


def test_a_cache_type_that_nobody_knows_leaves_kv_unknown_instead_of_failing() -> None:
    told = Question(shape=shape_of(LLAMA_70B), weights_bytes=131.4 * GIB)
    for dtype in ("nvfp4", "fp8_ds_mla"):
        found = answer(Life(config=replace(POOL, cache_dtype=dtype)), CHATS, told, HOUR)
        assert any(f"not known: the KV cache type is {dtype}" in fact.replace("'", "") for fact in found.facts)
        assert about(found, Topic.FP8).change is None


def test_a_model_without_keys_and_values_gets_answers_and_no_division_by_0() -> None:
    told = Question(shape=shape_of(MAMBA2), weights_bytes=5 * GIB, gpu_memory_bytes=CARD, utilization=0.9)
    listed = counter(CHATS).lengths((16,), PARAMETERS)
    assert lengths_answer(replace(told, lengths=listed), PARAMETERS).advice[-1].change is None
    found = answer(Life(config=replace(POOL, kv_cache_memory_bytes=GIB)), CHATS, told, HOUR)
    assert "only a state of fixed size" in about(found, Topic.FP8).sentence


OLD_POOL = CacheConfig(16, 40_000, 0.9, "auto")


def test_blocks_of_an_unknown_model_are_no_tokens_and_what_needs_them_is_not_known() -> None:
    found = answer(Life(config=OLD_POOL, waiting=lambda _: 2.0), CHATS, seconds=HOUR)
    assert found.pool_tokens is None
    assert (about(found, Topic.SPLIT).change, about(found, Topic.SPLIT).missing) == (None, ("pool_tokens",))
    assert any("shows no kv_cache_size_tokens" in fact for fact in found.facts)


def test_blocks_are_divided_by_the_groups_of_layers_of_a_known_model() -> None:
    windowed = answer(Life(config=OLD_POOL), CHATS, Question(shape=shape_of(GPT_OSS_120B)), HOUR)
    assert windowed.pool_tokens == 320_000
    assert any("in 2 groups" in fact for fact in windowed.facts)
    assert answer(Life(config=OLD_POOL), CHATS, Question(shape=LLAMA), HOUR).pool_tokens == 640_000


def test_a_hybrid_config_beside_lengths_gets_no_block_advice() -> None:
    listed = counter([(32, 1)] * 50).lengths((16, 64), PARAMETERS)
    told = Question(shape=shape_of(QWEN3_NEXT), lengths=listed, block_size=64)
    given = lengths_answer(told, PARAMETERS).advice[0]
    assert (given.change, given.flags) == (False, ())


def test_the_histogram_that_is_missing_is_named() -> None:
    past = Observed()
    for sample in samples(Life(), HOUR, 300):
        engine = replace(sample.engines[0], prompt_tokens=histogram_of([32] * 50))
        past.observe(replace(sample, engines=(engine,)))
    found = engine_answer(past.engines["vllm", "0"], past, NOTHING, "none", PARAMETERS)
    assert about(found, Topic.BLOCK_SIZE).missing == ("vllm:request_generation_tokens",)
