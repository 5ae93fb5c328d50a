"""How requests ended: vLLM's counters turned into outcomes that nobody counted twice.

vLLM counts a refused stream and a client that hung up as 2xx, and a queue-limit 503 as 5xx; the
arithmetic that takes these apart is explained in docs/detector.md.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from fragscope.model import EngineReading, Outcome

_COUNTERS = ("2xx", "4xx", "5xx", "rejected", "errors", "aborts", "first", "finished")


@dataclass(frozen=True, slots=True)
class Increments:
    """Outcomes since the poll before; `answered` is every HTTP answer, the base of the conditions' shares."""

    ok: float = 0.0
    server_error: float = 0.0
    admission_rejected: float = 0.0
    client_error: float = 0.0
    aborted: float = 0.0
    answered: float = 0.0

    def by_outcome(self) -> Iterable[tuple[Outcome, float]]:
        """The outcomes that happened, with their amounts."""
        pairs = (
            (Outcome.OK, self.ok),
            (Outcome.SERVER_ERROR, self.server_error),
            (Outcome.ADMISSION_REJECTED, self.admission_rejected),
            (Outcome.CLIENT_ERROR, self.client_error),
            (Outcome.ABORTED, self.aborted),
        )
        return ((outcome, amount) for outcome, amount in pairs if amount > 0)


NOTHING = Increments()


class Ledger:
    """Follows one server's request counters through resets, late counters and refused streams.

    Levels that may fall between polls (refusals lead their 503 by a poll, and some never become one)
    are exported as increases of their running maximum: clamping each interval at 0 would invent
    failures.
    """

    def __init__(self) -> None:
        self._last: dict[str, float] | None = None
        self._open_new_process()

    def _open_new_process(self) -> None:
        self._sums = dict.fromkeys(_COUNTERS, 0.0)
        self._highest = {"ok": 0.0, "server": 0.0, "aborted": 0.0}

    def resume(self) -> None:
        """The next call sets the baseline again."""
        self._last = None
        self._open_new_process()

    def advance(self, engines: tuple[EngineReading, ...], *, restarted: bool, counting: bool) -> Increments:
        """Outcomes since the last call; the first call only sets the baseline.

        `counting` is False while `/health` fails: what a dead engine's front end answers is no evidence
        about memory.
        """
        page = _totals(engines)
        last = self._last
        if restarted:
            self._open_new_process()
            last = dict.fromkeys(page, 0.0)
        if last is None or not counting:
            self._last = {**(last or {}), **page}
            return NOTHING
        deltas = dict.fromkeys(_COUNTERS, 0.0)
        now = self._last = dict(last)
        for name, value in page.items():
            before = last.get(name, value)
            # A row that is missing from one page lowers a sum, and its return would look like a burst.
            now[name] = max(value, before)
            if value > before:
                deltas[name] = value - before
                self._sums[name] += value - before
        return self._increments(deltas, _in_flight(engines), page.keys())

    def _increments(self, deltas: dict[str, float], in_flight: float, shown: Collection[str]) -> Increments:
        sums = self._sums
        http = "2xx" in shown
        streamed_refusals = max(0.0, sums["rejected"] - sums["5xx"]) if http else 0.0
        aborted = self._rise("aborted", self._hang_ups(in_flight, streamed_refusals, shown))
        served = sums["2xx"] if http else sums["finished"] - sums["errors"]
        ok = self._rise("ok", served - self._highest["aborted"] - streamed_refusals)
        server = self._rise("server", sums["5xx"] - sums["rejected"]) if http else 0.0
        answered = deltas["2xx"] + deltas["4xx"] + deltas["5xx"] if http else deltas["finished"]
        return Increments(
            ok=ok,
            server_error=server + deltas["errors"],
            admission_rejected=deltas["rejected"],
            client_error=deltas["4xx"],
            aborted=aborted,
            answered=answered,
        )

    def _hang_ups(self, in_flight: float, streamed_refusals: float, shown: Collection[str]) -> float:
        """The larger of two lower bounds; a page that lacks one of their parts says nothing about them."""
        sums, bounds = self._sums, [0.0]
        if "finished" in shown:
            bounds.append(sums["aborts"])
            if "first" in shown:
                bounds.append(sums["first"] - sums["finished"] - in_flight)
            if "2xx" in shown:
                bounds.append(sums["2xx"] - sums["finished"] - streamed_refusals)
        return max(bounds)

    def _rise(self, name: str, level: float) -> float:
        rise = max(0.0, level - self._highest[name])
        self._highest[name] += rise
        return rise


def _totals(engines: tuple[EngineReading, ...]) -> dict[str, float]:
    """The server's counters now; a counter that no engine shows is left out."""
    totals: dict[str, float] = {}
    for engine in engines:
        if engine.http_total is not None:
            for name in ("2xx", "4xx", "5xx"):
                totals[name] = engine.http_total.get(name, 0.0)
        if engine.admission_rejections_total is not None:
            totals["rejected"] = engine.admission_rejections_total
        if engine.finished_total is not None:
            aborts = engine.finished_total.get("abort", 0.0)
            _add(totals, "errors", engine.finished_total.get("error", 0.0))
            _add(totals, "aborts", aborts)
            _add(totals, "finished", sum(engine.finished_total.values()) - aborts)
        if engine.first_tokens_total is not None:
            _add(totals, "first", engine.first_tokens_total)
    return totals


def _add(totals: dict[str, float], name: str, amount: float) -> None:
    totals[name] = totals.get(name, 0.0) + amount


def _in_flight(engines: tuple[EngineReading, ...]) -> float:
    return sum((e.running or 0.0) + (e.waiting or 0.0) for e in engines)
