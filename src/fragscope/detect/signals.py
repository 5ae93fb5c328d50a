"""Conditions: what is true now, one function each, over the window's good polls."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fragscope.detect.engine import EngineWindow, Poll, Total
from fragscope.detect.parameters import Parameters
from fragscope.detect.statistics import wilson
from fragscope.detect.window import Answer, TargetWindow
from fragscope.model import Condition, Evidence


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition that holds now, with the number that says so."""

    condition: Condition
    evidence: Evidence


def target_findings(window: TargetWindow, at: float, p: Parameters, *, fresh: bool) -> list[Finding]:
    """Conditions of the server as a whole; without a fresh good poll only its state can be told."""
    rows = window.totals.window() if fresh else ()
    found = [engine_down(window), starting(window, at, p), *request_findings(rows, p)]
    return [finding for finding in found if finding is not None]


def request_findings(rows: Collection[Total], p: Parameters) -> list[Finding | None]:
    """What the answers of the window say; most windows hold nothing but successes."""
    rejected = client_error = aborted = 0.0
    for row in rows:
        outcomes = row.outcomes
        rejected += outcomes.admission_rejected
        client_error += outcomes.client_error
        aborted += outcomes.aborted
    if max(rejected, client_error, aborted) < p.gate_min_failures:
        return []
    answered = sum(row.outcomes.answered for row in rows)
    return [
        admission_limit(rejected, answered, p),
        client_errors(client_error, answered, p),
        client_aborts(aborted, answered, p),
    ]


def engine_findings(window: EngineWindow, p: Parameters, *, fresh: bool) -> list[Finding]:
    """Conditions of one engine; without a fresh good poll only its state can be told."""
    found = [sleeping(window)]
    if fresh:
        polls = window.polls.window()
        found += [stalled(window, p), kv_exhausted(window, p), scheduler_limit(polls, p)]
    return [finding for finding in found if finding is not None]


def engine_down(window: TargetWindow) -> Finding | None:
    """Two refused or reset polls, or two failing health checks, in a row."""
    if not window.dead and not (window.process is None and window.ever_answered):
        return None
    if window.last_polled is Answer.UNHEALTHY:
        words = "/metrics answers, but /health says that the engine is dead; its gauges are frozen"
    else:
        words = "connections are refused: the server process is gone"
    return _finding(Condition.ENGINE_DOWN, None, "", words)


def starting(window: TargetWindow, at: float, p: Parameters) -> Finding | None:
    """Never answered, or no token yet in a young process."""
    if window.process is None:
        if window.ever_answered:
            return None
        return _finding(Condition.STARTING, None, "", "nothing has answered at its address yet")
    if window.dead or window.process.generated or window.process.age_s(at) >= p.starting_s:
        return None
    age_s = max(0.0, window.process.age_s(at))
    return _finding(Condition.STARTING, age_s, "s", f"no token yet in a process that is {age_s:.0f} s old")


def sleeping(window: EngineWindow) -> Finding | None:
    """Sleep mode has given the memory back on purpose."""
    if window.reading is None or not window.reading.sleeping:
        return None
    return _finding(Condition.SLEEPING, None, "", "the engine sleeps: its memory was given back on purpose")


def stalled(window: EngineWindow, p: Parameters) -> Finding | None:
    """Requests wait, none runs, the pool is empty and no token moves: memory is innocent."""
    last = window.polls.last()
    if window.stalled_since is None or last is None or last.at - window.stalled_since < p.stalled_s:
        return None
    seconds = last.at - window.stalled_since
    words = f"{last.waiting:.0f} requests have waited {seconds:.0f} s with none running and no token made"
    return _finding(Condition.STALLED, seconds, "s", words)


def kv_exhausted(window: EngineWindow, p: Parameters) -> Finding | None:
    """The pool is full for a good share of the busy time, and requests are evicted or wait for it."""
    last = window.polls.last()
    if last is None or window.last_full_at is None or last.at - window.last_full_at > p.kv_recent_s:
        return None
    share, seen_s, preemptions = window.busy()
    if share < p.kv_full_share or seen_s < p.kv_min_seen_s or (preemptions <= 0 and last.waiting <= 0):
        return None
    words = f"the KV pool was full at {100 * share:.0f} % of the busy polls, with {preemptions:.0f} preemptions"
    return _finding(Condition.KV_EXHAUSTED, share, "ratio", words)


def scheduler_limit(polls: Sequence[Poll], p: Parameters) -> Finding | None:
    """Requests wait although the pool has room, and the number running stands still."""
    if len(polls) < 2 or polls[-1].waiting <= 0 or polls[-1].at - polls[0].at < p.scheduler_min_s:
        return None
    running = [poll.running for poll in polls]
    usage = max((poll.usage_ratio for poll in polls if poll.usage_ratio is not None), default=None)
    blocked = all(poll.waiting > 0 for poll in polls) and not any(poll.preemptions > 0 for poll in polls)
    level = min(running) > 0 and max(running) - min(running) <= 1
    if usage is None or usage >= p.scheduler_usage_ratio or not (blocked and level):
        return None
    words = (
        f"{polls[-1].waiting:.0f} requests wait at {100 * usage:.1f} % KV usage while {running[-1]:.0f} run: "
        "a limit of the scheduler, not memory"
    )
    return _finding(Condition.SCHEDULER_LIMIT, polls[-1].waiting, "requests", words)


def admission_limit(k: float, answered: float, p: Parameters) -> Finding | None:
    """A queue limit turns requests away."""
    share = _gated_share(k, answered, p.admission_ratio, p)
    if share is None:
        return None
    words = f"a queue limit refused {k:.0f} requests in the last seconds ({100 * share:.1f} % of the answers)"
    return _finding(Condition.ADMISSION_LIMIT, share, "ratio", words)


def client_errors(k: float, answered: float, p: Parameters) -> Finding | None:
    """Clients send what the server must refuse."""
    share = _gated_share(k, answered, p.client_errors_ratio, p)
    if share is None:
        return None
    return _finding(
        Condition.CLIENT_ERRORS,
        share,
        "ratio",
        f"{100 * share:.1f} % of the answers are 4xx: the clients' fault",
    )


def client_aborts(k: float, answered: float, p: Parameters) -> Finding | None:
    """Clients hang up; vLLM counts them as successes."""
    share = _gated_share(k, answered, p.client_aborts_ratio, p)
    if share is None:
        return None
    words = f"at least {k:.0f} clients hung up in the last seconds ({100 * share:.1f} % of the answers)"
    return _finding(Condition.CLIENT_ABORTS, share, "ratio", words)


def _gated_share(k: float, answered: float, floor: float, p: Parameters) -> float | None:
    """The share of k among all answers if it is surely above `floor`, else None."""
    n = max(k, answered)
    if k < p.gate_min_failures or wilson(k, n, p.gate_z)[0] <= floor:
        return None
    return k / n


def _finding(condition: Condition, value: float | None, unit: str, words: str) -> Finding:
    return Finding(condition, Evidence(str(condition), value, unit, 0.0, str(condition), words))


_STRONGEST_FIRST = tuple(Condition)


class Lingering:
    """Keeps windowed conditions true for a while after they last held; states are exact."""

    _EXACT = frozenset({Condition.ENGINE_DOWN, Condition.STARTING, Condition.SLEEPING})

    def __init__(self, parameters: Parameters) -> None:
        self._linger_s = parameters.condition_linger_s
        self._held: dict[Condition, tuple[float, Finding]] = {}

    def update(self, at: float, findings: list[Finding]) -> list[Finding]:
        """The findings that hold now or held a moment ago, strongest first."""
        if not findings and not self._held:
            return []
        now = {finding.condition for finding in findings}
        for finding in findings:
            self._held[finding.condition] = (at, finding)
        self._held = {c: kept for c, kept in self._held.items() if c in now or self._keep(c, at - kept[0])}
        return [self._held[condition][1] for condition in _STRONGEST_FIRST if condition in self._held]

    def _keep(self, condition: Condition, age_s: float) -> bool:
        return condition not in self._EXACT and age_s < self._linger_s
