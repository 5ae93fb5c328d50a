"""`advise` from the history of a Prometheus: a window of it as samples, with a progress bar and what was missing."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from fragscope.gathering import Gathered, ParametersOf, from_samples
from fragscope.sources.prometheus import History, HistoryError, MatchError, QueryApi, Span, access
from fragscope.sources.prometheus import Progress as Reached

__all__ = ["HistoryError", "MatchError", "duration_s", "remembered", "window"]

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def duration_s(text: str) -> float:
    """30s, 10m, 12h, 7d or 2w in seconds. Raises ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"{text!r} is no duration; write 30s, 10m, 12h, 7d or 2w")
    return float(found[1]) * _UNITS_S[found[2]]


def window(text: str, now: float) -> tuple[float, float]:
    """START/END as unix seconds: each a time as 2026-11-20T08:00 (UTC), or how long ago, as in 14d/7d.

    Raises ValueError for anything else, and where it would end before it begins.
    """
    parts = text.split("/")
    if len(parts) != 2:
        raise ValueError(f"{text!r} is no window; write START/END, as in 14d/7d or 2026-11-20T08:00/2026-11-21T08:00")
    start, end = (_moment(part.strip(), now) for part in parts)
    if end <= start:
        raise ValueError(f"{text!r} ends before it begins")
    return start, end


def _moment(text: str, now: float) -> float:
    if text in ("now", "0"):
        return now
    if re.fullmatch(r"[\d.]+[a-z]+", text):
        return now - duration_s(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is no time; write 7d, now or 2026-11-20T08:00 (UTC)") from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def remembered(url: str, span: Span, parameters_of: ParametersOf, full_ratio: float) -> Gathered:
    """What a window of history came to; its notes say what was absent. Raises HistoryError."""
    with _bar() as bar:
        task = bar.add_task(f"{span.start_at:.0f}", total=None)

        def reached(progress: Reached) -> None:
            at = time.strftime("%Y-%m-%d %H:%M", time.gmtime(progress.at))
            bar.update(task, completed=progress.done, total=progress.total, description=at)

        history = History(QueryApi(url, access(os.environ)), span, reached)
        gathered = from_samples(history.samples(), parameters_of, full_ratio)
    gathered.notes.extend(history.coverage.sentences())
    return gathered


@contextmanager
def _bar() -> Iterator[Progress]:
    """On standard error, and only where somebody watches."""
    err = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        yield bar
