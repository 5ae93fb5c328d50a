"""gpu-memory-utilization: up where room was left, down where it was not, and honest where neither helps."""

from dataclasses import replace

import pytest

from fragscope.advise.advice import Advice
from fragscope.advise.memory import Setting, advise
from fragscope.advise.observed import EnginePast
from fragscope.advise.parameters import AdviceParameters
from fragscope.advise.room import Growth, tightest
from fragscope.model import EngineReading, Sample
from tests.advise.past import CARD, DAY, GIB, GPU, HOUR, MIDNIGHT, POOL, Life, observed, samples

PARAMETERS = AdviceParameters()
SETTING = Setting(0.90, pool_tokens=320_000, bytes_per_token=131_072)


def advice(life: Life, seconds: float = 1.5 * DAY, setting: Setting = SETTING) -> Advice:
    past = observed(life, seconds)
    return advise(tightest(past.gpus_of("vllm"), PARAMETERS), setting, PARAMETERS)


def test_room_left_over_a_day_raises_the_ratio_by_at_most_three_hundredths() -> None:
    given = advice(Life(used=lambda _: 0.90 * CARD, peak=lambda _: 0.91 * CARD))
    assert given.change is True
    assert given.flags == ("--gpu-memory-utilization 0.93",)
    assert given.effect is not None
    assert given.effect.unit == "ratio"
    assert given.effect.value.low == 0
    assert given.effect.value.high == pytest.approx(0.03 * CARD / 131_072 / 320_000)
    assert "up to 5.76 GiB more" in given.sentence


def test_it_is_never_raised_above_095_and_not_above_092_with_images_or_lora() -> None:
    roomy = Life(used=lambda _: 0.5 * CARD)
    assert advice(roomy, setting=replace(SETTING, utilization=0.94)).flags == ("--gpu-memory-utilization 0.95",)
    assert advice(roomy, setting=replace(SETTING, utilization=0.95)).change is False
    special = replace(SETTING, utilization=0.91, special=True, evidence=("LoRA",))
    assert advice(roomy, setting=special).flags == ("--gpu-memory-utilization 0.92",)


def test_peaks_that_leave_less_than_a_step_lower_it_even_after_an_hour() -> None:
    short = Life(used=lambda _: 0.955 * CARD, peak=lambda t: (0.985 if t > HOUR / 2 else 0.96) * CARD)
    given = advice(short, HOUR, replace(SETTING, utilization=0.95))
    assert given.change is True
    assert given.flags == ("--gpu-memory-utilization 0.92",)
    assert "leaves 5.76 GiB more" in given.sentence


def test_less_than_a_day_is_not_enough_to_raise_it() -> None:
    given = advice(Life(used=lambda _: 0.90 * CARD), 6 * HOUR)
    assert given.change is None
    assert "6.0 h were seen" in given.sentence
    assert not given.flags


def test_what_fits_stays_and_the_rule_of_thumb_is_given_in_gib() -> None:
    given = advice(Life(used=lambda _: 0.96 * CARD, peak=lambda _: 0.975 * CARD))
    assert given.change is False
    rule = given.caveats[0]
    assert "15.4 GiB to 28.8 GiB" in rule
    assert "agrees" in rule


def test_on_a_small_card_the_same_ratio_is_said_to_leave_little() -> None:
    small = Life(used=lambda _: 0.5 * 24 * GIB, total=24 * GIB)
    rule = advice(small).caveats[0]
    assert "1.92 GiB to 3.60 GiB" in rule


def leak(t: float) -> float:
    return 0.93 * CARD + t / HOUR * 0.2 * GIB


def test_growing_live_memory_is_told_that_lowering_only_buys_hours() -> None:
    given = advice(Life(used=leak, allocated=lambda t: leak(t) - 3 * GIB))
    assert given.change is False
    assert not given.flags
    # 0.02 of 192 GiB at 0.2 GiB an hour.
    assert "lowering by 0.02 would only buy about 19 hours" in given.sentence
    assert given.numbers["growth_bytes_per_s"] == pytest.approx(0.2 * GIB / HOUR, rel=0.05)


@pytest.mark.parametrize(
    ("life", "kind"),
    [
        (Life(used=leak), Growth.UNKNOWN),
        (Life(used=leak, own=lambda _: 0.9 * CARD), Growth.EXTERNAL),
        (Life(used=leak, own=leak, allocated=leak), Growth.LIVE),
        (Life(used=leak, allocated=lambda _: 0.8 * CARD, cached=lambda t: leak(t) - 0.9 * CARD), Growth.CACHED),
        (Life(used=leak, allocated=lambda _: 0.8 * CARD), Growth.NON_TORCH),
        (Life(), Growth.NONE),
    ],
)
def test_the_component_that_grew_most_names_the_growth(life: Life, kind: Growth) -> None:
    room = tightest(observed(life, DAY).gpus_of("vllm"), PARAMETERS)
    assert room is not None
    assert room.trend.kind is kind


def test_growth_nobody_can_name_is_lowered_for_with_the_doubt_said() -> None:
    given = advice(Life(used=leak))
    assert given.change is True
    assert any("only buys hours" in caveat for caveat in given.caveats)


def test_tenants_that_vary_speak_for_a_pool_in_bytes() -> None:
    swinging = Life(used=lambda t: (0.94 + 0.02 * (t // HOUR % 2)) * CARD, own=lambda _: 0.9 * CARD)
    given = advice(swinging)
    assert any("other processes" in caveat for caveat in given.caveats)
    assert any(caveat.startswith("as bytes") for caveat in given.caveats)


def test_a_pool_that_changes_size_from_boot_to_boot_does_too() -> None:
    assert any("2 sizes" in caveat for caveat in advice(Life(), setting=replace(SETTING, pools=2)).caveats)


def test_without_vram_or_the_ratio_it_is_not_known() -> None:
    assert advise(None, SETTING, PARAMETERS).missing == ("gpu",)
    room = tightest(observed(Life(), DAY).gpus_of("vllm"), PARAMETERS)
    assert advise(room, Setting(None), PARAMETERS).missing == ("gpu_memory_utilization",)


def test_the_worst_gpu_decides_for_all() -> None:
    past = observed(Life(used=lambda _: 0.90 * CARD), DAY)
    for sample in samples(Life(used=lambda _: 0.97 * CARD), DAY):
        other = tuple(replace(gpu, gpu="0000:c2:00.0") for gpu in sample.gpus)
        past.observe(Sample(sample.at + 1, "vllm", sample.engines, other))
    room = tightest(past.gpus_of("vllm"), PARAMETERS)
    assert room is not None
    assert room.gpu == "0000:c2:00.0"


def test_a_restart_begins_growth_anew_and_warm_up_does_not_count() -> None:
    past = observed(Life(used=leak), DAY)
    reborn = Life(used=lambda _: 0.93 * CARD, started_at=MIDNIGHT + DAY)
    for sample in samples(reborn, 3 * HOUR, begin_s=DAY):
        past.observe(sample)
    assert past.engines["vllm", "0"].restarts == 1
    (gpu,) = past.gpus_of("vllm")
    assert gpu.gpu == GPU
    assert len(gpu.rows) == pytest.approx(3 * 6 - 1, abs=1)
    room = tightest([gpu], PARAMETERS)
    assert room is not None
    assert room.trend.kind is Growth.NONE


ROOMY = Life(used=lambda _: 0.85 * CARD)


def test_a_day_without_requests_is_not_known_although_much_was_free() -> None:
    given = advice(replace(ROOMY, usage=lambda _: 0.0, running=lambda _: 0.0))
    assert (given.change, given.missing) == (None, ("load",))
    assert not given.flags


def test_two_samples_a_day_apart_are_no_day_of_history() -> None:
    past = observed(ROOMY, 50 * HOUR, 25 * HOUR)
    given = advise(tightest(past.gpus_of("vllm"), PARAMETERS), SETTING, PARAMETERS)
    assert (given.change, given.missing) == (None, ("a day of history",))
    assert "0.2 h were seen" in given.sentence


def slow_leak(t: float) -> float:
    return 0.80 * CARD + t / HOUR * 0.25 * GIB


@pytest.mark.parametrize(
    ("life", "meaning"),
    [
        (Life(used=slow_leak, own=slow_leak, allocated=slow_leak), "Live tensors grow"),
        (Life(used=slow_leak, own=slow_leak, allocated=lambda _: 0.7 * CARD), "outside torch grows"),
        (Life(used=slow_leak), "may be a leak"),
        (Life(used=slow_leak, own=lambda _: 0.7 * CARD), "Another process"),
    ],
)
def test_while_anything_grows_the_ratio_is_not_raised_and_the_growth_is_explained(life: Life, meaning: str) -> None:
    given = advice(life)
    assert given.change is False
    assert not given.flags
    assert given.numbers["change_ratio"] == 0
    assert meaning in given.sentence


def test_a_pool_sized_in_bytes_is_advised_in_bytes_since_the_ratio_has_no_effect() -> None:
    given = advice(ROOMY, setting=replace(SETTING, fixed_by="kv_cache_memory_bytes", fixed_bytes=40 * GIB))
    assert given.change is True
    assert given.flags == (f"--kv-cache-memory-bytes {int(40 * GIB + 0.03 * CARD)}",)
    assert "has no effect" in given.sentence
    assert given.numbers["change_ratio"] == 0


def test_a_pool_of_overridden_blocks_is_advised_in_bytes_where_they_are_known() -> None:
    known = replace(SETTING, fixed_by="num_gpu_blocks_override")
    assert "in place of num_gpu_blocks_override" in advice(ROOMY, setting=known).sentence
    unknown = advice(ROOMY, setting=replace(known, bytes_per_token=None))
    assert (unknown.change, unknown.missing) == (None, ("bytes_per_token",))


def test_a_ratio_above_the_limit_never_fits_whatever_was_free() -> None:
    given = advice(ROOMY, setting=replace(SETTING, utilization=0.98))
    assert given.flags == ("--gpu-memory-utilization 0.95",)
    assert "beyond what the field reports" in given.sentence
    images = replace(SETTING, utilization=0.97, special=True, evidence=("images or sound",))
    assert advice(ROOMY, setting=images).flags == ("--gpu-memory-utilization 0.94",)
    hair = advice(ROOMY, setting=replace(SETTING, utilization=0.955))
    assert hair.change is False
    assert "beyond what the field reports" in hair.sentence
    assert "fits" not in hair.sentence


def test_an_unknown_model_is_raised_to_092_at_most_and_told_so() -> None:
    given = advice(ROOMY, setting=replace(SETTING, special=None))
    assert given.flags == ("--gpu-memory-utilization 0.92",)
    assert any("is not known: never raised above 0.92" in caveat for caveat in given.caveats)


def test_an_unknown_model_above_092_fits_only_with_the_doubt_said() -> None:
    given = advice(ROOMY, setting=replace(SETTING, utilization=0.94, special=None))
    assert given.change is False
    assert "unless the model has images" in given.sentence


@pytest.mark.parametrize(
    ("now", "used", "flag"),
    [(0.925, 0.85, "0.95"), (0.905, 0.985, "0.89"), (0.905, 1.0, "0.88"), (0.945, 0.985, "0.93")],
)
def test_the_printed_ratio_is_the_old_one_plus_the_move(now: float, used: float, flag: str) -> None:
    given = advice(Life(used=lambda _: used * CARD), setting=replace(SETTING, utilization=now))
    assert given.flags == (f"--gpu-memory-utilization {flag}",)
    assert now + given.numbers["change_ratio"] == pytest.approx(float(flag))
    assert abs(given.numbers["change_ratio"]) <= 0.03 + 1e-9


def test_lowering_never_leaves_no_pool_and_never_a_ratio_near_0() -> None:
    full = Life(used=lambda _: 0.999 * CARD)
    assert advice(full, setting=Setting(0.02)).change is False
    tiny = advice(full, setting=replace(SETTING, pool_tokens=1000))
    assert tiny.change is False
    assert "would leave none" in tiny.sentence


def test_a_card_that_was_full_in_an_hour_shows_0_free_there() -> None:
    full = observed(Life(used=lambda t: CARD if t < 600 else 0.9 * CARD), HOUR)
    assert full.engines["vllm", "0"].hours[0].free_lowest_bytes == 0


def test_another_size_in_bytes_begins_a_new_day() -> None:
    past = observed(ROOMY, DAY)
    after = replace(ROOMY, config=replace(POOL, kv_cache_memory_bytes=100 * GIB))
    for sample in samples(after, HOUR, begin_s=DAY):
        past.observe(sample)
    (gpu,) = past.gpus_of("vllm")
    assert gpu.covered_s < HOUR


def test_a_counter_that_falls_to_0_is_a_restart() -> None:
    past = EnginePast("vllm", "0")
    for i, tokens in enumerate((1000.0, 5000.0, 0.0, 300.0)):
        past.observe(EngineReading(i * 60.0, "0", "llama", prompt_tokens_total=tokens), 0.97)
    assert past.restarts == 1
