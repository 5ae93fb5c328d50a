"""A whole log, line by line, to incidents with their cause: what `explain` prints."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fragscope.arithmetic import account
from fragscope.detect.parameters import Parameters
from fragscope.detect.words import SENTENCES
from fragscope.explain.accounting import Part, parts
from fragscope.explain.findings import Finding, Kind
from fragscope.explain.incidents import Collector, Incident
from fragscope.explain.judge import Judged, judge
from fragscope.explain.reader import Reader
from fragscope.explain.remedies import Advice, advise
from fragscope.model import MEMORY_CAUSES, Cause, Condition

ALARMING = frozenset({*MEMORY_CAUSES, Condition.KV_EXHAUSTED, Cause.HOST_OOM, Cause.STARTUP_NO_MEMORY})
"""Causes for which `explain` ends with exit code 1 (docs/commands.md)."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """One incident, judged: its cause, how sure, why, what to do, and how the card was divided."""

    incident: Incident
    judged: Judged
    advice: Advice
    division: tuple[Part, ...]

    @property
    def sentence(self) -> str:
        """The cause in one sentence; a thin stranded share is called mixed."""
        if self.judged.cause == Cause.FRAGMENTATION and self.judged.probability < _CLEAR:
            return "Mixed: the card was nearly full, and what was left of it was in pieces."
        return _OWN_SENTENCES.get(self.judged.cause, "") or SENTENCES[self.judged.cause]


_CLEAR = 0.9
_OWN_SENTENCES: dict[str, str] = {
    Cause.MEMORY_UNDETERMINED: "A request for GPU memory failed, and the text does not hold what would say why.",
}


class PostMortem:
    """Feed it the lines of one log in order; it yields what it explains as soon as an incident has ended."""

    def __init__(self, parameters: Parameters) -> None:
        self._p = parameters
        self._reader = Reader()
        self._collector = Collector(parameters)

    def feed(self, line: str, at: float | None = None) -> Iterator[Explanation]:
        """Takes a line; `at` is its own time in unix seconds where the wrapping told it."""
        for finding in self._reader.feed(line, at):
            yield from self.take(finding)

    def feed_batch(self, lines: Sequence[str]) -> Iterator[Explanation]:
        """Takes lines in order, faster where none of them matters."""
        if self._reader.pass_over(lines):
            return
        for line in lines:
            yield from self.feed(line)

    def take(self, finding: Finding) -> Iterator[Explanation]:
        """Takes a finding that was made elsewhere, such as the fact of a recording's sample."""
        self._collector.stack = self._reader.stack
        for incident in self._collector.observe(finding):
            yield self._explain(incident)

    def close(self) -> Iterator[Explanation]:
        """What is left at the end."""
        for finding in self._reader.flush():
            yield from self.take(finding)
        for incident in self._collector.close(self._reader.number):
            yield self._explain(incident)

    def _explain(self, incident: Incident) -> Explanation:
        judged = judge(incident, self._p)
        division = parts(account(incident.oom.facts)) if incident.oom is not None else ()
        return Explanation(incident, judged, advise(incident, judged, self._p), division)


def evidence_of(explanation: Explanation) -> list[tuple[str, str]]:
    """What decided, as (signal, sentence): the reasons, then what was missing."""
    rows = [("arithmetic" if explanation.incident.oom else "log", each) for each in explanation.judged.reasons]
    oom = explanation.incident.oom
    if oom is not None and oom.missing:
        rows.append(("missing", f"Not in the text: {', '.join(oom.missing)}."))
    processes = {each.process for each in explanation.incident.of(Kind.OOM) if each.process}
    if len(processes) > 1:
        rows.append(("ranks", f"{len(processes)} processes report it: one incident."))
    return rows
