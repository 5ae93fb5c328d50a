"""`record`: a recording from live sources, one line per sample, or the raw lines they were made of."""

import gzip
import sys
import threading
import time
from pathlib import Path
from typing import IO, cast

from fragscope.app import Core, build_core, hold_signals, wait_for_signal
from fragscope.model import Gap, GpuReading, Part, Reason, Sample
from fragscope.recording import STDIN, Device, ExpositionLine, GpuLine, LogLine, encode_line, encode_sample
from fragscope.serve.clock import Clock
from fragscope.serve.feeds import EnginePoll
from fragscope.serve.logfeed import LogIntake
from fragscope.settings import Settings

_LOOK_S = 0.2
_ERRORS = {Reason.TIMEOUT: "timed out", Reason.REFUSED: "connection refused"}


class Writer:
    """Writes lines as they come; each line is whole when the process is killed."""

    def __init__(self, stream: IO[bytes], *, raw: bool) -> None:
        self._stream = stream
        self._raw = raw
        self.samples = 0
        self._opened: set[str] = set()
        self.error: OSError | None = None

    def tap(self, sample: Sample, poll: EnginePoll | None) -> None:
        """Takes one sample, and the poll it was made of."""
        if self._write(raw_lines(sample, poll) if self._raw else [encode_sample(sample)]):
            self.samples += 1

    def tap_log(self, target: str, intake: LogIntake) -> None:
        """Takes the lines of a target's log; an empty one, once, says that the log is there though it is silent."""
        lines = [encode_line(LogLine(at, line, target)) for at, line in intake.lines]
        if not lines and intake.gap is None and target not in self._opened:
            lines = [encode_line(LogLine(time.time(), "", target))]
        if lines:
            self._opened.add(target)
            self._write(lines)

    def _write(self, lines: list[bytes]) -> bool:
        if self.error is not None:
            return False
        try:
            self._stream.write(b"".join(line + b"\n" for line in lines))
            self._stream.flush()
        except OSError as error:
            self.error = error
        return self.error is None


def raw_lines(sample: Sample, poll: EnginePoll | None) -> list[bytes]:
    """The `gpu` and `exposition` lines of one sample; GPUs first, so that replay joins them with the poll."""
    lines = []
    if sample.gpus:
        devices = [_device(gpu) for gpu in sample.gpus]
        lines.append(encode_line(GpuLine(sample.at, devices, sample.target, sample.gpus[0].source)))
    if poll is not None:
        error = None if poll.text is not None else _error(poll.gap)
        lines.append(encode_line(ExpositionLine(sample.at, sample.target, poll.text, error, poll.health)))
    return lines


def _device(gpu: GpuReading) -> Device:
    return Device(gpu.gpu, gpu.total_bytes, gpu.used_bytes, gpu.peak_used_bytes, gpu.own_bytes)


def _error(gap: Gap | None) -> str:
    """Free text in the words that replay understands."""
    if gap is None or gap.part is not Part.ENGINE:
        return "no answer"
    return f"{_ERRORS.get(gap.reason, str(gap.reason))}: {gap.detail}"


def record(settings: Settings, out: str, seconds: float | None, *, raw: bool) -> int:
    """Records until the time is over or a signal comes; returns how many samples were written.

    Raises OSError where the file cannot be written.
    """
    stop = threading.Event()
    with _open(out) as stream:
        writer = Writer(stream, raw=raw)
        core: Core = build_core(settings, Clock(), stop, writer.tap, writer.tap_log if raw else None)
        hold_signals()
        core.start()
        until = None if seconds is None else time.monotonic() + seconds
        while writer.error is None and not wait_for_signal(_LOOK_S):
            if until is not None and time.monotonic() >= until:
                break
        stop.set()
        core.poller.join(2)
        if writer.error is not None:
            raise writer.error
        return writer.samples


def _open(out: str) -> IO[bytes]:
    if out == STDIN:
        return sys.stdout.buffer
    if out.endswith(".gz"):
        return cast("IO[bytes]", gzip.open(out, "wb"))
    return Path(out).open("wb")
