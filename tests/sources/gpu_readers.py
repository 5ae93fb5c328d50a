"""What a vendor's library may do to the child that reads it; each function is a child's target."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from fragscope.model import Reason
from fragscope.sources.gpu.device import WitnessError

Read = Callable[[], object]


def answers(value: object) -> Read:
    """The same plain value every time."""
    return lambda: value


def tells_its_pid() -> Read:
    return os.getpid


def tells_where_it_is() -> Read:
    return os.getcwd


def refuses() -> Read:
    raise WitnessError(Reason.DENIED, "the device is closed to us")


def raises() -> Read:
    raise KeyError("libamd_smi.so")


def sleeps() -> Read:
    return lambda: time.sleep(3600)


def sleeps_while_it_loads() -> Read:
    time.sleep(3600)
    return sleeps()


def crashes() -> Read:
    return lambda: ctypes.string_at(0)


def exits() -> Read:
    return lambda: os._exit(3)


def fills_stdout(value: object) -> Read:
    """64 MiB where the import's noise goes, from Python and from below it."""

    def read() -> object:
        for _ in range(512):
            sys.stdout.write("x" * 65536)
            os.write(1, b"y" * 65536)
            os.write(2, b"z" * 65536)
        return value

    return read


def answers_without_end() -> Read:
    return lambda: "x" * (8 << 20)


def answers_nonsense() -> Read:
    handle = int(sys.argv[2])
    return lambda: os.write(handle, b"Segmentation fault\n")


def starts_another(note: str) -> Read:
    """Leaves a process of its own behind, as AMD's library does for /dev/kfd, and hangs."""

    def read() -> object:
        other = subprocess.Popen(["sleep", "3600"])
        with open(note, "w", encoding="utf-8") as file:  # noqa: PTH123 - one line
            file.write(str(other.pid))
        time.sleep(3600)
        return None

    return read


def kills_itself_late() -> Read:
    """Answers once; the second question finds it dying of SIGKILL."""
    asked: list[int] = []

    def read() -> object:
        if asked:
            os.kill(os.getpid(), signal.SIGKILL)
        asked.append(1)
        return "fine"

    return read
