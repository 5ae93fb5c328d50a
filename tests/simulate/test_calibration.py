"""The simulated allocator against what a real GPU's allocator did under the same load."""

import json
from typing import Any

import pytest

from fragscope.simulate.allocator import GIB
from fragscope.simulate.calibration import Outcome, Setting, run
from tests.paths import REPOSITORY

MEASURED: dict[str, dict[str, Any]] = json.loads((REPOSITORY / "tests/data/h200/measured.json").read_text())
SEEDS = range(20)


def simulated(**settings: Any) -> list[Outcome]:
    return [run(Setting(seed=seed, **settings)) for seed in SEEDS]


@pytest.fixture(scope="module")
def fragmented() -> list[Outcome]:
    return simulated(steps=20000)


@pytest.fixture(scope="module")
def healthy() -> list[Outcome]:
    return simulated(pinned_share=0.0, steps=MEASURED["nopinned-0"]["steps"])


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def test_a_healthy_run_has_the_largest_gap_no_split_and_ten_harmless_retries(healthy: list[Outcome]) -> None:
    real = MEASURED["nopinned-0"]
    assert real["first_oom_step"] is None
    assert all(one.first_oom_step is None and one.largest_split_bytes == 0 for one in healthy)
    assert middle([one.largest_gap_bytes for one in healthy]) == pytest.approx(real["largest_gap_bytes"], rel=0.1)
    assert middle([one.retries_before_oom for one in healthy]) == pytest.approx(real["retries_before_oom"], abs=2)


@pytest.mark.parametrize("name", ["frag-default-0", "frag-default-1"])
def test_buffers_that_stay_lead_to_an_oom_by_fragmentation(fragmented: list[Outcome], name: str) -> None:
    real = MEASURED[name]
    assert all(one.first_oom_step is not None and one.tried_bytes > one.free_bytes for one in fragmented)
    served = [one for one in fragmented if one.tried_bytes <= one.free_bytes + one.stranded_bytes]
    assert len(served) >= 0.9 * len(fragmented)
    for field in ("stranded_bytes", "largest_gap_bytes", "largest_split_bytes"):
        values = [getattr(one, field) for one in fragmented]
        assert min(values) <= real[field] <= 1.1 * max(values), field


def test_retries_come_long_before_the_oom_as_they_did(fragmented: list[Outcome]) -> None:
    for one in fragmented:
        assert one.first_retry_step is not None
        assert one.first_oom_step is not None
        assert one.first_retry_step < one.first_oom_step
    leads = [
        one.first_oom_step / one.first_retry_step for one in fragmented if one.first_oom_step and one.first_retry_step
    ]
    assert middle(leads) > 1.5
    firsts = [one.first_retry_step or 0 for one in fragmented]
    assert min(firsts) <= MEASURED["frag-default-1"]["first_retry_step"] <= max(firsts)


def test_at_a_higher_utilization_it_comes_as_much_sooner_as_it_did(fragmented: list[Outcome]) -> None:
    thin = simulated(utilization=0.95)
    real = MEASURED["util95-0"]
    sooner = middle([one.first_oom_step or 0 for one in thin])
    assert sooner == pytest.approx(real["first_oom_step"], rel=0.3)
    assert sooner < 0.5 * middle([one.first_oom_step or 0 for one in fragmented])
    stranded = middle([one.stranded_bytes for one in thin])
    assert stranded == pytest.approx(real["stranded_bytes"], rel=0.4)


def test_with_expandable_segments_it_lasts_longer_and_is_exhaustion(fragmented: list[Outcome]) -> None:
    expandable = [one for one in simulated(expandable=True, steps=30000) if one.first_oom_step is not None]
    assert middle([one.first_oom_step or 0 for one in expandable]) > middle([o.first_oom_step or 0 for o in fragmented])
    assert all(one.split_bytes == 0 and one.stranded_bytes < 1.5 * GIB for one in expandable)


def test_at_every_oom_the_card_is_full_by_its_own_count(fragmented: list[Outcome]) -> None:
    assert all(one.used_ratio > 0.985 for one in fragmented)
