"""Programs of others under a deadline: started in a group of their own, and the whole group killed.

A vendor's tool may wait for ever for a wedged GPU (docs/sources.md). One that even SIGKILL does not end sits in
the kernel: it is given up, remembered, and no second one is started beside it.
"""

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fragscope.model import Gap, Part, Reason

DEADLINE_S = 10.0
"""Ten times the slowest answer reported (0.74 s of amd-smi on 16 GPUs), with room for a busy node."""
MAX_OUTPUT_BYTES = 4 << 20
"""The longest real answer (everything of 16 GPUs as JSON) is under 1 MiB."""
NOWHERE = "/"
"""Where vendors' programs run: ROCm 6's amd-smi looks for its library in the working directory (rocm-systems#3634)."""
_GRACE_S = 1.0
_CHUNK = 65536

Process = subprocess.Popen[bytes]
End = Callable[[Process], int | None]


@dataclass(frozen=True, slots=True)
class Ran:
    """What a program printed, and how it ended (negative: the signal)."""

    stdout: str
    stderr: str
    code: int


def end(process: Process) -> int | None:
    """Kills the process group; the exit code, or None if it is still there after a second (it waits in the kernel).

    The group is killed before the process is waited for: until then its number cannot belong to another.
    """
    if process.returncode is not None:
        return process.returncode
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        return None


def ending(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exit status {code}"
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def stuck_gap(what: str, pid: int) -> Gap:
    """The state in which nothing more is started."""
    detail = f"{what} (pid {pid}) cannot be killed: it waits in the kernel, and no other is started beside it"
    return Gap(Part.GPU, Reason.TIMEOUT, detail)


class Command:
    """One program of the command line, run now and then; never more than one of it that does not end."""

    def __init__(self, program: str, *, deadline_s: float = DEADLINE_S, end: End = end) -> None:
        self._program = program
        self._deadline_s = deadline_s
        self._end = end
        self._stuck: Process | None = None
        self._running: Process | None = None
        self._closed = False

    def run(self, arguments: Sequence[str], deadline_s: float | None = None) -> Ran | Gap:
        """Runs it to its end or to the deadline; the gap says which of the two ways it failed."""
        words = " ".join((Path(self._program).name, *arguments))
        if self._closed:
            return Gap(Part.GPU, Reason.ABSENT, f"{words} was not run: the source was closed")
        if self._stuck is not None and self._stuck.poll() is None:
            return stuck_gap(words, self._stuck.pid)
        self._stuck = None
        limit_s = self._deadline_s if deadline_s is None else deadline_s
        try:
            process = subprocess.Popen(  # noqa: S603 - a fixed program with fixed words, no shell
                [self._program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                cwd=NOWHERE,
            )
        except OSError as error:
            reason = Reason.DENIED if isinstance(error, PermissionError) else Reason.ABSENT
            return Gap(Part.GPU, reason, f"{self._program} cannot be started: {error.strerror}")
        self._running = process
        if self._closed:  # close() may have come while it was started
            self._end(process)
        try:
            return self._gather(process, words, limit_s)
        finally:
            self._running = None
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()

    def close(self) -> None:
        """Kills the program if it runs, also while another thread waits for it; may be called twice."""
        self._closed = True
        process = self._running
        if process is not None:
            self._end(process)  # whoever waits for its output wakes up
        if self._stuck is not None and self._stuck.poll() is not None:
            self._stuck = None

    def _gather(self, process: Process, words: str, limit_s: float) -> Ran | Gap:
        texts, why = _drain(process, time.monotonic() + limit_s)
        natural = why is None and _waited(process, _GRACE_S)
        code = self._end(process)
        if code is None:
            self._stuck = process
            return stuck_gap(words, process.pid)
        if self._closed:
            return Gap(Part.GPU, Reason.ABSENT, f"{words} was killed: the source was closed")
        if why == "deadline" or (why is None and not natural):
            return Gap(Part.GPU, Reason.TIMEOUT, f"{words} did not end within {limit_s:g} s and was killed")
        if why == "flood":
            limit_mib = MAX_OUTPUT_BYTES >> 20
            return Gap(Part.GPU, Reason.MALFORMED, f"{words} printed more than {limit_mib} MiB and was killed")
        return Ran(texts[0].decode(errors="replace"), texts[1].decode(errors="replace"), code)


def _waited(process: Process, patience_s: float) -> bool:
    """Whether it ended by itself; what is left of its group is killed afterwards either way."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        with suppress(ChildProcessError):  # another thread has collected it
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                time.sleep(0.005)
                continue
        return True
    return False


def _drain(process: Process, deadline: float) -> tuple[tuple[bytes, bytes], str | None]:
    """Both outputs until they close; and `deadline` or `flood` if that was not to be waited for."""
    if process.stdout is None or process.stderr is None:
        raise ValueError("both outputs must be pipes")
    out, err = process.stdout.fileno(), process.stderr.fileno()
    texts = {out: bytearray(), err: bytearray()}
    poller = select.poll()
    for handle in texts:
        poller.register(handle, select.POLLIN)
    still_open = set(texts)
    why: str | None = None
    while still_open and why is None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            why = "deadline"
            break
        for handle, _ in poller.poll(left_s * 1000):
            chunk = os.read(handle, _CHUNK)
            texts[handle] += chunk
            if not chunk:
                poller.unregister(handle)
                still_open.discard(handle)
            elif len(texts[handle]) > MAX_OUTPUT_BYTES:
                why = "flood"
    return (bytes(texts[out]), bytes(texts[err])), why
