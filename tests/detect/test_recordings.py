"""A real vLLM's recordings come out as labelled: at every second, and thinned to slower polling at any offset."""

import json
from collections.abc import Iterator

import pytest

from fragscope.model import Cause, Phase, Verdict
from fragscope.recording import ExpositionLine, Line, Tally, read_lines
from fragscope.replay import Replayer, Timeline, rank, replay
from tests.paths import H200, VLLM_032

EXPECTED = json.loads((VLLM_032 / "expected.json").read_text())
EVERY_RECORDING = sorted(EXPECTED)
THINNED = [(5, offset) for offset in range(5)] + [(15, offset) for offset in range(0, 15, 2)]


def lines(name: str, every_s: float = 0, offset_s: float = 0) -> Iterator[Line]:
    """The recording, with only one exposition in every so many seconds."""
    due = None
    for line in read_lines(str(VLLM_032 / f"{name}.jsonl.gz"), Tally()):
        if isinstance(line, ExpositionLine) and every_s:
            due = line.at + offset_s if due is None else due
            if line.at < due - 0.3:
                continue
            while due <= line.at + 0.3:
                due += every_s
        yield line


def timeline(stream: Iterator[Line]) -> tuple[Timeline, list[Verdict]]:
    told = Timeline()
    changes: list[Verdict] = []
    for assessment in replay(stream, Replayer()):
        changes += told.observe(assessment)
    return told, changes


def complaints(name: str, told: Timeline) -> list[str]:
    expected = EXPECTED[name]
    ((final, seen),) = told.finals()
    found = [f"{cause} was never named" for cause in expected["includes"] if cause not in seen]
    found += [f"{cause} was named" for cause in expected["never"] if cause in seen]
    if final.cause not in expected["final"]:
        found.append(f"ends with {final.cause}")
    if not set(expected.get("includes_any", seen)) & set(seen) and "includes_any" in expected:
        found.append(f"none of {expected['includes_any']} was named")
    lowest, highest = Phase(expected.get("phase_min", "unknown")), Phase(expected["phase_max"])
    if not rank(lowest) <= rank(told.highest) <= rank(highest):
        found.append(f"reached {told.highest}")
    return found


@pytest.mark.parametrize("name", EVERY_RECORDING)
def test_a_recording_comes_out_as_labelled(name: str) -> None:
    told, _ = timeline(lines(name))
    assert complaints(name, told) == []


@pytest.mark.parametrize("name", EVERY_RECORDING)
def test_slower_polling_changes_nothing(name: str) -> None:
    wrong = {}
    for every_s, offset_s in THINNED:
        told, _ = timeline(lines(name, every_s, offset_s))
        if problems := complaints(name, told):
            wrong[every_s, offset_s] = problems
    assert wrong == {}


@pytest.mark.parametrize("name", ["oom_crash_restart_log", "zombie_engine", "kv_exhausted"])
def test_a_prefix_of_the_lines_tells_a_prefix_of_the_story(name: str) -> None:
    everything = list(lines(name))
    _, whole = timeline(iter(everything))
    for cut in (len(everything) // 4, len(everything) // 2, 3 * len(everything) // 4):
        replayer, told = Replayer(), Timeline()
        part: list[Verdict] = []
        for line in everything[:cut]:
            for assessment in replayer.feed(line):
                part += told.observe(assessment)
        assert part == whole[: len(part)]


def test_a_death_is_judged_at_the_second_refused_poll() -> None:
    _, changes = timeline(lines("oom_crash_restart"))
    refused = [x.at for x in lines("oom_crash_restart") if isinstance(x, ExpositionLine) and x.error is not None]
    suspected = next(verdict.at for verdict in changes if verdict.phase is Phase.SUSPECTED)
    assert suspected == refused[1]


def test_a_surviving_engine_that_answers_500_is_no_memory_failure() -> None:
    told, _ = timeline(lines("zombie_engine"))
    ((final, _),) = told.finals()
    assert final.probabilities[Cause.MEMORY_UNDETERMINED] < 0.5
    assert final.phase is Phase.CLEAR


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("frag-default-0", Cause.FRAGMENTATION),
        ("frag-default-1", Cause.FRAGMENTATION),
        ("util95-0", Cause.VRAM_EXHAUSTED),
    ],
)
def test_a_real_allocators_message_is_confirmed_with_its_own_arithmetic(name: str, cause: Cause) -> None:
    told, _ = timeline(read_lines(str(H200 / f"{name}.jsonl.gz"), Tally()))
    ((final, _),) = told.finals()
    assert final.phase is Phase.CONFIRMED
    assert final.cause == cause


def test_true_exhaustion_with_expandable_segments_is_not_called_fragmentation() -> None:
    told, _ = timeline(read_lines(str(H200 / "frag-expandable-0.jsonl.gz"), Tally()))
    ((final, seen),) = told.finals()
    assert final.cause == Cause.VRAM_EXHAUSTED
    assert Cause.FRAGMENTATION not in seen


def test_a_healthy_allocator_with_a_large_gap_pages_nobody() -> None:
    told, _ = timeline(read_lines(str(H200 / "nopinned-0.jsonl.gz"), Tally()))
    assert rank(told.highest) < rank(Phase.SUSPECTED)
