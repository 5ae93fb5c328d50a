"""`gpu-memory-utilization` from what was left free at the peak, in GiB as well as a ratio.

`u_rec = u_now + (free_p01 - need - growth * horizon - margin) / total`, moved by at most 0.03 at a time; where
the numbers come from is in docs/advise.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from fragscope.advise.advice import Advice, Effect, Range, Topic, gib
from fragscope.advise.observed import GpuPast
from fragscope.advise.parameters import AdviceParameters
from fragscope.detect.statistics import mann_kendall_z, theil_sen_slope

_NEED_DEFAULT_RATIO = 0.01
NEED_MIN_BYTES = 64 * 2**20
"""Smaller steps are noise, and with none seen 1 % of the card is assumed, as in the detector."""
_TREND_MIN_ROWS = 6
_TREND_MAX_ROWS = 150
_TREND_Z = 2.6
_TIE_BYTES = 16 * 2**20
_MOSTLY = 0.5
_HOUR_S = 3600.0
RULE_OF_THUMB = (0.85, 0.92)
"""What the field uses on ROCm."""


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
    """The tightest GPU of a target; bytes."""

    gpu: str
    total_bytes: float
    free_p01_bytes: float
    need_bytes: float
    margin_bytes: float
    trend: Trend
    span_s: float
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
    need = past.transient_bytes if seen else _NEED_DEFAULT_RATIO * past.total_bytes
    swing = (past.external_highest_bytes or 0.0) - (past.external_lowest_bytes or 0.0)
    return Room(
        past.gpu,
        past.total_bytes,
        share * past.total_bytes,
        need,
        parameters.margin_ratio * past.total_bytes,
        trend(past, parameters),
        past.span_s,
        past.peaks_seen,
        swing,
    )


def tightest(gpus: Sequence[GpuPast], parameters: AdviceParameters) -> Room | None:
    """The GPU that decides: one ratio is set for all of them."""
    rooms = [room for past in gpus if (room := room_of(past, parameters)) is not None]
    return min(rooms, key=lambda room: room.spare_bytes(parameters.horizon_s) / room.total_bytes, default=None)


@dataclass(frozen=True, slots=True)
class Setting:
    """How the pool is set now; `special`: images, LoRA, prompt_logprobs or an uneven mixture of experts.

    `pools` counts the sizes the pool had over its restarts, `bytes_per_token` are of one GPU.
    """

    utilization: float | None
    special: bool = False
    pools: int = 1
    pool_tokens: float | None = None
    bytes_per_token: float | None = None
    evidence: tuple[str, ...] = field(default_factory=tuple)


def advise(room: Room | None, setting: Setting, parameters: AdviceParameters) -> Advice:
    """Whether and how far to move `gpu-memory-utilization`; not known without a day of VRAM readings.

    A GPU that has less free than its largest transient is told at once. Growth of live or non-torch memory
    is told that lowering only buys hours.
    """
    if room is None or setting.utilization is None:
        gap = ("gpu",) if room is None else ("gpu_memory_utilization",)
        return Advice(Topic.MEMORY, None, _unknown_words(room), missing=gap)
    move = _move(room, setting, parameters)
    short = room.free_p01_bytes < room.need_bytes
    caveats = _caveats(room, setting, move, parameters)
    numbers = _numbers(room, move, setting.utilization)
    if room.span_s < parameters.history_min_s and not short:
        words = (
            f"{_room_words(room)}. Only {room.span_s / _HOUR_S:.1f} h were seen; a day with a traffic peak is needed "
            f"before the ratio is moved (so far it points {_direction(move)})."
        )
        return Advice(Topic.MEMORY, None, words, caveats=caveats, missing=("a day of history",), numbers=numbers)
    if room.trend.kind in (Growth.LIVE, Growth.NON_TORCH) and move < 0:
        words = f"{_room_words(room)}. {buys_words(room, -move)}"
        return Advice(Topic.MEMORY, False, words, caveats=caveats, numbers=numbers)
    if abs(move) < parameters.move_min_ratio - 1e-9:
        words = f"{_room_words(room)}: {setting.utilization:g} fits, moving it would not help."
        return Advice(Topic.MEMORY, False, words, caveats=caveats, numbers=numbers)
    return _change(room, setting, move, caveats, numbers)


def _move(room: Room, setting: Setting, parameters: AdviceParameters) -> float:
    """How far to move, in hundredths: up never above the limit, down never more than one step at a time."""
    now = setting.utilization or 0.0
    limit = parameters.utilization_max_special_ratio if setting.special else parameters.utilization_max_ratio
    wanted = room.spare_bytes(parameters.horizon_s) / room.total_bytes
    wanted = min(wanted, max(0.0, limit - now)) if wanted > 0 else wanted
    wanted = max(-parameters.move_max_ratio, min(parameters.move_max_ratio, wanted))
    # Down to whole hundredths: less is raised, more is lowered.
    return float(int(wanted * 100 + (1e-6 if wanted > 0 else -0.999999))) / 100


def _change(room: Room, setting: Setting, move: float, caveats: tuple[str, ...], numbers: dict[str, float]) -> Advice:
    now = setting.utilization or 0.0
    amount = abs(move) * room.total_bytes
    if move > 0:
        words = (
            f"{_room_words(room)}: raise --gpu-memory-utilization from {now:g} to {now + move:.2f}, which gives the "
            f"pool up to {gib(amount)} more per GPU."
        )
    else:
        words = (
            f"{_room_words(room)}: lower --gpu-memory-utilization from {now:g} to {now + move:.2f}, which leaves "
            f"{gib(amount)} more per GPU outside the pool."
        )
    return Advice(
        Topic.MEMORY,
        True,
        words,
        flags=(f"--gpu-memory-utilization {now + move:.2f}",),
        effect=_effect(setting, move, amount),
        caveats=caveats,
        numbers=numbers,
    )


def _effect(setting: Setting, move: float, amount: float) -> Effect:
    """Tokens where their size is known, else bytes; nothing is the other end: other limits may bind first."""
    sign = 1.0 if move > 0 else -1.0
    if not setting.bytes_per_token:
        ends = sorted((0.0, sign * amount))
        return Effect("KV pool per GPU", Range(ends[0], sign * amount, ends[1]), "bytes")
    tokens = sign * amount / setting.bytes_per_token
    if setting.pool_tokens:
        share = tokens / setting.pool_tokens
        return Effect("tokens in the KV pool", Range(min(0.0, share), share, max(0.0, share)), "ratio")
    return Effect("tokens in the KV pool", Range(min(0.0, tokens), tokens, max(0.0, tokens)), "tokens")


def _room_words(room: Room) -> str:
    words = (
        f"{room.gpu} had {gib(room.free_p01_bytes)} free at its peaks (1st percentile), of which a step takes up to "
        f"{gib(room.need_bytes)}"
    )
    if room.trend.bytes_per_s:
        words += f", and fills by {gib(room.trend.bytes_per_s * _HOUR_S)} an hour"
    return words


def _unknown_words(room: Room | None) -> str:
    if room is None:
        return (
            "VRAM was not seen while an engine older than ten minutes served, so its headroom is not known: watch it "
            "with --target or give a recording that holds GPUs."
        )
    return "The engine does not show gpu_memory_utilization (cache_config_info), so there is nothing to move from."


def _direction(move: float) -> str:
    if abs(move) < 0.005:
        return "to no change"
    return f"{'up' if move > 0 else 'down'} by {abs(move):.2f}"


def buys_words(room: Room, move: float) -> str:
    """What lowering by so much buys while live or non-torch memory grows (vllm#38257)."""
    hours = move * room.total_bytes / room.trend.bytes_per_s / _HOUR_S
    kind = "live tensors" if room.trend.kind is Growth.LIVE else "memory outside torch"
    return (
        f"What grows are {kind}: lowering by {move:.2f} would only buy about {hours:.0f} hours. "
        "Restart at a quiet hour and report it with an allocator snapshot."
    )


def _caveats(room: Room, setting: Setting, move: float, parameters: AdviceParameters) -> tuple[str, ...]:
    said = [_rule_words(room, (setting.utilization or 0.0) + move)]
    if not room.peaks_seen:
        said.append("VRAM peaks between two samples were not seen; the largest step is a lower bound")
    if room.trend.kind is Growth.UNKNOWN:
        said.append("what grows cannot be told from outside; if it is a leak, lowering only buys hours")
    swings = room.external_swing_bytes > room.margin_bytes
    if swings:
        swing = gib(room.external_swing_bytes)
        said.append(f"other processes on {room.gpu} varied by {swing}: --kv-cache-memory-bytes fixes the pool anyway")
    if setting.pools > 1:
        said.append(f"the pool had {setting.pools} sizes over its restarts: --kv-cache-memory-bytes makes it the same")
    if (swings or setting.pools > 1) and setting.bytes_per_token and setting.pool_tokens:
        size = setting.pool_tokens * setting.bytes_per_token + move * room.total_bytes
        said.append(f"as bytes (it replaces the ratio): --kv-cache-memory-bytes {int(size)}")
    if setting.special:
        why = ", ".join(setting.evidence) or "a special load"
        said.append(f"with {why} never above {parameters.utilization_max_special_ratio}")
    return tuple(said)


def _rule_words(room: Room, ratio: float) -> str:
    low, high = RULE_OF_THUMB
    inside = low <= ratio <= high + 1e-9
    outside_bytes = gib((1 - ratio) * room.total_bytes)
    ends = f"{gib((1 - high) * room.total_bytes)} to {gib((1 - low) * room.total_bytes)}"
    return (
        f"the field's {low} to {high} leaves {ends} outside the pool on this card; the evidence "
        f"{'agrees' if inside else 'does not agree'}: {ratio:.2f} leaves {outside_bytes}"
    )


def _numbers(room: Room, move: float, now: float) -> dict[str, float]:
    found = {
        "total_bytes": room.total_bytes,
        "free_p01_bytes": room.free_p01_bytes,
        "need_bytes": room.need_bytes,
        "margin_bytes": room.margin_bytes,
        "growth_bytes_per_s": room.trend.bytes_per_s,
        "gpu_memory_utilization": now,
        "change_ratio": move,
        "change_bytes": move * room.total_bytes,
    }
    left = room.time_left_s()
    return found if left is None else {**found, "time_left_s": left}
