"""A detector's state does not grow with time: seconds of a simulated week in the suite, the whole week by hand."""

import gc
import random
import sys
from collections import deque
from time import monotonic

from fragscope.detect.snapshot import dump
from fragscope.model import Fact
from tests.stories import CARD, GIB, Story

DAY_S = 86400.0
WEEK_S = 7 * DAY_S


def deep_bytes(root: object) -> int:
    """What everything reachable takes; classes, functions and modules are not the detector's."""
    seen: set[int] = set()
    todo: deque[object] = deque([root])
    total = 0
    while todo:
        item = todo.popleft()
        if id(item) in seen or isinstance(item, type) or callable(item):
            continue
        seen.add(id(item))
        total += sys.getsizeof(item)
        todo.extend(gc.get_referents(item))
    return total


class Life:
    """A server's ordinary and extraordinary hours, seeded: load, storms, leaks, deaths, restarts, late lines."""

    def __init__(self) -> None:
        self.rng = random.Random(41)
        self.story = Story(interval_s=15.0, with_log=True, others_bytes=GIB)
        self.allocator = {"live": 160 * GIB, "split": 0, "cache": 4 * GIB, "retries": 0, "ooms": 0}
        self.story.allocator = self.allocator

    def hour(self) -> None:
        """One hour of it."""
        rng, story = self.rng, self.story
        base = int(0.9 * CARD)
        for minute in range(60):
            used = min(CARD, base + minute * rng.choice((0, 0, 64, 300)) * 2**20)
            self.allocator["retries"] += rng.random() < 0.1
            self.allocator["split"] = rng.choice((0, GIB, 3 * GIB))
            errors = 20 if rng.random() < 0.02 else 0
            if rng.random() < 0.05:
                story.say(rng.choice(list(Fact)))
            story.serve(rng.random(), running=rng.randint(0, 30), server_errors=errors, used=used, ticks=4)
        if rng.random() < 0.5:
            self.allocator["ooms"] += rng.random() < 0.5
            story.refuse(ticks=rng.randint(2, 20))
            story.restart()
            story.pid += 1


def test_a_week_leaves_no_more_behind_than_a_day(soak_s: float) -> None:
    life, began = Life(), monotonic()
    sizes: list[int] = []
    while life.story.at < 1_000_000.0 + WEEK_S and monotonic() - began < soak_s:
        life.hour()
        sizes.append(deep_bytes(life.story.detector))
    assert len(sizes) > 36, "too slow to say anything"
    early, late = max(sizes[24 : 24 + len(sizes) // 4]), max(sizes[-len(sizes) // 4 :])
    print(f"{len(sizes)} hours: {early / 1024:.0f} KiB on the second day, {late / 1024:.0f} KiB at the end")
    assert late < 1.1 * early
    assert late < 2 * 2**20
    assert dump(life.story.detector)
