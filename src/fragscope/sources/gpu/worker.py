"""What runs in the child process: a vendor's library, with its noise kept off every stream that somebody reads.

`python -P -m fragscope.sources.gpu.worker module:function fd [arguments as JSON]`. The function loads the library
and gives back a reader of plain values. A line on stdin asks for one reading; the answer is a line of JSON on the
given descriptor: `{"raw": ...}`, or `{"gap": [reason, sentence]}`. When stdin closes, the parent is gone and so are
we, at once, even if the library hangs.
"""

import importlib
import json
import os
import resource
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from fragscope.model import Reason
from fragscope.sources.gpu.device import WitnessError

Read = Callable[[], object]


def main(arguments: list[str]) -> None:
    """Answers until stdin closes; a library that cannot be opened gets one answer, and the end."""
    target, handle, words = arguments[0], int(arguments[1]), json.loads(arguments[2])
    os.set_inheritable(handle, False)  # a program that the library starts must not keep it open
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asked = threading.Semaphore(0)
    threading.Thread(target=_watch, args=(asked,), daemon=True).start()
    module, _, function = target.partition(":")
    asked.acquire()
    try:
        read: Read = getattr(importlib.import_module(module), function)(*words)
    except BaseException as error:  # noqa: BLE001 - a library may raise anything, and exit, at import
        _answer(handle, _refusal(error))
        os._exit(1)
    while True:
        try:
            answer: dict[str, object] = {"raw": read()}
        except BaseException as error:  # noqa: BLE001
            answer = _refusal(error)
        _answer(handle, answer)
        asked.acquire()


def _watch(asked: threading.Semaphore) -> None:
    """Counts the questions; the end of stdin ends the process, whatever the main thread is stuck in."""
    while os.read(0, 1):
        asked.release()
    os._exit(0)


def _refusal(error: BaseException) -> dict[str, object]:
    if isinstance(error, WitnessError):
        return {"gap": [error.reason.value, str(error)]}
    return {"gap": [Reason.UNSUPPORTED.value, f"{type(error).__name__}: {' '.join(str(error).split())}"]}


def _answer(handle: int, answer: dict[str, object]) -> None:
    line = memoryview(json.dumps(answer).encode() + b"\n")
    while line:
        line = line[os.write(handle, line) :]


if __name__ == "__main__":
    main(sys.argv[1:])
