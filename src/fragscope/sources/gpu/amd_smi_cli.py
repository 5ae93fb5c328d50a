"""VRAM from `amd-smi metric --mem-usage --json`: for `check`, and a last resort.

A call costs 0.4 to 0.7 s of CPU, and two are needed: the figures carry only amd-smi's own index, the PCI address is
in `amd-smi list`. Figures are whole MiB, called MB. What the versions print is in docs/sources.md.
"""

import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from fragscope.model import Gap, Part, Reason
from fragscope.sources.gpu.device import Listing
from fragscope.sources.gpu.documents import document, failed, no_document
from fragscope.sources.gpu.plausible import Claim, listing, quoted
from fragscope.sources.gpu.process import DEADLINE_S, Command

NAME = "amd_smi_cli"
_PROGRAM = "amd-smi"
_MIB = 1 << 20
_FIGURES = ("metric", "--mem-usage", "--json")
_NAMES = ("list", "--json")
_NONE_SEEN = Gap(
    Part.GPU,
    Reason.BLIND,
    "amd-smi works but lists no GPU: it needs /dev/kfd and the GPUs' /dev/dri/renderD* in this container",
)


class AmdSmiCli:
    """The source; both calls together stay within one deadline."""

    name = NAME

    def __init__(self, program: str | None = None, *, deadline_s: float = DEADLINE_S) -> None:
        """`program` is the tool's path; without it PATH is searched, then ROCm's folder."""
        self._program = program or found(_PROGRAM)
        self._deadline_s = deadline_s
        self._command = Command(self._program or _PROGRAM, deadline_s=deadline_s)

    def why_not(self) -> Gap | None:
        """None if the program is there."""
        if self._program is not None:
            return None
        return Gap(Part.GPU, Reason.ABSENT, "amd-smi is not on PATH nor in /opt/rocm/bin; mount ROCm or install it")

    def read(self) -> Listing:
        """What amd-smi says now; about a second."""
        started = time.monotonic()
        figures = self._command.run(_FIGURES)
        if isinstance(figures, Gap):
            return Listing(gaps=(figures,))
        if document(figures.stdout) is None:
            return Listing(gaps=(failed(_PROGRAM, figures),))
        left_s = max(0.1, self._deadline_s - (time.monotonic() - started))
        names = self._command.run(_NAMES, left_s)
        return parse({"metric": figures.stdout, "list": None if isinstance(names, Gap) else names.stdout})

    def rest(self) -> None:
        """Nothing runs between two reads."""

    def close(self) -> None:
        """Kills the tool if it runs."""
        self._command.close()


def found(program: str) -> str | None:
    """The absolute path of a ROCm program, on PATH or in ROCm's folder."""
    folder = Path(os.environ.get("ROCM_PATH", "/opt/rocm")) / "bin"
    path = shutil.which(program) or shutil.which(program, path=str(folder))
    return None if path is None else str(Path(path).absolute())


def parse(raw: object) -> Listing:
    """`{"metric": stdout, "list": stdout or None}` of the two calls.

    Without the list no device has an address: amd-smi's index is neither HIP's order nor the number of a card.
    """
    texts = raw if isinstance(raw, dict) else {"metric": raw}
    figures = document(texts.get("metric"))
    if isinstance(figures, dict) and "error" in figures:
        detail = f"amd-smi refuses: {quoted(figures['error'])}"
        return Listing(gaps=(Gap(Part.GPU, Reason.UNSUPPORTED, detail),))
    entries = _entries(figures)
    if entries is None:
        return Listing(gaps=(no_document(_PROGRAM, texts.get("metric")),))
    names = {_index(entry): entry for entry in _entries(document(texts.get("list"))) or () if isinstance(entry, dict)}
    names.pop(None, None)
    return listing(_claims(entries, names), _NONE_SEEN)


def _entries(parsed: object) -> list[object] | None:
    """The GPUs of a document: a bare list up to ROCm 6.4, under `gpu_data` since 7.0."""
    if isinstance(parsed, dict):
        parsed = parsed.get("gpu_data")
    return parsed if isinstance(parsed, list) else None


def _claims(entries: list[object], names: dict[int | None, dict[str, object]]) -> Iterable[Claim]:
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            yield Claim(f"amd-smi GPU {number}", total=entry)
            continue
        index = _index(entry)
        label = f"amd-smi GPU {number if index is None else index}"
        name = names.get(index, {}) if index is not None else {}
        usage = entry.get("mem_usage")
        if not isinstance(usage, dict):
            usage = {"total_vram": usage, "used_vram": usage}
        yield Claim(
            label,
            gpu=name.get("bdf"),
            total=_bytes(usage.get("total_vram"), f"total_vram of {label}"),
            used=_bytes(usage.get("used_vram"), f"used_vram of {label}"),
            uuid=name.get("uuid"),
        )


def _index(entry: dict[str, object]) -> int | None:
    index = entry.get("gpu")
    return index if isinstance(index, int) and not isinstance(index, bool) else None


def _bytes(value: object, what: str) -> object:
    """MiB to bytes: a bare number up to ROCm 6.0, `{"value", "unit": "MB"}` since 6.1; any other unit is refused."""
    if isinstance(value, dict):
        unit = value.get("unit")
        value = value.get("value")
        if isinstance(value, int) and unit != "MB":
            return Gap(Part.GPU, Reason.MALFORMED, f"{what} is in {quoted(unit)}, where amd-smi has always said MB")
    return value * _MIB if isinstance(value, int) and not isinstance(value, bool) else value
