"""Bounds against published values."""

import math

import pytest
from evaluation.bounds import Rate, Share, garwood


@pytest.mark.parametrize(
    ("events", "low", "high"),
    [(0, 0.0, 3.689), (1, 0.0253, 5.572), (3, 0.619, 8.767), (10, 4.795, 18.390), (100, 81.364, 121.627)],
)
def test_poisson_bounds_are_those_of_the_tables(events: int, low: float, high: float) -> None:
    # 95 % limits of a Poisson mean as in the usual tables, half a chi-square quantile each.
    found = garwood(events)
    assert found[0] == pytest.approx(low, abs=5e-4)
    assert found[1] == pytest.approx(high, abs=5e-4)


def test_thousands_of_events_do_not_underflow() -> None:
    low, high = garwood(3000)
    assert low == pytest.approx(3000 - 1.96 * math.sqrt(3000), rel=0.002)
    assert high == pytest.approx(3000 + 1.96 * math.sqrt(3000), rel=0.002)


def test_a_rate_is_bounded_by_its_days() -> None:
    rate = Rate(0, 10.0)
    assert rate.per_day == 0.0
    assert list(rate.bounds) == pytest.approx([0.0, 0.3689], abs=1e-4)


def test_nothing_watched_is_no_rate_and_no_share() -> None:
    assert Rate(0, 0.0).per_day is None
    assert Share(0, 0).ratio is None


def test_a_share_has_wilsons_bounds() -> None:
    assert list(Share(11, 31).bounds) == pytest.approx([0.21, 0.53], abs=0.005)
