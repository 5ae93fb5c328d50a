"""How a card was divided at a failure: parts that add up to its size, for a bar that people can read."""

from dataclasses import dataclass

from fragscope.arithmetic import Account


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the card: its name, a letter for the bar, its size in bytes."""

    name: str
    letter: str
    size_bytes: float


def parts(a: Account) -> tuple[Part, ...]:
    """Live, stranded, private pools, outside and free; empty where the figures are too few or contradict."""
    if a.total is None or a.free is None or a.live is None or a.contradiction is not None or a.total <= 0:
        return ()
    unallocated = a.unallocated or 0.0
    outside = max(0.0, a.total - a.free - a.live - a.private - unallocated)
    made = (
        Part("live", "#", a.live),
        Part("stranded", "!", unallocated),
        Part("private pools", "p", a.private),
        Part("outside", "o", outside),
        Part("free", ".", a.free),
    )
    return tuple(each for each in made if each.size_bytes > 0)


def bar(shown: tuple[Part, ...], width: int) -> str:
    """The parts as a row of letters; whatever is there gets at least one."""
    total = sum(each.size_bytes for each in shown)
    if not shown or total <= 0:
        return ""
    counts = [max(1, round(width * each.size_bytes / total)) for each in shown]
    while sum(counts) > max(width, len(shown)):
        counts[counts.index(max(counts))] -= 1
    while sum(counts) < width:
        counts[counts.index(max(counts))] += 1
    return "".join(each.letter * count for each, count in zip(shown, counts, strict=True))
