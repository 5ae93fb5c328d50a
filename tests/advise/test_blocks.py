"""Block waste against exact integration over public traces, and advice that makes sense to the field."""

import random

import pytest

from fragscope.advise.backends import UNKNOWN, rule_for
from fragscope.advise.blocks import Geometry, advise, concurrency_gain, costs, live_waste
from fragscope.advise.lengths import Lengths, from_histograms, second_moment, steps_of, waste_at
from fragscope.model import Histogram
from tests.advise.traces import PARAMETERS, SIZES, TRACES, counter, histogram, histogram_of, requests

ROCM_ATTN = rule_for("ROCM_ATTN", "0.32.0")
UNIFIED = rule_for("ROCM_AITER_UNIFIED_ATTN", "0.32.0")


def of_trace(trace: str) -> Lengths:
    found = from_histograms(histogram(trace, "prompt"), histogram(trace, "output"), PARAMETERS)
    assert found is not None
    return found


def of_requests(pairs: list[tuple[int, int]]) -> Lengths:
    """What the histograms of these requests tell."""
    found = from_histograms(histogram_of(p for p, _ in pairs), histogram_of(o for _, o in pairs), PARAMETERS)
    assert found is not None
    return found


@pytest.mark.parametrize("block", SIZES)
@pytest.mark.parametrize("trace", TRACES)
def test_the_exact_waste_of_a_trace_lies_in_the_interval_that_its_histograms_give(trace: str, block: int) -> None:
    exact = TRACES[trace]["blocks"][str(block)]["exact"] / 100
    waste = waste_at(of_trace(trace), block)
    assert waste.ratio.low <= exact <= waste.ratio.high
    assert waste.ratio.low <= waste.ratio.point <= waste.ratio.high <= waste.ceiling
    assert waste.ceiling >= TRACES[trace]["blocks"][str(block)]["ceiling"] / 100 - 1e-5


@pytest.mark.parametrize("block", SIZES)
@pytest.mark.parametrize("trace", TRACES)
def test_both_estimates_lie_in_the_stated_interval_of_the_exact_integration(trace: str, block: int) -> None:
    stated = TRACES[trace]["blocks"][str(block)]
    listed = counter(requests(trace)).lengths((block,), PARAMETERS)
    assert listed is not None
    for point in (waste_at(of_trace(trace), block).ratio.point, waste_at(listed, block).ratio.point):
        # The table is rounded to 0.001 percentage points.
        assert stated["low"] - 6e-4 <= 100 * point <= stated["high"] + 6e-4


@pytest.mark.parametrize("block", SIZES)
def test_listed_lengths_give_the_exact_integral_correlation_included(block: int) -> None:
    listed = counter(requests("mooncake_synth")).lengths((block,), PARAMETERS)
    assert listed is not None
    exact = TRACES["mooncake_synth"]["blocks"][str(block)]["exact"]
    assert 100 * waste_at(listed, block).ratio.point == pytest.approx(exact, abs=6e-4)


def test_the_waste_of_listed_lengths_is_what_stepping_through_them_gives() -> None:
    pairs = [(random.Random(i).randrange(1, 300), random.Random(-i).randrange(0, 200)) for i in range(1, 60)]
    lost = held = 0.0
    for prompt, output in pairs:
        steps = [(prompt, prompt / PARAMETERS.prefill_tokens_per_s)]
        steps += [(prompt + i, PARAMETERS.decode_s_per_token) for i in range(1, output + 1)]
        for tokens, seconds in steps:
            lost += (-tokens % 16) * seconds
            held += tokens * seconds
    listed = counter(pairs).lengths((16,), PARAMETERS)
    assert listed is not None
    assert waste_at(listed, 16).ratio.point == pytest.approx(lost / (lost + held))
    assert listed.context_tokens.low <= listed.context_tokens.point <= listed.context_tokens.high


def test_second_moments_lie_between_the_edges_of_the_buckets() -> None:
    lengths = [random.Random(i).randrange(1, 9000) for i in range(500)]
    moment = second_moment(steps_of(histogram_of(lengths)))
    assert moment.low <= sum(n * n for n in lengths) / 500 <= moment.high


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("rule", [ROCM_ATTN, UNIFIED, UNKNOWN], ids=lambda rule: rule.backend)
@pytest.mark.parametrize("block", [16, 32, 64])
def test_no_public_trace_gets_another_block_size(trace: str, rule: object, block: int) -> None:
    advice = advise(of_trace(trace), Geometry(block), rule, PARAMETERS)  # type: ignore[arg-type]
    assert advice.change is False
    assert not advice.flags
    assert "0.01 in --gpu-memory-utilization" in advice.sentence


def test_going_from_16_to_8_buys_less_than_a_hundredth_of_gpu_memory_utilization() -> None:
    gains = [concurrency_gain(of_trace(trace), 16, 8) for trace in TRACES]
    assert max(gain.point for gain in gains) < 0.007
    # A hundredth of a 192 GiB card is 2 % of a 96 GiB pool.
    assert max(gain.high for gain in gains) < 0.02


def test_short_chats_with_a_long_tail_keep_their_block_because_the_tail_holds_the_memory() -> None:
    """128-token answers for 80 % of requests, 5 % beyond 2048: the long ones dominate what is held."""
    pairs = [(200, 128)] * 80 + [(200, 600)] * 15 + [(400, 3000)] * 5
    advice = advise(of_requests(pairs), Geometry(16), ROCM_ATTN, PARAMETERS)
    assert advice.change is False
    assert advice.numbers["waste_ratio"] < 0.02
    assert advice.numbers["context_tokens"] > 3 * (200 + 128 / 2)


def test_documents_of_32_thousand_tokens_do_not_care_about_blocks() -> None:
    lengths = of_requests([(32_000, 500)] * 50)
    assert waste_at(lengths, 16).ratio.high < 0.001
    assert waste_at(lengths, 128).ratio.high < 0.01
    assert advise(lengths, Geometry(128), UNIFIED, PARAMETERS).change is False


def test_classification_prompts_of_32_tokens_want_16_where_the_backend_chose_64() -> None:
    lengths = of_requests([(32, 1)] * 100)
    advice = advise(lengths, Geometry(64), UNIFIED, PARAMETERS)
    assert advice.change is True
    assert advice.flags == ("--block-size 16",)
    assert advice.numbers["waste_ratio"] == pytest.approx(0.49, abs=0.05)
    assert advice.effect is not None
    assert 0 < advice.effect.value.low <= advice.effect.value.point <= advice.effect.value.high
    assert any("tuned for 64" in caveat for caveat in advice.caveats)


def test_classification_prompts_at_16_are_told_that_nothing_smaller_is_accepted() -> None:
    advice = advise(of_requests([(32, 1)] * 100), Geometry(16), ROCM_ATTN, PARAMETERS)
    assert advice.change is False
    assert advice.numbers["waste_ratio"] == pytest.approx(0.19, abs=0.02)
    assert "accepts no smaller block" in advice.sentence


FIXED = {
    "one length of 32": [(32, 1)] * 100,
    "one length of 32, no answer": [(32, 0)] * 100,
    "a token over two blocks of 64": [(129, 1)] * 100,
    "a token over two blocks of 16": [(33, 1)] * 100,
    "long prompts with short answers": [(20_000, 10) if i % 10 == 0 else (50, 800) for i in range(400)],
    "long prompts with long answers": [(20_000, 4000) if i % 10 == 0 else (50, 50) for i in range(400)],
}


@pytest.mark.parametrize("block", [16, 64, 128, 256, 800])
@pytest.mark.parametrize("name", FIXED)
def test_interval_and_ceiling_hold_for_fixed_short_and_correlated_lengths(name: str, block: int) -> None:
    listed = counter(FIXED[name]).lengths((block,), PARAMETERS)
    assert listed is not None
    exact = waste_at(listed, block).ratio.point
    waste = waste_at(of_requests(FIXED[name]), block)
    assert waste.ratio.low <= exact <= waste.ratio.high <= waste.ceiling
    assert exact <= waste_at(listed, block).ceiling


@pytest.mark.parametrize("geometry", [Geometry(800), Geometry(528), Geometry(16, hybrid=True)])
def test_a_block_above_256_or_of_a_hybrid_gets_no_block_advice(geometry: Geometry) -> None:
    advice = advise(of_requests([(32, 1)] * 100), geometry, UNKNOWN, PARAMETERS)
    assert advice.change is False
    assert not advice.flags
    assert "raise" in advice.sentence


def test_of_the_sizes_that_end_the_matter_one_is_taken_that_the_backend_is_fast_at() -> None:
    lengths = of_requests([(2050 + i, 200) for i in range(100)])
    assert waste_at(lengths, 128).ratio.point < PARAMETERS.waste_min_ratio
    assert advise(lengths, Geometry(256), ROCM_ATTN, PARAMETERS).flags == ("--block-size 32",)
    assert advise(lengths, Geometry(256), UNIFIED, PARAMETERS).flags == ("--block-size 64",)
    assert advise(lengths, Geometry(256), UNKNOWN, PARAMETERS).flags == ("--block-size 128",)


def test_what_a_hundredth_of_the_ratio_is_worth_is_claimed_only_where_it_is_known() -> None:
    lengths = of_trace("azure_conv")
    assert "worth more" not in advise(lengths, Geometry(16), ROCM_ATTN, PARAMETERS).sentence
    known = Geometry(16, pool_tokens=300_000, step_tokens=15_000)
    assert "worth 5.0 % of the pool" in advise(lengths, known, ROCM_ATTN, PARAMETERS).sentence


def test_a_histogram_without_a_finite_bucket_tells_no_lengths() -> None:
    endless = Histogram(100.0, 1e5, ((float("inf"), 100.0),))
    assert from_histograms(endless, endless, PARAMETERS) is None


def test_nobody_on_rocm_is_sent_to_a_block_of_8() -> None:
    short = of_requests([(10, 5)] * 100)
    for name in ("ROCM_ATTN", "TRITON_ATTN", "ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN", "TRITON_MLA", None):
        advice = advise(short, Geometry(32), rule_for(name), PARAMETERS)
        assert advice.flags == ("--block-size 16",), name


def test_a_hybrid_whose_block_became_800_is_not_told_to_set_the_block_size() -> None:
    advice = advise(of_requests([(500, 300)] * 50), Geometry(800, hybrid=True), ROCM_ATTN, PARAMETERS)
    assert advice.change is False
    assert not advice.flags
    assert "only a floor" in advice.sentence
    assert "--mamba" in advice.sentence
    assert advice.numbers["waste_ratio"] > 0.3


def test_aiter_mla_at_block_1_wastes_nothing_and_stays() -> None:
    rule = rule_for("ROCM_AITER_MLA", "0.17.1")
    assert (rule.accepts(1), rule.accepts(16)) == (True, False)
    advice = advise(of_requests([(32, 20)] * 100), Geometry(1, mla=True), rule, PARAMETERS)
    assert advice.change is False
    assert advice.numbers["waste_ratio"] == 0


def test_mla_on_an_unknown_backend_is_not_known_rather_than_guessed() -> None:
    advice = advise(of_requests([(32, 20)] * 100), Geometry(64, mla=True), UNKNOWN, PARAMETERS)
    assert advice.change is None
    assert advice.missing == ("backend",)


def test_an_unknown_backend_is_said() -> None:
    rule = rule_for("MY_OWN_ATTN")
    assert rule is UNKNOWN
    advice = advise(of_trace("azure_conv"), Geometry(16), rule, PARAMETERS)
    assert any("backend is not known" in caveat for caveat in advice.caveats)


@pytest.mark.parametrize(
    ("backend", "version", "accepted", "refused"),
    [
        ("ROCM_ATTN", "0.17.1", (16, 32), (8, 64)),
        ("ROCM_ATTN", "0.19.0", (16, 64, 784), (8,)),
        ("rocm-aiter-fa", "0.30.0", (16, 32), (8, 64)),
        ("ROCM_AITER_MLA", "0.33.0", (1, 16, 64), ()),
        ("ROCM_AITER_MLA", None, (1, 16, 64), ()),
        ("ROCM_AITER_TRITON_MLA", "0.20.2", (1, 16, 64), ()),
    ],
)
def test_what_a_backend_accepts_depends_on_the_version(
    backend: str, version: str | None, accepted: tuple[int, ...], refused: tuple[int, ...]
) -> None:
    rule = rule_for(backend, version)
    assert all(rule.accepts(size) for size in accepted)
    assert not any(rule.accepts(size) for size in refused)
    assert rule.source


def test_sizes_that_run_on_slower_kernels_are_pointed_out() -> None:
    advice = advise(of_trace("azure_conv"), Geometry(64), ROCM_ATTN, PARAMETERS)
    assert any("fast at 16 and 32 only" in caveat for caveat in advice.caveats)


def test_the_live_estimate_contradicts_histograms_that_do_not_fit() -> None:
    lengths = of_requests([(1000, 200)] * 100)
    fits = live_waste(16, 100, 100 * 1150)
    off = live_waste(16, 100, 100 * 100)
    assert fits is not None
    assert off is not None
    said = [advise(lengths, Geometry(16), ROCM_ATTN, PARAMETERS, live).caveats[-1] for live in (fits, off)]
    assert "which fits" in said[0]
    assert "does not fit" in said[1]
    assert live_waste(16, 0, 100) is None


def test_the_live_estimate_is_as_exact_as_the_number_of_sequences_allows() -> None:
    random.seed(5)
    tails = [random.randrange(16) for _ in range(250)]
    held = 250 * 1000 + sum(tails)
    live = live_waste(16, 250, held)
    assert live is not None
    assert live.ratio.low < sum(tails) / held < live.ratio.high
    assert live.ratio.high / live.ratio.point == pytest.approx(1.07, abs=0.005)


def test_small_blocks_cost_block_tables_and_large_ones_recomputed_tokens() -> None:
    assert costs(16, 331_000, 256, 131_072).block_table_bytes == pytest.approx(8.4e6, rel=0.01)
    assert costs(1, 331_000, 256, 131_072).block_table_bytes == pytest.approx(134e6, rel=0.01)
    assert costs(16, 331_000, 256, 131_072).blocks == pytest.approx(20_700, rel=0.01)
    assert costs(128, None, 256, 131_072).recompute_tokens == 63.5


def test_no_finished_request_gives_no_estimate() -> None:
    empty = histogram_of([])
    assert from_histograms(empty, empty, PARAMETERS) is None
    assert from_histograms(None, None, PARAMETERS) is None
    assert counter([]).lengths((16,), PARAMETERS) is None
