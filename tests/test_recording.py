"""Recordings: what is written is read back, and what is broken costs only itself."""

import gzip
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragscope.model import (
    AllocatorReading,
    CacheConfig,
    EngineReading,
    Fact,
    Gap,
    GpuReading,
    Histogram,
    LogFact,
    Part,
    Reason,
    Sample,
)
from fragscope.recording import (
    ExpositionLine,
    GpuLine,
    LabelLine,
    Line,
    LogLine,
    SampleLine,
    Tally,
    encode_sample,
    parse_line,
    read_lines,
)
from fragscope.replay import Alarm, Replayer, Timeline, replay, score
from tests.paths import VLLM_032
from tests.stories import CARD, GPU

FULL = Sample(
    at=1000.5,
    target="llama",
    engines=(
        EngineReading(
            at=1000.0,
            engine="0",
            model_name="m",
            version="0.32.0",
            kv_usage_ratio=0.5,
            running=3,
            waiting=0,
            waiting_by_reason={"capacity": 1.0},
            finished_total={"stop": 2.0},
            http_total={"2xx": 3.0},
            prompt_tokens=Histogram(3, 30, ((1.0, 0.0), (10.0, 3.0))),
            cache_config=CacheConfig(16, 1000, 0.92, "auto", 16000),
            sleeping=False,
            healthy=True,
            started_at=900.0,
        ),
    ),
    gpus=(GpuReading(1000.2, GPU, CARD, 5, 6, source="sysfs"),),
    allocators=(AllocatorReading(1000.2, GPU, 12, 1, 2, 3, 4, 5),),
    log_facts=(LogFact(1000.3, "llama", Fact.OOM, {"tried": 2.0}, "words"),),
    gaps=(Gap(Part.LOG, Reason.ABSENT, "none"),),
)


def written(tmp_path: Path, lines: list[bytes], name: str = "r.jsonl") -> str:
    path = tmp_path / name
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return str(path)


def read_all(path: str) -> tuple[list[Line], Tally]:
    tally = Tally()
    return list(read_lines(path, tally)), tally


def test_a_sample_is_read_back_as_it_was_written() -> None:
    line = parse_line(encode_sample(FULL), Tally())
    assert isinstance(line, SampleLine)
    assert line.sample == FULL


def test_what_is_not_known_is_not_written() -> None:
    plain = json.loads(encode_sample(Sample(1.0, "x", (EngineReading(1.0, "0", "m"),))))
    assert plain == {
        "kind": "sample",
        "at": 1.0,
        "target": "x",
        "engines": [{"at": 1.0, "engine": "0", "model_name": "m"}],
    }


def test_broken_lines_are_counted_and_skipped(tmp_path: Path) -> None:
    good = b'{"kind":"log","at":1,"line":"x"}'
    lines = [
        good,
        b"not json",
        b'{"kind":"log","at":"yesterday","line":"x"}',
        b'{"at":1}',
        b'["kind"]',
        b"\xff\xfe",
        good,
    ]
    found, tally = read_all(written(tmp_path, lines))
    assert len(found) == 2
    assert tally.malformed == 5
    assert tally.sentence() == "5 of 7 lines were malformed and skipped"


def test_unknown_kinds_are_skipped_and_named(tmp_path: Path) -> None:
    found, tally = read_all(written(tmp_path, [b'{"kind":"weather","at":1}', b'{"kind":"log","at":1,"line":"x"}']))
    assert len(found) == 1
    assert "weather" in (tally.sentence() or "")


def test_a_truncated_last_line_loses_only_that_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"kind":"log","at":1,"line":"x"}\n{"kind":"log","at":2,"li')
    found, tally = read_all(str(path))
    assert len(found) == 1
    assert tally.malformed == 1


def test_a_truncated_gzip_stream_loses_only_its_end(tmp_path: Path) -> None:
    raw = (VLLM_032 / "healthy.jsonl.gz").read_bytes()
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(raw[: len(raw) // 2])
    found, tally = read_all(str(path))
    whole, _ = read_all(str(VLLM_032 / "healthy.jsonl.gz"))
    assert 20 < len(found) < len(whole)
    assert tally.truncated
    assert found == whole[: len(found)]


def test_gzip_is_known_by_its_content_and_not_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "plain-name"
    path.write_bytes(gzip.compress(b'{"kind":"log","at":1,"line":"x"}\n'))
    assert len(read_all(str(path))[0]) == 1


def test_standard_input_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BufferedReader(io.BytesIO(gzip.compress(b'{"kind":"log","at":1,"line":"x"}\n')))

    monkeypatch.setattr("sys.stdin", Stdin())
    assert len(read_all("-")[0]) == 1


@given(st.binary(max_size=200))
def test_no_line_raises(raw: bytes) -> None:
    parse_line(raw, Tally())


@given(
    st.dictionaries(
        st.text(max_size=5), st.none() | st.floats() | st.text(max_size=5) | st.lists(st.integers()), max_size=6
    )
)
def test_no_object_raises(plain: dict[str, object]) -> None:
    for kind in ("exposition", "gpu", "allocator", "log", "label", "sample"):
        parse_line(json.dumps({"kind": kind, **plain}).encode(), Tally())


def samples_of(lines: list[Line]) -> list[Sample]:
    seen: list[Sample] = []
    list(replay(lines, Replayer(tap=seen.append)))
    return seen


GOOD = 'vllm:num_requests_running{engine="0"} 1\n'


def gpu_line(at: float, used: int, peak: int | None = None, target: str | None = None) -> Line:
    line = parse_line(
        json.dumps(
            {
                "kind": "gpu",
                "at": at,
                "target": target,
                "source": "x",
                "devices": [{"gpu": GPU, "total_bytes": CARD, "used_bytes": used, "peak_used_bytes": peak}],
            }
        ).encode(),
        Tally(),
    )
    assert isinstance(line, GpuLine)
    return line


def test_one_sample_is_made_per_exposition_with_the_newest_gpu_and_the_highest_peak() -> None:
    lines = [
        gpu_line(1, 100, 900),
        gpu_line(2, 200, 250),
        ExpositionLine(3, None, GOOD, None, 200),
        gpu_line(4, 300),
        ExpositionLine(5, None, GOOD, None, 200),
    ]
    first, second = samples_of(lines)
    assert (first.gpus[0].used_bytes, first.gpus[0].peak_used_bytes) == (200, 900)
    assert (second.gpus[0].used_bytes, second.gpus[0].peak_used_bytes) == (300, 300)


def test_gpu_figures_that_are_too_old_are_a_gap() -> None:
    lines = [gpu_line(1, 100), ExpositionLine(17, None, GOOD, None, 200)]
    (sample,) = samples_of(lines)
    assert sample.gpus == ()
    assert Gap(Part.GPU, Reason.STALE) in sample.gaps


def test_lines_behind_the_last_poll_make_one_closing_sample_without_an_engine() -> None:
    lines = [ExpositionLine(1, None, GOOD, None, 200), gpu_line(2, 5), LogLine(3, "HIP out of memory.")]
    first, last = samples_of(lines)
    assert last.at == 3
    assert last.engines == ()
    assert [gap.part for gap in last.gaps] == [Part.ALLOCATOR]
    assert [fact.what for fact in last.log_facts] == [Fact.OOM]
    assert first.log_facts == ()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("URLError(ConnectionRefusedError(111, 'Connection refused'))", Reason.REFUSED),
        ("Connection reset by peer", Reason.REFUSED),
        ("('Connection aborted.', RemoteDisconnected())", Reason.REFUSED),
        ("Remote end closed connection without response", Reason.REFUSED),
        ("The read operation timed out", Reason.TIMEOUT),
        ("HTTP 500", Reason.MALFORMED),
        (None, Reason.MALFORMED),
    ],
)
def test_an_errors_words_are_a_reason(error: str | None, reason: Reason) -> None:
    (sample,) = samples_of([ExpositionLine(1, None, None, error, 0)])
    assert sample.gaps[0].reason is reason


def test_a_line_without_a_target_belongs_to_all() -> None:
    lines = [
        gpu_line(1, 100),
        ExpositionLine(2, "a", GOOD, None, 200),
        ExpositionLine(2, "b", GOOD, None, 200),
        gpu_line(3, 200),
        ExpositionLine(4, "a", GOOD, None, 200),
        ExpositionLine(4, "b", GOOD, None, 200),
    ]
    seen = samples_of(lines)
    assert [(s.target, s.gpus[0].used_bytes) for s in seen] == [("a", 100), ("b", 100), ("a", 200), ("b", 200)]


def test_samples_beside_the_raw_lines_they_were_made_of_are_not_replayed_twice() -> None:
    sample = SampleLine(Sample(2.0, "vllm", (EngineReading(2.0, "0", "m"),)))
    seen = samples_of([ExpositionLine(1, "vllm", GOOD, None, 200), sample, ExpositionLine(3, "vllm", GOOD, None, 200)])
    assert [s.at for s in seen] == [1, 3]


def test_every_engine_has_a_final_verdict_of_its_own() -> None:
    two = GOOD + 'vllm:num_requests_running{engine="1"} 1\n'
    told = Timeline()
    for assessment in replay([ExpositionLine(1, None, two, None, 200)], Replayer()):
        list(told.observe(assessment))
    assert [final.engine for final, _ in told.finals()] == ["0", "1"]


def test_alarms_are_scored_against_labels() -> None:
    labels = [
        LabelLine(1000, 1010, "fragmentation"),
        LabelLine(50_000, 50_010, "memory_growth"),
        LabelLine(1, 2, "shutdown"),
    ]
    alarms = [Alarm("vllm", 1100, 1200, "fragmentation"), Alarm("vllm", 20_000, 20_100, "memory_undetermined")]
    result = score(labels, alarms)
    assert (result.labels, result.found, result.cause_right, result.alarms, result.false_alarms) == (2, 1, 1, 2, 1)
    assert result.delays_s == (100,)
