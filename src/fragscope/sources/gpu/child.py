"""A vendor's library in a process of its own, that can hang, crash or lie without taking us along.

Spawned, not forked: a fork would take locks and threads of the daemon along. It lives for many readings, since
loading costs more than reading, and is replaced by age, since such libraries have leaked descriptors and memory
(ROCm/amdsmi#64). Every way in which it can fail is a Gap with a reason:

| state | reason |
|---|---|
| no answer before the deadline; killed | timeout |
| cannot be killed; nothing is started beside it | timeout |
| died (a signal, an exit) | absent |
| an answer that is none, or has no end | malformed |
| the library is missing, does not fit, sees nothing | what the reader in the child says |
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from fragscope.model import Gap, Part, Reason
from fragscope.sources.gpu.process import DEADLINE_S, NOWHERE, End, Process, end, ending, stuck_gap

RECYCLE_S = 600.0
"""A new child every ten minutes: about 0.3 s of CPU each, against leaks and against a partition change unseen."""
REST_S = 30.0
"""After a failure no child is started for so long: a library that crashes at once must not cost a core."""
_MAX_ANSWER_BYTES = 1 << 20
_CHUNK = 65536


class Child:
    """One worker process for one library."""

    def __init__(
        self,
        what: str,
        target: str,
        arguments: Sequence[object] = (),
        *,
        deadline_s: float = DEADLINE_S,
        recycle_s: float = RECYCLE_S,
        rest_s: float = REST_S,
        clock: Callable[[], float] = time.monotonic,
        end: End = end,
    ) -> None:
        """`target` is `module:function` of what runs in the child, `arguments` its plain arguments."""
        self._what = what
        self._command = (target, json.dumps(list(arguments)))
        self._deadline_s = deadline_s
        self._recycle_s = recycle_s
        self._rest_s = rest_s
        self._clock = clock
        self._end_process = end
        self._process: Process | None = None
        self._answers = -1
        self._stuck: Process | None = None
        self._born = 0.0
        self._failed: tuple[float, Gap] | None = None
        self._closed = threading.Event()
        self._asking = threading.Lock()

    def ask(self) -> object:
        """One reading as plain values, or the Gap in its place; blocks no longer than the deadline and a second."""
        with self._asking:
            return self._ask()

    def _ask(self) -> object:
        if self._closed.is_set():
            return self._closed_gap()
        if self._stuck is not None and self._stuck.poll() is None:
            return stuck_gap(f"the {self._what} child", self._stuck.pid)
        self._stuck = None
        now = self._clock()
        if self._failed is not None and now - self._failed[0] < self._rest_s:
            return self._failed[1]
        if self._process is not None and now - self._born >= self._recycle_s:
            self._end()
            if self._stuck is not None:
                return stuck_gap(f"the {self._what} child", self._stuck.pid)
        raw = self._exchange(now)
        self._failed = (now, raw) if isinstance(raw, Gap) else None
        return raw

    def rest(self) -> None:
        """Ends the child until the next question; one that cannot be killed, and a failure's rest, are remembered."""
        with self._asking:
            self._end()

    def close(self) -> None:
        """Kills the child, also while another thread asks it; may be called twice."""
        self._closed.set()
        process = self._process
        if process is not None:
            self._end_process(process)  # whoever waits for its answer wakes up
        with self._asking:
            self._end()

    @property
    def pid(self) -> int | None:
        """The child's process, None while there is none."""
        return None if self._process is None else self._process.pid

    def _start(self) -> Gap | None:
        ours, theirs = os.pipe()
        target, arguments = self._command
        # -P: a file in the working directory or beside the worker must not stand in for the library.
        words = [sys.executable, "-P", "-m", "fragscope.sources.gpu.worker", target, str(theirs), arguments]
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and our own module
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs,),
                start_new_session=True,
                cwd=NOWHERE,
                bufsize=0,
            )
        except OSError as error:
            os.close(ours)
            return Gap(Part.GPU, Reason.ABSENT, f"the {self._what} child cannot be started: {error.strerror}")
        finally:
            os.close(theirs)
        self._answers = ours
        return None

    def _exchange(self, now: float) -> object:
        if self._process is None:
            self._born = now
            failed = self._start()
            if failed is not None:
                return failed
        process = self._process
        if (
            self._closed.is_set() or process is None or process.stdin is None
        ):  # close() may have come while it was started
            self._end()
            return self._closed_gap()
        with suppress(BrokenPipeError):  # a dead child answers with the end of its pipe
            process.stdin.write(b"?")
        line, why = _line(self._answers, time.monotonic() + self._deadline_s)
        answer = self._understood(line) if why is None else None
        if answer is not None and not isinstance(answer, Gap):
            return answer[0]
        code = self._end()
        if isinstance(answer, Gap):
            return answer
        if code is None:
            return stuck_gap(f"the {self._what} child", process.pid)
        return self._closed_gap() if self._closed.is_set() else self._failure(why, code)

    def _closed_gap(self) -> Gap:
        return Gap(Part.GPU, Reason.ABSENT, f"the {self._what} source was closed")

    def _failure(self, why: str | None, code: int) -> Gap:
        if why == "deadline":
            detail = f"the {self._what} child gave no answer within {self._deadline_s:g} s and was killed"
            return Gap(Part.GPU, Reason.TIMEOUT, detail)
        if why == "end":
            return Gap(Part.GPU, Reason.ABSENT, f"the {self._what} child died ({ending(code)}) instead of answering")
        return Gap(Part.GPU, Reason.MALFORMED, f"the {self._what} child gave an answer that is none and was killed")

    def _understood(self, line: bytes) -> tuple[object] | Gap | None:
        """The raw values in a tuple of one, the child's own Gap, or None for what is no answer."""
        try:
            answer = json.loads(line)
            if "raw" in answer:
                return (answer["raw"],)
            reason, detail = answer["gap"]
            return Gap(Part.GPU, Reason(reason), str(detail))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def _end(self) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        code = self._end_process(process)
        if code is None:
            self._stuck = process
        with suppress(OSError):
            os.close(self._answers)
        if process.stdin is not None:
            process.stdin.close()
        return code


def _line(handle: int, deadline: float) -> tuple[bytes, str | None]:
    """One line, and `deadline`, `end` (the writer is gone) or `flood` if there is none."""
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    text = bytearray()
    while not text.endswith(b"\n"):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return b"", "deadline"
        if not poller.poll(left_s * 1000):
            continue
        chunk = os.read(handle, _CHUNK)
        if not chunk:
            return b"", "end"
        text += chunk
        if len(text) > _MAX_ANSWER_BYTES:
            return b"", "flood"
    return bytes(text), None
