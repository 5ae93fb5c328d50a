"""From runs to the page: the whole way, on runs of which everything is known."""

import json
import pickle
import re
from pathlib import Path

import pytest
from evaluation.__main__ import main
from evaluation.page import BEGIN, END, refusal
from evaluation.reliability import bins, calibration_error
from evaluation.running import Job, Play, watch, watch_all
from evaluation.scoring import RunScore
from evaluation.seeds import HELD_OUT_SEEDS, TUNING_SEEDS, parse_seeds, spoken
from evaluation.sheets import sheets
from evaluation.stage import Theatre
from evaluation.watched import EpisodeRow

from fragscope.recording import encode_sample
from tests.evaluation import plays

THEATRE = Theatre(plays.play, plays.SCENARIOS)
ALL_TIERS = ("T0", "T1", "T2", "T3")


def scores_of(scenario: str) -> dict[str, RunScore]:
    found = watch(Job(plays.play, scenario, 0, 5.0, ALL_TIERS, ("N1", "N2", "N3", "N4", "N5")))
    return {score.run.observer: score for score in found}


def test_an_oom_is_found_from_every_tier_and_named_with_the_log() -> None:
    scores = scores_of("oom")
    assert all(scores[tier].true_alarms == scores[tier].found == 1 for tier in ALL_TIERS)
    assert (scores["T0"].cause_right, scores["T0"].cause_undetermined) == (0, 1)
    assert (scores["T3"].cause_right, scores["T3"].cause_undetermined) == (1, 0)
    assert (scores["T0"].deaths, scores["T0"].deaths_in_time, scores["T0"].delay_s) == (1, 1, 5.0)
    assert scores["T0"].fragmentation_led == 0 < scores["T3"].fragmentation_led
    assert scores["N5"].true_alarms == 1
    assert scores["N2"].alarms == 0, "the failures of a crash are never scraped"


def test_a_kill_on_a_full_card_is_a_hard_negative_that_only_the_log_sees_through() -> None:
    scores = scores_of("kill-thin")
    assert scores["T0"].hard
    assert (scores["T0"].false_alarms, scores["T3"].false_alarms) == (1, 0)
    assert scores["T0"].alarm_s >= 900


def test_server_errors_alarm_the_naive_rules_alone() -> None:
    scores = scores_of("server-errors")
    assert not any(scores[tier].alarms for tier in ALL_TIERS)
    assert (scores["N2"].false_alarms, scores["N3"].false_alarms) == (1, 1)


def test_an_episode_is_dumped_with_what_it_was_weighed_by() -> None:
    (row,) = scores_of("oom")["T0"].episodes
    assert row.memory
    assert row.true_cause == "fragmentation"
    assert row.weights["headroom"] == pytest.approx(2.6)
    assert row.said_first == pytest.approx(row.said_last, abs=0.2)
    (other,) = scores_of("kill-thin")["T3"].episodes
    assert (other.memory, other.true_cause) == (False, "engine_fault")


def test_several_processes_find_what_one_finds() -> None:
    jobs = [Job(plays.play, name, 0, 15.0, ("T0",), ("N5",)) for name in ("oom", "healthy")]
    together = {score.run: score for scores in watch_all(jobs, 2) for score in scores}
    alone = {score.run: score for scores in watch_all(jobs, 1) for score in scores}
    assert {run: s.alarms for run, s in together.items()} == {run: s.alarms for run, s in alone.items()}
    assert len(together) == 4


def row(said: float, *, memory: bool) -> EpisodeRow:
    return EpisodeRow("T0", "s", 0, "vllm", 0, True, said, said, "c", memory, None, 0, 0, {}, {}, {})


def test_a_calibration_error_is_the_distance_of_said_from_true() -> None:
    # Four times 0.8 and three right: off by 0.05. Twice 0.2 and none right: off by 0.2.
    rows = [row(0.8, memory=n < 3) for n in range(4)] + [row(0.2, memory=False)] * 2
    found = bins(rows, lambda each: each.said_first)
    assert [(b.true.hits, b.true.of) for b in found] == [(0, 2), (3, 4)]
    assert calibration_error(found) == pytest.approx((4 * 0.05 + 2 * 0.2) / 6)
    assert calibration_error([]) is None


def test_certainty_has_a_bin() -> None:
    (only,) = bins([row(1.0, memory=True)], lambda each: each.said_last)
    assert (only.true.hits, only.said_mean) == (1, 1.0)


def test_tuning_and_judging_never_share_a_seed() -> None:
    assert not set(TUNING_SEEDS) & set(HELD_OUT_SEEDS)
    assert len(HELD_OUT_SEEDS) >= 20


def test_seeds_are_read_and_spoken() -> None:
    assert parse_seeds("tuning") == tuple(range(40))
    assert parse_seeds("3,7..9,7") == (3, 7, 8, 9)
    assert spoken(parse_seeds("held-out")) == "10000..10019"
    assert spoken((1, 5)) == "1, 5"
    with pytest.raises(ValueError, match="must be tuning"):
        parse_seeds("some")


def test_what_was_tuned_on_is_not_written() -> None:
    assert "tuning" in (refusal((10000, 3), (), partial=False) or "")
    assert "--set" in (refusal((10000,), ("hold_s=1",), partial=False) or "")
    assert "every scenario" in (refusal((10000,), (), partial=True) or "")
    assert refusal((10000,), (), partial=False) is None


def test_constants_are_not_tried_on_held_out_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--set", "weights.prior=-2"], THEATRE) == 2
    assert "tuning seeds only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--seeds", "tuning", "--write"], "for tuning"),
        (["--scenarios", "nonsense"], "is unknown"),
        (["--seeds", "0", "--set", "weights.none=1"], "no number of Weights"),
        (["--seeds", "0", "--set", "hold_s=long"], "no number like"),
        (["--seeds", "0", "--set", "hold_s"], "write name=value"),
    ],
)
def test_senseless_requests_are_refused_with_a_sentence(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words, THEATRE) == 2
    assert why in capsys.readouterr().err


def test_another_constant_changes_the_figures(tmp_path: Path) -> None:
    asked = ["--seeds", "0", "--scenarios", "kill-thin", "--tiers", "T0", "--rules", "none", "--processes", "1"]
    said = []
    for more in ([], ["--set", "weights.prior=-4"]):
        dump = tmp_path / "episodes.jsonl"
        assert main([*asked, "--episodes", str(dump), *more], THEATRE) == 0
        said.append(json.loads(dump.read_text())["said_last"])
    assert said[0] > 0.9 > said[1]


def test_labelled_recordings_can_be_judged(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = tmp_path / "oom.jsonl"
    label = {"kind": "label", "at": plays.START + 1200, "until": plays.START + 1260, "cause": "fragmentation"}
    samples = b"".join(encode_sample(sample) + b"\n" for sample in plays.play("oom", 0, 5.0).samples)
    run.write_bytes(samples + json.dumps(label).encode())
    asked = ["--recordings", str(run), "--tiers", "T3", "--rules", "none", "--processes", "1"]
    mistakes = tmp_path / "mistakes.jsonl"
    assert main([*asked, "--mistakes", str(mistakes)]) == 0
    assert "1.00 (0.21-1.00), 1/1" in capsys.readouterr().out
    assert not mistakes.read_text()
    assert main([*asked, "--write"]) == 2


def tables(text: str) -> dict[str, list[dict[str, str]]]:
    """Markdown tables by their title: a row is a mapping from column to cell."""
    found = {}
    for title, body in re.findall(r"^### (.*)\n\n((?:\|.*\n?)+)", text, re.MULTILINE):
        cells = [line[2:-2].split(" | ") for line in body.strip().splitlines()]
        found[title] = [dict(zip(cells[0], line, strict=True)) for line in cells[2:]]
    return found


def test_the_page_holds_the_tables_and_keeps_what_people_wrote(tmp_path: Path) -> None:
    page = tmp_path / "evaluation.md"
    page.write_text(f"# Before\n\n{BEGIN}\nold\n{END}\n\nAfter\n")
    asked = ["--seeds", "10000,10001", "--interval", "15", "--processes", "1", "--write"]
    assert main(asked, THEATRE, page) == 0
    text = page.read_text()
    assert text.startswith("# Before\n")
    assert text.endswith("\nAfter\n")
    assert "old" not in text
    assert "seeds 10000, 10001 (2 each)" in text
    assert "a poll every 15 s" in text
    overall = {line["who"]: line for line in tables(text)["All scenarios"]}
    assert overall["T0"]["run recall"].endswith("2/2")
    assert overall["T0"]["alarm precision"].startswith("0.50 (")
    assert overall["T3"]["false alarms a day"].startswith("0.00 (0.00-")
    per_scenario = {line["scenario"]: line for line in tables(text)["T3: and the log"]}
    assert per_scenario["kill-thin"]["hard"] == "2"
    assert per_scenario["kill-thin"]["other labels named"].endswith("/2")


def test_a_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "evaluation.md"
    page.write_text("nothing here")
    asked = ["--seeds", "10000", "--interval", "15", "--processes", "1", "--write"]
    with pytest.raises(ValueError, match="has no place"):
        main(asked, THEATRE, page)


def test_every_table_is_as_wide_as_its_head() -> None:
    scores = [score for name in plays.SCENARIOS for score in scores_of(name).values()]
    for sheet in sheets(scores):
        assert {len(cells) for cells in sheet.rows} == {len(sheet.columns)}, sheet.title


def test_an_aim_is_met_or_missed_by_its_own_figure() -> None:
    scores = [score for name in ("oom", "kill-thin", "healthy") for score in scores_of(name).values()]
    (aims,) = [sheet for sheet in sheets(scores) if sheet.title == "Aims"]
    said = {(who, what): (measured, met) for who, what, measured, _, met, _ in aims.rows}
    assert said["T0", "alarm precision"] == ("0.500", "NO")
    assert said["T0", "run recall"] == ("1.000", "yes")
    assert said["T0", "runs in which fragmentation led"] == ("0.000", "yes")
    assert not [who for who, _ in said if who == "T3-lossy"], "a tier that was not run has no figure"


class TwoPartError(Exception):
    """Cannot be put together again from its arguments, as a pool would."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def test_a_run_that_breaks_says_which_it_was_and_can_be_told_by_a_pool() -> None:
    def broken(scenario: str, seed: int, interval_s: float, hours: float | None) -> Play:
        raise TwoPartError("no such ", "card")

    with pytest.raises(RuntimeError) as caught:
        watch(Job(broken, "oom", 3, 5.0, (), ()))
    assert str(caught.value) == "TwoPartError: no such card (in scenario oom, seed 3)"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301 - our own
