"""Which GPUs belong to a target. Unassigned is missing evidence, never "all"."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from fragscope.model import Gap, Part, Reason
from fragscope.sources.gpu.holdings import Held, Owned
from fragscope.sources.gpu.plausible import address


class Identity(Protocol):
    """Who a GPU is, whichever source named it; `gpu` is its PCI address (BDF)."""

    @property
    def gpu(self) -> str:
        """PCI address."""

    @property
    def unique_id(self) -> str | None:
        """The driver's own name for it."""

    @property
    def card(self) -> str:
        """Its DRM card, empty where that is not known."""

    @property
    def render(self) -> str | None:
        """Its render node."""


@dataclass(frozen=True, slots=True)
class Named:
    """A GPU that a library named; DRM names are known to sysfs only."""

    gpu: str
    unique_id: str | None = None
    card: str = ""
    render: str | None = None


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a target says of its GPUs: the setting, and how many its engine spans (TP x PP)."""

    gpus: tuple[str, ...] = ()
    expected: int | None = None


NOTHING_CLAIMED = Claimed()


@dataclass(frozen=True, slots=True)
class Assigned:
    """A target's cards and the rule that says so, or the gap that stands in their place."""

    cards: tuple[Identity, ...]
    rule: str
    gap: Gap | None = None


def assign(
    cards: tuple[Identity, ...],
    claimed: Claimed,
    owned: Owned | None = None,
    renders: Mapping[str, str] | None = None,
    unreadable: int = 0,
) -> Assigned:
    """Applies the first rule that speaks: the setting, the engine's processes, a file of render nodes, the only card.

    `renders` are GPUs by render node beyond the cards' own (partitions have some). `unreadable` cards are there
    too: one of two is not the only one. A pool spread over nodes is not exonerated by the headroom of one of
    them: fewer GPUs than the engine spans are a gap.
    """
    assigned = _first(cards, claimed, owned, renders or {}, unreadable)
    if assigned.gap is not None:
        return assigned
    need = claimed.expected or 1  # that every configured one is there is known by now
    if len(assigned.cards) < need:
        detail = f"{len(assigned.cards)} of the engine's {need} GPUs can be seen"
        return Assigned((), assigned.rule, Gap(Part.GPU, Reason.ABSENT, detail))
    return assigned


def _first(
    cards: tuple[Identity, ...], claimed: Claimed, owned: Owned | None, renders: Mapping[str, str], unreadable: int
) -> Assigned:
    if claimed.gpus:
        return _configured(cards, claimed.gpus)
    if owned is not None and owned.holding is not None:
        held = _held(owned.holding, claimed)
        if held:
            return _known(cards, held, owned.holding.source, "the engine's processes hold")
    nodes = owned.render_nodes if owned is not None else None
    if isinstance(nodes, frozenset):
        return _rendering(cards, nodes, renders, claimed.expected)
    return _only(cards, unreadable, nodes)


def _configured(cards: tuple[Identity, ...], wanted: tuple[str, ...]) -> Assigned:
    names = {normal(name) for name in wanted}
    found = tuple(card for card in cards if names & _names(card))
    known = {name for card in found for name in _names(card)}
    lost = sorted(names - known)
    if lost:
        seen = ", ".join(card.gpu for card in cards) or "none"
        detail = f"configured GPU {', '.join(lost)} is not there; seen: {seen}"
        return Assigned((), "configured", Gap(Part.GPU, Reason.ABSENT, detail))
    return Assigned(found, "configured")


def _held(holding: Held, claimed: Claimed) -> frozenset[str]:
    """A process opens every GPU it is shown: opened ones count only where that leaves no choice.

    So do those with a little memory where the kernel leaves compute memory out: it may be a model or none.
    """
    held, surely = holding.gpus(), holding.surely()
    if held != surely and len(held) not in (1, claimed.expected):
        return surely if len(surely) == claimed.expected else frozenset()
    if held or len(holding.opened) not in (1, claimed.expected):
        return held
    return holding.opened


def _known(cards: tuple[Identity, ...], gpus: frozenset[str], rule: str, who: str) -> Assigned:
    found = tuple(card for card in cards if card.gpu in gpus)
    lost = sorted(gpus - {card.gpu for card in found})
    if lost:
        return Assigned((), rule, Gap(Part.GPU, Reason.ABSENT, f"{who} {', '.join(lost)}, which cannot be read"))
    return Assigned(found, rule)


def _rendering(
    cards: tuple[Identity, ...], nodes: frozenset[str], renders: Mapping[str, str], expected: int | None
) -> Assigned:
    """A container may be shown more GPUs than its engine uses, as `--device /dev/dri` shows it all of them."""
    by_render = {**renders, **{card.render: card.gpu for card in cards if card.render is not None}}
    strange = sorted(nodes - set(by_render))
    if strange:
        detail = f"the engine sees {', '.join(strange)}, and no known GPU has such a render node (a partition?)"
        return Assigned((), "render_nodes", Gap(Part.GPU, Reason.UNASSIGNED, detail))
    gpus = frozenset(by_render[node] for node in nodes)
    if expected is not None and len(gpus) > expected:
        detail = f"the engine's container sees {len(gpus)} GPUs and expected_gpus is {expected}; set `gpus`"
        return Assigned((), "render_nodes", Gap(Part.GPU, Reason.UNASSIGNED, detail))
    if expected is None and len(cards) > 1 and gpus >= {card.gpu for card in cards}:
        detail = f"the engine's container sees all {len(gpus)} GPUs of the node; set expected_gpus, or `gpus`"
        return Assigned((), "render_nodes", Gap(Part.GPU, Reason.UNASSIGNED, detail))
    return _known(cards, gpus, "render_nodes", "the engine sees")


def _only(cards: tuple[Identity, ...], unreadable: int, nodes: Gap | None) -> Assigned:
    if len(cards) == 1 and not unreadable:
        return Assigned(cards, "only_card")
    if not cards:
        return Assigned((), "none", Gap(Part.GPU, Reason.ABSENT, "no GPU can be read"))
    names = ", ".join(card.gpu for card in cards)
    detail = f"{len(cards) + unreadable} GPUs are visible ({names}) and nothing says which are the engine's; set `gpus`"
    return Assigned((), "none", Gap(Part.GPU, Reason.UNASSIGNED, f"{detail} ({nodes.detail})" if nodes else detail))


def _names(card: Identity) -> set[str]:
    return {normal(card.gpu)} | ({normal(card.unique_id)} if card.unique_id else set())


def normal(name: str) -> str:
    """A GPU's name as it is compared: an address in sysfs' form, whichever tool wrote it (`00000000:C6:00.0`).

    A unique_id is lower case without `GPU-` and `0x`.
    """
    plain = name.strip().lower().removeprefix("gpu-").removeprefix("0x")
    return address(plain) or plain
