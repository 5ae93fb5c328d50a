"""What a single log line of vLLM establishes: an out-of-memory error, a stop asked for, a death."""

from fragscope.explain.oom import read_oom
from fragscope.model import Fact, LogFact

_SHUTDOWN = ("API server: shutdown triggered", "trigger received signal=SIG")
_DEATH = ("engine core exited unexpectedly", "EngineCore encountered a fatal error", "EngineDeadError")


def read_line(at: float, target: str, line: str) -> LogFact | None:
    """The fact in a line, or None.

    Other `[shutdown]` lines, 'send sigterm to process EngineCore' among them, follow crashes as well and
    prove nothing.
    """
    if "out of memory" in line:
        facts = read_oom(line)
        if facts is not None:
            return LogFact(at, target, Fact.OOM, facts, "the allocator's out-of-memory message")
    for what, markers in ((Fact.SHUTDOWN, _SHUTDOWN), (Fact.ENGINE_DEATH, _DEATH)):
        words = next((marker for marker in markers if marker in line), None)
        if words is not None:
            return LogFact(at, target, what, {}, words)
    return None
