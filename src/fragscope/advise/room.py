"""What the tightest GPU of a target has left at its peaks, and what climbs there."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fragscope.advise.gpu_past import GpuPast
from fragscope.advise.parameters import AdviceParameters
from fragscope.detect.statistics import mann_kendall_z, theil_sen_slope

NEED_DEFAULT_RATIO = 0.01
NEED_MIN_BYTES = 64 * 2**20
"""Smaller steps are noise, and with none seen 1 % of the card is assumed, as in the detector."""
_TREND_MIN_ROWS = 6
_TREND_MAX_ROWS = 150
_TREND_Z = 2.6
_TIE_BYTES = 16 * 2**20
_MOSTLY = 0.5


class Growth(StrEnum):
    """What climbs; `unknown` where the process and its allocator cannot be seen."""

    NONE = "none"
    EXTERNAL = "external"
    LIVE = "live"
    CACHED = "allocator_cache"
    NON_TORCH = "non_torch"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Trend:
    """How fast a GPU fills, and with what; bytes per second, 0 while it does not."""

    bytes_per_s: float
    kind: Growth


def _slope(points: list[tuple[float, float]]) -> float:
    """Theil and Sen's slope where Mann and Kendall see a rise, else 0; thinned to the least of each stretch."""
    if len(points) < _TREND_MIN_ROWS:
        return 0.0
    width = -(-len(points) // _TREND_MAX_ROWS)
    thinned = [min(points[i : i + width], key=lambda point: point[1]) for i in range(0, len(points), width)]
    rises = mann_kendall_z([value for _, value in thinned], _TIE_BYTES) > _TREND_Z
    return max(0.0, theil_sen_slope(thinned)) if rises else 0.0


def trend(past: GpuPast, parameters: AdviceParameters) -> Trend:
    """The growth since the last restart and the component that makes up most of it."""
    used = _slope(past.points("used_bytes"))
    if used < parameters.growth_min_bytes_per_s:
        return Trend(0.0, Growth.NONE)
    own, live, cached = (past.points(what) for what in ("own_bytes", "allocated_bytes", "cached_bytes"))
    if own and _slope(own) < _MOSTLY * used:
        return Trend(used, Growth.EXTERNAL)
    if not live:
        return Trend(used, Growth.UNKNOWN)
    if _slope(live) >= _MOSTLY * used:
        return Trend(used, Growth.LIVE)
    return Trend(used, Growth.CACHED if _slope(cached) >= _MOSTLY * used else Growth.NON_TORCH)


@dataclass(frozen=True, slots=True)
class Room:
    """The tightest GPU of a target; bytes, and the time that readings cover (`busy_s`: with requests running)."""

    gpu: str
    total_bytes: float
    free_p01_bytes: float
    need_bytes: float
    margin_bytes: float
    trend: Trend
    covered_s: float
    busy_s: float
    peaks_seen: bool
    external_swing_bytes: float

    def spare_bytes(self, horizon_s: float) -> float:
        """What is left after the largest transient, the growth until the horizon and the margin; may be negative."""
        return self.free_p01_bytes - self.need_bytes - self.trend.bytes_per_s * horizon_s - self.margin_bytes

    def time_left_s(self) -> float | None:
        """Until growth has eaten what an ordinary step needs; None without growth."""
        if not self.trend.bytes_per_s:
            return None
        return max(0.0, self.free_p01_bytes - self.need_bytes) / self.trend.bytes_per_s


def room_of(past: GpuPast, parameters: AdviceParameters) -> Room | None:
    """What one GPU had left while its engine served; None where it was never seen doing so."""
    share = past.free.quantile(0.01)
    if share is None or not past.total_bytes:
        return None
    seen = past.transient_bytes >= NEED_MIN_BYTES
    need = past.transient_bytes if seen else NEED_DEFAULT_RATIO * past.total_bytes
    swing = (past.external_highest_bytes or 0.0) - (past.external_lowest_bytes or 0.0)
    return Room(
        past.gpu,
        past.total_bytes,
        share * past.total_bytes,
        need,
        parameters.margin_ratio * past.total_bytes,
        trend(past, parameters),
        past.covered_s,
        past.busy_s,
        past.peaks_seen,
        swing,
    )


def tightest(gpus: Sequence[GpuPast], parameters: AdviceParameters) -> Room | None:
    """The GPU that decides: one ratio is set for all of them."""
    rooms = [room for past in gpus if (room := room_of(past, parameters)) is not None]
    return min(rooms, key=lambda room: room.spare_bytes(parameters.horizon_s) / room.total_bytes, default=None)
