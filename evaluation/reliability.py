"""Said 0.9, was right how often: probabilities of episodes against what was true."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from evaluation.bounds import Rate, Share
from evaluation.scoring import RunScore
from evaluation.watched import EpisodeRow

EDGES = (0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 1.0)
"""Bins of said probability; finer at the ends, where most episodes lie and where people act."""
POINTS = (0.5, 0.7, 0.9, 0.95, 0.99)
"""Probabilities at which one could page or open a ticket."""


@dataclass(frozen=True, slots=True)
class Bin:
    """Episodes of which about the same was said."""

    low: float
    high: float
    said_mean: float
    true: Share


@dataclass(frozen=True, slots=True)
class Point:
    """What alarming at a probability would have meant, per episode."""

    probability: float
    precision: Share
    recall: Share
    """Of the episodes that were memory failures; failures that opened none are not in it."""
    false_a_day: Rate
    """Over negative runs."""


def bins(rows: Iterable[EpisodeRow], said: Callable[[EpisodeRow], float]) -> list[Bin]:
    """The bins that are not empty; each holds its lower edge, the last both."""
    listed = list(rows)
    found = []
    for low, high in pairwise(EDGES):
        inside = [row for row in listed if low <= said(row) < high or (high == EDGES[-1] and said(row) == high)]
        if inside:
            mean = sum(said(row) for row in inside) / len(inside)
            found.append(Bin(low, high, mean, Share(sum(row.memory for row in inside), len(inside))))
    return found


def calibration_error(found: Iterable[Bin]) -> float | None:
    """Expected calibration error: |said - true share| averaged over episodes; None without any.

    Naeini, Cooper and Hauskrecht, AAAI 2015, with the bins of `EDGES`.
    """
    listed = list(found)
    episodes = sum(each.true.of for each in listed)
    if not episodes:
        return None
    return sum(abs(each.true.of * each.said_mean - each.true.hits) for each in listed) / episodes


def points(scores: Iterable[RunScore]) -> list[Point]:
    """One tier at every probability of `POINTS`, by what was said last."""
    listed = list(scores)
    rows = [row for score in listed for row in score.episodes]
    of_negatives = [row for score in listed if not score.positive for row in score.episodes]
    days = sum(score.seconds for score in listed if not score.positive) / 86400
    memory = sum(row.memory for row in rows)
    found = []
    for probability in POINTS:
        above = [row for row in rows if row.said_last >= probability]
        right = sum(row.memory for row in above)
        false = sum(row.said_last >= probability for row in of_negatives)
        found.append(Point(probability, Share(right, len(above)), Share(right, memory), Rate(false, days)))
    return found
