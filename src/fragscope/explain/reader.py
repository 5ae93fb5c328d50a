"""A log as it comes, line by line: joins what was wrapped and yields findings; bounded memory, no clock."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fragscope.explain import lines, measured, oom, stages, versions
from fragscope.explain.findings import Finding, Kind, Stage
from fragscope.explain.stats import read_stats
from fragscope.explain.text import Plain, is_user_text, plain, stamp, unpack

LINE_MAX_CHARS = 32 * 1024
"""Longer lines are cut: vLLM's configuration dump is the longest known, about 10 kB."""
_STACK_LINES = 120
_CONTINUATION_LINES = 12
"""A terminal of 80 columns wraps the allocator's message over seven lines."""
_TAIL_CHARS = 40
_PERIODIC, _PERIODIC_END = "Avg prompt throughput", "KV cache usage"
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


@dataclass(slots=True)
class _Pending:
    """A message whose end has not come yet."""

    prefix: Plain
    first_line: int
    at: float | None
    texts: list[str] = field(default_factory=list)

    def belongs(self, line: Plain) -> bool:
        """Whether a line can go on with it: same process, same level, where both tell."""
        told = (self.prefix.process, line.process), (self.prefix.level, line.level)
        return all(ours is None or theirs is None or ours == theirs for ours, theirs in told)


class Reader:
    """Findings of one log; `feed` every line in order, `flush` at the end or when the log has gone quiet."""

    def __init__(self) -> None:
        self.number = 0
        self.stage = Stage.UNKNOWN
        self.stack = versions.Stack()
        self._pending: _Pending | None = None
        self._last = ""
        self._half: tuple[str, Kind | None, lines.Facts] | None = None
        self._recent: deque[str] = deque(maxlen=_STACK_LINES)
        self._told: tuple[int, str | None, Stage | None, str | None] = (-_STACK_LINES, None, None, None)

    def feed(self, raw: str, at: float | None = None) -> tuple[Finding, ...]:
        """What this line, and what it completes, establishes; `at` is the line's own time where known."""
        self.number += 1
        parts = unpack(raw[:LINE_MAX_CHARS])
        if len(parts) == 1:
            return self._feed(parts[0], at)
        return tuple(found for part in parts for found in self._feed(part, at)) + self.flush()

    def pass_over(self, batch: Sequence[str]) -> bool:
        """Takes many lines at once if nothing in them can matter; else takes none and returns False."""
        # Without line breaks, so that words which a terminal cut in two are seen as well.
        joined = "".join(batch).replace("\n", "")
        held = self._pending is not None or self._half is not None or oom.may_start(self._last[-_TAIL_CHARS:])
        if held or not batch or oom.may_start(joined) or _interesting(joined):
            return False
        self.number += len(batch)
        self._recent.extend(batch[-_STACK_LINES:])
        self._last = batch[-1].rstrip()
        return True

    def flush(self) -> tuple[Finding, ...]:
        """A message whose rest never came."""
        return tuple(self._finish(self.number))

    def _feed(self, raw: str, at: float | None) -> tuple[Finding, ...]:
        if is_user_text(raw):
            return ()
        if self._pending is None and _PERIODIC in raw and _PERIODIC_END in raw:
            found = self._periodic(raw, at)
        elif self._pending is None and oom.may_start(self._last[-_TAIL_CHARS:]) and self._cut_in_two(raw):
            before = plain(self._last)
            joined = f"{before.text[-_TAIL_CHARS:]} {plain(raw).text}"
            found = tuple(self._begin(Plain(joined, before.stamp, before.process, before.level), at))
        elif self._pending is not None or self._half is not None or _interesting(raw):
            found = tuple(self._read(raw, at))
        else:
            found = ()
        self._last = raw.rstrip()
        self._recent.append(raw)
        return found

    def _cut_in_two(self, raw: str) -> bool:
        """Whether a terminal cut the words "out of memory" themselves, half of them on the line before."""
        tail = self._last[-_TAIL_CHARS:]
        return not oom.starts(tail) and oom.starts(f"{tail} {plain(raw).text[:_TAIL_CHARS]}", across=True)

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
            self._recent.clear()
            yield Finding(Kind.STARTUP, self.number, self.number, words="new process", at=at)
        self.stage = stages.after(self.stage, raw)
        self.stack = versions.learn(self.stack, raw)
        if self._pending is not None:
            yield from self._continue(self._pending, raw, at)
        else:
            yield from self._open(plain(raw), at)

    def _open(self, line: Plain, at: float | None) -> Iterator[Finding]:
        half, self._half = self._half, None
        if oom.starts(line.text):
            yield from self._begin(line, at)
            return
        read = lines.classify(line.text)
        if half is not None and (read is None or read[0] is half[1]):
            read = self._rejoined(half, line.text) or read
        if read is not None:
            yield self._finding(read[0], line, at, facts=read[1])
        for kind, facts in measured.read(line.text) if read is None else ():
            yield self._finding(kind, line, at, facts=facts)
        if lines.may_go_on(line.text):
            self._half = (line.text, read[0] if read else None, read[1] if read else {})
        told = lines.hint(line.text)
        if told is not None:
            words, one_off, stage = told
            yield Finding(
                Kind.HINT, self.number, self.number, words=words, stage=stage, one_off=one_off, stamp=line.stamp, at=at
            )

    @staticmethod
    def _rejoined(half: tuple[str, Kind | None, lines.Facts], text: str) -> tuple[Kind, lines.Facts] | None:
        """What a line and the one before it say together, if that is more than they say alone."""
        for blank in (" ", ""):
            read = lines.classify(half[0].rstrip() + blank + text.lstrip())
            if read is not None and (half[1] is None or (read[0] is half[1] and len(read[1]) > len(half[2]))):
                return read
        return None

    def _begin(self, line: Plain, at: float | None) -> Iterator[Finding]:
        self._pending = _Pending(line, self.number, at, [line.text])
        if oom.complete(line.text):
            yield from self._finish(self.number)

    def _continue(self, pending: _Pending, raw: str, at: float | None) -> Iterator[Finding]:
        line = plain(raw)
        begins = oom.starts(line.text)
        if begins or any(stop in raw for stop in _STOPS):
            yield from self._finish(self.number - 1)
            yield from self._open(line, at)
            return
        if not pending.belongs(line) or lines.classify(line.text) is not None:
            # Several processes write one log: what is not of this message is read for itself.
            yield from self._open(line, at)
            pending.texts.append("")
        else:
            pending.texts.append(line.text)
        if oom.complete("\n".join(pending.texts)) or len(pending.texts) > _CONTINUATION_LINES:
            yield from self._finish(self.number)

    def _finish(self, last_line: int) -> Iterator[Finding]:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        text, prefix = "\n".join(pending.texts), pending.prefix
        stage, one_off = self._surroundings(prefix, text)
        for message in oom.read_messages(text):
            yield Finding(
                Kind.OOM,
                pending.first_line,
                max(pending.first_line, last_line),
                facts=message.facts,
                words="the allocator's out-of-memory message",
                stage=stage or self._known_stage(),
                one_off=one_off,
                stamp=prefix.stamp,
                at=pending.at,
                process=prefix.process,
                backend=message.backend,
                uncertainties={name: float(each.uncertainty_bytes) for name, each in message.figures.items()},
                processes=message.processes,
                missing=message.missing,
                variable=message.variable,
            )

    def _surroundings(self, prefix: Plain, text: str) -> tuple[Stage | None, str | None]:
        """The stage and the one-off buffer that the stack before a message, or the message's own wrapping, names."""
        told = lines.hint(text)
        number, process, stage, one_off = self._told
        if process != prefix.process or self.number - number > _CONTINUATION_LINES:
            stack = self._stack_of(prefix)
            stage, one_off = stages.stage_of_stack(stack), stages.one_off(stack)
        # The same message is printed several times in a row: its stack need not be read again.
        self._told = (self.number, prefix.process, stage, one_off)
        return stage or (told[2] if told else None), one_off or (told[1] if told else None)

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
        recent = list(self._recent)
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
