"""`gpu-memory-utilization` from what was left free at the peak, in GiB as well as a ratio.

`u_rec = u_now + (free_p01 - need - growth * horizon - margin) / total`, moved by at most 0.03 at a time; where
the numbers come from is in docs/advise.md.
"""

import math
from dataclasses import dataclass, field, replace

from fragscope.advise.advice import Advice, Effect, Range, Topic, gib
from fragscope.advise.parameters import AdviceParameters
from fragscope.advise.room import Growth, Room

_HOUR_S = 3600.0
RULE_OF_THUMB = (0.85, 0.92)
"""What the field uses on ROCm."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How the pool is set now; `special`: images, LoRA, prompt_logprobs or an uneven mixture of experts, None: unknown.

    `pools` counts the sizes the pool had over its restarts, `bytes_per_token` are of one GPU. `fixed_by` names the
    setting that sizes the pool in place of the ratio, `fixed_bytes` its size per GPU where it says so.
    """

    utilization: float | None
    special: bool | None = False
    pools: int = 1
    pool_tokens: float | None = None
    bytes_per_token: float | None = None
    evidence: tuple[str, ...] = field(default_factory=tuple)
    fixed_by: str | None = None
    fixed_bytes: float | None = None

    @property
    def pool_bytes(self) -> float | None:
        """The pool on one GPU; None where neither the flag nor tokens and their size say it."""
        if self.fixed_bytes is not None:
            return self.fixed_bytes
        return self.pool_tokens * self.bytes_per_token if self.pool_tokens and self.bytes_per_token else None

    def raise_limit(self, parameters: AdviceParameters) -> float:
        """Never raised above; a model nobody knows may be a special one."""
        return parameters.utilization_max_ratio if self.special is False else parameters.utilization_max_special_ratio

    def hard_limit(self, parameters: AdviceParameters) -> float:
        """Never called fitting above."""
        return parameters.utilization_max_special_ratio if self.special else parameters.utilization_max_ratio


def advise(room: Room | None, setting: Setting, parameters: AdviceParameters) -> Advice:
    """Whether and how far to move `gpu-memory-utilization`; not known without a day of VRAM readings under load.

    A GPU that has less free than its largest transient is told at once. While anything grows the ratio is never
    raised; of live or non-torch memory it is said that lowering only buys hours. Where a flag in bytes or blocks
    sizes the pool, that is what is advised on.
    """
    if room is None or (setting.utilization is None and setting.fixed_by is None):
        gap = ("gpu",) if room is None else ("gpu_memory_utilization",)
        return Advice(Topic.MEMORY, None, _unknown_words(room), missing=gap)
    move = _move(room, setting, parameters)
    blank = Advice(
        Topic.MEMORY,
        False,
        "",
        caveats=_caveats(room, setting, move, parameters),
        numbers=_numbers(room, move, setting),
    )
    unknown = _too_little_seen(room, move, parameters)
    if unknown is not None:
        return replace(blank, change=None, sentence=f"{_room_words(room)}. {unknown[0]}", missing=unknown[1])
    stays = _stays(room, setting, move, parameters)
    if stays is not None:
        return replace(blank, sentence=f"{_room_words(room)}{stays}")
    return (
        _change_bytes(room, setting, move, blank)
        if setting.fixed_by
        else _change(room, setting, move, blank, parameters)
    )


def _too_little_seen(room: Room, move: float, parameters: AdviceParameters) -> tuple[str, tuple[str, ...]] | None:
    """Why the answer is not known, and what is missing; None where enough was seen or too little is free."""
    if room.free_p01_bytes < room.need_bytes:
        return None
    if room.covered_s < parameters.history_min_s:
        words = (
            f"Only {room.covered_s / _HOUR_S:.1f} h were seen; a day with a traffic peak is needed before the ratio is "
            f"moved (so far it points {_direction(move)})."
        )
        return words, ("a day of history",)
    if move >= 0 and room.busy_s < parameters.busy_min_s:
        words = (
            f"Requests were running for {room.busy_s / _HOUR_S:.1f} h of them only: what an idle engine leaves free "
            "says nothing of a traffic peak."
        )
        return words, ("load",)
    return None


def _stays(room: Room, setting: Setting, move: float, parameters: AdviceParameters) -> str | None:
    """Why moving would not help, as the end of a sentence; None where it would."""
    if room.trend.kind in (Growth.LIVE, Growth.NON_TORCH) and move < 0:
        return f". {buys_words(room, -move)}"
    if room.trend.bytes_per_s and move >= 0:
        return f". {_GROWS[room.trend.kind]} Until it stops the pool is not made larger."
    if move < 0 and setting.pool_bytes is not None and -move * room.total_bytes >= setting.pool_bytes:
        return (
            f". The whole pool is {gib(setting.pool_bytes)}, so lowering would leave none: use a smaller model or FP8."
        )
    return None if move else _no_move(room, setting, parameters)


def _no_move(room: Room, setting: Setting, parameters: AdviceParameters) -> str:
    if setting.fixed_by is not None:
        return f". {_fixed_words(setting)}, and the pool fits as it is."
    now, hard = setting.utilization or 0.0, setting.hard_limit(parameters)
    if now > hard + 1e-9:
        return f". {now:g} is beyond what the field reports as safe ({hard:g}), whatever was free here."
    if room.spare_bytes(parameters.horizon_s) < 0:
        return f". {now:g} leaves too little, but is not lowered below {parameters.utilization_min_ratio:g}."
    limit = setting.raise_limit(parameters)
    doubt = f", unless the model has images or a mixture of experts ({limit:g} at most)" if now > limit + 1e-9 else ""
    return f": {now:g} fits{doubt}, moving it would not help."


_GROWS = {
    Growth.LIVE: "Live tensors grow, a leak until somebody shows otherwise: report it with an allocator snapshot.",
    Growth.NON_TORCH: "Memory outside torch grows, which no ratio cures (vllm#38257).",
    Growth.CACHED: "Torch's cache grows: it is fragmentation, or a cache that has not reached its size yet.",
    Growth.EXTERNAL: "Another process on the GPU grows.",
    Growth.UNKNOWN: "What grows cannot be told from outside: it may be a leak.",
}


def _fixed_words(setting: Setting) -> str:
    return f"{setting.fixed_by} sizes the pool, so --gpu-memory-utilization has no effect"


def _move(room: Room, setting: Setting, parameters: AdviceParameters) -> float:
    """How far to move: to a whole hundredth, up never above the limit or while something grows, one step at a time."""
    wanted = room.spare_bytes(parameters.horizon_s) / room.total_bytes
    if room.trend.bytes_per_s:
        wanted = min(0.0, wanted)
    if setting.fixed_by is not None:
        # No ratio to bound: as much stays free at the peaks as the limit of the ratio would leave.
        wanted = min(wanted, max(0.0, room.free_p01_bytes / room.total_bytes - 1 + setting.raise_limit(parameters)))
        return _hundredths(max(-parameters.move_max_ratio, min(parameters.move_max_ratio, wanted)))
    now = setting.utilization or 0.0
    if wanted < 0:
        wanted = min(wanted, -parameters.move_min_ratio)
    else:
        wanted = min(wanted, max(0.0, setting.raise_limit(parameters) - now))
    if now > setting.hard_limit(parameters):
        wanted = min(wanted, setting.hard_limit(parameters) - now)
    wanted = max(wanted, min(0.0, parameters.utilization_min_ratio - now))
    wanted = max(-parameters.move_max_ratio, min(parameters.move_max_ratio, wanted))
    move = _hundredths(now + wanted) - now
    if move < -parameters.move_max_ratio - 1e-9:
        move += 0.01
    return round(move, 6) if abs(move) >= parameters.move_min_ratio - 1e-9 else 0.0


def _hundredths(ratio: float) -> float:
    """The hundredth at or below: less is raised, more is lowered."""
    return math.floor(ratio * 100 + 1e-6) / 100


def _change(room: Room, setting: Setting, move: float, blank: Advice, parameters: AdviceParameters) -> Advice:
    now = setting.utilization or 0.0
    to, amount = f"{now + move:.2f}", gib(abs(move) * room.total_bytes)
    if move > 0:
        words = (
            f": raise --gpu-memory-utilization from {now:g} to {to}, which gives the pool up to {amount} more per GPU."
        )
    elif room.spare_bytes(parameters.horizon_s) >= 0:
        limit = setting.hard_limit(parameters)
        words = (
            f". {now:g} is beyond what the field reports as safe ({limit:g}), whatever was free here: lower "
            f"--gpu-memory-utilization to {to}, which leaves {amount} more outside the pool."
        )
    else:
        words = f": lower --gpu-memory-utilization from {now:g} to {to}, which leaves {amount} more outside the pool."
    flags = (f"--gpu-memory-utilization {to}",)
    effect = _effect(setting, move, abs(move) * room.total_bytes)
    return replace(blank, change=True, sentence=_room_words(room) + words, flags=flags, effect=effect)


def _change_bytes(room: Room, setting: Setting, move: float, blank: Advice) -> Advice:
    """The same in bytes, where a flag in bytes or blocks sizes the pool."""
    words = f"{_room_words(room)}. {_fixed_words(setting)}: "
    size, amount = setting.pool_bytes, move * room.total_bytes
    way = f"{'larger' if move > 0 else 'smaller'} by {gib(abs(amount))} per GPU"
    if size is None:
        words += f"the pool may be made {way}; its size in bytes is not known here (--model-config tells it)."
        return replace(blank, change=None, sentence=words, missing=("bytes_per_token",))
    words += f"make the pool {way} with --kv-cache-memory-bytes" + (
        "." if setting.fixed_by == "kv_cache_memory_bytes" else f", in place of {setting.fixed_by}."
    )
    flags = (f"--kv-cache-memory-bytes {int(size + amount)}",)
    return replace(blank, change=True, sentence=words, flags=flags, effect=_effect(setting, move, abs(amount)))


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
    said = [_rule_words(room, setting.utilization + move)] if setting.utilization and not setting.fixed_by else []
    if not room.peaks_seen:
        said.append("VRAM peaks between two samples were not seen; the largest step is a lower bound")
    if room.trend.kind is Growth.UNKNOWN and move < 0:
        said.append("what grows cannot be told from outside; if it is a leak, lowering only buys hours")
    swings = room.external_swing_bytes > room.margin_bytes
    if swings:
        swing = gib(room.external_swing_bytes)
        said.append(f"other processes on {room.gpu} varied by {swing}: --kv-cache-memory-bytes fixes the pool anyway")
    if setting.pools > 1:
        said.append(f"the pool had {setting.pools} sizes over its restarts: --kv-cache-memory-bytes makes it the same")
    size = setting.pool_bytes
    if (swings or setting.pools > 1) and size is not None and setting.fixed_by is None:
        size += move * room.total_bytes
        said.append(f"as bytes (it replaces the ratio): --kv-cache-memory-bytes {int(size)}")
    if setting.special:
        why = ", ".join(setting.evidence) or "a special load"
        said.append(f"with {why} never above {parameters.utilization_max_special_ratio}")
    if setting.special is None and setting.fixed_by is None:
        limit = parameters.utilization_max_special_ratio
        said.append(f"whether the model has images or a mixture of experts is not known: never raised above {limit:g}")
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


def _numbers(room: Room, move: float, setting: Setting) -> dict[str, float]:
    found = {
        "total_bytes": room.total_bytes,
        "free_p01_bytes": room.free_p01_bytes,
        "need_bytes": room.need_bytes,
        "margin_bytes": room.margin_bytes,
        "growth_bytes_per_s": room.trend.bytes_per_s,
        # Where the ratio has no effect it is not moved.
        "change_ratio": 0.0 if setting.fixed_by else move,
        "change_bytes": move * room.total_bytes,
    }
    if setting.utilization is not None:
        found["gpu_memory_utilization"] = setting.utilization
    left = room.time_left_s()
    return found if left is None else {**found, "time_left_s": left}
