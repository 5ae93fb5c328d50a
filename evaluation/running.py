"""Runs of scenario and seed over the cores: each is simulated once, and every observer watches the same samples."""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from evaluation.course import CourseKeeper
from evaluation.naive import MERGED_S, NAIVE, Rule
from evaluation.scoring import Run, RunScore, score_alarms, score_watched
from evaluation.tiers import TIERS, Mask, tiers_named
from evaluation.watched import AlarmLog, Watched
from fragscope.detect.parameters import Parameters
from fragscope.model import Sample
from fragscope.recording import LabelLine


@dataclass(frozen=True, slots=True)
class Play:
    """One simulated run; `labels` are complete once `samples` are used up."""

    samples: Iterable[Sample]
    labels: Iterable[LabelLine]


Stage = Callable[[str, int, float, float | None], Play]
"""(scenario, seed, interval_s, hours or the usual) -> what happens; a function that another process can import."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run and who watches it."""

    stage: Stage
    scenario: str
    seed: int
    interval_s: float
    tiers: tuple[str, ...]
    rules: tuple[str, ...]
    parameters: Parameters = field(default_factory=Parameters)
    hours: float | None = None


class NaiveWatch:
    """A naive rule per target, and its alarms."""

    def __init__(self, make: Callable[[], Rule]) -> None:
        self._make = make
        self._rules: dict[str, Rule] = {}
        self.log = AlarmLog(MERGED_S)

    def observe(self, sample: Sample) -> None:
        """Feeds the sample to its target's rule."""
        if sample.target not in self._rules:
            self._rules[sample.target] = self._make()
        self.log.observe(sample.target, sample.at, alarming=self._rules[sample.target].observe(sample))


def watch(job: Job) -> list[RunScore]:
    """Plays the run once, a sample at a time, and scores every observer."""
    try:
        return _watch(job)
    except Exception as error:
        # Words only: an exception that cannot be taken apart and put together again would hang the pool.
        words = f"{type(error).__name__}: {error} (in scenario {job.scenario}, seed {job.seed})"
        raise RuntimeError(words) from error


def _watch(job: Job) -> list[RunScore]:
    keeper = CourseKeeper()
    rules = {name: NaiveWatch(NAIVE[name]) for name in job.rules}
    tiers: list[tuple[str, Mask, Watched]] = [
        (tier.name, tier.mask_of(job.seed), Watched(job.parameters))
        for tier in (tiers_named(",".join(job.tiers)) if job.tiers else ())
    ]
    outside = TIERS[0].mask_of(job.seed)
    play = job.stage(job.scenario, job.seed, job.interval_s, job.hours)
    for sample in play.samples:
        keeper.observe(sample)
        seen = outside(sample)
        for rule in rules.values():
            rule.observe(seen)
        for _, mask, watched in tiers:
            watched.observe(mask(sample))
    course = keeper.course(play.labels)
    scores = [score_alarms(Run(job.scenario, job.seed, name), course, rule.log.all) for name, rule in rules.items()]
    return scores + [score_watched(Run(job.scenario, job.seed, name), course, w) for name, _, w in tiers]


def watch_all(jobs: Iterable[Job], processes: int) -> Iterator[list[RunScore]]:
    """The scores of every job as they come in; in this process where `processes` is 1."""
    if processes <= 1:
        yield from map(watch, jobs)
        return
    # A fresh process each: a fork would inherit the threads of whoever draws the progress.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(watch, jobs)
