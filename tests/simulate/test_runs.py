"""Simulated runs: repeatable, told alike as samples and as recordings, and showing what their scenario is about."""

import gzip
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fragscope.detect.detector import Detector
from fragscope.explain.witness import LineReader
from fragscope.model import MEMORY_CAUSES, Fact, Part, Reason, Sample
from fragscope.recording import LabelLine, LogLine, Tally, read_lines
from fragscope.replay import Replayer, replay
from fragscope.simulate.catalogue import SCENARIOS
from fragscope.simulate.run import BEGAN, Simulation, generate, samples
from tests.paths import REPOSITORY


def told(name: str, seed: int, hours: float) -> tuple[list[Sample], list[LabelLine]]:
    run = list(samples(name, seed, hours))
    return [s for s in run if isinstance(s, Sample)], [s for s in run if isinstance(s, LabelLine)]


def conditions_seen(of: list[Sample]) -> Counter[str]:
    detectors: dict[str, Detector] = {}
    seen: Counter[str] = Counter()
    for sample in of:
        detector = detectors.setdefault(sample.target, Detector(sample.target))
        for verdict in detector.observe(sample).verdicts:
            seen.update(map(str, verdict.conditions))
    return seen


@pytest.mark.parametrize(
    ("name", "seed"),
    [("fragmentation", 3), ("hard-kill", 1), ("dead-engine", 0), ("two-engines", 1), ("sleep-mode", 1),
     ("scrape-gaps", 2), ("admission-limit", 0)],
)  # fmt: skip
def test_lines_through_replay_are_the_samples_and_the_verdicts_too(name: str, seed: int) -> None:
    direct, _ = told(name, seed, 0.4)
    replayed: list[Sample] = []
    verdicts = [a.verdicts for a in replay(generate(name, seed, 0.4), Replayer(tap=replayed.append))]
    assert replayed == direct
    detector = Detector("vllm")
    assert verdicts == [detector.observe(sample).verdicts for sample in direct]


def digest_in_another_process(hash_seed: str) -> str:
    code = (
        "import hashlib\n"
        "from fragscope.simulate.run import samples\n"
        "d = hashlib.sha256()\n"
        "for name in ('external-process', 'kv-exhausted', 'two-engines'):\n"
        "    for sample in samples(name, 7, 0.3):\n"
        "        d.update(repr(sample).encode())\n"
        "print(d.hexdigest())\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    return done.stdout


def test_a_seed_gives_one_history_whatever_the_process_hashes() -> None:
    assert digest_in_another_process("1") == digest_in_another_process("2")


def test_another_seed_gives_another_history() -> None:
    assert told("healthy", 1, 0.1)[0] != told("healthy", 2, 0.1)[0]


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_samples_come_in_time_at_every_poll(name: str) -> None:
    run, _ = told(name, 11, 0.25)
    targets = {sample.target for sample in run}
    for target in targets:
        assert [s.at - BEGAN for s in run if s.target == target] == [5.0 * n for n in range(1, 181)]
    for sample in run:
        for gpu in sample.gpus:
            assert gpu.peak_used_bytes is not None
            assert gpu.own_bytes is not None
            assert gpu.own_bytes <= gpu.used_bytes <= gpu.peak_used_bytes <= gpu.total_bytes


@pytest.mark.parametrize(
    ("name", "condition"),
    [
        ("kv-exhausted", "kv_exhausted"),
        ("scheduler-limit", "scheduler_limit"),
        ("admission-limit", "admission_limit"),
        ("stalled", "stalled"),
        ("client-errors", "client_errors"),
        ("hang-ups", "client_aborts"),
        ("sleep-mode", "sleeping"),
        ("dead-engine", "engine_down"),
    ],
)
def test_a_scenario_shows_its_condition(name: str, condition: str) -> None:
    run, labels = told(name, 4, 2.0)
    seen = conditions_seen(run)
    assert seen[condition] >= 12
    assert not any(label.note.startswith("memory") for label in labels)


@pytest.mark.parametrize("name", ["healthy", "healthy-bursty", "multimodal-growth", "lora-adapter", "low-traffic"])
def test_where_all_is_well_nobody_dies_and_no_queue_stays(name: str) -> None:
    for seed in (5, 6, 7):
        run, labels = told(name, seed, 1.0)
        assert not [label for label in labels if label.note.startswith("memory")]
        waiting = sorted(s.engines[0].waiting or 0.0 for s in run if s.engines)
        assert waiting[len(waiting) // 2] == 0


def test_a_failure_leaves_what_a_real_one_leaves() -> None:
    run, labels = told("slow-leak", 1, 4.0)
    label = next(label for label in labels if label.note.startswith("memory"))
    assert label.cause == "memory_growth"
    assert 60 <= label.until - label.at <= 360
    down = [s for s in run if label.at + 1 < s.at < label.until]
    assert all(s.engines == () and s.gaps[0].part is Part.ENGINE for s in down)
    assert {s.gaps[0].reason for s in down} <= {Reason.REFUSED, Reason.TIMEOUT}
    ooms = [fact for s in run for fact in s.log_facts if fact.what is Fact.OOM and fact.facts]
    assert ooms
    assert ooms[0].at == pytest.approx(label.at, abs=0.1)
    assert ooms[0].facts["tried"] > ooms[0].facts["free"]
    before = next(s for s in reversed(run) if s.at < label.at and s.engines).engines[0]
    after = next(s for s in run if s.at >= label.until and s.engines).engines[0]
    assert before.started_at is not None
    assert after.started_at is not None
    assert before.started_at < label.at < after.started_at < label.until
    assert (after.generation_tokens_total or 0) < (before.generation_tokens_total or 0)
    assert max(g.peak_used_bytes or 0 for s in run for g in s.gpus) > 0.98 * run[0].gpus[0].total_bytes
    assert min(s.gpus[0].used_bytes for s in down) < 0.01 * run[0].gpus[0].total_bytes


def test_a_pseudo_oom_emerges_at_low_cache_use_where_nothing_leaks() -> None:
    run, labels = told("fragmentation", 2, 4.0)
    label = next(label for label in labels if label.note.startswith("memory"))
    assert label.cause == "fragmentation"
    last = next(s for s in reversed(run) if s.at < label.at and s.engines)
    assert (last.engines[0].kv_usage_ratio or 0.0) < 0.85
    assert last.allocators[0].inactive_split_bytes > 2**30
    assert any(s.allocators and s.allocators[0].retries_total > 0 for s in run)


def test_every_memory_label_has_a_memory_cause_and_every_other_none() -> None:
    memory = set(map(str, MEMORY_CAUSES))
    for name in ("external-process", "transient-peak", "rolling-restart", "hard-kill", "one-bad-gpu"):
        labels = [label for seed in (2, 3, 4) for label in told(name, seed, 3.0)[1]]
        assert labels, name
        for label in labels:
            assert (label.cause in memory) == label.note.startswith("memory")


def test_the_neighbours_full_card_belongs_to_nobody_else() -> None:
    run, _ = told("full-neighbour", 2, 1.5)
    cards = {sample.target: {gpu.gpu for gpu in sample.gpus} for sample in run}
    assert len(cards) == 8
    assert len(set.union(*cards.values())) == 8
    fullest = {t: max(s.gpus[0].used_bytes / s.gpus[0].total_bytes for s in run if s.target == t) for t in cards}
    assert [target for target, ratio in fullest.items() if ratio > 0.97] == ["vllm-3"]


@pytest.mark.parametrize(("name", "first"), [("rolling-restart", Fact.SHUTDOWN), ("dead-engine", Fact.ENGINE_DEATH)])
def test_the_first_words_of_a_death_name_it(name: str, first: Fact) -> None:
    run, labels = told(name, 3, 3.0)
    death = next(label for label in labels if label.note.startswith("death"))
    facts = [fact for s in run for fact in s.log_facts if fact.at >= death.at - 0.01]
    assert facts[0].what is first


def test_the_command_writes_a_recording_that_replay_reads(tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl.gz"
    command = [sys.executable, "-m", "fragscope.simulate", "hard-kill", "--seed", "3", "--hours", "0.2", "--out"]
    subprocess.run([*command, str(out)], check=True, cwd=REPOSITORY)
    tally = Tally()
    lines = list(read_lines(str(out), tally))
    assert tally.malformed == 0
    assert {type(line).__name__ for line in lines} >= {"ExpositionLine", "GpuLine", "AllocatorLine", "LogLine"}
    assert out.read_bytes()[:2] == gzip.compress(b"")[:2]


def test_an_interval_that_is_no_whole_second_is_refused() -> None:
    with pytest.raises(ValueError, match=r"interval_s is 2\.5, but must be whole seconds"):
        Simulation("healthy", 1, interval_s=2.5)


def test_the_oom_line_reads_back_as_the_figures_it_was_made_of() -> None:
    line = next(
        line.line
        for line in generate("transient-peak", 1003, 4.0, interval_s=60.0)
        if isinstance(line, LogLine) and "out of memory" in line.line
    )
    (fact,) = LineReader("vllm").feed(0.0, line)
    assert set(fact.facts) >= {"tried", "total", "free", "allocated", "reserved_unallocated"}


def test_the_page_lists_every_scenario() -> None:
    page = (REPOSITORY / "docs" / "simulator.md").read_text()
    assert [name for name in SCENARIOS if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("name", "seed", "deaths", "first_tokens", "reserved_bytes"),
    [
        ("external-process", 2, [2398, 3562, 4710], 14275, 189163110400),
        ("slow-leak", 1, [5619], 8318, 198321373184),
    ],
)
def test_a_seed_gives_this_history_on_every_python(
    name: str, seed: int, deaths: list[int], first_tokens: int, reserved_bytes: int
) -> None:
    """Whoever changes the simulator changes these figures: the evaluation must then be run again."""
    run, labels = told(name, seed, 2.0)
    last = [sample for sample in run if sample.engines][-1]
    assert [round(label.at - BEGAN) for label in labels] == deaths
    assert last.engines[0].first_tokens_total == first_tokens
    assert last.allocators[0].reserved_bytes == reserved_bytes


@pytest.mark.parametrize(("name", "seed"), [("fragmentation", 3), ("slow-leak", 0)])
def test_no_forecast_blames_a_tenant_where_there_is_none(name: str, seed: int) -> None:
    run, _ = told(name, seed, 4.0)
    detectors = {sample.target: Detector(sample.target) for sample in run}
    for sample in run:
        for verdict in detectors[sample.target].observe(sample).verdicts:
            blamed = [
                row.sentence for row in verdict.evidence if row.cause == "external_process" and (row.value or 0) > 0
            ]
            assert not any("another process" in sentence.lower() for sentence in blamed), sample.at


def test_a_start_on_a_card_that_is_too_full_is_refused_and_tried_again() -> None:
    run, _ = told("one-bad-gpu", 30, 4.0)
    assert len({engine.started_at for sample in run for engine in sample.engines}) > 1
