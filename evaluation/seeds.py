"""Which seeds are for choosing constants and which for judging; declared once, and never mixed."""

from collections.abc import Iterable

TUNING_SEEDS = range(40)
"""Constants may be chosen on these; figures from them are only printed, never written."""
HELD_OUT_SEEDS = range(10_000, 10_020)
"""The figures of docs/evaluation.md come from these; nothing may be chosen by looking at them."""

_NAMED = {"tuning": TUNING_SEEDS, "held-out": HELD_OUT_SEEDS}


def parse_seeds(text: str) -> tuple[int, ...]:
    """Seeds from 'tuning', 'held-out', '0..9', '3' or a list of these with commas. Raises ValueError."""
    seeds: list[int] = []
    for part in text.split(","):
        if part in _NAMED:
            seeds += _NAMED[part]
            continue
        first, dots, last = part.partition("..")
        try:
            seeds += range(int(first), int(last if dots else first) + 1)
        except ValueError as error:
            raise ValueError(f"seeds are {text!r}, but must be tuning, held-out, 0..9 or a list like 1,2,7") from error
    if not seeds:
        raise ValueError(f"seeds are {text!r}, which names none")
    return tuple(dict.fromkeys(seeds))


def of_tuning(seeds: Iterable[int]) -> list[int]:
    """Those of the seeds that constants may have been chosen on."""
    return [seed for seed in seeds if seed in TUNING_SEEDS]


def of_judging(seeds: Iterable[int]) -> list[int]:
    """Those of the seeds that nothing may be chosen on."""
    return [seed for seed in seeds if seed not in TUNING_SEEDS]


def spoken(seeds: Iterable[int]) -> str:
    """Seeds for people: '10000..10019', or a list where they are not in a row."""
    ordered = sorted(seeds)
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]}..{ordered[-1]}"
    return ", ".join(map(str, ordered))
