"""Bytes to dated lines of the engine, without a file: cut, unwrapped, dated."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragscope.sources.logs.dating import dated
from fragscope.sources.logs.envelope import CRI, DOCKER, PLAIN, Entry, Unwrapper, unix_seconds
from fragscope.sources.logs.splitter import Splitter

T = "2025-10-15T00:02:38.756689123Z"
AT = 1760486558.756689
SECOND_LATER = "2025-10-15T00:02:39.756689123Z"


def docker(text: str, stream: str = "stdout", time: str = T) -> bytes:
    return json.dumps({"log": text, "stream": stream, "time": time}, separators=(",", ":")).encode()


def texts(*raw: bytes) -> list[str]:
    return [entry.text for entry in Unwrapper().feed(raw)]


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=6))
def test_lines_are_the_same_however_the_bytes_are_cut(stream: bytes, cuts: list[int]) -> None:
    bounds = [0, *sorted(cut for cut in cuts if cut <= len(stream)), len(stream)]
    splitter = Splitter(cap_bytes=1000)
    pieces = [line for a, b in itertools.pairwise(bounds) for line in splitter.feed(stream[a:b])]
    expected = [line.removesuffix(b"\r") for line in stream.replace(b"\0", b"").split(b"\n")]
    assert pieces + (splitter.finish() or [b""]) == expected


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_no_line_is_longer_than_the_cap_and_the_next_one_is_whole(chunks: list[bytes]) -> None:
    splitter = Splitter(cap_bytes=8)
    lines = [line for chunk in chunks for line in splitter.feed(chunk)]
    assert all(len(line) <= 8 for line in lines)
    assert [*splitter.feed(b"\nnext\n")][-1] == b"next"


def test_a_stream_that_begins_amid_a_line_begins_with_the_next() -> None:
    assert Splitter(amid_line=True).feed(b"end of one\nthe next\n") == [b"the next"]


def test_the_kubelets_format_gives_text_and_the_time_it_was_written() -> None:
    (entry,) = Unwrapper().feed([f"{T} stderr F ERROR 11-30 it  broke".encode()])
    assert (entry.text, entry.form) == ("ERROR 11-30 it  broke", CRI)
    assert entry.wall == pytest.approx(AT, abs=1e-5)


def test_pieces_are_joined_stream_by_stream() -> None:
    raw = [f"{T} stdout P HIP out of ".encode(), f"{T} stderr F meanwhile".encode()]
    raw += [f"{T} stdout P mem".encode(), f"{SECOND_LATER} stdout F ory.".encode()]
    unwrapper = Unwrapper()
    entries = unwrapper.feed(raw)
    assert [entry.text for entry in entries] == ["meanwhile", "HIP out of memory."]
    assert entries[1].wall == pytest.approx(AT, abs=1e-5)


def test_pieces_without_an_end_are_told_when_nothing_more_comes() -> None:
    unwrapper = Unwrapper()
    assert unwrapper.feed([f"{T} stdout P half a line".encode()]) == []
    assert [entry.text for entry in unwrapper.finish()] == ["half a line"]
    assert unwrapper.finish() == []


def test_joined_pieces_keep_the_cap() -> None:
    raw = [f"{T} stdout P {'x' * 50}".encode()] * 5 + [f"{T} stdout F end".encode()]
    (entry,) = Unwrapper(cap=120).feed(raw)
    assert entry.text == "x" * 120


def test_an_empty_line_of_the_kubelet_is_an_empty_line() -> None:
    assert texts(f"{T} stdout F ".encode(), f"{T} stdout F".encode()) == ["", ""]


def test_dockers_json_gives_text_and_time() -> None:
    (entry,) = Unwrapper().feed([docker('say "HIP out of memory." \x1b[0m\n')])
    assert (entry.text, entry.form) == ('say "HIP out of memory." \x1b[0m', DOCKER)
    assert entry.wall == pytest.approx(AT, abs=1e-5)


def test_docker_cuts_long_lines_and_they_are_joined() -> None:
    assert texts(docker("HIP out"), docker("other\n", "stderr"), docker(" of memory.\n")) == [
        "other",
        "HIP out of memory.",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "INFO 11-30 15:00:17 [core.py:1] plain",
        '{"asctime": "x", "levelname": "ERROR", "message": "vLLM\'s own JSON"}',
        '{"log": 3, "stream": "stdout", "time": "x"}',
        '{"log":"cut off',
        '{"log":' + "[" * 100_000,
        "2025-10-15T00:02:38Z stdwhat F x",
        "",
    ],
)
def test_what_is_no_envelope_is_the_line_itself(line: str) -> None:
    assert Unwrapper().feed([line.encode()]) == [Entry(line, None, PLAIN)]


def test_a_file_may_change_its_format() -> None:
    assert texts(b"plain", docker("docker\n"), f"{T} stdout F cri".encode()) == ["plain", "docker", "cri"]


def test_invalid_utf_8_is_replaced_and_the_rest_of_the_line_stays() -> None:
    assert texts(b"\xff\xfe HIP out of memory. \xc3") == ["\ufffd\ufffd HIP out of memory. \ufffd"]


@given(st.lists(st.binary(max_size=80), max_size=5))
def test_no_input_makes_it_raise(lines: list[bytes]) -> None:
    unwrapper = Unwrapper()
    entries = unwrapper.feed(lines) + unwrapper.finish()
    assert len(entries) <= len(lines)


@pytest.mark.parametrize(("stamp", "at"), [(T, AT), ("2025-10-15T02:02:38.75+02:00", AT - 0.006689), ("2025", None)])
def test_stamps_are_rfc_3339(stamp: str, at: float | None) -> None:
    assert unix_seconds(stamp) == (None if at is None else pytest.approx(at, abs=1e-4))


def test_a_stamp_without_zone_or_of_no_real_day_is_none() -> None:
    assert unix_seconds("2025-10-15T00:02:38") is None
    assert unix_seconds("2025-13-15T00:02:38Z") is None


def test_plain_lines_are_dated_by_their_distance_from_the_last_stamp_of_the_file() -> None:
    lines = ["starting", "INFO 11-30 14:00:00 [a.py:1] x", "raw traceback", "(W pid=1) ERROR 11-30 15:00:17 [b.py:2] y"]
    assert dated([Entry(line) for line in lines], 10_000.0) == [6383.0, 6383.0, 6383.0, 10_000.0]


def test_the_distance_goes_over_new_year() -> None:
    lines = [Entry("INFO 12-31 23:59:59 old"), Entry("INFO 01-01 00:00:01 new")]
    assert dated(lines, 1000.0) == [998.0, 1000.0]


def test_processes_that_overtake_each_other_are_not_a_year_apart() -> None:
    lines = [Entry("INFO 11-30 15:00:02 a"), Entry("INFO 11-30 15:00:01 b")]
    assert dated(lines, 1000.0) == [1000.0, 1000.0]


def test_a_file_without_a_stamp_is_as_old_as_its_last_change() -> None:
    assert dated([Entry("a"), Entry("b")], 1000.0) == [1000.0, 1000.0]


def test_the_runtimes_stamp_counts_before_the_engines() -> None:
    lines = [Entry("INFO 11-30 15:00:02 a", 500.0), Entry("INFO 11-30 15:00:01 b", 2000.0)]
    assert dated(lines, 1000.0) == [500.0, 1000.0]


@pytest.mark.parametrize("text", ["build 13-45 99:00:00", "x" * 300 + " 11-30 15:00:00", "id 911-30 15:00:00"])
def test_what_only_looks_like_a_stamp_is_none(text: str) -> None:
    assert dated([Entry(text), Entry("INFO 11-30 15:00:00 b")], 1000.0) == [1000.0, 1000.0]
    assert dated([Entry("INFO 11-30 14:59:00 b"), Entry(text)], 1000.0) == [1000.0, 1000.0]
