"""`advise` over the memory of a real Prometheus that watched the demo, or that holds a week with gaps."""

import json
import shutil
from pathlib import Path

import pytest

from fragscope.cli import main
from fragscope.remembering import duration_s, window
from tests.test_history import DAY_S, remembered, week

__all__ = ["remembered", "week"]

needs_prometheus = pytest.mark.skipif(
    any(shutil.which(name) is None for name in ("prometheus", "promtool")), reason="prometheus is not installed (apt)"
)


@needs_prometheus
def test_what_prometheus_saw_of_the_demo_gets_advice(
    remembered: tuple[str, float, float], capsys: pytest.CaptureFixture[str]
) -> None:
    address, _, _ = remembered
    asked = ("advise", "--prometheus", address, "--query-range", "2m", "--query-step", "1s", "--format", "json")
    assert main([*asked]) == 0
    (engine,) = json.loads(capsys.readouterr().out)["engines"]
    assert engine["model_name"] == "demo-llama"
    assert engine["lengths"]["count"] > 0
    assert {advice["topic"] for advice in engine["advice"]} >= {"block_size", "gpu_memory_utilization", "split"}
    memory = next(advice for advice in engine["advice"] if advice["topic"] == "gpu_memory_utilization")
    assert memory["missing"] == ["gpu"], "the demo was in its first ten minutes all the time"


@needs_prometheus
def test_a_week_with_gaps_is_advised_on_and_says_what_is_missing(
    week: tuple[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    address, began = week
    asked = ("advise", "--prometheus", address, "--query-range", "9d", "--query-step", "5m", "--format", "json")
    assert main([*asked]) == 0
    answer = json.loads(capsys.readouterr().out)
    (engine,) = answer["engines"]
    assert len(engine["hours"]) == 24
    notes = " ".join(answer["notes"])
    assert "cache_config_info is absent" in notes
    assert "kv_cache_usage_perc is absent" in notes
    memory = next(advice for advice in engine["advice"] if advice["topic"] == "gpu_memory_utilization")
    assert memory["missing"] == ["gpu_memory_utilization"]
    assert began > 0


@needs_prometheus
def test_two_windows_of_history_are_compared(week: tuple[str, float], capsys: pytest.CaptureFixture[str]) -> None:
    address, _ = week
    asked = ("--prometheus", address, "--query-step", "5m", "--compare", "7d/5d", "4d/2d", "--format", "json")
    assert main(["advise", *asked]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["compare"]}
    assert rows["VRAM free at peaks"]["verdict"] == "no clear difference"
    assert rows["block waste"]["verdict"] == "not known"


@needs_prometheus
def test_a_selector_that_finds_nothing_is_refused(week: tuple[str, float], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--prometheus", week[0], "--match", '{job="nobody"}', "--query-range", "1d"]) == 2
    assert "no vLLM metric was found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prometheus", "http://127.0.0.1:1", "--query-range", "1h"), "127.0.0.1:1"),
        (("--prometheus", "http://x", "--query-range", "soon"), "'soon'"),
        (("--prometheus", "http://x", "--query-step", "0s"), "no duration"),
        (("--prometheus", "http://x", "--match", "{"), "{"),
        (("--prometheus", "http://x", "--compare", "7d", "1d"), "is no window"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_a_sentence(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["advise", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_windows_are_times_or_how_long_ago() -> None:
    assert window("14d/7d", 100 * DAY_S) == (86 * DAY_S, 93 * DAY_S)
    assert window("1d/now", 100 * DAY_S) == (99 * DAY_S, 100 * DAY_S)
    assert window("1970-01-02T00:00/1970-01-03T00:00+00:00", 0) == (DAY_S, 2 * DAY_S)
    with pytest.raises(ValueError, match="ends before it begins"):
        window("1d/2d", 100 * DAY_S)
    with pytest.raises(ValueError, match="is no time"):
        window("yesterday/now", 0)
    assert duration_s("1.5h") == 5400
