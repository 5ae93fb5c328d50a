"""What has not failed yet but will: a climb that meets the need soon, or an allocator against the ceiling."""

from dataclasses import dataclass

from fragscope.detect.allocator import Allocators, Held, times
from fragscope.detect.parameters import GIB, Parameters
from fragscope.detect.vram import Exhaustion, Vram
from fragscope.model import Cause, Evidence


@dataclass(frozen=True, slots=True)
class Forecast:
    """Why the phase is `watch`; `words` names the sentence and the remedy."""

    words: str
    evidence: Evidence


class Outlook:
    """Holds a forecast with some patience, so that one quiet reading does not end it."""

    def __init__(self, parameters: Parameters) -> None:
        self._p = parameters
        self._growth: Forecast | None = None
        self._grew_at = 0.0
        self._retries: Forecast | None = None
        self._retried_at = 0.0

    def update(self, at: float, vram: Vram, allocators: Allocators, *, seen: bool) -> Forecast | None:
        """The forecast after this sample; `seen`: the GPUs are heard now."""
        self._follow_growth(at, vram.exhaustion() if seen else None)
        self._follow_retries(at, _cornered(vram, allocators, at, self._p) if seen else None)
        return self._retries or self._growth

    def _follow_growth(self, at: float, nearest: Exhaustion | None) -> None:
        limit_s = self._p.watch_enter_s if self._growth is None else self._p.watch_leave_s
        if nearest is not None and nearest.left_s < limit_s:
            self._growth, self._grew_at = _growth(nearest), at
        elif nearest is not None or at - self._grew_at >= self._p.watch_absent_s:
            self._growth = None

    def _follow_retries(self, at: float, held: Held | None) -> None:
        if held is not None:
            self._retries, self._retried_at = _cornering(held), at
        elif at - self._retried_at >= self._p.watch_absent_s:
            self._retries = None


def _cornered(vram: Vram, allocators: Allocators, at: float, p: Parameters) -> Held | None:
    """The allocator that ran into a full device more than once while a good part of the card lies stranded."""
    for gpu in vram.readings():
        held = allocators.on(gpu.gpu, at)
        if held is None or held.retries < p.forecast_retries:
            continue
        if held.inactive_split_bytes >= p.forecast_split_ratio * gpu.total_bytes:
            return held
    return None


def _growth(nearest: Exhaustion) -> Forecast:
    hours, rate = nearest.left_s / 3600, nearest.slope_bytes_per_s * 3600 / GIB
    if nearest.own:
        cause, words = Cause.MEMORY_GROWTH, f"VRAM of {nearest.gpu} climbs by {rate:.2f} GiB an hour"
    else:
        cause, words = Cause.EXTERNAL_PROCESS, f"another process on {nearest.gpu} takes {rate:.2f} GiB more an hour"
    sentence = f"{words}; {hours:.1f} h are left"
    return Forecast("watch", Evidence("vram_growth", nearest.left_s, "s", 0.0, str(cause), sentence))


def _cornering(held: Held) -> Forecast:
    sentence = (
        f"the allocator on {held.gpu} ran into a full device {times(held.retries)} in the last minutes, "
        f"with {held.inactive_split_bytes / GIB:.2f} GiB stranded in split segments"
    )
    evidence = Evidence("allocator_ceiling", held.retries, "", 0.0, str(Cause.FRAGMENTATION), sentence)
    return Forecast("cornered", evidence)
