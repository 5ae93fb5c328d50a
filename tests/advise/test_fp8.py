"""FP8 against a worked example (70B on one 192 GiB GPU), and what checkpoints say of themselves."""

from typing import Any

import pytest

from fragscope.advise.advice import GIB
from fragscope.advise.fp8 import Card, Use, advise, carried, options
from fragscope.advise.shape import shape_of
from tests.advise.configs import DEEPSEEK_V3, GPT_OSS_120B, LLAMA_70B, QWEN3_NEXT

CARD = Card(192 * GIB, 0.90, 131.4 * GIB)
SHAPE = shape_of(LLAMA_70B)
SHORT = Use(pool_short=True)
CONTEXTS = {"azure_conv": 1250, "azure_code": 2558, "mooncake_conv": 15635, "servegen_r1": 3498}


@pytest.mark.parametrize(
    ("name", "thousand_tokens", "sequences"),
    [
        ("now", 112.7, {"azure_conv": 90, "azure_code": 44, "mooncake_conv": 7, "servegen_r1": 32}),
        ("fp8 weights", 320.5, {"azure_conv": 255, "azure_code": 125, "mooncake_conv": 20, "servegen_r1": 91}),
        ("fp8 weights and KV", 640.9, {"azure_conv": 510, "azure_code": 250, "mooncake_conv": 41, "servegen_r1": 183}),
    ],
)
def test_a_70b_model_on_one_card_gains_what_the_worked_example_says(
    name: str, thousand_tokens: float, sequences: dict[str, int]
) -> None:
    for trace, expected in sequences.items():
        row = next(row for row in options(SHAPE, CARD, "auto", CONTEXTS[trace]) if row.name == name)
        assert row.pool_tokens / 1000 == pytest.approx(thousand_tokens, rel=0.005)
        assert row.sequences == pytest.approx(expected, rel=0.02, abs=0.6)


def test_weights_give_most_and_every_figure_is_an_up_to() -> None:
    given, rows = advise(SHAPE, CARD, "auto", 1250, SHORT)
    assert given.change is True
    assert given.flags == ("--quantization fp8", "--kv-cache-dtype fp8")
    assert "up to 5.7 times" in given.sentence
    assert given.effect is not None
    assert given.effect.value.low == 0
    by_name = {row.name: row.pool_tokens for row in rows}
    assert by_name["fp8 weights"] > by_name["fp8 KV"] > by_name["now"]
    assert any("max-num-seqs" in caveat for caveat in given.caveats)


def test_where_the_pool_is_not_the_limit_it_says_so() -> None:
    given, _ = advise(SHAPE, CARD, "auto", 1250, Use(pool_short=False))
    assert given.change is False
    assert "not what limited this server" in given.sentence


def test_a_checkpoint_that_is_fp8_already_offers_only_its_kv() -> None:
    shape = shape_of(DEEPSEEK_V3)
    rows = options(shape, Card(192 * GIB, 0.9, 84 * GIB, 8), None, 4000)
    assert [row.name for row in rows] == ["now", "fp8 KV"]
    assert "scales in blocks of 128x128" in carried(shape.quantization).sentence


def test_with_fp8_everywhere_nothing_is_left() -> None:
    given, _ = advise(shape_of(DEEPSEEK_V3), Card(192 * GIB, 0.9, 84 * GIB, 8), "fp8", 4000, SHORT)
    assert given.change is False
    assert "Nothing is left to shrink" in given.sentence


@pytest.mark.parametrize(
    ("quantization", "weights", "scales", "words"),
    [
        (None, False, False, "would quantize it on load"),
        ({"quant_method": "fp8"}, True, False, "carries FP8 weights"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"type": "float", "num_bits": 8}}},
                "kv_cache_scheme": {"num_bits": 8},
            },
            True,
            True,
            "with scales for the KV cache",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"type": "int", "num_bits": 4}}}},
            False,
            False,
            "not FP8",
        ),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}},
                "kv_cache_group": ["*k_proj"],
            },
            True,
            True,
            "quark",
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, True, True, "modelopt"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8"}, False, False, "not FP8"),
        ({"quant_method": "awq"}, False, False, "quantized by awq"),
        (GPT_OSS_120B["quantization_config"], False, False, "quantized by mxfp4"),
    ],
)
def test_the_checkpoint_says_whether_it_carries_scales(
    quantization: dict[str, Any] | None, weights: bool, scales: bool, words: str
) -> None:
    have = carried(quantization)
    assert (have.weights_fp8, have.kv_scales) == (weights, scales)
    assert words in have.sentence


def test_a_hybrid_is_warned_that_short_contexts_gain_nothing() -> None:
    given, _ = advise(shape_of(QWEN3_NEXT), Card(192 * GIB, 0.9, 150 * GIB), None, 800, SHORT)
    assert any("vllm#55196" in caveat for caveat in given.caveats)


def test_without_the_model_or_its_size_it_is_not_known() -> None:
    assert advise(None, CARD, None, None, SHORT)[0].missing == ("model_config",)
    assert advise(SHAPE, None, None, None, SHORT)[0].change is None


def test_where_nobody_knows_whether_the_pool_runs_short_it_is_possible_and_not_recommended() -> None:
    given, rows = advise(SHAPE, CARD, "auto", 1250, Use(pool_short=None))
    assert (given.change, given.flags) == (None, ())
    assert "Possible, not recommended" in given.sentence
    assert len(rows) == 4


def test_weights_that_do_not_fit_in_fp8_either_get_no_flags() -> None:
    given, _ = advise(SHAPE, Card(24 * GIB, 0.9, 131.4 * GIB), "auto", 1250, SHORT)
    assert (given.change, given.flags) == (False, ())
    assert "do not fit, in FP8 neither" in given.sentence


def test_a_model_that_fits_only_in_fp8_is_told_to_shrink_its_weights_alone() -> None:
    given, _ = advise(SHAPE, Card(128 * GIB, 0.9, 131.4 * GIB), "auto", 1250, Use(pool_short=None))
    assert given.flags == ("--quantization fp8",)


def test_a_hybrid_is_not_recommended_fp8_kv() -> None:
    shape = shape_of(QWEN3_NEXT)
    given, _ = advise(shape, Card(192 * GIB, 0.9, 150 * GIB), None, 800, SHORT)
    assert given.flags == ("--quantization fp8",)
    already = shape_of(QWEN3_NEXT | {"quantization_config": {"quant_method": "fp8"}})
    given, _ = advise(already, Card(192 * GIB, 0.9, 75 * GIB), None, 800, SHORT)
    assert (given.change, given.flags) == (False, ())


@pytest.mark.parametrize(
    ("version", "flags"),
    [("0.20.2", ("--quantization fp8",)), ("0.32.0", ("--quantization fp8", "--kv-cache-dtype fp8"))],
)
def test_a_backend_that_does_not_take_fp8_kv_in_this_version_is_not_told_to(
    version: str, flags: tuple[str, ...]
) -> None:
    given, _ = advise(SHAPE, CARD, "auto", 1250, Use(True, "ROCM_AITER_UNIFIED_ATTN", version))
    assert given.flags == flags
    assert any("not for this server" in caveat for caveat in given.caveats) == (len(flags) == 1)
