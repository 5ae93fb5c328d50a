"""Where VRAM went: what is live, what others hold, and how much each part has grown since the process settled.

used = live + unallocated (these two are the allocator's) + non-torch (both: own) + external. Which parts can
be told apart depends on who speaks: per-process VRAM separates external from own, the allocator separates
live and non-torch from own. Readings of two sources are seconds apart and the allocator breathes by
gigabytes, hence the medians where two sources are subtracted.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from fragscope.detect.allocator import Held
from fragscope.detect.parameters import Parameters
from fragscope.detect.statistics import median
from fragscope.model import GpuReading

_SPACING_S = 4.0
"""Rows closer than this add nothing but memory."""


@dataclass(frozen=True, slots=True)
class Parts:
    """VRAM of one GPU at one time by owner, bytes; None where nobody can tell."""

    at: float
    used: float
    own: float | None
    external: float | None
    live: float | None
    non_torch: float | None


@dataclass(frozen=True, slots=True)
class Growth:
    """How much each part grew since the baseline, bytes, at least 0; None where nobody can tell."""

    used: float | None = None
    own: float | None = None
    external: float | None = None
    live: float | None = None
    non_torch: float | None = None


UNTOLD = Growth()


@dataclass(frozen=True, slots=True)
class Inside:
    """What was known of one card's memory by owner before a failure; None where nobody could tell."""

    held: Held | None = None
    growth: Growth = UNTOLD


UNSEEN = Inside()


@dataclass(slots=True)
class _Baseline:
    """The first minutes of a stretch: rows while they are collected, then nothing but their summary."""

    rows: list[Parts] = field(default_factory=list)
    settled: Parts | None = None

    def add(self, row: Parts, span_s: float) -> None:
        if self.settled is not None:
            return
        self.rows.append(row)
        if row.at - self.rows[0].at >= span_s:
            self.settled, self.rows = _summary(self.rows), []

    def summary(self) -> Parts | None:
        if self.settled is not None:
            return self.settled
        return _summary(self.rows) if self.rows else None


class Waterfall:
    """The parts of one GPU's VRAM since the process that uses it began."""

    def __init__(self, parameters: Parameters) -> None:
        self._p = parameters
        self._rows: deque[Parts] = deque()
        self._settled = _Baseline()
        self._first = _Baseline()
        """What others hold needs no warm-up of ours: it is counted from the first reading on."""

    def observe(self, gpu: GpuReading, held: Held | None, *, warm: bool) -> None:
        """Adds one reading; `warm`: past warm-up and awake."""
        if self._rows and gpu.at - self._rows[-1].at < _SPACING_S:
            return
        own = float(gpu.own_bytes) if gpu.own_bytes is not None else None
        reserved = held.reserved_bytes if held is not None else None
        row = Parts(
            at=gpu.at,
            used=float(gpu.used_bytes),
            own=own,
            external=gpu.used_bytes - own if own is not None else None,
            live=float(held.allocated_bytes) if held is not None else None,
            non_torch=own - reserved if own is not None and reserved is not None else None,
        )
        self._rows.append(row)
        while self._rows[0].at < row.at - self._p.headroom_history_s:
            self._rows.popleft()
        self._first.add(row, self._p.baseline_span_s)
        if warm:
            self._settled.add(row, self._p.baseline_span_s)

    def rebase(self) -> None:
        """Another process uses the memory now, or the engine slept: its own growth is counted from here.

        What others hold goes on: a tenant that outlives our engine is the cause of the next death, too.
        """
        self._rows.clear()
        self._settled = _Baseline()

    def growth(self, until: float) -> Growth:
        """Growth as of `until`: the last minute against the baseline; others: the last reading."""
        rows = [row for row in self._rows if until - self._p.trend_bucket_s <= row.at <= until]
        first, before = self._first.summary(), self._settled.settled
        if not rows or first is None:
            return Growth()
        now = _summary(rows)
        # A tenant that came ten seconds ago counts whole: device and own are read together.
        external = _rise(rows[-1].external, first.external)
        if before is None:
            return Growth(external=external)
        return Growth(
            used=_rise(now.used, before.used),
            own=_rise(now.own, before.own),
            external=external,
            live=_rise(now.live, before.live),
            non_torch=_rise(now.non_torch, before.non_torch),
        )


def _summary(rows: list[Parts]) -> Parts:
    """Least of what one source says at once, median of what takes two readings."""
    return Parts(
        at=rows[-1].at,
        used=min(row.used for row in rows),
        own=_least(row.own for row in rows),
        external=_middle(row.external for row in rows),
        live=_least(row.live for row in rows),
        non_torch=_middle(row.non_torch for row in rows),
    )


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _rise(now: float | None, before: float | None) -> float | None:
    return max(0.0, now - before) if now is not None and before is not None else None
