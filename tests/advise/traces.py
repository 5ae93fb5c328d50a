"""Public traces: their histograms, the exact waste, and their first requests one by one."""

import csv
import gzip
import json
from collections.abc import Iterable
from typing import Any

from fragscope.advise.lengths import LengthCounter
from fragscope.advise.parameters import AdviceParameters
from fragscope.model import Histogram
from tests.paths import DATA

TRACES: dict[str, Any] = json.loads((DATA / "traces" / "traces.json").read_text())
SIZES = (8, 16, 32, 64, 128, 256)
PARAMETERS = AdviceParameters()
BOUNDS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


def histogram(trace: str, what: str) -> Histogram:
    stored = TRACES[trace][what]
    return Histogram(stored["count"], stored["sum"], tuple((bound, count) for bound, count in stored["buckets"]))


def requests(trace: str) -> list[tuple[int, int]]:
    with gzip.open(DATA / "traces" / f"{trace}.csv.gz", "rt") as lines:
        return [(int(prompt), int(output)) for _, prompt, output in list(csv.reader(lines))[1:]]


def histogram_of(values: Iterable[int]) -> Histogram:
    """What vLLM would count of these lengths, in its own 1-2-5 buckets."""
    listed = list(values)
    buckets = tuple((bound, float(sum(v <= bound for v in listed))) for bound in BOUNDS)
    return Histogram(float(len(listed)), float(sum(listed)), buckets)


def counter(pairs: Iterable[tuple[int, int]]) -> LengthCounter:
    counted = LengthCounter()
    for prompt, output in pairs:
        counted.add(prompt, output)
    return counted
