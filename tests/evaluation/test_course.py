"""What anybody can read off the samples: deaths, and how full the card was."""

import pytest
from evaluation.course import CourseKeeper

from tests.evaluation import plays


def test_a_death_is_due_at_the_second_refused_poll() -> None:
    keeper = CourseKeeper()
    played = plays.play("kill-thin", 0, 5.0)
    for sample in played.samples:
        keeper.observe(sample)
    course = keeper.course(played.labels)
    (death,) = course.deaths
    assert death.first_bad_at == plays.START + plays.FAILS_AT_S
    assert death.due_at == death.first_bad_at + 5
    assert death.free_ratio == pytest.approx(0.5 / 192)
    assert course.hard
    assert course.interval_s == 5.0


def test_a_restart_between_two_polls_is_a_death_at_the_later_one() -> None:
    keeper = CourseKeeper()
    played = plays.play("kill-thin", 0, 5.0)
    for sample in played.samples:
        if sample.engines:
            keeper.observe(sample)
    (death,) = keeper.course(()).deaths
    assert death.first_bad_at == death.due_at == plays.START + plays.FAILS_AT_S + 60


def test_a_healthy_run_is_a_plain_negative() -> None:
    keeper = CourseKeeper()
    for sample in plays.play("healthy", 0, 5.0).samples:
        keeper.observe(sample)
    course = keeper.course(())
    assert (course.deaths, course.positive, course.hard) == ((), False, False)
    assert course.seconds == plays.MINUTES * 60 - 5
