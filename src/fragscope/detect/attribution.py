"""Why the engine died or failed requests, weighed from the state before it.

Each circumstance adds its weight to the log-odds that memory *outside the KV pool* ran out. The table
and its public sources are in docs/detector.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fragscope.arithmetic import memory_shares, oom_sentence
from fragscope.detect.parameters import GIB, Parameters
from fragscope.detect.statistics import sigmoid
from fragscope.detect.vram import Headroom
from fragscope.model import MEMORY_CAUSES, Cause, Evidence, Fact, LogFact

MEMORY = "memory"
"""The `cause` of evidence that speaks for or against any memory cause."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What was known before the first failure; None where the evidence abstains."""

    crashed: bool
    usage_ratio: float | None = None
    headroom: Headroom | None = None
    growing: bool | None = None
    lost: float | None = None
    worked: bool | None = None
    drained: bool | None = None
    queueing: bool = False
    seen_by_health: bool = False
    log_present: bool = False
    earlier_crash: float = 0.0
    """0..1: an earlier undrained crash, decayed."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """An episode weighed: its log-odds for a memory cause, the causes' probabilities, what spoke."""

    score: float
    probabilities: Mapping[Cause, float]
    cause: Cause
    confirmed: bool
    evidence: tuple[Evidence, ...] = field(default=())

    @property
    def memory_probability(self) -> float:
        """The memory causes together."""
        return sum(self.probabilities.get(cause, 0.0) for cause in MEMORY_CAUSES)


def weigh(
    circumstances: Circumstances, told: LogFact | None, parameters: Parameters
) -> tuple[float, tuple[Evidence, ...]]:
    """The clipped log-odds of an episode on its own, and the evidence they are made of."""
    rows = _crash(circumstances, parameters) if circumstances.crashed else _alive(circumstances, parameters)
    rows += _log(circumstances, told, parameters)
    w = parameters.weights
    score = min(w.clip_high, max(w.clip_low, w.prior + sum(row.weight for row in rows)))
    if told is not None and told.what is Fact.OOM:
        score = w.clip_high
    return score, tuple(rows)


def judge(
    score: float,
    earlier: float,
    evidence: tuple[Evidence, ...],
    circumstances: Circumstances,
    told: LogFact | None,
    parameters: Parameters,
) -> Judgement:
    """Turns log-odds into a cause; `earlier` is what past memory episodes still add."""
    probability = sigmoid(score + earlier)
    confirmed = told is not None and told.what is Fact.OOM
    shares = (
        memory_shares(told.facts, parameters) if told is not None and confirmed else {Cause.MEMORY_UNDETERMINED: 1.0}
    )
    probabilities = {cause: probability * share for cause, share in shares.items()}
    other = _other_cause(circumstances, told)
    probabilities[other] = 1 - probability
    likeliest = max(probabilities, key=lambda name: probabilities[name])
    # Without a look at the GPUs or the allocator's words the prior alone would name memory.
    cause = likeliest if confirmed or circumstances.headroom is not None else other
    return Judgement(score, probabilities, cause, confirmed, evidence)


_NAMED = {
    Fact.SHUTDOWN: Cause.SHUTDOWN,
    Fact.PLANNED_STOP: Cause.SHUTDOWN,
    Fact.DRIVER_FAULT: Cause.DRIVER_FAULT,
    Fact.HOST_OOM: Cause.HOST_OOM,
    Fact.REFUSAL: Cause.STARTUP_NO_MEMORY,
}


def _other_cause(circumstances: Circumstances, told: LogFact | None) -> Cause:
    named = _NAMED.get(told.what) if told is not None else None
    if named is not None:
        return named
    if circumstances.seen_by_health or (told is not None and told.what in (Fact.ENGINE_DEATH, Fact.WORKER_DEATH)):
        return Cause.ENGINE_FAULT
    return Cause.UNEXPLAINED


def _crash(c: Circumstances, p: Parameters) -> list[Evidence]:
    w = p.weights
    rows = _usage(c, p, w.usage_low, w.usage_high, "the engine died")
    if c.headroom is not None:
        steps = ((0.5, w.headroom_half), (1, w.headroom_one), (2, w.headroom_two), (5, w.headroom_five))
        weight = next((weight for limit, weight in steps if c.headroom.ratio < limit), w.headroom_ample)
        rows.append(_headroom(c.headroom, weight))
    if c.growing is not None:
        rows.append(_growth(w.growing if c.growing else w.not_growing, growing=c.growing))
    rows += _lost(c, p)
    if c.drained:
        rows.append(_row("drained", None, "", w.drained, "the engine had been emptied before it went: a planned stop"))
    if c.earlier_crash > 0 and c.headroom is not None and c.headroom.ratio < 2:
        weight = w.earlier_crash * c.earlier_crash
        rows.append(_row("earlier_crash", c.earlier_crash, "", weight, "it had crashed before with work in flight"))
    return rows


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


def _alive(c: Circumstances, p: Parameters) -> list[Evidence]:
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
    if told.what is Fact.OOM:
        return [_row("log_oom", told.facts.get("tried"), "bytes", w.log_oom, oom_sentence(told.facts))]
    if told.what is Fact.PLANNED_STOP:
        return [_row("planned_stop", None, "", w.marker, "the planned-stop marker had just been touched")]
    if told.what is Fact.SHUTDOWN:
        return [_row("log_shutdown", None, "", w.log_shutdown, "the log shows that a shutdown was asked for first")]
    weight = w.log_silent if c.crashed else w.alive_log_silent
    return [_row("log_death", None, "", weight, "the log names the engine's death, and no out-of-memory message")]


def _row(signal: str, value: float | None, unit: str, weight: float, sentence: str) -> Evidence:
    return Evidence(signal, value, unit, weight, MEMORY, sentence)


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"
