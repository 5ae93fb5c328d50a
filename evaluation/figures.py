"""Scores of runs added up to the figures that people ask for."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from evaluation.bounds import Rate, Share
from evaluation.scoring import RunScore

_DAY_S = 86400.0
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Figures:
    """One observer over some runs. "Negative" is a run in which no allocation outside the pool failed."""

    runs: int
    positive_runs: int
    hard_runs: int
    hours: float
    alarm_precision: Share
    run_precision: Share
    run_recall: Share
    failure_recall: Share
    false_alarms: Rate
    """Over all negative runs."""
    hard_false_alarms: Rate
    """Over those in which something died on an almost full card."""
    negative_alarm_share: float | None
    """Share of the negative runs' time in alarm."""
    cause_right: Share
    cause_undetermined: Share
    delays_s: tuple[float, ...]
    in_time: Share
    """Deaths for lack of memory, of those found, at which the alarm stood by the second poll."""
    fragmentation_led_runs: int
    others_named: Share
    """Labels that are no memory cause, and were said."""
    negative_watch_share: float | None
    watch_leads_s: tuple[float, ...]
    """From `watch` to the first failure, one per positive run that had it."""

    @property
    def delay_median_s(self) -> float | None:
        """From the first failure to the verdict."""
        return statistics.median(self.delays_s) if self.delays_s else None

    @property
    def delay_p90_s(self) -> float | None:
        """The same for the slowest tenth."""
        return quantile(self.delays_s, 0.9)


def quantile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed; None of none."""
    ordered = sorted(values)
    if not ordered:
        return None
    rank = -int(-share * len(ordered) // 1)
    return ordered[max(0, rank - 1)]


def figures(scores: Iterable[RunScore]) -> Figures:
    """Adds up the runs of one observer."""
    every = list(scores)
    positive = [s for s in every if s.positive]
    negative = [s for s in every if not s.positive]
    hard = [s for s in negative if s.hard]
    alarmed = [s for s in every if s.alarms]
    causes = _sum(every, lambda s: s.causes)
    return Figures(
        runs=len(every),
        positive_runs=len(positive),
        hard_runs=len(hard),
        hours=sum(s.seconds for s in every) / 3600,
        alarm_precision=Share(_sum(every, lambda s: s.true_alarms), _sum(every, lambda s: s.alarms)),
        run_precision=Share(_sum(alarmed, lambda s: s.true_alarms > 0), len(alarmed)),
        run_recall=Share(_sum(positive, lambda s: s.true_alarms > 0), len(positive)),
        failure_recall=Share(_sum(positive, lambda s: s.found), _sum(positive, lambda s: s.failures)),
        false_alarms=_false_alarms(negative),
        hard_false_alarms=_false_alarms(hard),
        negative_alarm_share=_time_share(negative, lambda s: s.alarm_s),
        cause_right=Share(_sum(every, lambda s: s.cause_right), causes),
        cause_undetermined=Share(_sum(every, lambda s: s.cause_undetermined), causes),
        delays_s=tuple(s.delay_s for s in positive if s.delay_s is not None),
        in_time=Share(_sum(every, lambda s: s.deaths_in_time), _sum(every, lambda s: s.deaths)),
        fragmentation_led_runs=_sum(every, lambda s: s.fragmentation_led > 0),
        others_named=Share(_sum(every, lambda s: s.others_named), _sum(every, lambda s: s.others)),
        negative_watch_share=_time_share(negative, lambda s: s.watch_s),
        watch_leads_s=tuple(s.watch_lead_s for s in positive if s.watch_lead_s is not None),
    )


def grouped(scores: Iterable[RunScore], key: Callable[[RunScore], Key]) -> dict[Key, list[RunScore]]:
    """The scores by a key, in the order in which the keys come."""
    groups: dict[Key, list[RunScore]] = {}
    for score in scores:
        groups.setdefault(key(score), []).append(score)
    return groups


def _sum(scores: Iterable[RunScore], of: Callable[[RunScore], int]) -> int:
    return sum(of(score) for score in scores)


def _false_alarms(scores: Iterable[RunScore]) -> Rate:
    listed = list(scores)
    return Rate(sum(s.false_alarms for s in listed), sum(s.seconds for s in listed) / _DAY_S)


def _time_share(scores: list[RunScore], of: Callable[[RunScore], float]) -> float | None:
    seconds = sum(s.seconds for s in scores)
    return min(1.0, sum(of(s) for s in scores) / seconds) if seconds else None
