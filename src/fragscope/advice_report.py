"""Advice for people and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from fragscope.advise.advice import Advice, Effect, Range, gib, percent
from fragscope.advise.answers import EngineAnswer
from fragscope.advise.blocks import costs_words
from fragscope.advise.compare import Comparison, Row
from fragscope.plotting import hour_bars, waste_bars
from fragscope.report import say, table
from fragscope.wire import encode

_WORDS = {True: "change", False: "no change", None: "not known"}
_STYLES = {True: "bold yellow", False: "green", None: "dim"}


def show(
    out: Console, answers: Sequence[EngineAnswer], fleet: Advice | None, notes: Sequence[str], *, as_json: bool
) -> None:
    """All of it: a table per engine, then the reasons, then pictures in text."""
    if as_json:
        engines = [_engine_object(answer) for answer in answers]
        plain = {
            "engines": engines,
            "fleet": [_advice_object(fleet)] if fleet is not None else [],
            "notes": list(notes),
        }
        out.print(encode(plain), markup=False)
        return
    for answer in answers:
        _show_engine(out, answer)
    if fleet is not None:
        say(out, "\nAll engines", "bold")
        _show_advice(out, fleet)
    for note in notes:
        say(out, f"note: {note}", "dim")


def _show_engine(out: Console, answer: EngineAnswer) -> None:
    title = "Lengths"
    if answer.target is not None:
        version = answer.version or "of unknown version"
        title = f"{answer.target}/{answer.engine}  {answer.model_name or 'unnamed model'}, vLLM {version}"
    say(out, f"\n{title}", "bold")
    for fact in answer.facts:
        say(out, f"  {fact}")
    rows = [(str(a.topic), _WORDS[a.change], "; ".join(a.flags) or "-", effect_words(a.effect)) for a in answer.advice]
    short = [
        (topic, change, flags if len(flags) < 50 else "see below", effect) for topic, change, flags, effect in rows
    ]
    table(out, "", ("about", "advice", "set", "expected effect"), short)
    for advice in answer.advice:
        _show_advice(out, advice)
    if answer.waste:
        say(out, "\n  used slots that hold no token, by block size", "bold")
        for line in waste_bars(answer.waste):
            say(out, line)
        now = next(row for row in answer.waste if row.current)
        say(out, f"  at {answer.block_size}: {costs_words(now.costs)}", "dim")
    hours = list(hour_bars(answer.hours))
    if len(hours) > 1:
        say(out, "\n  least free VRAM by hour of the day (UTC)", "bold")
        for line in hours:
            say(out, line)


def _show_advice(out: Console, advice: Advice) -> None:
    say(out, f"\n  {advice.topic}: {_WORDS[advice.change]}", _STYLES[advice.change])
    say(out, f"    {advice.sentence}")
    for flag in advice.flags:
        say(out, f"    set: {flag}", "bold")
    if advice.effect is not None:
        say(out, f"    expected: {advice.effect.what} {effect_words(advice.effect)}")
    for caveat in advice.caveats:
        say(out, f"    but: {caveat}", "dim")
    if advice.missing:
        say(out, f"    missing: {', '.join(advice.missing)}", "dim")


def effect_words(effect: Effect | None) -> str:
    """An effect with its range, signed."""
    if effect is None:
        return "-"
    value = effect.value
    return (
        f"{_amount(value.point, effect.unit)} ({_amount(value.low, effect.unit)} to {_amount(value.high, effect.unit)})"
    )


def _amount(value: float, unit: str, *, signed: bool = True) -> str:
    sign = "+" if signed and value > 0 else ""
    if unit == "ratio":
        return sign + percent(value)
    if unit == "bytes":
        return sign + gib(value)
    number = f"{sign}{value:,.3g}" if abs(value) < 1000 else f"{sign}{value:,.0f}"
    return f"{number} {unit}".rstrip()


def show_comparison(out: Console, comparison: Comparison, notes: Sequence[str], *, as_json: bool) -> None:
    """Before and after."""
    if as_json:
        rows = [{**asdict(row), "outcome": str(row.outcome), "verdict": row.verdict} for row in comparison.rows]
        settings = {"changed": list(comparison.changed), "caveats": list(comparison.caveats), "notes": list(notes)}
        out.print(encode({"compare": rows, **settings}), markup=False)
        return
    for change in comparison.changed:
        say(out, f"changed: {change}")
    if not comparison.changed:
        say(out, "changed: no setting that the engines show")
    cells = [(row.name, _range(row, row.a), _range(row, row.b), row.verdict) for row in comparison.rows]
    table(out, "", ("figure", "A", "B", "B is"), cells)
    for caveat in (*comparison.caveats, *notes):
        say(out, f"note: {caveat}", "dim")


def _range(row: Row, value: Range | None) -> str:
    if value is None:
        return "not known"
    point, low, high = (_amount(part, row.unit, signed=False) for part in (value.point, value.low, value.high))
    return point if low == high else f"{point} ({low.removesuffix(f' {row.unit}')} to {high})"


def _advice_object(advice: Advice) -> dict[str, Any]:
    plain = asdict(advice)
    return {**plain, "topic": str(advice.topic)}


def _engine_object(answer: EngineAnswer) -> dict[str, Any]:
    lengths = answer.lengths
    seen: Mapping[str, Any] | None = None
    if lengths is not None:
        seen = {
            "count": lengths.count,
            "prompt_mean_tokens": lengths.prompt_mean_tokens,
            "output_mean_tokens": lengths.output_mean_tokens,
            "context_tokens": asdict(lengths.context_tokens),
        }
    waste = [
        {
            "block_size": row.waste.block_size,
            **asdict(row.waste.ratio),
            "ceiling": row.waste.ceiling,
            "accepted": row.accepted,
            "current": row.current,
            **asdict(row.costs),
        }
        for row in answer.waste
    ]
    return {
        "target": answer.target,
        "engine": answer.engine,
        "model_name": answer.model_name,
        "version": answer.version,
        "block_size": answer.block_size,
        "pool_tokens": answer.pool_tokens,
        "lengths": seen,
        "facts": list(answer.facts),
        "waste": waste,
        "hours": [asdict(row) for row in answer.hours],
        "fp8": [asdict(row) for row in answer.fp8],
        "advice": [_advice_object(advice) for advice in answer.advice],
    }
