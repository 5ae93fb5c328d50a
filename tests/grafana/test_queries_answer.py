"""Every query of the dashboard returns data from a real Prometheus beside the demo, or is named here with a reason."""

import json
import shutil
import time
import urllib.parse
import urllib.request

import pytest
from tools.shots.stack import running

from tests.grafana.dashboard import QUERIES, Query

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (apt)")

RIGHTLY_EMPTY = {
    "VRAM with peaks D": "the memory of the engine's own processes is not read in the demo",
    "Growth A": "the engine of the demo dies before its staircase is long enough (20 minutes) to be called growth",
    "Time left A": "likewise",
}
PATIENCE_S = 50


def answers(prometheus: str, query: Query) -> bool:
    """Whether there is a number; a mean of nothing is none."""
    url = f"{prometheus}/api/v1/query?" + urllib.parse.urlencode({"query": query.expression})
    with urllib.request.urlopen(url, timeout=5) as answer:
        return any(row["value"][1] != "NaN" for row in json.load(answer)["data"]["result"])


def test_every_query_answers_at_some_moment_of_a_pseudo_oom_or_of_a_full_pool() -> None:
    waiting = {query.where: query for query in QUERIES}
    assert set(RIGHTLY_EMPTY) <= set(waiting)
    deadline = time.monotonic() + PATIENCE_S
    with running("pseudo-oom") as memory, running("kv-exhausted") as pool:
        while set(waiting) - set(RIGHTLY_EMPTY) and time.monotonic() < deadline:
            time.sleep(1)
            for prometheus in (memory, pool):
                waiting = {where: query for where, query in waiting.items() if not answers(prometheus, query)}
    assert set(waiting) == set(RIGHTLY_EMPTY)
