"""The flight recorder: the last minutes of every target in memory, and what of them becomes an incident file."""

import re
import time
from collections import deque
from dataclasses import dataclass, field

from fragscope.model import Assessment, Condition, Phase, Sample, Verdict
from fragscope.recording import encode_sample
from fragscope.wire import encode, verdict_object

AFTERMATH_S = 120.0
"""An incident is written at once, and again this much later with what followed."""
_MAX_BYTES = 8 * 2**20
_ALARMS = (Phase.SUSPECTED, Phase.CONFIRMED)


@dataclass(frozen=True, slots=True)
class Incident:
    """A file to be written: its name, and the lines of a recording."""

    name: str
    content: bytes


@dataclass(slots=True)
class _Tape:
    """One target's recent samples, encoded."""

    lines: deque[tuple[float, bytes]] = field(default_factory=deque)
    size_bytes: int = 0
    state: tuple[bool, bool] = (False, False)
    unfinished: tuple[str, float] | None = None


class FlightRecorder:
    """Remembers `history_s` of samples per target, at most 8 MiB each."""

    def __init__(self, history_s: float) -> None:
        self._history_s = history_s
        self._tapes: dict[str, _Tape] = {}

    def observe(self, sample: Sample, assessment: Assessment) -> Incident | None:
        """Keeps the sample; an incident when a phase rises to suspected or confirmed, or an engine dies."""
        tape = self._tapes.setdefault(sample.target, _Tape())
        self._keep(tape, sample)
        verdict = assessment.verdicts[0]
        state = (
            any(v.phase in _ALARMS for v in assessment.verdicts),
            any(Condition.ENGINE_DOWN in v.conditions for v in assessment.verdicts),
        )
        began = any(now and not before for now, before in zip(state, tape.state, strict=True))
        tape.state = state
        if began and tape.unfinished is None:
            tape.unfinished = (_name(verdict), sample.at)
            return self._incident(tape, verdict)
        if tape.unfinished is not None and sample.at - tape.unfinished[1] >= AFTERMATH_S:
            incident = self._incident(tape, verdict)
            tape.unfinished = None
            return incident
        return None

    def _keep(self, tape: _Tape, sample: Sample) -> None:
        line = encode_sample(sample)
        tape.lines.append((sample.at, line))
        tape.size_bytes += len(line)
        while tape.lines[0][0] < sample.at - self._history_s or tape.size_bytes > _MAX_BYTES:
            tape.size_bytes -= len(tape.lines.popleft()[1])
            if not tape.lines:
                return

    def _incident(self, tape: _Tape, verdict: Verdict) -> Incident:
        assert tape.unfinished is not None  # noqa: S101 - set by the only caller, for mypy
        remark = encode({"kind": "verdict", **verdict_object(verdict)}).encode()
        lines = [line for _, line in tape.lines] + [remark]
        return Incident(tape.unfinished[0], b"".join(line + b"\n" for line in lines))


def _name(verdict: Verdict) -> str:
    """Sorts by time; the target's name without what a file name cannot hold."""
    at = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(verdict.at))
    target = re.sub(r"[^A-Za-z0-9_.-]", "_", verdict.target)[:80]
    return f"{at}-{target}-{verdict.cause}.jsonl.gz"
