"""An incident's reasons in sentences, with the figures that decide."""

from collections.abc import Iterator

from fragscope.arithmetic import Account, size
from fragscope.detect.parameters import Parameters
from fragscope.model import Cause


def reason(a: Account, cause: str, p: Parameters, one_off: str | None, *, sure: bool = True) -> Iterator[str]:
    """Why an allocation failed, step by step: the request, what compaction would give, what lacked instead."""
    if a.contradiction is not None:
        yield f"The figures contradict each other ({a.contradiction}), so they are not judged."
        return
    if a.tried is not None and a.free is not None:
        yield f"{size(a.tried)} was asked for with {size(a.free)} free."
    elif a.tried is not None:
        yield f"{size(a.tried)} was asked for; how much was free is not in the text."
    if a.capped and a.allowed is not None:
        yield f"The process may use {size(a.allowed)} by its own setting: that cap was hit, not the card."
        return
    yield from _stranded(a, p)
    if cause == Cause.EXTERNAL_PROCESS:
        yield _outside(a)
    elif cause == Cause.MEMORY_UNDETERMINED and a.free is not None and a.tried is not None and a.free >= a.tried:
        yield "Enough was free, by the driver's word: the device refused for another reason, or that word is wrong."
    elif cause == Cause.TRANSIENT_PEAK:
        yield _peak(a, p, one_off)
    elif cause == Cause.STARTUP_NO_MEMORY:
        yield (
            "The engine was still loading: what it was given does not fit the card."
            if sure
            else "So much of the card is live, and no graph captured: probably it was still loading its weights."
        )
    yield from _non_torch(a)


def _stranded(a: Account, p: Parameters) -> Iterator[str]:
    if a.stranded is None:
        yield "How much the allocator held without using it is not in the text, so fragmentation cannot be decided."
        return
    share = "" if not a.total else f" ({100 * a.stranded / a.total:.1f} % of the card)"
    held = f"{size(a.stranded)}{share} was held but stranded"
    if a.compaction is None:
        yield f"{held}."
    elif a.undecidable:
        yield f"{held}: whether compaction would have served it lies within the rounding of the figures."
    elif not a.compaction:
        served = a.tried is not None and a.free is not None and a.free >= a.tried
        yield f"{held}." if served else f"{held}: even perfect compaction would not have served the request."
    elif a.total and a.stranded >= p.mixed_high_ratio * a.total:
        yield f"{held}: perfect compaction would have served the request."
    elif a.total and a.stranded >= p.mixed_low_ratio * a.total:
        yield f"{held}: compaction would have served it, but the share is thin: mixed, pieces on a nearly full card."
    else:
        yield f"{held}: compaction would just have served it, but so little is stranded that the card was simply full."


def _peak(a: Account, p: Parameters, one_off: str | None) -> str:
    if one_off is not None:
        return f"It was wanted for {one_off}: a buffer that lives for one step."
    if a.tried is not None and a.total and a.tried >= p.huge_ratio * a.total:
        return f"One request for {100 * a.tried / a.total:.0f} % of the card is a one-off buffer."
    return "Weights and KV pool are fixed once an engine serves: what it lacked was room for the step's own buffers."


def _outside(a: Account) -> str:
    if a.others is not None:
        return f"Other processes held {size(a.others)} of the card."
    return f"{size(a.outside or 0.0)} was held outside this allocator, more than the engine itself held."


def _non_torch(a: Account) -> Iterator[str]:
    if a.in_use is None or a.allocated is None or a.unallocated is None:
        return
    beside = a.in_use - a.allocated - a.unallocated
    if beside > 2 * 2**30:
        usual = "communication, graphs, workspaces; 0.5 to 2 GiB is usual"
        yield f"{size(beside)} of this process lies outside the allocator ({usual})."
