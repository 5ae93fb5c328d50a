"""The real simulator, the real detector, a few runs: what must hold before anybody runs the whole of it."""

import pytest
from evaluation.figures import Figures, figures, grouped
from evaluation.running import Job, watch_all
from evaluation.stage import SIMULATOR

SCENARIOS = ("healthy", "slow-leak", "transient-peak", "hard-kill")


@pytest.fixture(scope="module")
def found() -> dict[str, Figures]:
    jobs = [Job(SIMULATOR.play, name, seed, 5.0, ("T0", "T3"), ("N2",)) for name in SCENARIOS for seed in (0, 1)]
    scores = [score for scores in watch_all(jobs, 2) for score in scores]
    return {name: figures(of) for name, of in grouped(scores, lambda score: score.run.observer).items()}


def test_the_runs_hold_failures_to_be_found(found: dict[str, Figures]) -> None:
    assert found["T0"].positive_runs >= 2
    assert found["T0"].runs == 8


def test_the_log_makes_no_false_alarm_and_finds_what_failed(found: dict[str, Figures]) -> None:
    assert found["T3"].false_alarms.events == 0
    assert (found["T3"].run_recall.ratio or 0) >= 0.5


def test_fragmentation_is_never_said_from_outside(found: dict[str, Figures]) -> None:
    assert found["T0"].fragmentation_led_runs == 0


def test_fragscope_from_outside_beats_the_naive_rule(found: dict[str, Figures]) -> None:
    assert (found["T0"].run_recall.ratio or 0) >= (found["N2"].run_recall.ratio or 0)
    assert found["T0"].false_alarms.events < found["N2"].false_alarms.events
