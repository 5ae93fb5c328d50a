"""Pictures of advice: bars of text for a terminal, PNG, SVG or PDF by matplotlib (extra `plot`)."""

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fragscope.advise.advice import GIB, percent
from fragscope.advise.answers import EngineAnswer, WasteRow
from fragscope.advise.split import HourRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SUFFIXES = (".png", ".svg", ".pdf")
_WIDTH = 40
_BAND, _SURE = "#9ecae1", "#3182bd"


class PlotError(Exception):
    """A picture cannot be made; the message says what to do."""


def check_plot(path: Path) -> None:
    """Raises PlotError where no picture could be written to this file: before the work, not after it."""
    if path.suffix.lower() not in _SUFFIXES:
        raise PlotError(f"--plot {path} ends in {path.suffix or 'nothing'}; it must be one of {', '.join(_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError("--plot needs matplotlib, which is not installed: pip install 'fragscope[plot]'")
    if not path.parent.is_dir():
        raise PlotError(f"--plot {path}: there is no folder {path.parent}")


def waste_bars(rows: Sequence[WasteRow]) -> Iterator[str]:
    """Waste against block size: `#` up to the lower bound, `=` up to the upper one, `|` the estimate."""
    highest = max((row.waste.ratio.high for row in rows), default=0.0) or 1.0
    for row in rows:
        ratio = row.waste.ratio
        marks = [" "] * (_WIDTH + 1)
        low, point, high = (round(_WIDTH * value / highest) for value in (ratio.low, ratio.point, ratio.high))
        marks[:high] = "=" * high
        marks[:low] = "#" * low
        marks[point] = "|"
        what = "now" if row.current else "" if row.accepted else "not accepted"
        bounds = f"{percent(ratio.point):>7} ({percent(ratio.low)} to {percent(ratio.high)})"
        yield f"{row.waste.block_size:>6} {''.join(marks)} {bounds:<30} {what}".rstrip()


def hour_bars(rows: Sequence[HourRow]) -> Iterator[str]:
    """Least free VRAM by hour of the day (UTC), with the load beside it."""
    known = [row for row in rows if row.free_lowest_bytes is not None]
    highest = max((row.free_lowest_bytes or 0.0 for row in known), default=0.0) or 1.0
    for row in known:
        free = row.free_lowest_bytes or 0.0
        bar = "#" * round(_WIDTH * free / highest)
        usage = percent(row.usage_highest_ratio)
        room = f"{free / GIB:6.1f} GiB free"
        yield f"  {row.hour:02d} h {bar:<{_WIDTH}} {room}, {row.load:5.1f} requests, KV up to {usage}"


def draw(path: Path, answers: Sequence[EngineAnswer]) -> None:
    """Waste against block size with its band, and headroom by hour where it was seen; a row per engine.

    Raises PlotError where the file cannot be written or nothing is there to draw.
    """
    drawn = [answer for answer in answers if answer.waste or _free(answer.hours)]
    if not drawn:
        raise PlotError(f"--plot {path}: no lengths and no VRAM were seen, so there is nothing to draw")
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional extra, and slow to load

    columns = 2 if any(_free(answer.hours) for answer in drawn) else 1
    figure = Figure(figsize=(5.5 * columns, 4 * len(drawn)), layout="constrained")
    axes = figure.subplots(len(drawn), columns, squeeze=False)
    for row, answer in zip(axes, drawn, strict=True):
        _draw_waste(row[0], answer)
        if columns > 1:
            _draw_hours(row[1], answer)
    try:
        figure.savefig(path)
    except OSError as error:
        raise PlotError(f"--plot {path} cannot be written: {error.strerror or error}") from error


def _free(hours: Sequence[HourRow]) -> list[tuple[int, float]]:
    return [(row.hour, row.free_lowest_bytes / GIB) for row in hours if row.free_lowest_bytes is not None]


def _draw_waste(axes: "Axes", answer: EngineAnswer) -> None:
    name = f"{answer.target}/{answer.engine}" if answer.target is not None else "lengths"
    axes.set_title(f"{name}: empty slots by block size")
    if not answer.waste:
        axes.text(0.5, 0.5, "no lengths seen", ha="center", transform=axes.transAxes)
        return
    sizes = [row.waste.block_size for row in answer.waste]
    ratios = [row.waste.ratio for row in answer.waste]
    axes.fill_between(sizes, [100 * r.low for r in ratios], [100 * r.high for r in ratios], color=_BAND, label="bounds")
    axes.plot(sizes, [100 * r.point for r in ratios], "o-", color=_SURE, label="estimate")
    axes.axvline(answer.block_size, color="grey", linestyle=":", label=f"now: {answer.block_size}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("block size, tokens")
    axes.set_ylabel("used slots without a token, %")
    axes.set_ylim(bottom=0)
    axes.legend()


def _draw_hours(axes: "Axes", answer: EngineAnswer) -> None:
    axes.set_title("least free VRAM by hour of the day")
    free = _free(answer.hours)
    if not free:
        axes.text(0.5, 0.5, "no VRAM seen", ha="center", transform=axes.transAxes)
        return
    axes.bar([hour for hour, _ in free], [amount for _, amount in free], color=_SURE)
    axes.set_xlim(-0.6, 23.6)
    axes.set_xlabel("hour, UTC")
    axes.set_ylabel("GiB")
