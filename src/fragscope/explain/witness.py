"""What one target's log says, as the facts that the detector takes; it never sees text."""

from collections.abc import Iterable

from fragscope.arithmetic import ONE_OFF
from fragscope.explain.findings import Finding, Kind
from fragscope.explain.reader import Reader
from fragscope.model import Fact, LogFact

QUIET_S = 1.0
"""A writer that has said nothing for this long has no more lines of the same message."""

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
        facts = finding.facts if finding.one_off is None else {**finding.facts, ONE_OFF: 1.0}
        return LogFact(at, self._target, what, facts, words)
