"""From weighed evidence to a cause: how sure that it was memory, and which of the memory causes.

The allocator's arithmetic comes first, from its message or from its last readings; then what has grown takes
its part: the component of VRAM that grew most names the cause. From outside alone nothing divides, and the
cause stays `memory_undetermined`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fragscope.arithmetic import ONE_OFF, Clue, account, fragmentation_share, memory_shares
from fragscope.detect.allocator import Held
from fragscope.detect.attribution import MEMORY, Circumstances
from fragscope.detect.parameters import GIB, Parameters
from fragscope.detect.statistics import sigmoid
from fragscope.detect.vram import Headroom
from fragscope.model import MEMORY_CAUSES, Cause, Evidence, Fact, LogFact


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
    shares = divide(circumstances, told, parameters)
    probabilities = {cause: probability * share for cause, share in shares.items() if share > 0}
    other = _other_cause(circumstances, told)
    probabilities[other] = 1 - probability
    likeliest = max(probabilities, key=lambda name: probabilities[name])
    # Without a look at the GPUs or the allocator's words the prior alone would name memory.
    held = circumstances.inside.held
    looked = circumstances.headroom is not None or (held is not None and held.retries > 0)
    cause = likeliest if confirmed or looked else other
    rows = (*evidence, *_earlier_row(earlier), *_growth_rows(circumstances, parameters))
    return Judgement(score, probabilities, cause, confirmed, rows)


def divide(c: Circumstances, told: LogFact | None, p: Parameters) -> dict[Cause, float]:
    """The memory causes' shares of a memory failure; they sum to 1."""
    facts = told.facts if told is not None and told.what is Fact.OOM else None
    external = _others(c, facts or {}, p)
    if facts is not None and {"tried", "free"} <= facts.keys():
        shares = memory_shares(facts, p, Clue(one_off=ONE_OFF in facts))
        if facts["free"] >= facts["tried"] and not account(facts).capped:
            # Nothing was short, so nothing that grew explains it.
            return shares
        stranded = facts.get("reserved_unallocated", 0.0) + facts.get("private_pools", 0.0)
        own = _own_growth(c, p, stranded + external)
        if facts["tried"] > facts["free"] + external + own:
            # It would not have fitted either if nothing had grown.
            shares = _one_huge(shares, facts["tried"], c.headroom, p)
    elif c.inside.held is not None and c.headroom is not None:
        shares = _from_readings(c.inside.held, c.headroom, p)
        stranded = float(c.inside.held.inactive_split_bytes)
        own = _own_growth(c, p, stranded + external)
    else:
        shares = memory_shares({}, p) if facts is not None else {Cause.MEMORY_UNDETERMINED: 1.0}
        return _undivided(shares, external, c.inside.growth.own or 0.0)
    served = _served(facts, p) and not c.growing
    return _divided(shares, stranded, external, own, served=served)


def _others(c: Circumstances, facts: Mapping[str, float], p: Parameters) -> float:
    """How much more others hold than at first, bytes; 0 for less than `growth_bytes`.

    Without per-process VRAM the message's own figures bound it: what is neither free nor this process's.
    """
    growth = c.inside.growth
    found = growth.external or 0.0
    if growth.external is None and {"total", "free", "in_use"} <= facts.keys():
        found = min(facts["total"] - facts["free"] - facts["in_use"], growth.used or 0.0)
    return found if found >= p.growth_bytes else 0.0


def _one_huge(shares: dict[Cause, float], tried: float, room: Headroom | None, p: Parameters) -> dict[Cause, float]:
    """A request of twice the largest step seen, or larger than any step, is no ordinary one: it was a peak."""
    if room is None:
        return shares
    if tried < min(p.headroom_back * room.need_bytes, p.need_max_ratio * room.total_bytes):
        return shares
    lacking = shares.get(Cause.VRAM_EXHAUSTED, 0.0)
    peak = shares.get(Cause.TRANSIENT_PEAK, 0.0) + lacking * p.share_transient
    return {**shares, Cause.VRAM_EXHAUSTED: lacking * (1 - p.share_transient), Cause.TRANSIENT_PEAK: peak}


def _from_readings(held: Held, room: Headroom, p: Parameters) -> dict[Cause, float]:
    """The arithmetic without a message: what was stranded, as a share of the card.

    What a request wanted is not known.
    """
    if room.ratio >= 1:
        # If it was memory although the largest step ever seen would have fitted, it was a larger one.
        return {Cause.TRANSIENT_PEAK: p.share_transient, Cause.VRAM_EXHAUSTED: 1 - p.share_transient}
    split = held.inactive_split_bytes
    if split < p.need_min_bytes:
        share = p.share_expandable if held.expandable else p.share_unknown
    else:
        share = fragmentation_share(split, room.total_bytes, p)
    return {Cause.FRAGMENTATION: share, Cause.VRAM_EXHAUSTED: 1 - share}


def _undivided(shares: Mapping[Cause, float], external: float, own: float) -> dict[Cause, float]:
    """Another process takes its part by bytes; what grew in the engine itself cannot be told apart."""
    part = external / (external + own) if external else 0.0
    return {**{cause: share * (1 - part) for cause, share in shares.items()}, Cause.EXTERNAL_PROCESS: part}


def _served(facts: Mapping[str, float] | None, p: Parameters) -> bool:
    """Whether the message shows that compaction alone would have served, with a real share of the card stranded."""
    a = account(facts or {})
    return bool(a.compaction and a.total and a.stranded and a.stranded >= p.mixed_low_ratio * a.total)


def _divided(
    shares: Mapping[Cause, float], stranded: float, external: float, own: float, *, served: bool
) -> dict[Cause, float]:
    """What grew takes its part by bytes from what was stranded, and all of the rest.

    `served`: compaction would have served the request although the engine's own memory had grown, and it no
    longer climbed: a working set that rose and stayed is no leak, so it takes only from the rest.
    """
    taken = external + own
    if not taken:
        return dict(shares)
    against = external if served else taken
    fragmentation = shares.get(Cause.FRAGMENTATION, 0.0) * stranded / (stranded + against)
    # What the message names (a buffer, another process) stays named.
    named = {cause: share for cause, share in shares.items() if cause not in _OPEN}
    rest = 1 - fragmentation - sum(named.values())
    for cause, grown in ((Cause.EXTERNAL_PROCESS, external), (Cause.MEMORY_GROWTH, own)):
        named[cause] = named.get(cause, 0.0) + rest * grown / taken
    return {Cause.FRAGMENTATION: fragmentation, **named}


_OPEN = (Cause.FRAGMENTATION, Cause.VRAM_EXHAUSTED, Cause.MEMORY_UNDETERMINED)
"""Shares that growth may take: it says why the card was full."""


def _own_growth(c: Circumstances, p: Parameters, explained: float) -> float:
    """Live and non-torch growth, bytes; from a message alone what grew and is not `explained`.

    A climb of live memory has to be seen as one, unless it is large: it swings by gigabytes.
    """
    growth = c.inside.growth
    large = p.growth_large_ratio * c.headroom.total_bytes if c.headroom is not None else float("inf")
    floor = p.growth_bytes if c.growing else max(p.growth_bytes, large)
    if c.inside.held is not None:
        live, non_torch = growth.live or 0.0, growth.non_torch or 0.0
        return (live if live >= floor else 0.0) + (non_torch if non_torch >= p.growth_bytes else 0.0)
    whole = growth.own if growth.own is not None else growth.used
    grown = whole - explained if whole is not None else 0.0
    return grown if grown >= floor else 0.0


_TOLD_CAUSES = {
    Fact.SHUTDOWN: Cause.SHUTDOWN,
    Fact.PLANNED_STOP: Cause.SHUTDOWN,
    Fact.DRIVER_FAULT: Cause.DRIVER_FAULT,
    Fact.HOST_OOM: Cause.HOST_OOM,
    Fact.REFUSAL: Cause.STARTUP_NO_MEMORY,
    Fact.REQUEST_TOO_LONG: Cause.REQUEST_TOO_LONG,
    Fact.ENGINE_DEATH: Cause.ENGINE_FAULT,
    Fact.WORKER_DEATH: Cause.ENGINE_FAULT,
}
"""What a text names where it is what came first."""


def _other_cause(circumstances: Circumstances, told: LogFact | None) -> Cause:
    if told is not None and told.what in _TOLD_CAUSES:
        return _TOLD_CAUSES[told.what]
    return Cause.ENGINE_FAULT if circumstances.seen_by_health else Cause.UNEXPLAINED


def _earlier_row(earlier: float) -> tuple[Evidence, ...]:
    if not earlier:
        return ()
    words = "memory failures of the last hours still count, the less the longer ago"
    return (Evidence("earlier_failures", earlier, "nats", earlier, MEMORY, words),)


def _growth_rows(c: Circumstances, p: Parameters) -> tuple[Evidence, ...]:
    """What grew and what did not, where somebody can tell: it divides the memory causes and weighs nothing."""
    growth = c.inside.growth
    parts = (
        ("external_growth", growth.external, Cause.EXTERNAL_PROCESS, "what other processes hold on that GPU"),
        ("live_growth", growth.live, Cause.MEMORY_GROWTH, "the engine's live tensors"),
        ("non_torch_growth", growth.non_torch, Cause.MEMORY_GROWTH, "the engine's memory outside PyTorch"),
    )
    rows = []
    for signal, value, cause, what in parts:
        if value is None:
            continue
        verb = "grew" if value >= p.growth_bytes else "did not grow much:"
        words = f"{what} {verb} by {value / GIB:.2f} GiB since the engine settled"
        rows.append(Evidence(signal, value, "bytes", 0.0, str(cause), words.replace(": by", ":")))
    return tuple(rows)
