"""Alarms that are known give figures that are known."""

import pytest
from evaluation.course import Course, Death
from evaluation.figures import figures, quantile
from evaluation.scoring import Run, RunScore, score_alarms
from evaluation.watched import Alarm, AlarmLog

from fragscope.recording import LabelLine

DAY = 86400.0


def course(*labels: LabelLine, deaths: tuple[Death, ...] = ()) -> Course:
    return Course(labels, deaths, DAY, 5.0)


def oom(at: float, until: float | None = None) -> LabelLine:
    return LabelLine(at, until or at, "fragmentation", "vllm")


def scored(of: Course, *alarms: tuple[float, float]) -> RunScore:
    return score_alarms(Run("s", 0, "N1"), of, [Alarm("vllm", a, b, on_s=b - a) for a, b in alarms])


def test_an_alarm_up_to_an_hour_after_or_ten_minutes_before_is_true() -> None:
    failed = course(oom(10_000))
    assert scored(failed, (13_600, 14_000)).true_alarms == 1
    assert scored(failed, (13_601, 14_000)).true_alarms == 0
    assert scored(failed, (9_000, 9_400)).true_alarms == 1
    assert scored(failed, (9_000, 9_399)).true_alarms == 0


def test_an_alarm_of_another_target_is_false() -> None:
    score = score_alarms(Run("s", 0, "N1"), course(oom(10_000)), [Alarm("neighbour", 10_000, 10_100)])
    assert (score.true_alarms, score.found) == (0, 0)


def test_the_delay_is_from_the_first_failure_to_the_first_true_alarm() -> None:
    assert scored(course(oom(10_000), oom(20_000)), (10_090, 11_000), (20_001, 21_000)).delay_s == 90
    assert scored(course(oom(10_000), oom(20_000)), (20_001, 21_000)).delay_s == 10_001
    assert scored(course(oom(10_000)), (9_900, 11_000)).delay_s == 0
    assert scored(course(oom(10_000))).delay_s is None


def test_precision_recall_and_false_alarms_add_up() -> None:
    thin = Death("vllm", 5_000, 5_005, 0.02)
    found = figures(
        [
            scored(course(oom(10_000), oom(30_000)), (10_090, 11_000), (60_000, 61_000)),
            scored(course(oom(10_000))),
            scored(course(), (1_000, 1_895), (3_000, 3_895)),
            scored(course(deaths=(thin,)), (5_005, 5_900)),
        ]
    )
    assert (found.alarm_precision.hits, found.alarm_precision.of) == (1, 5)
    assert (found.run_precision.hits, found.run_precision.of) == (1, 3)
    assert (found.run_recall.hits, found.run_recall.of) == (1, 2)
    assert (found.failure_recall.hits, found.failure_recall.of) == (1, 3)
    assert (found.false_alarms.events, found.false_alarms.days) == (3, 2.0)
    assert (found.hard_false_alarms.events, found.hard_false_alarms.days) == (1, 1.0)
    assert found.negative_alarm_share == pytest.approx(2700 / (2 * DAY))
    assert found.delay_median_s == 90


def test_a_death_with_room_is_no_hard_negative() -> None:
    assert not course(deaths=(Death("vllm", 5_000, 5_005, 0.1),)).hard
    assert not course(deaths=(Death("vllm", 5_000, 5_005, None),)).hard
    assert not course(oom(5_000), deaths=(Death("vllm", 5_000, 5_005, 0.01),)).hard


def test_alarms_are_stretches_of_one_target() -> None:
    log = AlarmLog()
    for at, a, b in ((0, True, False), (5, True, True), (10, False, True), (15, True, False)):
        log.observe("a", at, alarming=a, cause="memory_undetermined" if at < 5 else "fragmentation")
        log.observe("b", at, alarming=b)
    assert [(alarm.target, alarm.since, alarm.until) for alarm in log.all] == [("a", 0, 5), ("b", 5, 10), ("a", 15, 15)]
    assert log.all[0].cause_before(5) == "memory_undetermined"
    assert log.all[0].cause_before(6) == "fragmentation"


def test_alarms_that_come_back_soon_are_one_and_count_the_time_they_were_on() -> None:
    log = AlarmLog(merge_s=900)
    for at in (0, 5, 10, 500, 910, 1811):
        log.observe("a", at, alarming=at not in (500, 1811))
    log.observe("a", 1816, alarming=True)
    assert [(alarm.since, alarm.until, alarm.on_s) for alarm in log.all] == [(0, 910, 10), (1816, 1816, 0)]


def test_mistakes_say_where_to_look() -> None:
    killed = LabelLine(60_000, 60_100, "engine_fault", "vllm", "core")
    score = scored(course(oom(10_000), oom(50_000), killed), (10_090, 11_000), (60_005, 61_000), (80_000, 80_900))
    assert [(m.kind, m.at, m.truth) for m in score.mistakes] == [
        ("missed", 50_000, "fragmentation"),
        ("false_alarm", 60_005, "engine_fault"),
        ("false_alarm", 80_000, None),
    ]


def test_quantiles_are_values_that_were_seen() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.9) == 3.0
    assert quantile(map(float, range(1, 11)), 0.9) == 9.0
    assert quantile([], 0.9) is None
