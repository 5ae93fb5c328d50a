"""A log as it comes, line by line: joins what was wrapped and yields findings; bounded memory, no clock."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from fragscope.explain import lines, measured, oom, stages, versions
from fragscope.explain.findings import Finding, Kind, Stage
from fragscope.explain.stats import read_stats
from fragscope.explain.text import Plain, plain, stamp
from fragscope.model import Fact, LogFact

LINE_MAX_CHARS = 64 * 1024
"""Longer lines are cut: vLLM's configuration dump is the longest known, about 10 kB."""
QUIET_S = 1.0
"""A writer that has said nothing for this long has no more lines of the same message."""
_STACK_LINES = 120
_CONTINUATION_LINES = 8
"""A terminal of 80 columns wraps the allocator's message over seven lines."""
_TAIL_CHARS = 40
_PERIODIC = "Avg prompt throughput"
_STOPS = ("Traceback (most recent call last)", '  File "', "During handling of the above")
_CUES = tuple(
    dict.fromkeys(
        (
            *("emory", "OOM", "warming up sampler", "Failed to load model"),
            *(cue for _, cues, _ in lines.READERS for cue in cues),
            *(*stages.CUES, *measured.CUES, *versions.CUES),
        )
    )
)  # fmt: skip


class Reader:
    """Findings of one log; `feed` every line in order, `flush` at the end or when the log has gone quiet."""

    def __init__(self) -> None:
        self.number = 0
        self.stage = Stage.UNKNOWN
        self.stack = versions.Stack()
        self._pending: list[str] = []
        self._pending_from = 0
        self._pending_prefix: Plain | None = None
        self._pending_at: float | None = None
        self._tail = ""
        self._stack: deque[str] = deque(maxlen=_STACK_LINES)

    def feed(self, raw: str, at: float | None = None) -> tuple[Finding, ...]:
        """What this line, and what it completes, establishes; `at` is the line's own time where known."""
        self.number += 1
        raw = raw[:LINE_MAX_CHARS]
        if not self._pending and _PERIODIC in raw:
            found = self._periodic(raw, at)
        elif not self._pending and oom.may_start(self._tail) and self._cut_in_two(raw):
            found = tuple(self._begin(Plain(f"{self._tail} {plain(raw).text}", None, None), at))
        elif self._pending or _interesting(raw):
            found = tuple(self._read(raw, at))
        else:
            found = ()
        self._tail = raw.rstrip()[-_TAIL_CHARS:]
        self._stack.append(raw)
        return found

    def _cut_in_two(self, raw: str) -> bool:
        """Whether a terminal cut the words "out of memory" themselves, half of them on the line before."""
        return not oom.starts(self._tail) and oom.starts(f"{self._tail} {plain(raw).text[:_TAIL_CHARS]}", across=True)

    def pass_over(self, batch: Sequence[str]) -> bool:
        """Takes many lines at once if nothing in them can matter; else takes none and returns False."""
        # Without line breaks, so that words which a terminal cut in two are seen as well.
        joined = "".join(batch).replace("\n", "")
        if self._pending or not batch or oom.may_start(self._tail) or oom.may_start(joined) or _interesting(joined):
            return False
        self.number += len(batch)
        self._stack.extend(batch[-_STACK_LINES:])
        self._tail = batch[-1].rstrip()[-_TAIL_CHARS:]
        return True

    def flush(self) -> tuple[Finding, ...]:
        """A message whose rest never came."""
        return tuple(self._finish(self.number))

    def _periodic(self, raw: str, at: float | None) -> tuple[Finding, ...]:
        """The commonest line that matters, by the shortest way."""
        self.stage = Stage.SERVING
        facts = read_stats(raw)
        if facts is None:
            return ()
        return (Finding(Kind.STATS, self.number, self.number, facts, stage=Stage.SERVING, stamp=stamp(raw), at=at),)

    def _read(self, raw: str, at: float | None) -> Iterator[Finding]:
        if stages.begins_process(raw):
            yield from self._finish(self.number - 1)
            self.stage = Stage.STARTUP
            self._stack.clear()
            yield Finding(Kind.STARTUP, self.number, self.number, words="new process", at=at)
        self.stage = stages.after(self.stage, raw)
        self.stack = versions.learn(self.stack, raw)
        if self._pending:
            yield from self._continue(raw, at)
        else:
            yield from self._open(plain(raw), at)

    def _open(self, line: Plain, at: float | None) -> Iterator[Finding]:
        if oom.starts(line.text):
            yield from self._begin(line, at)
            return
        read = lines.classify(line.text)
        if read is not None:
            kind, facts = read
            yield self._finding(kind, line, at, facts=facts)
        for kind, facts in measured.read(line.text) if read is None else ():
            yield self._finding(kind, line, at, facts=facts)
        told = lines.hint(line.text)
        if told is not None:
            words, one_off, stage = told
            yield Finding(
                Kind.HINT, self.number, self.number, words=words, stage=stage, one_off=one_off, stamp=line.stamp, at=at
            )

    def _begin(self, line: Plain, at: float | None) -> Iterator[Finding]:
        self._pending, self._pending_from = [line.text], self.number
        self._pending_prefix, self._pending_at = line, at
        if oom.complete(line.text):
            yield from self._finish(self.number)

    def _continue(self, raw: str, at: float | None) -> Iterator[Finding]:
        line = plain(raw)
        ends = any(stop in raw for stop in _STOPS) or oom.starts(line.text) or lines.classify(line.text) is not None
        if ends:
            yield from self._finish(self.number - 1)
            yield from self._open(line, at)
            return
        self._pending.append(line.text)
        if oom.complete("\n".join(self._pending)) or len(self._pending) > _CONTINUATION_LINES:
            yield from self._finish(self.number)

    def _finish(self, last_line: int) -> Iterator[Finding]:
        if not self._pending or self._pending_prefix is None:
            return
        text, first = "\n".join(self._pending), self._pending_from
        prefix, at = self._pending_prefix, self._pending_at
        self._pending = []
        stack = self._stack_of(prefix)
        told = lines.hint(text)
        stage = stages.stage_of_stack(stack) or (told[2] if told else None)
        one_off = stages.one_off(stack) or (told[1] if told else None)
        for message in oom.read_messages(text):
            yield Finding(
                Kind.OOM,
                first,
                max(first, last_line),
                facts=message.facts,
                words="the allocator's out-of-memory message",
                stage=stage or self._known_stage(),
                one_off=one_off,
                stamp=prefix.stamp,
                at=at,
                process=prefix.process,
                backend=message.backend,
                uncertainties={name: float(each.uncertainty_bytes) for name, each in message.figures.items()},
                processes=message.processes,
                missing=message.missing,
            )

    def _finding(self, kind: Kind, line: Plain, at: float | None, facts: lines.Facts) -> Finding:
        stage = stages.stage_of_stack(self._stack_of(line)) if kind in (Kind.RUNTIME_OOM, Kind.ENGINE_ERROR) else None
        return Finding(
            kind,
            self.number,
            self.number,
            facts=facts,
            words=_quote(line.text),
            stage=stage or self._known_stage(),
            stamp=line.stamp,
            at=at,
            process=line.process,
        )

    def _known_stage(self) -> Stage | None:
        return None if self.stage is Stage.UNKNOWN else self.stage

    def _stack_of(self, prefix: Plain) -> list[str]:
        """The lines of the traceback that led here, from the same process where prefixes tell."""
        recent = list(self._stack)
        if prefix.process is not None:
            own = f"pid={prefix.process.rpartition('=')[2]})"
            recent = [line for line in recent if own in line or "pid=" not in line]
        starts = [i for i, line in enumerate(recent) if "Traceback (most recent call last)" in line]
        return recent[starts[-1] :] if starts else recent[-_CONTINUATION_LINES:]


def _interesting(raw: str) -> bool:
    """A cheap look, since nearly every line of a log is about a request that went well."""
    for cue in _CUES:  # noqa: SIM110 - a generator would cost more than the look itself
        if cue in raw:
            return True
    return False


def _quote(text: str, most: int = 160) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


# Kind -> the detector's word and a fixed description: nothing else of a line is kept by the daemon.
_FACTS = {
    Kind.OOM: (Fact.OOM, "the allocator's out-of-memory message"),
    Kind.RUNTIME_OOM: (Fact.OOM, "out of memory outside the caching allocator"),
    Kind.SHUTDOWN: (Fact.SHUTDOWN, "a stop was asked for"),
    Kind.ENGINE_DEATH: (Fact.ENGINE_DEATH, "the engine's death"),
    Kind.WORKER_DEATH: (Fact.WORKER_DEATH, "a worker's death"),
    Kind.REFUSAL: (Fact.REFUSAL, "a refusal to start for lack of memory"),
    Kind.DRIVER_FAULT: (Fact.DRIVER_FAULT, "a fault of the GPU or its driver"),
    Kind.HOST_OOM: (Fact.HOST_OOM, "a kill for lack of host memory"),
    Kind.REQUEST_TOO_LONG: (Fact.REQUEST_TOO_LONG, "a request that is too long"),
}


class LineReader:
    """The facts of one target's log for the detector, which never sees text."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._reader = Reader()
        self._last_at = 0.0

    def feed(self, at: float, line: str) -> tuple[LogFact, ...]:
        """What this line, and what it completes, establishes."""
        self._last_at = at
        return self._facts(self._reader.feed(line, at))

    def flush(self, at: float | None = None) -> tuple[LogFact, ...]:
        """A message whose rest never came: at the end, or once the log has been quiet for `QUIET_S` at `at`."""
        if at is not None and at - self._last_at < QUIET_S:
            return ()
        return self._facts(self._reader.flush())

    def _facts(self, findings: Iterable[Finding]) -> tuple[LogFact, ...]:
        return tuple(self._fact(each) for each in findings if each.kind in _FACTS)

    def _fact(self, finding: Finding) -> LogFact:
        what, words = _FACTS[finding.kind]
        at = finding.at if finding.at is not None else self._last_at
        return LogFact(at, self._target, what, finding.facts, words)
