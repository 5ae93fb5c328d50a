"""`replay`: recordings to a timeline and final verdicts, with the exit code they deserve."""

import statistics
import sys
from collections.abc import Callable, Iterator

from rich.console import Console

from fragscope import report
from fragscope.detect.parameters import Parameters
from fragscope.model import Evidence, Phase, Verdict
from fragscope.recording import Line, Tally, read_lines
from fragscope.replay import Alarms, Replayer, Score, Timeline, rank, replay, score
from fragscope.wire import encode, verdict_object


def replay_files(
    files: list[str], parameters_of: Callable[[str], Parameters], out: Console, *, as_json: bool, scored: bool
) -> int:
    """Prints the timeline and the final verdicts; returns 0, 1, 2 (nothing readable) or 3.

    Raises OSError where a file cannot be opened.
    """
    tally = Tally()
    replayer, timeline, alarms, told = Replayer(parameters_of), Timeline(), Alarms(), _Told()
    for assessment in replay(_all_lines(files, tally), replayer):
        alarms.observe(assessment)
        for verdict in timeline.observe(assessment):
            if as_json:
                _print(out, {"event": "change", **verdict_object(verdict)})
            else:
                out.print(report.change_line(verdict))
                report.evidence_lines(out, told.news(verdict), " " * 10)
    finals = timeline.finals()
    for verdict, seen in finals:
        if as_json:
            _print(out, {"event": "final", **verdict_object(verdict), "causes_seen": seen})
        else:
            report.final_block(out, verdict, seen)
    if scored:
        _print_score(out, score(replayer.labels, alarms.all), as_json=as_json)
    note = tally.sentence()
    if note is not None:
        print(f"fragscope: {note}", file=sys.stderr)
    if not finals:
        print(
            f"fragscope: {', '.join(files)} holds nothing to replay: no exposition and no sample line",
            file=sys.stderr,
        )
        return 2
    if rank(timeline.highest) >= rank(Phase.SUSPECTED):
        return 1
    return 3 if any(verdict.phase is Phase.UNKNOWN for verdict, _ in finals) else 0


class _Told:
    """Evidence that was printed already: an episode's is printed when it is weighed, and when that changes."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str | None], tuple[Evidence, ...]] = {}

    def news(self, verdict: Verdict) -> tuple[Evidence, ...]:
        """The evidence of the verdict's episode, if it is not what was printed last."""
        weighed = tuple(row for row in verdict.evidence if row.weight or row.signal == "correction")
        key = verdict.target, verdict.engine
        if weighed == self._last.get(key, ()):
            return ()
        self._last[key] = weighed
        return weighed


def _all_lines(files: list[str], tally: Tally) -> Iterator[Line]:
    for file in files:
        yield from read_lines(file, tally)


def _print(out: Console, plain: dict[str, object]) -> None:
    out.print(encode(plain), markup=False)


def _print_score(out: Console, result: Score, *, as_json: bool) -> None:
    delay_s = statistics.median(result.delays_s) if result.delays_s else None
    if as_json:
        plain = {
            "event": "score",
            "labels": result.labels,
            "found": result.found,
            "cause_right": result.cause_right,
            "alarms": result.alarms,
            "false_alarms": result.false_alarms,
            "delay_median_s": delay_s,
        }
        _print(out, plain)
        return
    delay = "" if delay_s is None else f", {delay_s:.0f} s after they began (median)"
    report.say(
        out,
        f"\nscore  {result.found} of {result.labels} labelled memory episodes found{delay}, "
        f"{result.cause_right} with the right cause; {result.false_alarms} of {result.alarms} alarms were false",
    )
