"""Results for people: tables and colours where there is a terminal, plain lines where there is none."""

import time
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fragscope.model import Cause, Evidence, Phase, Verdict

_STYLES = {
    Phase.UNKNOWN: "dim",
    Phase.CLEAR: "green",
    Phase.WATCH: "yellow",
    Phase.SUSPECTED: "bold red",
    Phase.CONFIRMED: "bold white on red",
}


def console() -> Console:
    """Standard output; a pipe gets whole lines, however long."""
    return Console(highlight=False, soft_wrap=True)


def say(out: Console, text: str, style: str | None = None) -> None:
    """One line."""
    out.print(Text(text, style=style or ""))


def change_line(verdict: Verdict, since_s: float | None = None) -> Text:
    """One verdict on one line."""
    at = time.strftime("%H:%M:%S", time.gmtime(verdict.at)) if since_s is None else f"{since_s:6.1f}s"
    line = Text(f"{at}  ")
    line.append(f"{verdict.phase:<9}", style=_STYLES[verdict.phase])
    line.append(f"  {who(verdict)}  ")
    line.append(what(verdict), style="bold")
    line.append(f"  {verdict.sentence}")
    return line


def who(verdict: Verdict) -> str:
    """Target, engine and model."""
    if verdict.engine is None:
        return verdict.target
    return f"{verdict.target}/{verdict.engine}"


def what(verdict: Verdict) -> str:
    """The cause, and the other conditions beside it."""
    others = [str(condition) for condition in verdict.conditions if str(condition) != verdict.cause]
    return verdict.cause + (f" (+ {', '.join(others)})" if others else "")


def final_block(out: Console, verdict: Verdict, seen: Mapping[str, list[float]]) -> None:
    """The last verdict of one engine: what it is, why, what to do, what was missing."""
    line = Text("\nfinal  ")
    line.append(str(verdict.phase), style=_STYLES[verdict.phase])
    line.append(f"  {who(verdict)}  ")
    line.append(what(verdict), style="bold")
    out.print(line)
    say(out, f"  {verdict.sentence}")
    say(out, f"  Do: {verdict.remedy}")
    evidence_lines(out, verdict.evidence)
    if verdict.missing:
        say(out, f"  Missing evidence: {', '.join(verdict.missing)}", "dim")
    memory = {cause: p for cause, p in verdict.probabilities.items() if p >= 0.005 and cause != Cause.NONE}
    if memory:
        ordered = sorted(memory.items(), key=lambda item: -item[1])
        say(out, "  Probabilities: " + ", ".join(f"{cause} {100 * p:.0f} %" for cause, p in ordered))
    if seen:
        say(out, f"  Seen on the way: {', '.join(sorted(seen))}", "dim")


def evidence_lines(out: Console, evidence: Iterable[Evidence], indent: str = "  ") -> None:
    """What spoke for memory (+) and against it (-), in nats, and what weighs nothing but is worth knowing."""
    for row in evidence:
        say(out, f"{indent}{row.weight:+5.1f}  {row.sentence}" if row.weight else f"{indent}       {row.sentence}")


def table(out: Console, title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """A table of texts."""
    drawn = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        drawn.add_column(column, overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    out.print(drawn, soft_wrap=False)
