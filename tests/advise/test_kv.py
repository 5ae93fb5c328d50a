"""KV bytes per token against figures worked out by hand for public models."""

from typing import Any

import pytest

from fragscope.advise.kv import FP8_DS_MLA, Kind, block_of, check, footprint, is_hybrid, pool_tokens, shape_of
from fragscope.model import CacheConfig
from tests.advise.configs import (
    DEEPSEEK_V3,
    GPT_OSS_120B,
    LLAMA_8B,
    LLAMA_70B,
    NEMOTRON_H,
    QWEN3_32B,
    QWEN3_235B,
    QWEN3_NEXT,
)


@pytest.mark.parametrize(
    ("config", "tensor_parallel", "cache_dtype", "bytes_per_token"),
    [
        (LLAMA_8B, 1, "auto", 131072),
        (LLAMA_8B, 1, "fp8", 65536),
        (LLAMA_70B, 1, None, 327680),
        (LLAMA_70B, 8, None, 40960),
        (QWEN3_32B, 1, None, 262144),
        (QWEN3_235B, 4, None, 48128),
        (QWEN3_235B, 8, None, 48128),
        (DEEPSEEK_V3, 1, None, 70272),
        (DEEPSEEK_V3, 8, None, 70272),
        (DEEPSEEK_V3, 8, "fp8", 35136),
        (DEEPSEEK_V3, 8, FP8_DS_MLA, 40016),
        (GPT_OSS_120B, 1, None, 73728),
    ],
)
def test_bytes_per_token_of_public_models(
    config: dict[str, Any], tensor_parallel: int, cache_dtype: str | None, bytes_per_token: int
) -> None:
    assert footprint(shape_of(config), cache_dtype, tensor_parallel).bytes_per_token == bytes_per_token


def test_tensor_parallelism_beyond_the_kv_heads_stores_them_twice() -> None:
    assert footprint(shape_of(QWEN3_235B), None, 4).copies == 1
    assert footprint(shape_of(QWEN3_235B), None, 8).copies == 2


def test_mla_is_not_divided_by_tensor_parallelism() -> None:
    assert shape_of(DEEPSEEK_V3).kind is Kind.MLA
    assert footprint(shape_of(DEEPSEEK_V3), None, 8).copies == 8


def test_beyond_the_window_only_full_layers_grow() -> None:
    print_of = footprint(shape_of(GPT_OSS_120B))
    assert print_of.bytes_beyond_window == 36864
    assert print_of.sequence_bytes(100) == 100 * 73728
    assert print_of.sequence_bytes(1128) == 128 * 73728 + 1000 * 36864


def test_a_window_that_the_config_switches_off_does_not_count() -> None:
    shape = shape_of(LLAMA_8B | {"sliding_window": 4096, "use_sliding_window": False})
    assert (shape.full_layers, shape.window_layers) == (32, 0)
    mistral = shape_of(LLAMA_8B | {"sliding_window": 4096})
    assert (mistral.full_layers, mistral.window_layers, mistral.window_tokens) == (0, 32, 4096)
    assert footprint(mistral).sequence_bytes(100_000) == 4096 * 131072


@pytest.mark.parametrize(
    ("config", "attention", "state"),
    [
        (QWEN3_NEXT, 12, 36),
        (NEMOTRON_H, 2, 3),
        (LLAMA_8B | {"attn_layer_period": 8, "attn_layer_offset": 4}, 4, 28),
        (LLAMA_8B | {"attn_layer_indices": [9, 18, 27]}, 3, 29),
        (LLAMA_8B | {"layers_block_type": ["mamba"] * 30 + ["attention"] * 2}, 2, 30),
    ],
)
def test_a_hybrid_counts_only_its_attention_layers(config: dict[str, Any], attention: int, state: int) -> None:
    shape = shape_of(config)
    assert shape.hybrid
    assert (shape.full_layers, shape.state_layers) == (attention, state)


def test_the_language_part_of_a_multimodal_config_is_found() -> None:
    shape = shape_of({"model_type": "x", "text_config": LLAMA_8B, "vision_config": {"num_hidden_layers": 24}})
    assert shape.full_layers == 32


def test_multi_query_attention_keeps_one_head() -> None:
    falcon = {"n_layer": 32, "n_head": 71, "multi_query": True, "hidden_size": 4544}
    assert shape_of(falcon).kind is Kind.MQA
    assert footprint(shape_of(falcon)).bytes_per_token == 2 * 32 * 1 * 64 * 2


def test_a_file_that_is_no_model_config_is_refused_with_the_field() -> None:
    with pytest.raises(ValueError, match="num_hidden_layers is None"):
        shape_of({"architectures": ["x"]})
    with pytest.raises(ValueError, match="'int3'"):
        footprint(shape_of(LLAMA_8B), "int3")
    with pytest.raises(ValueError, match="only MLA"):
        footprint(shape_of(LLAMA_8B), FP8_DS_MLA)


def test_the_formula_is_checked_against_bytes_and_tokens_of_the_pool() -> None:
    expected = footprint(shape_of(LLAMA_8B))
    pool = CacheConfig(block_size=16, num_gpu_blocks=8192, kv_cache_memory_bytes=8192 * 16 * 131072 + 70_000)
    assert check(expected, pool).agrees is True
    assert check(footprint(shape_of(LLAMA_8B), "fp8"), pool).agrees is False


def test_a_pool_with_overridden_blocks_or_without_bytes_says_nothing() -> None:
    expected = footprint(shape_of(LLAMA_8B))
    overridden = CacheConfig(16, 2000, kv_cache_memory_bytes=2**30, num_gpu_blocks_override=2000)
    assert check(expected, overridden).agrees is None
    assert check(expected, CacheConfig(16, 2000)).agrees is None


def test_a_hybrid_pool_is_known_by_its_effective_block_and_measured_in_tokens_only() -> None:
    pool = CacheConfig(16, 1000, effective_attention_block_size=800)
    assert is_hybrid(pool)
    assert block_of(pool) == 800
    assert pool_tokens(pool) is None, "blocks times their size is no capacity there"
    assert pool_tokens(CacheConfig(16, 1000, kv_cache_size_tokens=5000, effective_attention_block_size=800)) == 5000


def test_blocks_are_the_sum_over_engines_and_tokens_are_not() -> None:
    assert pool_tokens(CacheConfig(16, 1000), engines=2) == 8000
    assert pool_tokens(CacheConfig(16, 1000, kv_cache_size_tokens=8000), engines=2) == 8000
