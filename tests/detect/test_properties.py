"""What must hold for any cut, any polling and any clock: the recordings, told in other ways, say the same."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

import msgspec
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from fragscope.detect.parameters import Parameters
from fragscope.detect.snapshot import dump, load
from fragscope.model import Cause, Phase, Verdict
from fragscope.recording import AllocatorLine, ExpositionLine, GpuLine, Line, LogLine, Tally, read_lines
from fragscope.replay import Replayer, Timeline, replay
from tests.detect.test_recordings import EVERY_RECORDING, complaints
from tests.paths import H200, VLLM_032

REAL_ALLOCATORS = sorted(path.name.removesuffix(".jsonl.gz") for path in H200.glob("*.jsonl.gz"))
BORN = "process_start_time_seconds "
CALM = settings(deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
FEW = settings(CALM, max_examples=20)


@cache
def recording(name: str) -> tuple[Line, ...]:
    folder = H200 if name in REAL_ALLOCATORS else VLLM_032
    return tuple(read_lines(str(folder / f"{name}.jsonl.gz"), Tally()))


def told(lines: Iterable[Line]) -> tuple[Timeline, list[Verdict]]:
    timeline = Timeline()
    changes: list[Verdict] = []
    for assessment in replay(lines, Replayer()):
        changes += timeline.observe(assessment)
    return timeline, changes


@cache
def story(name: str) -> tuple[Verdict, ...]:
    return tuple(told(recording(name))[1])


def before_the_close(lines: Iterable[Line]) -> list[Verdict]:
    """The changes that the lines themselves led to, without those of the closing sample."""
    replayer, timeline = Replayer(), Timeline()
    changes: list[Verdict] = []
    for line in lines:
        for assessment in replayer.feed(line):
            changes += timeline.observe(assessment)
    return changes


def thinned(lines: Iterable[Line], every_s: float, offset_s: float) -> Iterator[Line]:
    """Only one exposition line in every so many seconds; what GPUs, allocators and logs said stays."""
    due = None
    for line in lines:
        if isinstance(line, ExpositionLine):
            due = line.at + offset_s if due is None else due
            if line.at < due - 0.3:
                continue
            while due <= line.at + 0.3:
                due += every_s
        yield line


def shifted(line: Line, seconds: int) -> Line:
    """The line at another time, the start of the process with it."""
    if isinstance(line, ExpositionLine) and line.text is not None:
        page = "\n".join(_born_later(row, seconds) for row in line.text.split("\n"))
        return replace(line, at=line.at + seconds, text=page)
    assert isinstance(line, ExpositionLine | GpuLine | AllocatorLine | LogLine)
    return replace(line, at=line.at + seconds)


def _born_later(row: str, seconds: int) -> str:
    return f"{BORN}{float(row.removeprefix(BORN)) + seconds!r}" if row.startswith(BORN) else row


def timeless(verdict: Verdict, seconds: int) -> Verdict:
    return replace(verdict, at=verdict.at - seconds, since=verdict.since - seconds)


@CALM
@given(name=st.sampled_from(EVERY_RECORDING + REAL_ALLOCATORS), share=st.floats(0, 1))
def test_any_prefix_of_the_lines_tells_a_prefix_of_the_story(name: str, share: float) -> None:
    lines = recording(name)
    part = before_the_close(lines[: int(share * len(lines))])
    assert tuple(part) == story(name)[: len(part)]


@CALM
@given(name=st.sampled_from(EVERY_RECORDING), every_s=st.floats(1, 15), offset=st.floats(0, 1))
@example(name="kv_exhausted", every_s=10.48, offset=0.967)
@example(name="rolling_restart_log", every_s=15, offset=0.966)
def test_polling_at_any_pace_and_offset_comes_out_as_labelled(name: str, every_s: float, offset: float) -> None:
    lines = list(thinned(recording(name), every_s, offset * every_s))
    # An engine that no poll met alive has no story: one recording's engine is gone after 14 s.
    assume(any(isinstance(line, ExpositionLine) and line.text is not None for line in lines))
    timeline, _ = told(lines)
    assert complaints(name, timeline) == []


@FEW
@given(every_s=st.floats(5, 15), offset=st.floats(0, 1))
@pytest.mark.parametrize(
    ("name", "phase", "cause"),
    [
        ("frag-default-0", Phase.CONFIRMED, Cause.FRAGMENTATION),
        ("frag-default-1", Phase.CONFIRMED, Cause.FRAGMENTATION),
        ("frag-expandable-0", Phase.CONFIRMED, Cause.VRAM_EXHAUSTED),
        ("util95-0", Phase.CONFIRMED, Cause.VRAM_EXHAUSTED),
        ("nopinned-0", Phase.CLEAR, Cause.NONE),
    ],
)
def test_a_real_allocator_comes_out_the_same_at_any_pace(
    name: str, phase: Phase, cause: Cause, every_s: float, offset: float
) -> None:
    timeline, _ = told(thinned(recording(name), every_s, offset * every_s))
    ((final, _),) = timeline.finals()
    assert (timeline.highest, final.cause) == (phase, cause)


@FEW
@given(name=st.sampled_from(EVERY_RECORDING + REAL_ALLOCATORS), seconds=st.integers(-600_000_000, 300_000_000))
def test_another_clock_changes_nothing_but_the_times(name: str, seconds: int) -> None:
    _, changes = told(shifted(line, seconds) for line in recording(name))
    assert tuple(timeless(verdict, seconds) for verdict in changes) == story(name)


@FEW
@given(name=st.sampled_from(EVERY_RECORDING + REAL_ALLOCATORS), share=st.floats(0, 1))
def test_a_snapshot_taken_anywhere_changes_nothing(name: str, share: float) -> None:
    lines = recording(name)
    cut = int(share * len(lines))
    replayer, timeline = Replayer(), Timeline()
    changes: list[Verdict] = []
    for number, line in enumerate(lines):
        if number == cut:
            reborn(replayer)
        for assessment in replayer.feed(line):
            changes += timeline.observe(assessment)
    for assessment in replayer.finish():
        changes += timeline.observe(assessment)
    assert tuple(changes) == story(name)


def reborn(replayer: Replayer) -> None:
    """Every detector goes through its snapshot, as in a daemon that is killed and started again."""
    for name, track in replayer._tracks.items():
        written = msgspec.json.encode(dump(track.detector))
        track.detector = load(msgspec.json.decode(written), name, Parameters())
