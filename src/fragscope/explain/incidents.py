"""Findings to incidents: what belongs together is told once, however many processes print it."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fragscope.detect.parameters import Parameters
from fragscope.explain.findings import FAILURES, Finding, Kind, Stage
from fragscope.explain.pressure import SHORT_LINES, Stretch, nearly_full
from fragscope.explain.versions import Stack

_TOGETHER_LINES = 400
"""Tracebacks of eight workers are about this long."""
_TOGETHER_S = 60.0
_CONTEXT_LINES = 300
_MOST_FINDINGS = 64
_DAYS_BEFORE = (0, 31, 60, 91, 121, 152, 182, 213, 244, 274, 305, 335)
_YEAR_S = 366 * 86400.0
_NOTE_LINES = 50
"""Figures alone are judged in a note that somebody wrote; in a log, sizes with arrows are progress reports."""
_STAMP = re.compile(r"(?:(\d{4})-)?(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)")


@dataclass(frozen=True, slots=True)
class Incident:
    """Failures close in time, or a pressure that lasted; `context` is what was printed before it."""

    findings: tuple[Finding, ...]
    stats: Mapping[str, float] = field(default_factory=dict)
    startup: Mapping[str, float] = field(default_factory=dict)
    stack: Stack = field(default_factory=Stack)
    repeats: int = 0

    @property
    def first_line(self) -> int:
        """Where it begins, counted from 1."""
        return min(each.first_line for each in self.findings)

    @property
    def last_line(self) -> int:
        """Where it ends."""
        return max(each.last_line for each in self.findings)

    @property
    def lines(self) -> int:
        """How many lines of the log it covers."""
        return self.last_line - self.first_line + 1

    def of(self, *kinds: Kind) -> tuple[Finding, ...]:
        """Its findings of these kinds, in the order of the log."""
        return tuple(each for each in self.findings if each.kind in kinds)

    @property
    def oom(self) -> Finding | None:
        """The allocator's message with the most figures; ranks print their own."""
        return max(self.of(Kind.OOM), key=lambda each: len(each.facts), default=None)

    @property
    def stage(self) -> Stage:
        """How far the engine had come."""
        told = next((each.stage for each in self.of(Kind.HINT) if each.stage is not None), None)
        told = told or next((each.stage for each in self.findings if each.stage is not None), None)
        if told is not None:
            return told
        if any("initialization failed" in each.words for each in self.findings) or self.of(Kind.REFUSAL):
            return Stage.STARTUP
        return Stage.UNKNOWN

    @property
    def one_off(self) -> str | None:
        """The one-off buffer that a stack or a warm-up names."""
        return next((each.one_off for each in self.findings if each.one_off is not None), None)

    @property
    def facts(self) -> dict[str, float]:
        """Its numbers, by the names of docs/explain.md; the failure's own come before its surroundings'."""
        facts: dict[str, float] = {}
        oom = self.oom
        sources = [oom.facts] if oom is not None else []
        # Another rank's message is another card's account: its figures are not mixed with these.
        sources += [each.facts for each in self.findings if each.kind in FAILURES and each.kind is not Kind.OOM]
        sources += [each.facts for each in self.of(Kind.DUMP)]
        sources += [self.stats]
        sources += [each.facts for each in self.of(Kind.MEASURED, Kind.SERIES, Kind.SMI)]
        sources += [self.startup]
        for source in sources:
            facts |= {name: value for name, value in source.items() if name not in facts}
        return facts


class Collector:
    """Groups findings as they come; `observe` and `close` yield what is complete. Bounded memory.

    `stack` is what the log has told of versions so far; whoever reads the lines sets it.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._p = parameters
        self._open: list[Finding] = []
        self._seen = 0
        self._stats: Finding | None = None
        self._startup: dict[str, float] = {}
        self.stack = Stack()
        self._stretches: dict[float, Stretch] = {}
        self._stats_count = 0
        self._loose: list[Finding] = []
        self._failures = 0
        self._refused: list[Finding] = []
        self._refused_seen = 0

    def observe(self, finding: Finding) -> Iterator[Incident]:
        """Takes a finding; yields the incidents that it ends."""
        if finding.kind is Kind.STARTUP:
            yield from self._start_up(finding)
        elif finding.kind in (Kind.STATS, Kind.PREEMPTION):
            yield from self._observe_stats(finding)
        elif finding.kind in (Kind.MEASURED, Kind.SERIES, Kind.SMI) and not self._open:
            self._loose = [*self._loose, finding][-_MOST_FINDINGS:]
        elif finding.kind is Kind.REQUEST_TOO_LONG:
            yield from self._observe_refused(finding)
        else:
            yield from self._observe_failure(finding)

    def close(self, lines: int) -> Iterator[Incident]:
        """What is left at the end of a log of that many lines."""
        yield from self._close_open()
        yield from self._close_refused()
        yield from self._close_pressures(final=True)
        if self._loose and not self._failures and lines <= _NOTE_LINES:
            yield Incident(tuple(self._loose), self._last_stats(), dict(self._startup), self.stack)
            self._loose = []

    def _start_up(self, finding: Finding) -> Iterator[Incident]:
        if finding.facts:
            self._startup |= finding.facts
            return
        yield from self._close_open()
        yield from self._close_pressures()
        self._startup, self._stats = {}, None

    def _observe_stats(self, finding: Finding) -> Iterator[Incident]:
        if self._open and not _together(self._open[-1], finding):
            yield from self._close_open()
        self._stats, self._stats_count = finding, self._stats_count + 1
        # Each engine on the log has a state of its own; one that waits is not calmed by a neighbour that idles.
        engine = finding.facts.get("engine", -1.0)
        stretch = self._stretches.setdefault(engine, Stretch(self._p))
        if stretch.ends_with(finding):
            del self._stretches[engine]
            yield from self._told(stretch)
            self._stretches[engine] = stretch = Stretch(self._p)
        stretch.take(finding)

    def _observe_refused(self, finding: Finding) -> Iterator[Incident]:
        """A refused request is the client's affair and never part of an engine's failure."""
        self._failures += 1
        if self._refused and not _together(self._refused[-1], finding):
            yield from self._close_refused()
        self._refused = [*self._refused[: _MOST_FINDINGS - 1], finding]
        self._refused_seen += 1

    def _close_refused(self) -> Iterator[Incident]:
        findings, seen = tuple(self._refused), self._refused_seen
        self._refused, self._refused_seen = [], 0
        if findings:
            yield Incident(findings, {}, {}, self.stack, seen - len(findings))

    def _observe_failure(self, finding: Finding) -> Iterator[Incident]:
        if self._open and not _together(self._open[-1], finding):
            yield from self._close_open()
        if finding.kind in FAILURES:
            self._failures += 1
        self._seen += 1
        if len(self._open) < _MOST_FINDINGS:
            self._open.append(finding)
        else:
            self._open[-1] = finding

    def _close_open(self) -> Iterator[Incident]:
        findings, self._open = tuple(self._open), []
        repeats, self._seen = self._seen - len(findings), 0
        if not any(each.kind in FAILURES for each in findings) and not any(each.kind is Kind.DUMP for each in findings):
            return
        if all(each.kind in (Kind.SHUTDOWN, Kind.HINT) for each in findings):
            # A stop that somebody asked for, and that broke nothing, is no incident.
            return
        near = tuple(each for each in self._loose if findings[0].first_line - each.last_line <= _CONTEXT_LINES)
        self._loose = []
        stats = self._last_stats(findings[0].first_line)
        yield Incident(
            findings + near if _needs_help(findings) else findings, stats, dict(self._startup), self.stack, repeats
        )

    def _close_pressures(self, *, final: bool = False) -> Iterator[Incident]:
        stretches, self._stretches = list(self._stretches.values()), {}
        short = final and self._stats_count <= SHORT_LINES and not self._failures
        last = self._stats
        if short and last is not None and not any(each.kind for each in stretches) and nearly_full(last.facts, self._p):
            yield Incident((last,), last.facts, dict(self._startup), self.stack)
            return
        for stretch in stretches:
            yield from self._told(stretch, short=short)

    def _told(self, stretch: Stretch, *, short: bool = False) -> Iterator[Incident]:
        if stretch.kind is not None and (short or stretch.lasted):
            yield Incident(tuple(stretch.findings), stretch.findings[-1].facts, dict(self._startup), self.stack)

    def _last_stats(self, line: int | None = None) -> dict[str, float]:
        if self._stats is None or (line is not None and line - self._stats.last_line > _CONTEXT_LINES):
            return {}
        return dict(self._stats.facts)


def _needs_help(findings: tuple[Finding, ...]) -> bool:
    return any(each.kind is Kind.OOM and "tried" not in each.facts for each in findings)


def _together(earlier: Finding, later: Finding) -> bool:
    before, after = seconds(earlier), seconds(later)
    if before is not None and after is not None and before != after:
        apart = abs(after - before)
        # Printed times have no year: the last of December lies next to the first of January.
        return min(apart, abs(_YEAR_S - apart)) <= _TOGETHER_S
    return later.first_line - earlier.last_line <= _TOGETHER_LINES


def seconds(finding: Finding) -> float | None:
    """A finding's time on a scale good enough for differences; None where nothing was printed."""
    if finding.at is not None:
        return finding.at
    match = _STAMP.search(finding.stamp or "")
    if match is None:
        return None
    month, day, hour, minute, second = (int(group) for group in match.groups()[1:])
    days = _DAYS_BEFORE[min(max(month, 1), 12) - 1] + day
    return (days * 24 + hour) * 3600.0 + minute * 60 + second
