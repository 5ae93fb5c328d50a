"""What one GPU of a target was like while its engine served, in memory that depends on the time covered only."""

from collections import Counter
from dataclasses import dataclass, field

from fragscope.model import AllocatorReading, GpuReading

_ROW_S = 600.0
_BINS = 1000
_TRANSIENT_MAX_RATIO = 0.04
"""A step larger than this share of the card is a load or a wake-up, not a transient (as in the detector)."""


@dataclass(slots=True)
class Bins:
    """Shares 0..1 counted in thousandths."""

    counts: Counter[int] = field(default_factory=Counter)

    def add(self, share: float) -> None:
        """One more."""
        self.counts[min(_BINS, max(0, int(share * _BINS)))] += 1

    def quantile(self, q: float) -> float | None:
        """The share below which so many lie (its bin's lower edge); None without any."""
        wanted, seen = q * sum(self.counts.values()), 0
        for step, n in sorted(self.counts.items()):
            seen += n
            if seen >= wanted:
                return step / _BINS
        return None


@dataclass(frozen=True, slots=True)
class GpuRow:
    """The least of ten minutes: what was used by anybody, by the engine, live in torch, and cached by torch."""

    used_bytes: float
    own_bytes: float | None
    allocated_bytes: float | None
    cached_bytes: float | None


@dataclass(slots=True)
class GpuPast:
    """What one GPU of a target was like while its engine served; `rows` are those since the last restart."""

    target: str
    gpu: str
    total_bytes: int = 0
    free: Bins = field(default_factory=Bins)
    free_lowest_bytes: float | None = None
    transient_bytes: float = 0.0
    external_lowest_bytes: float | None = None
    external_highest_bytes: float | None = None
    peaks_seen: bool = False
    covered_s: float = 0.0
    """Time between readings, of which a silence counts for ten minutes at most."""
    busy_s: float = 0.0
    """The part of it with requests running."""
    rows: dict[int, GpuRow] = field(default_factory=dict)
    previous: GpuReading | None = None

    def observe(self, reading: GpuReading, allocator: AllocatorReading | None, *, busy: bool) -> None:
        """One reading of a warm, serving engine's GPU; `busy`: requests were running."""
        peak = max(reading.used_bytes, reading.peak_used_bytes or 0)
        free = max(0, reading.total_bytes - peak)
        self.total_bytes = reading.total_bytes
        self.peaks_seen |= reading.peak_used_bytes is not None
        self.free.add(free / max(1, reading.total_bytes))
        self.free_lowest_bytes = min(free, self.free_lowest_bytes if self.free_lowest_bytes is not None else free)
        if self.previous is not None:
            covered = min(_ROW_S, max(0.0, reading.at - self.previous.at))
            self.covered_s += covered
            self.busy_s += covered if busy else 0.0
            step = peak - self.previous.used_bytes
            if step <= _TRANSIENT_MAX_RATIO * reading.total_bytes:
                self.transient_bytes = max(self.transient_bytes, step)
        self.previous = reading
        self._external(reading)
        self._row(reading, allocator)

    def restart(self) -> None:
        """Another process uses the memory from here on: growth and steps begin anew."""
        self.rows.clear()
        self.previous = None

    def _external(self, reading: GpuReading) -> None:
        if reading.own_bytes is None:
            return
        external = max(0, reading.used_bytes - reading.own_bytes)
        low, high = self.external_lowest_bytes, self.external_highest_bytes
        self.external_lowest_bytes = external if low is None else min(low, external)
        self.external_highest_bytes = external if high is None else max(high, external)

    def _row(self, reading: GpuReading, allocator: AllocatorReading | None) -> None:
        now = GpuRow(
            reading.used_bytes,
            reading.own_bytes,
            allocator.allocated_bytes if allocator is not None else None,
            allocator.reserved_bytes - allocator.allocated_bytes if allocator is not None else None,
        )
        index = int(reading.at // _ROW_S)
        before = self.rows.get(index)
        self.rows[index] = now if before is None else _least(before, now)

    def points(self, what: str) -> list[tuple[float, float]]:
        """(seconds, bytes) of one column of the rows, where it is known."""
        found = []
        for index, row in sorted(self.rows.items()):
            value = getattr(row, what)
            if value is not None:
                found.append((index * _ROW_S, float(value)))
        return found


def _least(a: GpuRow, b: GpuRow) -> GpuRow:
    return GpuRow(
        min(a.used_bytes, b.used_bytes),
        _lesser(a.own_bytes, b.own_bytes),
        _lesser(a.allocated_bytes, b.allocated_bytes),
        _lesser(a.cached_bytes, b.cached_bytes),
    )


def _lesser(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else min(a, b)
