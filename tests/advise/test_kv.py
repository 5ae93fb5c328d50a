"""KV bytes per token against figures worked out by hand for public models."""

from typing import Any

import pytest

from fragscope.advise.kv import FP8_DS_MLA, block_of, check, footprint, is_hybrid, pool_tokens
from fragscope.advise.layers import UnknownWindowsError
from fragscope.advise.shape import Kind, shape_of
from fragscope.model import CacheConfig
from tests.advise.configs import (
    DEEPSEEK_V3,
    GEMMA2_9B,
    GEMMA3_4B,
    GEMMA3_12B,
    GPT_OSS_120B,
    LLAMA4_SCOUT,
    LLAMA_8B,
    LLAMA_70B,
    MAMBA2,
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
    mistral = shape_of(LLAMA_8B | {"model_type": "mistral", "sliding_window": 4096})
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


@pytest.mark.parametrize(
    ("config", "full", "window", "window_tokens", "layer_bytes", "groups"),
    [
        (GEMMA2_9B, 21, 21, 4096, 8192, 2),
        (GEMMA3_4B, 5, 29, 1024, 4096, 7),
        (GEMMA3_12B, 8, 40, 1024, 8192, 6),
        (LLAMA4_SCOUT, 12, 36, 8192, 4096, 4),
        (GPT_OSS_120B, 18, 18, 128, 2048, 2),
    ],
)
def test_published_files_that_leave_out_windows_and_heads_take_what_their_model_type_takes(
    config: dict[str, Any], full: int, window: int, window_tokens: int, layer_bytes: int, groups: int
) -> None:
    shape = shape_of(config)
    assert (shape.full_layers, shape.window_layers, shape.window_tokens) == (full, window, window_tokens)
    print_of = footprint(shape)
    assert print_of.bytes_per_token == (full + window) * layer_bytes
    assert print_of.bytes_beyond_window == full * layer_bytes
    assert print_of.groups == groups


def test_a_language_part_without_a_type_is_of_the_wholes() -> None:
    inner = {name: value for name, value in LLAMA4_SCOUT["text_config"].items() if name != "model_type"}
    shape = shape_of({"model_type": "llama4", "text_config": inner})
    assert (shape.full_layers, shape.window_layers) == (12, 36)


def test_a_window_of_which_nobody_says_where_it_is_makes_the_kv_unknown() -> None:
    with pytest.raises(UnknownWindowsError, match="not known"):
        shape_of(LLAMA_8B | {"model_type": "my_model", "sliding_window": 4096})


def test_qwen_without_a_word_of_its_window_has_none() -> None:
    shape = shape_of(LLAMA_8B | {"model_type": "qwen2", "sliding_window": 131072})
    assert (shape.full_layers, shape.window_layers) == (32, 0)


def test_letters_say_which_layers_are_local() -> None:
    exaone = LLAMA_8B | {"model_type": "exaone4", "sliding_window": 4096, "sliding_window_pattern": "LLLG"}
    assert (shape_of(exaone).full_layers, shape_of(exaone).window_layers) == (8, 24)


@pytest.mark.parametrize(
    ("config", "attention", "state"),
    [
        (LLAMA_8B | {"model_type": "falcon_h1"}, 32, 32),
        (LLAMA_8B | {"model_type": "minimax_text_01", "attn_type_list": [0, 0, 0, 1] * 8}, 8, 24),
        (
            LLAMA_8B | {"model_type": "kimi_linear", "linear_attn_config": {"full_attn_layers": [4, 8, 32]}},
            3,
            29,
        ),
        (MAMBA2, 0, 64),
    ],
)
def test_hybrids_that_say_so_in_their_own_way_are_known(config: dict[str, Any], attention: int, state: int) -> None:
    shape = shape_of(config)
    assert shape.hybrid
    assert (shape.full_layers, shape.state_layers) == (attention, state)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_hidden_layers": "80"}, "num_hidden_layers is '80'"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads is '8'"),
        ({"num_key_value_heads": [4, 8]}, r"num_key_value_heads is \[4, 8\]"),
        ({"hidden_size": 8}, "no width"),
        ({"layer_types": ["full_attention"] * 2}, "list of layer types has 2"),
        ({"attn_layer_period": 8, "attn_layer_offset": "4"}, "attn_layer_offset is '4'"),
    ],
)
def test_fields_of_the_wrong_kind_are_refused_with_their_value(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        shape_of(LLAMA_8B | wrong)


def test_a_model_without_keys_and_values_is_not_checked_against_the_pool() -> None:
    pool = CacheConfig(16, 100, 0.9, "auto", 1600, kv_cache_memory_bytes=10**9)
    assert check(footprint(shape_of(MAMBA2)), pool).agrees is None


def test_padded_groups_are_no_disagreement_with_the_formula() -> None:
    expected = footprint(shape_of(GEMMA3_4B))
    # 7 groups of 5 layers keep 35 layers where 34 are needed.
    blocks, page = 7000, 5 * 16 * 4096
    pool = CacheConfig(block_size=16, num_gpu_blocks=blocks, kv_cache_memory_bytes=blocks * page)
    assert check(expected, pool).agrees is True
    assert pool_tokens(pool, groups=expected.groups) == 16_000


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


def test_blocks_of_unknown_groups_of_layers_are_no_tokens() -> None:
    assert pool_tokens(CacheConfig(16, 1001)) is None
    assert pool_tokens(CacheConfig(16, 1001), groups=2) == 8000


def test_blocks_are_the_sum_over_engines_and_tokens_are_not() -> None:
    assert pool_tokens(CacheConfig(16, 1000), engines=2, groups=1) == 8000
    assert pool_tokens(CacheConfig(16, 1000, kv_cache_size_tokens=8000), engines=2) == 8000
