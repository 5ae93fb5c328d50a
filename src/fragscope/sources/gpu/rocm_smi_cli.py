"""VRAM from `rocm-smi --showmeminfo vram --json`, the older tool: for `check`, and the very last resort.

A call costs 0.4 s of CPU. Its `cardN` is the library's index, not `/sys/class/drm/cardN`; the PCI address is asked
for in the same call. A value it could not read is silently left out (docs/sources.md). Since ROCm 7.2 it may wake a
GPU that sleeps, which no Instinct does by default.
"""

import re
from collections.abc import Iterable

from fragscope.model import Gap, Part, Reason
from fragscope.sources.gpu.amd_smi_cli import found
from fragscope.sources.gpu.device import Listing
from fragscope.sources.gpu.documents import document, failed, no_document
from fragscope.sources.gpu.plausible import Claim, listing
from fragscope.sources.gpu.process import DEADLINE_S, Command

NAME = "rocm_smi_cli"
_PROGRAM = "rocm-smi"
_WORDS = ("--showmeminfo", "vram", "--showbus", "--showuniqueid", "--json")
_CARD = re.compile(r"card[0-9]+")
_MAX_DIGITS = 24
_NONE_SEEN = Gap(
    Part.GPU,
    Reason.BLIND,
    "rocm-smi works but lists no GPU: it needs /dev/kfd and the GPUs' /dev/dri/renderD* in this container",
)


class RocmSmiCli:
    """The source: one call per read."""

    name = NAME

    def __init__(self, program: str | None = None, *, deadline_s: float = DEADLINE_S) -> None:
        """`program` is the tool's path; without it PATH is searched, then ROCm's folder."""
        self._program = program or found(_PROGRAM)
        self._command = Command(self._program or _PROGRAM, deadline_s=deadline_s)

    def why_not(self) -> Gap | None:
        """None if the program is there."""
        if self._program is not None:
            return None
        return Gap(Part.GPU, Reason.ABSENT, "rocm-smi is not on PATH nor in /opt/rocm/bin; mount ROCm or install it")

    def read(self) -> Listing:
        """What rocm-smi says now; about half a second."""
        ran = self._command.run(_WORDS)
        if isinstance(ran, Gap):
            return Listing(gaps=(ran,))
        if document(ran.stdout) is None and "No JSON data to report" not in ran.stdout + ran.stderr:
            return Listing(gaps=(failed(_PROGRAM, ran),))
        return parse(ran.stdout or ran.stderr)

    def rest(self) -> None:
        """Nothing runs between two reads."""

    def close(self) -> None:
        """Kills the tool if it runs."""
        self._command.close()


def parse(raw: object) -> Listing:
    """The text that rocm-smi printed: `{"card0": {"VRAM Total Memory (B)": "206141652992", ...}, "system": ...}`."""
    cards = document(raw)
    if isinstance(raw, str) and cards is None and "No JSON data to report" in raw:
        return Listing(gaps=(_NONE_SEEN,))
    if not isinstance(cards, dict):
        return Listing(gaps=(no_document(_PROGRAM, raw),))
    return listing(_claims(cards), _NONE_SEEN)


def _claims(cards: dict[str, object]) -> Iterable[Claim]:
    for key, card in cards.items():
        if not _CARD.fullmatch(key):
            continue
        label = f"rocm-smi {key}"
        if not isinstance(card, dict):
            yield Claim(label, total=card)
            continue
        unique = card.get("Unique ID")
        yield Claim(
            label,
            gpu=card.get("PCI Bus"),
            total=_bytes(card.get("VRAM Total Memory (B)")),
            used=_bytes(card.get("VRAM Total Used Memory (B)")),
            unique_id=unique.removeprefix("0x") if isinstance(unique, str) else None,
            name=card.get("Card Series"),
        )


def _bytes(value: object) -> object:
    """Bytes as a string of digits, as every version prints them."""
    plain = isinstance(value, str) and len(value) <= _MAX_DIGITS and value.isascii() and value.isdigit()
    return int(value) if plain and isinstance(value, str) else value
