"""Why the engine died or failed requests, weighed from the state before it.

Each circumstance adds its weight to the log-odds that memory *outside the KV pool* ran out. The table
and its public sources are in docs/detector.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fragscope.detect.allocator import times
from fragscope.detect.parameters import GIB, Parameters
from fragscope.detect.vram import Headroom
from fragscope.detect.waterfall import UNSEEN, Inside
from fragscope.model import Cause, Evidence, Fact, LogFact

MEMORY = "memory"
"""The `cause` of evidence that speaks for or against any memory cause."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What was known before the first failure; None where the evidence abstains."""

    crashed: bool
    usage_ratio: float | None = None
    headroom: Headroom | None = None
    inside: Inside = UNSEEN
    growing: bool | None = None
    lost: float | None = None
    worked: bool | None = None
    drained: bool | None = None
    queueing: bool = False
    seen_by_health: bool = False
    log_present: bool = False
    earlier_crash: float = 0.0
    """0..1: an earlier undrained crash, decayed."""


def weigh(
    circumstances: Circumstances, told: LogFact | None, parameters: Parameters
) -> tuple[float, tuple[Evidence, ...]]:
    """The clipped log-odds of an episode on its own, and the evidence they are made of, strongest first."""
    rows = _crash(circumstances, parameters) if circumstances.crashed else _alive(circumstances, told, parameters)
    rows += _log(circumstances, told, parameters)
    w = parameters.weights
    rows.append(_row("prior", None, "", w.prior, "how often it is memory where nothing else is known"))
    score = min(w.clip_high, max(w.clip_low, sum(row.weight for row in rows)))
    if told is not None and told.what is Fact.OOM:
        score = w.allocator_oom if "ooms" in told.facts else w.clip_high
    return score, tuple(sorted(rows, key=lambda row: -abs(row.weight)))


def memory_shares(facts: Mapping[str, float], parameters: Parameters) -> dict[Cause, float]:
    """How the memory causes divide, by the allocator's own arithmetic (bytes).

    Stranded memory is what the allocator holds but cannot use: unallocated in split segments, and free
    blocks of private pools. Compaction would have served the request only if
    free < tried <= free + stranded.
    """
    tried, free, total = facts.get("tried"), facts.get("free"), facts.get("total")
    if tried is None or free is None or not total or free > total:
        return {
            Cause.FRAGMENTATION: parameters.share_unknown,
            Cause.MEMORY_UNDETERMINED: 1 - parameters.share_unknown,
        }
    stranded = facts.get("reserved_unallocated", 0.0) + facts.get("private_pools", 0.0)
    if free >= tried:
        capped = "allowed" in facts
        return {Cause.VRAM_EXHAUSTED: 1.0} if capped else {Cause.MEMORY_UNDETERMINED: 1.0}
    if tried > free + stranded:
        return {
            Cause.FRAGMENTATION: parameters.share_unknown,
            Cause.VRAM_EXHAUSTED: 1 - parameters.share_unknown,
        }
    share = _fragmentation_share(stranded / total, parameters)
    return {Cause.FRAGMENTATION: share, Cause.VRAM_EXHAUSTED: 1 - share}


def _fragmentation_share(stranded_ratio: float, p: Parameters) -> float:
    if stranded_ratio < p.mixed_low_ratio:
        return p.share_below
    if stranded_ratio >= p.mixed_high_ratio:
        return p.share_high
    position = (stranded_ratio - p.mixed_low_ratio) / (p.mixed_high_ratio - p.mixed_low_ratio)
    return p.share_low + position * (p.share_high - p.share_low)


def _crash(c: Circumstances, p: Parameters) -> list[Evidence]:
    w = p.weights
    rows = _usage(c, p, w.usage_low, w.usage_high, "the engine died")
    if c.headroom is not None:
        steps = ((0.5, w.headroom_half), (1, w.headroom_one), (2, w.headroom_two), (5, w.headroom_five))
        weight = next((weight for limit, weight in steps if c.headroom.ratio < limit), w.headroom_ample)
        rows.append(_headroom(c.headroom, weight))
    if c.growing is not None:
        rows.append(_growth(w.growing if c.growing else w.not_growing, growing=c.growing))
    rows += _allocator(c, p)
    rows += _lost(c, p)
    if c.drained:
        rows.append(_row("drained", None, "", w.drained, "the engine had been emptied before it went: a planned stop"))
    if c.earlier_crash > 0 and c.headroom is not None and c.headroom.ratio < 2:
        weight = w.earlier_crash * c.earlier_crash
        rows.append(_row("earlier_crash", c.earlier_crash, "", weight, "it had crashed before with work in flight"))
    return rows


def _allocator(c: Circumstances, p: Parameters) -> list[Evidence]:
    """What the allocators showed just before a death; nothing where nobody listened to them."""
    w, held = p.weights, c.inside.held
    if held is None:
        return []
    if held.retries > 0:
        words = f"the allocator on {held.gpu} ran into a full device {times(held.retries)} in the last seconds"
        rows = [_row("allocator_retries", held.retries, "", w.retries, words)]
    else:
        words = f"the allocator on {held.gpu} had not run into a full device in the last seconds"
        rows = [_row("allocator_retries", 0.0, "", w.no_retries, words)]
    if c.headroom is None:
        return rows
    split, need, free = held.inactive_split_bytes, c.headroom.need_bytes, c.headroom.free_bytes
    stranded = split > need > free
    sentence = (
        f"{split / GIB:.2f} GiB were stranded in split segments and {free / GIB:.2f} GiB free, "
        f"where a step needs {need / GIB:.2f} GiB"
    )
    row = _row("inactive_split", split, "bytes", w.split if stranded else w.no_split, sentence)
    return [*rows, replace(row, cause=str(Cause.FRAGMENTATION)) if stranded else row]


def _lost(c: Circumstances, p: Parameters) -> list[Evidence]:
    if c.lost is None:
        return []
    if c.lost > 0:
        sentence = f"{c.lost:.0f} requests were in flight and lost"
        return [_row("lost_work", c.lost, "requests", p.weights.lost_work, sentence)]
    if c.worked:
        return [
            _row(
                "lost_work",
                0.0,
                "requests",
                0.0,
                "no request was in flight at the last poll, yet tokens had moved",
            )
        ]
    return [_row("lost_work", 0.0, "requests", p.weights.lost_idle, "nothing was in flight: the engine died idle")]


def _alive(c: Circumstances, told: LogFact | None, p: Parameters) -> list[Evidence]:
    w = p.weights
    rows = _usage(c, p, w.alive_usage_low, w.usage_high, "requests failed")
    rows.append(
        _row(
            "engine_survived",
            None,
            "",
            w.alive,
            "the engine survived; an out-of-memory error in a step kills vLLM",
        )
    )
    if c.headroom is not None:
        steps = ((1.0, w.alive_headroom_one), (2.0, w.alive_headroom_two))
        weight = next((weight for limit, weight in steps if c.headroom.ratio < limit), w.alive_headroom_ample)
        rows.append(_headroom(c.headroom, weight))
    if c.growing is not None:
        rows.append(_growth(w.alive_growing if c.growing else w.not_growing, growing=c.growing))
    if c.inside.held is not None and (told is None or told.what is not Fact.OOM):
        words = "the allocator counted no out-of-memory error while requests failed"
        rows.append(_row("allocator_ooms", 0.0, "", w.alive_no_ooms, words))
    if c.queueing:
        rows.append(
            _row(
                "queue",
                None,
                "",
                w.alive_queue,
                "requests were waiting: a scheduler or queue limit is likelier",
            )
        )
    return rows


def _usage(c: Circumstances, p: Parameters, low: float, high: float, what: str) -> list[Evidence]:
    if c.usage_ratio is None:
        return []
    if c.usage_ratio < p.band_mid_ratio:
        weight, tail = low, "the pool was not the limit"
    elif c.usage_ratio < p.band_high_ratio:
        weight, tail = 0.0, "which says nothing either way"
    else:
        weight, tail = high, "the pool was full"
    sentence = f"{what} at {_percent(c.usage_ratio)} KV cache usage (highest of the window): {tail}"
    return [_row("kv_usage", c.usage_ratio, "ratio", weight, sentence)]


def _headroom(room: Headroom, weight: float) -> Evidence:
    sentence = (
        f"{room.gpu} had {room.free_bytes / GIB:.2f} GiB of VRAM free at its peak, "
        f"where {room.need_bytes / GIB:.2f} GiB is the largest step it is known to take"
    )
    return _row("headroom", room.ratio, "ratio", weight, sentence)


def _growth(weight: float, *, growing: bool) -> Evidence:
    sentence = "VRAM had been climbing in steps that did not come back" if growing else "VRAM had not been climbing"
    return _row("vram_trend", float(growing), "", weight, sentence)


def _log(c: Circumstances, told: LogFact | None, p: Parameters) -> list[Evidence]:
    w = p.weights
    if told is None:
        if not c.log_present:
            return []
        weight = w.log_silent if c.crashed else w.alive_log_silent
        return [_row("log", None, "", weight, "the log was there and shows no out-of-memory message")]
    if told.what is Fact.OOM and "ooms" in told.facts:
        ooms = told.facts["ooms"]
        words = f"the allocator of a worker counted {ooms:.0f} out-of-memory error{'s' if ooms > 1 else ''}"
        return [_row("allocator_ooms", ooms, "", w.allocator_oom, words)]
    if told.what is Fact.OOM:
        return [_row("log_oom", told.facts.get("tried"), "bytes", w.log_oom, _oom_sentence(told.facts))]
    if told.what in _EXPLAINED:
        name, sentence = _EXPLAINED[told.what]
        signal = str(told.what) if told.what is Fact.PLANNED_STOP else f"log_{told.what}"
        return [_row(signal, None, "", getattr(w, name), sentence)]
    weight = w.log_silent if c.crashed else w.alive_log_silent
    return [_row("log_death", None, "", weight, "the log names the engine's death, and no out-of-memory message")]


_EXPLAINED = {
    Fact.PLANNED_STOP: ("marker", "the planned-stop marker had just been touched"),
    Fact.SHUTDOWN: ("log_shutdown", "the log shows that a shutdown was asked for first"),
    Fact.DRIVER_FAULT: ("log_fault", "the log shows a fault of the GPU or its driver first"),
    Fact.HOST_OOM: ("log_fault", "the log shows that the host's own memory ran out first"),
    Fact.REFUSAL: ("log_fault", "the log shows that vLLM refused to start for lack of room for its KV pool"),
    Fact.REQUEST_TOO_LONG: ("log_request", "the log shows requests longer than the model allows"),
}
"""Texts that explain a failure without memory outside the pool: the weight's name, and the sentence."""


def _oom_sentence(facts: Mapping[str, float]) -> str:
    tried, free = facts.get("tried"), facts.get("free")
    if tried is None or free is None:
        return "the log holds an out-of-memory message of the allocator, without its numbers"
    stranded = facts.get("reserved_unallocated", 0.0) + facts.get("private_pools", 0.0)
    return (
        f"the allocator failed to get {tried / GIB:.2f} GiB with {free / GIB:.2f} GiB free "
        f"and {stranded / GIB:.2f} GiB held but unused"
    )


def _row(signal: str, value: float | None, unit: str, weight: float, sentence: str) -> Evidence:
    return Evidence(signal, value, unit, weight, MEMORY, sentence)


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"
