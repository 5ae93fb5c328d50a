"""gpu-memory-utilization: up where room was left, down where it was not, and honest where neither helps."""

from dataclasses import replace

import pytest

from fragscope.advise.advice import Advice
from fragscope.advise.memory import Growth, Setting, advise, tightest
from fragscope.advise.parameters import AdviceParameters
from fragscope.model import Sample
from tests.advise.past import CARD, DAY, GIB, GPU, HOUR, MIDNIGHT, Life, observed, samples

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
