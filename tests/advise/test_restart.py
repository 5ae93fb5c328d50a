"""A rolling restart only where it cures something, and only with the conditions that make it harmless."""

import pytest

from fragscope.advise.restart import Fleet, advise, quietest
from fragscope.advise.split import HourRow, by_hour
from tests.advise.past import DAY, HOUR, Life, observed
from tests.advise.traces import PARAMETERS

FLEET = Fleet(4, 0.6)


def day() -> list[HourRow]:
    """Busy from 8 to 20, quietest at 4 h UTC."""
    life = Life(running=lambda t: 50.0 if 8 <= t % DAY / HOUR < 20 else 5.0 + abs(t % DAY / HOUR - 4.5))
    return by_hour(observed(life, 2 * DAY, 300).engines["vllm", "0"].hours, None)


def test_growth_with_hours_left_is_restarted_at_the_quietest_hour() -> None:
    given = advise("memory_growth", 6 * HOUR, day(), FLEET, PARAMETERS)
    assert given.change is True
    assert given.numbers["quietest_hour"] == 4
    assert "6.0 hours left" in given.sentence
    assert any("rollout restart" in way for way in given.flags)
    assert any("CronJob" in way for way in given.flags)
    assert any("scale out by one" in way for way in given.flags)
    assert "their usage would reach 80 %" in " ".join(given.caveats)


@pytest.mark.parametrize(
    "cause", ["none", "transient_peak", "external_process", "kv_exhausted", "scheduler_limit", "memory_undetermined"]
)
def test_nothing_else_is_restarted(cause: str) -> None:
    given = advise(cause, HOUR, day(), FLEET, PARAMETERS)
    assert given.change is False
    assert not given.flags


def test_with_more_than_a_day_left_it_waits() -> None:
    assert advise("fragmentation", 30 * HOUR, day(), FLEET, PARAMETERS).change is False
    assert advise("fragmentation", None, day(), FLEET, PARAMETERS).change is None


def test_others_that_cannot_carry_the_load_are_said() -> None:
    full = " ".join(advise("memory_growth", HOUR, day(), Fleet(2, 0.6), PARAMETERS).caveats)
    assert "cannot carry the load (120 %" in full
    alone = " ".join(advise("memory_growth", HOUR, day(), Fleet(1, 0.6), PARAMETERS).caveats)
    assert "restart is an outage" in alone


def test_part_of_a_day_has_no_quietest_hour() -> None:
    assert quietest(day()[:20]) is None
    assert "not known" in advise("memory_growth", HOUR, day()[:20], FLEET, PARAMETERS).sentence
