"""Which GPUs belong to a target. Unassigned is missing evidence, never "all"."""

from dataclasses import dataclass

from fragscope.model import Gap, Part, Reason
from fragscope.sources.gpu.sysfs import Card


@dataclass(frozen=True, slots=True)
class Assigned:
    """A target's cards and the rule that says so, or the gap that stands in their place."""

    cards: tuple[Card, ...]
    rule: str
    gap: Gap | None = None


def assign(cards: tuple[Card, ...], wanted: tuple[str, ...], expected: int | None, unreadable: int = 0) -> Assigned:
    """Applies the setting (PCI addresses or unique_ids), else takes the only card of the node.

    `unreadable` cards are there too: one of two is not the only one.

    `expected` is how many GPUs the engine spans (TP x PP): a pool spread over nodes is not exonerated by
    the headroom of one of them. It defaults to the number of configured GPUs.
    """
    assigned = _configured(cards, wanted) if wanted else _only(cards, unreadable)
    if assigned.gap is not None:
        return assigned
    need = expected if expected is not None else max(1, len(wanted))
    if len(assigned.cards) < need:
        detail = f"{len(assigned.cards)} of the engine's {need} GPUs can be seen"
        return Assigned((), assigned.rule, Gap(Part.GPU, Reason.ABSENT, detail))
    return assigned


def _configured(cards: tuple[Card, ...], wanted: tuple[str, ...]) -> Assigned:
    names = {normal(name) for name in wanted}
    found = tuple(card for card in cards if names & _names(card))
    known = {name for card in found for name in _names(card)}
    lost = sorted(names - known)
    if lost:
        seen = ", ".join(card.gpu for card in cards) or "none"
        detail = f"configured GPU {', '.join(lost)} is not there; seen: {seen}"
        return Assigned((), "configured", Gap(Part.GPU, Reason.ABSENT, detail))
    return Assigned(found, "configured")


def _only(cards: tuple[Card, ...], unreadable: int) -> Assigned:
    if len(cards) == 1 and not unreadable:
        return Assigned(cards, "only_card")
    if not cards:
        return Assigned((), "none", Gap(Part.GPU, Reason.ABSENT, "no GPU can be read"))
    names = ", ".join(card.gpu for card in cards)
    detail = f"{len(cards) + unreadable} GPUs are visible ({names}) and nothing says which are the engine's; set `gpus`"
    return Assigned((), "none", Gap(Part.GPU, Reason.UNASSIGNED, detail))


def _names(card: Card) -> set[str]:
    return {normal(card.gpu)} | ({normal(card.unique_id)} if card.unique_id else set())


def normal(name: str) -> str:
    """A GPU's name as it is compared: lower case, `GPU-` and `0x` of a unique_id dropped, PCI domain added."""
    plain = name.strip().lower().removeprefix("gpu-").removeprefix("0x")
    return f"0000:{plain}" if plain.count(":") == 1 else plain
