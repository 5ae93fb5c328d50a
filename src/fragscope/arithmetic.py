"""The arithmetic of an allocator's figures: would perfect compaction have served the request, and if not, what lacked?

Shared by the detector and by `explain`, so that both say the same of the same message. Where the figures
come from and what each means is in docs/logs.md; the shares are explained in docs/explain.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fragscope.detect.parameters import GIB, Parameters
from fragscope.model import Cause

ONE_OFF = "one_off"
"""A fact beside the figures: the stack names a buffer of one unusual step, so a shortage was a peak."""
LARGEST_CARD_BYTES = 288 * GIB
"""MI355X, 2025: what is 4 % of this is at least 4 % of any card."""
_ROUNDING_BYTES = GIB / 100
"""Two figures printed with two decimals of GiB, each 5 MiB off."""
_OWN_SHARE = 0.85
_CAP_SHARE = 0.95
_NAMED_SHARE = 0.85
_STEP_SHARE = 0.55
"""A serving engine's shortage without a stack that names the buffer: just more often a step's peak than not."""


@dataclass(frozen=True, slots=True)
class Clue:
    """What the text around a message tells of it.

    `one_off`: the stack names a buffer that one unusual request or step asks for. `loading`: how sure it is
    that the engine was still filling the card with its weights, 0..1. `serving`: it had served already.
    """

    one_off: bool = False
    loading: float = 0.0
    serving: bool = False


NO_CLUE = Clue()


@dataclass(frozen=True, slots=True)
class Account:
    """How a card was divided when a request failed; bytes, None where the message does not say."""

    tried: float | None = None
    total: float | None = None
    free: float | None = None
    allocated: float | None = None
    unallocated: float | None = None
    private: float = 0.0
    allowed: float | None = None
    in_use: float | None = None
    others: float | None = None

    @property
    def live(self) -> float | None:
        """What tensors hold: the allocated figure includes the free blocks of private pools."""
        return None if self.allocated is None else max(0.0, self.allocated - self.private)

    @property
    def stranded(self) -> float | None:
        """Held but not usable for this request: unallocated in pinned segments, and free in private pools."""
        if self.unallocated is None:
            return None if self.private == 0 else self.private
        return self.unallocated + self.private

    @property
    def outside(self) -> float | None:
        """Neither free nor the allocator's: contexts, communication buffers, other processes."""
        if self.total is None or self.free is None or self.allocated is None or self.unallocated is None:
            return None
        return self.total - self.free - self.allocated - self.unallocated

    @property
    def contradiction(self) -> str | None:
        """Why the figures cannot all be true; None where they can."""
        if self.total is None:
            return None
        if self.allocated is not None and self.private > self.allocated + tolerance(self.private, self.allocated):
            return f"{size(self.private)} in private pools is more than the {size(self.allocated)} that contain it"
        for name, value in (("free", self.free), ("allocated", self.allocated), ("in use", self.in_use)):
            if value is not None and value > self.total + _ROUNDING_BYTES:
                return f"{value / GIB:.2f} GiB {name} is more than the card's {self.total / GIB:.2f} GiB"
        outside = self.outside
        if outside is not None and outside < -2 * _ROUNDING_BYTES:
            return f"free, allocated and unallocated add up to {-outside / GIB:.2f} GiB more than the card has"
        return None

    @property
    def compaction(self) -> bool | None:
        """Whether perfect compaction would have served it: free < tried <= free + stranded; None where unknown."""
        if self.tried is None or self.free is None or self.stranded is None:
            return None
        return self.free < self.tried <= self.free + self.stranded

    @property
    def undecidable(self) -> bool:
        """Whether that comparison falls within the rounding of the printed figures."""
        if self.tried is None or self.free is None or self.stranded is None:
            return False
        gap = abs(self.tried - self.free - self.stranded)
        return gap <= tolerance(self.tried, self.free, self.unallocated or 0.0, self.private)

    @property
    def capped(self) -> bool:
        """Whether the process's own cap was hit: what it held and what it asked for exceed it."""
        if self.allowed is None:
            return False
        if self.allocated is None or self.tried is None:
            return True
        held = self.allocated + (self.unallocated or 0.0)
        return held + self.tried > self.allowed - tolerance(self.allowed, self.allocated, self.unallocated or 0.0)


def tolerance(*values: float) -> float:
    """How far a sum of printed sizes can be off: half of the second decimal of each one's unit."""
    return sum(0.005 * (GIB if value >= GIB else 2**20 if value >= 2**20 else 2**10) for value in values if value)


def account(facts: Mapping[str, float]) -> Account:
    """The account of a message's facts (docs/logs.md has their names)."""
    return Account(
        facts.get("tried"),
        facts.get("total"),
        facts.get("free"),
        facts.get("allocated"),
        facts.get("reserved_unallocated"),
        facts.get("private_pools", 0.0),
        facts.get("allowed"),
        facts.get("in_use"),
        facts.get("others_in_use"),
    )


def memory_shares(facts: Mapping[str, float], p: Parameters, clue: Clue = NO_CLUE) -> dict[Cause, float]:
    """How the causes of a failed allocation divide; the shares sum to 1."""
    shares = _shares(account(facts), p, one_off=clue.one_off)
    lacking = shares.pop(Cause.VRAM_EXHAUSTED, 0.0)
    for cause, part in _shortage(account(facts), p, clue).items():
        shares[cause] = shares.get(cause, 0.0) + lacking * part
    if clue.one_off and shares.get(Cause.MEMORY_UNDETERMINED, 0.0) > 0 and account(facts).tried is None:
        # Without figures the buffer that is named is all there is to go by.
        shares = {Cause.TRANSIENT_PEAK: _NAMED_SHARE, Cause.MEMORY_UNDETERMINED: 1 - _NAMED_SHARE}
    return {cause: share for cause, share in shares.items() if share > 0}


def _shares(a: Account, p: Parameters, *, one_off: bool) -> dict[Cause, float]:
    """With every shortage called exhaustion; `_shortage` says of which kind it was."""
    if a.contradiction is not None or a.total == 0:
        return _undetermined(p)
    if a.capped:
        return {Cause.VRAM_EXHAUSTED: _CAP_SHARE, Cause.FRAGMENTATION: 1 - _CAP_SHARE}
    if a.tried is None or a.free is None or a.total is None:
        return _without_request(a, p, one_off=one_off)
    if a.free >= a.tried:
        return _enough_free(a, a.tried, a.free, a.total, p)
    foreign = _foreign_share(a, p)
    if foreign > 0:
        return {
            Cause.EXTERNAL_PROCESS: foreign,
            Cause.VRAM_EXHAUSTED: 1 - foreign - p.share_unknown,
            Cause.FRAGMENTATION: p.share_unknown,
        }
    share = fragmentation_share(a.stranded or 0.0, a.total, p) if a.compaction else p.share_unknown
    if a.undecidable and a.stranded:
        share = (fragmentation_share(a.stranded, a.total, p) + p.share_unknown) / 2
    if a.stranded is None:
        # A shortened message: what was stranded is not told, so nothing argues against the base rate.
        share = p.share_below
    if one_off and share > p.share_unknown:
        share = _weakened(share, p.one_off_odds)
    return {Cause.FRAGMENTATION: share, Cause.VRAM_EXHAUSTED: 1 - share}


def _enough_free(a: Account, tried: float, free: float, total: float, p: Parameters) -> dict[Cause, float]:
    """Free at least as large as the request: it is read after the failure, so a near miss is a full card."""
    if free - tried > max(tolerance(tried, free), p.near_ratio * tried):
        return {Cause.MEMORY_UNDETERMINED: 1.0}
    ratio = (a.stranded or 0.0) / total
    share = p.share_low if ratio >= p.mixed_high_ratio else 0.0
    return {Cause.FRAGMENTATION: share, Cause.VRAM_EXHAUSTED: 1 - share}


def oom_sentence(facts: Mapping[str, float]) -> str:
    """The message in one clause, with the figures that decide."""
    a = account(facts)
    if a.tried is None or a.free is None:
        return "the log holds an out-of-memory message, without the numbers that would decide"
    held = "" if a.stranded is None else f" and {size(a.stranded)} held but unused"
    return f"the allocator failed to get {size(a.tried)} with {size(a.free)} free{held}"


def size(value_bytes: float) -> str:
    """Bytes for people: GiB from one tenth up, else MiB."""
    return f"{value_bytes / GIB:.2f} GiB" if value_bytes >= 0.1 * GIB else f"{value_bytes / 2**20:.0f} MiB"


def _shortage(a: Account, p: Parameters, clue: Clue) -> dict[Cause, float]:
    """What lacked when nothing but more memory would have helped."""
    if a.capped:
        return {Cause.VRAM_EXHAUSTED: 1.0}
    if clue.one_off or _huge(a, p):
        return {Cause.TRANSIENT_PEAK: 1.0}
    if clue.loading > 0:
        return {Cause.STARTUP_NO_MEMORY: clue.loading, Cause.VRAM_EXHAUSTED: 1 - clue.loading}
    beside = (
        a.in_use - a.allocated - (a.unallocated or 0.0) if a.in_use is not None and a.allocated is not None else 0.0
    )
    if clue.serving and a.tried is not None and beside < p.beside_bytes:
        # Weights and pool are fixed once it serves: what varies from step to step is the activations.
        return {Cause.TRANSIENT_PEAK: _STEP_SHARE, Cause.VRAM_EXHAUSTED: 1 - _STEP_SHARE}
    return {Cause.VRAM_EXHAUSTED: 1.0}


def _huge(a: Account, p: Parameters) -> bool:
    """One request for a large part of the card, far beyond what was left, on top of live memory."""
    if a.tried is None or a.total is None or a.free is None or not a.live:
        return False
    lacking = a.tried - a.free - (a.stranded or 0.0)
    large = a.tried >= p.huge_ratio * a.total and lacking >= p.huge_ratio / 2 * a.total
    return large and a.live >= p.huge_ratio * a.total


def _foreign_share(a: Account, p: Parameters) -> float:
    """External processes' share; 0 where nothing points to them."""
    if a.total is None:
        return 0.0
    if a.others is not None:
        return _OWN_SHARE if a.others >= p.others_ratio * a.total else 0.0
    if a.in_use is not None or a.outside is None or a.live is None:
        return 0.0
    # Without a list of processes, contexts and communication buffers of our own are in this figure, too.
    large = a.outside >= p.outside_ratio * a.total and a.outside > a.live + (a.stranded or 0.0)
    return _OWN_SHARE - 0.15 if large else 0.0


def _without_request(a: Account, p: Parameters, *, one_off: bool) -> dict[Cause, float]:
    """What the held part alone tells, where the request, the free memory or the card's size is not known."""
    if a.stranded is None:
        known = a.tried is not None and (a.free is not None or a.tried > LARGEST_CARD_BYTES / 2)
        return {Cause.VRAM_EXHAUSTED: 1.0} if known else _undetermined(p)
    card = a.total or LARGEST_CARD_BYTES
    if a.stranded >= p.mixed_high_ratio * card and not one_off:
        return {Cause.FRAGMENTATION: p.share_high, Cause.VRAM_EXHAUSTED: 1 - p.share_high}
    if a.live and a.stranded < p.mixed_low_ratio * (a.live + a.stranded):
        return {Cause.VRAM_EXHAUSTED: 1 - p.share_unknown, Cause.FRAGMENTATION: p.share_unknown}
    return _undetermined(p)


def _undetermined(p: Parameters) -> dict[Cause, float]:
    return {Cause.FRAGMENTATION: p.share_unknown, Cause.MEMORY_UNDETERMINED: 1 - p.share_unknown}


def fragmentation_share(stranded: float, total: float, p: Parameters) -> float:
    """Fragmentation's share of the memory causes, 0..1, by the stranded part of the card (docs/explain.md)."""
    ratio = stranded / total
    if ratio < p.mixed_low_ratio:
        return p.share_below
    if ratio >= p.mixed_high_ratio:
        return p.share_high
    position = (ratio - p.mixed_low_ratio) / (p.mixed_high_ratio - p.mixed_low_ratio)
    return p.share_low + position * (p.share_high - p.share_low)


def _weakened(share: float, odds_factor: float) -> float:
    odds = share / (1 - share) * odds_factor
    return odds / (1 + odds)
