"""The caching allocator's out-of-memory message in all its variants: PyTorch 1.0 to 2.13, HIP, CUDA, NPU, XPU.

It is read without white space, so that a terminal which wrapped it in mid-word, prefixes in between and
doubled blanks make no difference. What each figure means, and which variant says what, is in docs/logs.md.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fragscope.explain.text import squeeze

_UNITS = {
    "bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_SIZE = r"~?(\d{1,15}(?:\.\d{1,9})?)(bytes|[KMGT]iB|[KMGT]B)"
_START = re.compile(
    r"(HIP|CUDA|NPU|XPU)outofmemory(?=[.(!'\"]|occurred|$)|memoryallocationfailedwithOOMondevice", re.IGNORECASE
)


def _all(*patterns: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern.replace("SIZE", _SIZE), re.IGNORECASE) for pattern in patterns)


# The allocator's own wording first, then people's shortenings of it; the first that matches counts.
_FIGURES: dict[str, tuple[re.Pattern[str], ...]] = {
    "tried": _all(r"TriedtoallocateSIZE", r"tryingtoallocate(\d{1,18})(bytes)", r"\btried[:=]?SIZE"),
    "total": _all(
        r"totalcapac(?:i?ty)ofSIZE",
        r"SIZEtotalcapacity",
        r"\(free:\d{1,18},total:(\d{1,18})\)",
        r"SIZEtotal",
        r"\btotal[:=]SIZE",
    ),
    "free": _all(
        r"ofwhichSIZEisfree", r"SIZEfree;", r"\(free:(\d{1,18}),total:", r"SIZE(?:is)?free", r"\bfree[:=]SIZE"
    ),
    "in_use": _all(r"thisprocesshasSIZEmemoryinuse"),
    "allowed": _all(r"SIZEallowed;"),
    "allocated": _all(
        r"OftheallocatedmemorySIZEisallocatedby", r"SIZEalreadyallocated", r"(?<!un)(?<!\+)allocated[:=]?SIZE"
    ),
    "private_pools": _all(r"withSIZEallocatedinprivatepools"),
    "reserved_unallocated": _all(
        r"SIZEisreservedbyPyTorchbutunallocated", r"SIZEcached\)", r"reserved-?but-?unallocated[:=]?SIZE"
    ),
    "reserved_total": _all(r"SIZEreservedintotalbyPyTorch"),
}
_WITH_UNIT = 2
_PROCESS = _all(r"Process\d{1,12}hasSIZEmemoryinuse")[0]
_COMPLETE = re.compile(
    r"butunallocated|reservedintotalbyPyTorch\)|cached\)|total:\d{1,18}\)|releaseallunoccupied", re.IGNORECASE
)
_SPLIT_CUES = ("HIP", "CUDA", "NPU", "XPU", "memory")
_SPLIT_ENDS = ("H", "HI", "C", "CU", "CUD", "N", "NP", "X", "XP")
EXPECTED = ("tried", "total", "free", "allocated", "reserved_unallocated")
"""What every complete message has; the rest is optional."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A size as printed: bytes, and half a unit of the last decimal (5 MiB for two decimals of GiB)."""

    value_bytes: int
    uncertainty_bytes: int


@dataclass(frozen=True, slots=True)
class OomMessage:
    """One message: its figures, the other holders it names, the backend, and what it lacks."""

    backend: str | None
    figures: Mapping[str, Figure] = field(default_factory=dict)
    processes: tuple[int, ...] = ()
    variable: str | None = None
    complete: bool = False

    @property
    def missing(self) -> tuple[str, ...]:
        """The figures that a complete message has and this one lacks."""
        return tuple(name for name in EXPECTED if name not in self.figures)

    @property
    def facts(self) -> dict[str, float]:
        """The figures in bytes; `others_in_use` is what processes other than ours hold, where that can be told."""
        facts: dict[str, float] = {name: figure.value_bytes for name, figure in self.figures.items()}
        others = self._others()
        if others is not None:
            facts["others_in_use"] = others
        return facts

    def _others(self) -> int | None:
        if not self.processes:
            return None
        if "in_use" in self.figures:
            return sum(self.processes)
        if not {"allocated", "reserved_unallocated"} <= self.figures.keys():
            return None
        held = self.figures["allocated"].value_bytes + self.figures["reserved_unallocated"].value_bytes
        slack = self.figures["allocated"].uncertainty_bytes + self.figures["reserved_unallocated"].uncertainty_bytes
        able = [each for each in self.processes if each + 2 * slack >= held]
        # A process id of another name space tells nothing: ours is the one that fits what we hold best.
        return sum(self.processes) - min(able) if able else sum(self.processes)


def starts(text: str, *, across: bool = False) -> bool:
    """Whether an allocator's message begins in this text; `across`: the text is two lines put together."""
    return (across or "emory" in text) and _START.search(squeeze(text)) is not None


def may_start(tail: str) -> bool:
    """Whether the end of a line could be the first half of a message that a terminal has cut in two."""
    return tail.endswith(_SPLIT_ENDS) or any(cue in tail for cue in _SPLIT_CUES)


def read_messages(text: str) -> tuple[OomMessage, ...]:
    """Every allocator message in a text, which may be several lines joined; none where there is none."""
    squeezed = squeeze(text)
    starts_at = [match.start() for match in _START.finditer(squeezed)]
    ends_at = [*starts_at[1:], len(squeezed)]
    return tuple(_message(squeezed[start:end]) for start, end in zip(starts_at, ends_at, strict=False))


def complete(text: str) -> bool:
    """Whether the last message in the text has reached the end of its figures."""
    squeezed = squeeze(text)
    starts_at = [match.start() for match in _START.finditer(squeezed)]
    return bool(starts_at) and _COMPLETE.search(squeezed, starts_at[-1]) is not None


def figures_in(text: str) -> dict[str, Figure]:
    """The figures a squeezed text names, by whichever wording it uses."""
    found: dict[str, Figure] = {}
    for name, patterns in _FIGURES.items():
        match = next((hit for hit in (pattern.search(text) for pattern in patterns) if hit is not None), None)
        if match is not None:
            found[name] = figure(match[1], match[2] if match.lastindex == _WITH_UNIT else "bytes")
    return found


def figure(number: str, unit: str) -> Figure:
    """A printed number and its unit as bytes."""
    factor = _UNITS[unit.lower()]
    decimals = len(number.partition(".")[2])
    exact = unit.lower() == "bytes"
    return Figure(round(float(number) * factor), 0 if exact else round(factor * 0.5 / 10**decimals))


def _message(squeezed: str) -> OomMessage:
    start = _START.match(squeezed)
    backend = start[1].upper() if start is not None and start[1] else None
    found = figures_in(squeezed)
    _derive(found)
    processes = tuple(figure(match[1], match[2]).value_bytes for match in _PROCESS.finditer(squeezed))
    hint = re.search(r"PYTORCH_(?:CUDA_|HIP_|NPU_)?ALLOC_CONF", squeezed)
    done = _COMPLETE.search(squeezed) is not None
    return OomMessage(backend, found, processes, hint[0] if hint else None, done)


def _derive(found: dict[str, Figure]) -> None:
    """Messages before PyTorch 2.1 print the reserved total: what is unallocated is the difference."""
    if "reserved_unallocated" in found or not {"reserved_total", "allocated"} <= found.keys():
        return
    reserved, allocated = found["reserved_total"], found["allocated"]
    difference = reserved.value_bytes - allocated.value_bytes
    if difference >= 0:
        uncertainty = reserved.uncertainty_bytes + allocated.uncertainty_bytes
        found["reserved_unallocated"] = Figure(difference, uncertainty)
