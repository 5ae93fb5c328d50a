"""A vendor's library in a child: every way to fail is a state with a reason, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fragscope.model import Gap, Reason
from fragscope.sources.gpu.child import Child
from fragscope.sources.gpu.process import Command, Process, Ran, end
from tests.paths import REPOSITORY

READERS = "tests.sources.gpu_readers"


@pytest.fixture(autouse=True)
def children_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY / 'src'}:{REPOSITORY}")


@pytest.fixture
def started() -> Iterator[list[Child]]:
    children: list[Child] = []
    yield children
    for child in children:
        child.close()


def child_of(started: list[Child], reader: str, *arguments: object, **settings: Any) -> Child:
    child = Child("test", f"{READERS}:{reader}", arguments, **settings)
    started.append(child)
    return child


def gap_of(child: Child) -> Gap:
    answer = child.ask()
    assert isinstance(answer, Gap), answer
    return answer


def gone(pid: int) -> bool:
    """Whether the process has ended; one that nobody has collected yet has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return True
    return state in "ZX"


def soon_gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return gone(pid)


def test_one_child_answers_many_questions(started: list[Child]) -> None:
    child = child_of(started, "tells_its_pid")
    pid = child.ask()
    assert pid == child.pid != os.getpid()
    assert child.ask() == pid


def test_a_library_in_the_working_directory_stands_in_for_no_other(
    started: list[Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert child_of(started, "tells_where_it_is").ask() == "/"
    ran = Command("/bin/pwd").run(())
    assert isinstance(ran, Ran)
    assert ran.stdout == "/\n"


def test_what_prints_at_will_neither_blocks_nor_reaches_us(started: list[Child], capfd: Any) -> None:
    assert child_of(started, "fills_stdout", "fine").ask() == "fine"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("reader", ["sleeps", "sleeps_while_it_loads"])
def test_a_child_that_sleeps_for_ever_is_killed_at_the_deadline(started: list[Child], reader: str) -> None:
    child = child_of(started, reader, deadline_s=0.8)
    begun = time.monotonic()
    gap = gap_of(child)
    assert gap.reason is Reason.TIMEOUT
    assert "no answer within 0.8 s" in gap.detail
    assert time.monotonic() - begun < 3
    assert child.pid is None


@pytest.mark.parametrize(("reader", "how"), [("crashes", "SIGSEGV"), ("exits", "exit status 3")])
def test_a_child_that_dies_says_how(started: list[Child], reader: str, how: str) -> None:
    gap = gap_of(child_of(started, reader))
    assert gap.reason is Reason.ABSENT
    assert how in gap.detail


@pytest.mark.parametrize("reader", ["answers_without_end", "answers_nonsense"])
def test_an_answer_that_is_none_is_malformed(started: list[Child], reader: str) -> None:
    assert gap_of(child_of(started, reader)).reason is Reason.MALFORMED


def test_the_reader_says_itself_why_it_cannot(started: list[Child]) -> None:
    assert gap_of(child_of(started, "refuses")) == gap_of(child_of(started, "refuses"))
    assert gap_of(started[0]).reason is Reason.DENIED
    assert gap_of(started[0]).detail == "the device is closed to us"


def test_an_exception_nobody_foresaw_is_named(started: list[Child]) -> None:
    assert "KeyError: 'libamd_smi.so'" in gap_of(child_of(started, "raises")).detail


def test_a_module_that_is_not_there_is_named(started: list[Child]) -> None:
    child = Child("test", "no.such:reader")
    started.append(child)
    assert "ModuleNotFoundError" in gap_of(child).detail


def test_what_the_child_started_is_killed_with_it(started: list[Child], tmp_path: Path) -> None:
    note = tmp_path / "pid"
    child = child_of(started, "starts_another", str(note), deadline_s=2.0)
    assert gap_of(child).reason is Reason.TIMEOUT
    assert soon_gone(int(note.read_text()))


def test_a_child_is_replaced_by_age(started: list[Child]) -> None:
    now = [0.0]
    child = child_of(started, "tells_its_pid", recycle_s=600.0, clock=lambda: now[0])
    first = child.ask()
    assert isinstance(first, int)
    now[0] = 599.0
    assert child.ask() == first
    now[0] = 601.0
    second = child.ask()
    assert isinstance(second, int)
    assert second != first
    assert soon_gone(first)


def test_after_a_failure_nothing_is_started_for_a_while(started: list[Child]) -> None:
    now = [0.0]
    child = child_of(started, "crashes", rest_s=30.0, clock=lambda: now[0])
    gap = gap_of(child)
    now[0] = 29.0
    assert gap_of(child) is gap
    now[0] = 31.0
    again = gap_of(child)
    assert again == gap
    assert again is not gap


def test_a_child_that_dies_between_two_questions_is_replaced(started: list[Child]) -> None:
    child = child_of(started, "kills_itself_late", rest_s=0.0)
    assert child.ask() == "fine"
    assert "SIGKILL" in gap_of(child).detail
    assert child.ask() == "fine"


def stop(pid: int) -> None:
    """Stops a process, and waits until it has stopped: the signal alone may come after the end of its input."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T" and time.monotonic() < deadline:
        time.sleep(0.01)


def test_never_more_than_one_child_that_cannot_be_killed(started: list[Child]) -> None:
    unkillable: list[Process] = []

    def cannot_end(process: Process) -> int | None:
        stop(process.pid)  # else it leaves by itself when its stdin is closed
        unkillable.append(process)
        return None

    child = child_of(started, "sleeps", deadline_s=0.5, rest_s=0.0, end=cannot_end)
    first = gap_of(child)
    assert first.reason is Reason.TIMEOUT
    assert f"pid {unkillable[0].pid}" in first.detail
    assert gap_of(child) == first
    assert len(unkillable) == 1, "a second one was started"
    end(unkillable[0])
    gap_of(child)
    assert len(unkillable) == 2, "once the first is gone, another may be tried"
    end(unkillable[1])


def test_a_child_too_old_that_cannot_be_killed_gets_no_other_beside_it(started: list[Child]) -> None:
    now = [0.0]
    unkillable: list[Process] = []

    def cannot_end(process: Process) -> int | None:
        stop(process.pid)
        unkillable.append(process)
        return None

    child = child_of(started, "tells_its_pid", recycle_s=600.0, clock=lambda: now[0], end=cannot_end)
    first = child.ask()
    now[0] = 601.0
    assert f"pid {first}" in gap_of(child).detail
    assert child.pid is None
    for process in unkillable:
        end(process)


def test_a_child_that_rests_is_started_again_by_the_next_question(started: list[Child]) -> None:
    child = child_of(started, "tells_its_pid")
    first = child.ask()
    child.rest()
    assert soon_gone(int(str(first)))
    assert child.ask() not in (first, None)


def test_closing_wakes_whoever_waits(started: list[Child]) -> None:
    child = child_of(started, "sleeps", deadline_s=60.0)
    answers: list[object] = []
    waiter = threading.Thread(target=lambda: answers.append(child.ask()))
    waiter.start()
    while child.pid is None:
        time.sleep(0.01)
    child.close()
    waiter.join(5)
    (gap,) = answers
    assert isinstance(gap, Gap)
    assert "closed" in gap.detail
    child.close()
    assert "closed" in gap_of(child).detail


def test_a_child_ends_with_its_parent_even_if_the_library_hangs(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = (
        "import os, threading, time\n"
        "from fragscope.sources.gpu.child import Child\n"
        f"child = Child('test', '{READERS}:sleeps')\n"
        "threading.Thread(target=child.ask, daemon=True).start()\n"
        "while child.pid is None: time.sleep(0.01)\n"
        "time.sleep(0.5)\n"
        f"open({str(note)!r}, 'w').write(str(child.pid))\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    assert soon_gone(int(note.read_text()))


def test_no_descriptor_is_left_open(started: list[Child]) -> None:
    child = child_of(started, "crashes", rest_s=0.0)
    child.ask()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - Path.iterdir would hold one open itself
    for _ in range(3):
        child.ask()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
