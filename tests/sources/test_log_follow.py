"""Following a log through what happens to files: rotated, truncated, denied, absent, restarted."""

import contextlib
import gzip
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fragscope.model import Part, Reason
from fragscope.sources.logs.follow import GRACE_S, QUIET_S
from fragscope.sources.logs.opened import BITE_BYTES, LAG_BYTES, PAST_BYTES
from fragscope.sources.logs.splitter import LINE_CAP_BYTES
from tests.sources.logs import STARTED_AT, Watcher, append

NOBODY = 65534


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "vllm.log"


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Root is refused nothing, so a test that runs as root is somebody else for a moment."""
    if os.getuid() != 0:
        yield
        return
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that anybody may search; pytest's own are private."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def held() -> int:
    """How many files this process holds open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def written(path: Path, text: str | bytes, ago_s: float = 0.0) -> None:
    """A file last changed that long before the start."""
    append(path, text)
    os.utime(path, (STARTED_AT - ago_s,) * 2)


def test_what_is_appended_is_told_once(path: Path) -> None:
    written(path, "")
    watcher = Watcher(path)
    assert watcher.look() == []
    append(path, "one\ntwo\n")
    assert watcher.look() == ["one", "two"]
    assert watcher.times() == [None, None]
    assert watcher.look() == []
    assert watcher.last.gap is None


def test_a_line_is_told_when_it_has_its_end(path: Path) -> None:
    written(path, "")
    watcher = Watcher(path)
    watcher.look()
    append(path, "HIP out of ")
    assert watcher.look(0.5) == []
    append(path, "memory.\n")
    assert watcher.look(0.5) == ["HIP out of memory."]


def test_a_line_that_never_gets_its_end_is_told_after_a_second(path: Path) -> None:
    written(path, "")
    watcher = Watcher(path)
    watcher.look()
    append(path, "the last words")
    assert watcher.look(5.0) == [], "it has only just been written, however quiet it was before"
    assert watcher.look(QUIET_S) == ["the last words"]
    append(path, " and more\n")
    assert watcher.look() == [" and more"]


def test_rotation_by_rename_loses_nothing(path: Path) -> None:
    written(path, "")
    watcher = Watcher(path)
    watcher.look()
    append(path, "one\n")
    path.rename(path.with_name("vllm.log.1"))
    append(path, "three\n")
    append(path.with_name("vllm.log.1"), "two\n")
    assert watcher.look() == ["one", "two", "three"]
    append(path.with_name("vllm.log.1"), "late: another process still holds the old file\n")
    append(path, "four\n")
    assert watcher.look() == ["late: another process still holds the old file", "four"]
    assert watcher.last.gap is None


def test_between_the_rename_and_the_new_file_nothing_is_missing(path: Path) -> None:
    written(path, "")
    watcher = Watcher(path)
    watcher.look()
    path.rename(path.with_name("vllm.log.1"))
    append(path.with_name("vllm.log.1"), "last\n")
    assert watcher.look() == ["last"]
    assert watcher.last.gap is None
    append(path, "first\n")
    assert watcher.look() == ["first"]


def test_truncation_begins_again(path: Path) -> None:
    written(path, "")
    watcher = Watcher(path)
    watcher.look()
    append(path, "a long line before\n")
    assert watcher.look() == ["a long line before"]
    os.truncate(path, 0)
    append(path, "after\n")
    assert watcher.look() == ["after"]


def test_copytruncate_is_noticed_though_the_file_is_longer_already(path: Path) -> None:
    written(path, "")
    watcher = Watcher(path)
    watcher.look()
    append(path, "11-30 15:00:01 one\n")
    watcher.look()
    os.truncate(path, 0)
    append(path, "11-30 15:00:02 two\n11-30 15:00:03 three\n")
    assert watcher.look() == ["11-30 15:00:02 two", "11-30 15:00:03 three"]


def test_the_hole_that_a_writer_leaves_over_a_truncation_costs_nothing(path: Path) -> None:
    written(path, "")
    watcher = Watcher(path)
    watcher.look()
    with path.open("wb", buffering=0) as writer:
        writer.write(b"x" * 1000 + b"\n")
        assert len(watcher.look()) == 1
        os.truncate(path, 0)
        writer.seek(20 * BITE_BYTES)
        writer.write(b"after the hole\n")
    assert watcher.look() == ["after the hole"]


def test_long_lines_are_capped(path: Path) -> None:
    written(path, "")
    watcher = Watcher(path)
    watcher.look()
    append(path, "x" * (2 * BITE_BYTES) + "\nnext\n")
    lines = [line for _ in range(4) for line in watcher.look()]
    assert [len(line) for line in lines] == [LINE_CAP_BYTES, 4]


def test_a_look_is_bounded_and_says_that_there_is_more(path: Path) -> None:
    written(path, "")
    watcher = Watcher(path)
    watcher.look()
    append(path, ("x" * 99 + "\n") * (3 * BITE_BYTES // 100))
    told = len(watcher.look())
    assert told <= BITE_BYTES // 100
    assert watcher.last.more
    while watcher.last.more:
        told += len(watcher.look())
    assert told == 3 * BITE_BYTES // 100


def test_who_writes_faster_than_is_read_is_not_caught_up_with(path: Path) -> None:
    written(path, "")
    watcher = Watcher(path)
    watcher.look()
    with path.open("wb") as stream:
        stream.write(b"first\n")
        stream.seek(LAG_BYTES + BITE_BYTES)
        stream.write(b"cut off\nlast\n")
    lines = watcher.look()
    assert lines[-1] == "last"
    assert "first" not in lines
    assert watcher.last.skipped_bytes > 0


def test_a_file_that_is_missing_is_absent_until_it_appears(path: Path) -> None:
    watcher = Watcher(path)
    watcher.look()
    gap = watcher.last.gap
    assert gap is not None
    assert (gap.part, gap.reason, gap.detail) == (Part.LOG, Reason.ABSENT, f"{path} does not exist")
    append(path, "hello\n")
    os.utime(path, (STARTED_AT + 1, STARTED_AT + 1))
    assert watcher.look() == ["hello"]
    assert watcher.last.gap is None


def test_a_file_that_is_gone_for_good_becomes_absent(path: Path) -> None:
    written(path, "")
    watcher = Watcher(path)
    watcher.look()
    path.unlink()
    watcher.look()
    assert watcher.last.gap is None
    watcher.look(GRACE_S)
    assert watcher.last.gap is not None
    assert watcher.last.gap.reason is Reason.ABSENT


def test_permission_lost_is_denied_and_regained_goes_on_where_it_was(open_folder: Path) -> None:
    path = open_folder / "vllm.log"
    written(path, "")
    path.chmod(0o644)
    with unprivileged():
        watcher = Watcher(path)
        watcher.look()
    append(path, "one\n")
    path.chmod(0)
    with unprivileged():
        lines = watcher.look()
    assert watcher.last.gap is not None
    assert watcher.last.gap.reason is Reason.DENIED
    append(path, "two\n")
    path.chmod(0o644)
    with unprivileged():
        lines += watcher.look()
    assert lines == ["one", "two"]
    assert watcher.last.gap is None


def test_a_rotated_successor_that_may_not_be_read_is_denied_and_then_told(open_folder: Path) -> None:
    path = open_folder / "vllm.log"
    written(path, "")
    path.chmod(0o644)
    with unprivileged():
        watcher = Watcher(path)
        watcher.look()
    append(path, "told while it was the log\n")
    os.utime(path, (STARTED_AT + 1, STARTED_AT + 1))
    path.rename(open_folder / "vllm.log.1")
    append(path, "one\n")
    os.utime(path, (STARTED_AT + 2, STARTED_AT + 2))
    path.chmod(0)
    with unprivileged():
        assert watcher.look() == ["told while it was the log"]
        assert watcher.last.gap is not None
        assert watcher.last.gap.reason is Reason.DENIED
    path.chmod(0o644)
    with unprivileged():
        assert watcher.look(10.0) == ["one"]
    assert watcher.times() == [2.0]


def test_a_pipe_is_refused_and_never_waited_for(path: Path) -> None:
    os.mkfifo(path)
    watcher = Watcher(path)
    began = time.monotonic()
    watcher.look()
    assert time.monotonic() - began < 1
    assert watcher.last.gap is not None
    assert watcher.last.gap.reason is Reason.UNSUPPORTED


def test_the_past_is_told_with_the_time_it_was_written_at(path: Path) -> None:
    written(path, "INFO 11-30 14:00:00 too old\nERROR 11-30 15:00:00 died\nERROR 11-30 15:00:10 after\n", ago_s=30)
    watcher = Watcher(path)
    assert watcher.look() == ["ERROR 11-30 15:00:00 died", "ERROR 11-30 15:00:10 after"]
    assert watcher.times() == [-40, -30]
    append(path, "now\n")
    assert watcher.look() == ["now"]
    assert watcher.times() == [None]


@pytest.mark.parametrize("name", ["vllm.log.1", "vllm.log-20261130", "vllm-20261130.log", "vllm.log.20261130-150000"])
def test_the_newest_rotated_file_is_told_first(path: Path, name: str) -> None:
    written(path.with_name(name), "died\n", ago_s=20)
    written(path.with_name(name.replace("1", "2")), "older\n", ago_s=200)
    written(path, "new\n", ago_s=1)
    watcher = Watcher(path)
    assert watcher.look() == ["died", "new"]
    assert watcher.times() == [-20, -1]


def test_a_gzipped_rotated_file_is_read_at_its_end(path: Path) -> None:
    long = b"x" * 99 + b"\n"
    content = gzip.compress(long * (3 * PAST_BYTES // 100)) + gzip.compress(b"died\n")
    written(path.with_name("vllm.log.1.gz"), content, ago_s=20)
    written(path, "new\n")
    lines = Watcher(path).look()
    assert lines[-2:] == ["died", "new"]
    assert len(lines) < PAST_BYTES // 99


def test_a_damaged_gzip_file_gives_what_came_before_the_damage(path: Path) -> None:
    content = gzip.compress(os.urandom(100_000).hex().encode() + b"\nlast\n")
    written(path.with_name("vllm.log.1.gz"), content[:-2000], ago_s=20)
    written(path.with_name("vllm.log"), "new\n")
    assert Watcher(path).look()[-1] == "new"


def test_a_rotated_file_from_long_ago_is_not_read(path: Path) -> None:
    written(path.with_name("vllm.log.1"), "died\n", ago_s=901)
    written(path, "new\n")
    assert Watcher(path).look() == ["new"]


def test_of_a_long_past_only_the_end_is_read(path: Path) -> None:
    written(path, "".join(f"{number:098d}\n" for number in range(2 * PAST_BYTES // 99)))
    lines = Watcher(path).look()
    assert len(lines) == PAST_BYTES // 99
    assert int(lines[-1]) == 2 * PAST_BYTES // 99 - 1


def cri(at: str, text: str) -> str:
    return f"2026-11-30T{at}.123456789Z stdout F {text}\n"


def test_a_containers_next_restart_is_noticed_and_its_last_words_are_told(tmp_path: Path) -> None:
    """The kubelet names a container's files by its restarts."""
    folder = tmp_path / "prod_llama-0_3f5e" / "vllm"
    folder.mkdir(parents=True)
    written(folder / "0.log", "")
    watcher = Watcher(f"{tmp_path}/prod_llama-0_*/vllm")
    watcher.look()
    append(folder / "0.log", cri("15:00:00", "died"))
    append(folder / "1.log", cri("15:00:11", "starts again"))
    assert watcher.look() == ["died", "starts again"]
    append(folder / "0.log", cri("15:00:01", "late"))
    os.utime(folder / "0.log", (STARTED_AT + 100, STARTED_AT + 100))
    assert watcher.look() == ["late"]
    assert watcher.last.following == folder / "1.log"


def test_the_restart_before_ours_is_read_at_start(tmp_path: Path) -> None:
    written(tmp_path / "0.log", cri("14:59:00", "died"), ago_s=60)
    written(tmp_path / "1.log", cri("15:00:00", "starts"))
    watcher = Watcher(tmp_path)
    assert watcher.look() == ["died", "starts"]


def test_rotated_files_in_a_pods_folder_are_not_taken_for_the_log(tmp_path: Path) -> None:
    written(tmp_path / "0.log", "", ago_s=100)
    written(tmp_path / "0.log.20261130-145900", "", ago_s=1)
    written(tmp_path / "0.log.20261130-145800.gz", gzip.compress(b""), ago_s=0)
    for where in (tmp_path, tmp_path / "0.log*"):
        watcher = Watcher(where)
        watcher.look()
        assert watcher.last.following == tmp_path / "0.log"


def test_two_files_that_grow_at_once_are_not_read_in_turns(tmp_path: Path) -> None:
    for name in ("rank0.log", "rank1.log"):
        written(tmp_path / name, "")
    watcher = Watcher(tmp_path)
    watcher.look()
    following = watcher.last.following
    for second in range(1, 6):
        for name in ("rank0.log", "rank1.log"):
            append(tmp_path / name, f"{name}\n")
            newer = (name == "rank0.log") == (second % 2 == 0)
            os.utime(tmp_path / name, (STARTED_AT + 2 * second + newer,) * 2)
        watcher.look()
        assert watcher.last.following == following


def test_a_new_pods_log_is_taken_up_when_the_old_one_is_quiet_and_told_once(tmp_path: Path) -> None:
    for uid in ("a", "b"):
        (tmp_path / uid).mkdir()
    written(tmp_path / "a" / "0.log", "")
    watcher = Watcher(tmp_path / "*")
    watcher.look()
    append(tmp_path / "b" / "0.log", "new pod\n")
    os.utime(tmp_path / "b" / "0.log", (STARTED_AT + 2, STARTED_AT + 2))
    assert watcher.look(2.0) == ["new pod"]
    os.utime(tmp_path / "a" / "0.log", (STARTED_AT + 9, STARTED_AT + 9))
    assert watcher.look(2.0) == []
    os.utime(tmp_path / "b" / "0.log", (STARTED_AT + 12, STARTED_AT + 12))
    append(tmp_path / "b" / "0.log", "second\n")
    assert watcher.look(2.0) == ["second"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _: None, "holds no file whose name ends in .log"),
        (lambda folder: (folder / "x.log").symlink_to("nowhere"), "holds no file"),
    ],
)
def test_a_folder_without_a_log_is_absent_and_says_so(tmp_path: Path, make: object, words: str) -> None:
    make(tmp_path)  # type: ignore[operator]
    watcher = Watcher(tmp_path)
    watcher.look()
    assert watcher.last.gap is not None
    assert watcher.last.gap.reason is Reason.ABSENT
    assert words in watcher.last.gap.detail


def test_a_pattern_that_matches_nothing_and_a_link_that_leads_nowhere_say_so(tmp_path: Path) -> None:
    (tmp_path / "link.log").symlink_to("nowhere")
    for where, words in ((tmp_path / "x*", "nothing matches"), (tmp_path / "link.log", "leads nowhere")):
        watcher = Watcher(where)
        watcher.look()
        assert watcher.last.gap is not None
        assert words in watcher.last.gap.detail


def test_a_link_that_is_turned_to_the_next_container_is_followed(tmp_path: Path) -> None:
    link = tmp_path / "link"
    written(tmp_path / "a", "")
    written(tmp_path / "b", "b\n")
    link.symlink_to(tmp_path / "a")
    watcher = Watcher(link)
    watcher.look()
    append(tmp_path / "a", "a\n")
    link.unlink()
    link.symlink_to(tmp_path / "b")
    assert watcher.look() == ["a", "b"]


def test_another_file_with_the_same_inode_number_is_not_taken_for_the_old_one(path: Path) -> None:
    """File systems give a freed number to the next file."""
    written(path, "")
    watcher = Watcher(path)
    watcher.look()
    append(path, "a line of the old file\n")
    watcher.look()
    path.unlink()
    watcher.look()
    watcher.look(GRACE_S)
    append(path, "the new file, longer than the old one was\n")
    os.utime(path, (STARTED_AT + 9, STARTED_AT + 9))
    assert watcher.look() == ["the new file, longer than the old one was"]


def test_files_are_let_go_of(path: Path) -> None:
    before = held()
    written(path, "")
    watcher = Watcher(path)
    for number in range(20):
        watcher.look()
        path.rename(path.with_name(f"vllm.log.{number}"))
        append(path, f"{number}\n")
    watcher.look()
    watcher.look(2 * GRACE_S)
    assert held() <= before + 1
    watcher.follower.close()
    assert held() == before
