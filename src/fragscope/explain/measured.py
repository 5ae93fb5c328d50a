"""Figures that a person or a script wrote down beside a failure: pairs, series, rows of a monitoring tool."""

import re
from collections.abc import Iterator, Mapping

from fragscope.explain.findings import Kind
from fragscope.explain.oom import figure, figures_in
from fragscope.explain.text import squeeze

CUES = ("allocated=", "allocated:", "at OOM", " -> ", " ... ", " slept]", " slept)", " MB |", " MB ")
_SIZE = r"~?(\d{1,12}(?:\.\d{1,9})?) ?(bytes|[KMGT]i?B)"
_PAIR = re.compile(rf"allocated ?[=:] ?{_SIZE}[ ,;|]+(?:\w+ )?reserved ?[=:] ?{_SIZE}", re.IGNORECASE)
_SERIES = re.compile(
    r"(?:(?P<label>[A-Za-z][\w -]{0,40}?)[\]:=, ]*)?(?P<a>\d{1,9}(?:\.\d{1,9})?) ?(?P<ua>[KMGT]i?B)?"
    r"(?: ?->| ?\.\.\.| ?;[^;\d]{0,20}(?:~?\d{1,4} ?h\b)?[^;\d]{0,30}) ?"
    r"(?P<b>\d{1,9}(?:\.\d{1,9})?) ?(?P<ub>[KMGT]i?B)"
)
_OOM = re.compile(r"\bat OOM\b")
_OF_MEMORY = re.compile(r"memory|pool|live|reserved|resid|slept|VRAM|device", re.IGNORECASE)
_NOT_THE_CARDS = re.compile(r"\bhost\b|\bCPU\b|download|shard|disk", re.IGNORECASE)
_NOTE_CHARS = 300
"""People's notes are short; dumps of a configuration are not, and hold arrows, too."""
_SMI = re.compile(r"\b(\d{2,9})/(\d{4,9}) ?MB\b")


def read(text: str) -> Iterator[tuple[Kind, Mapping[str, float]]]:
    """What is written here: an out-of-memory note with figures, pairs, series, monitoring rows."""
    if len(text) > _NOTE_CHARS:
        return
    if _OOM.search(text):
        figures = figures_in(squeeze(text))
        if figures:
            yield Kind.OOM, {name: float(each.value_bytes) for name, each in figures.items()}
            return
    pair = _PAIR.search(text)
    if pair is not None:
        allocated, reserved = figure(pair[1], pair[2]).value_bytes, figure(pair[3], pair[4]).value_bytes
        facts = {"allocated": float(allocated), "reserved_total": float(reserved)}
        yield (
            Kind.MEASURED,
            facts | ({"reserved_unallocated": float(reserved - allocated)} if reserved >= allocated else {}),
        )
        return
    smi = _SMI.search(text)
    if smi is not None:
        yield Kind.SMI, {"used": int(smi[1]) * 1e6, "total": int(smi[2]) * 1e6}
        return
    if _OF_MEMORY.search(text) and not _NOT_THE_CARDS.search(text):
        yield from _series(text)


def _series(text: str) -> Iterator[tuple[Kind, Mapping[str, float]]]:
    for match in _SERIES.finditer(text):
        unit = match["ub"]
        first = figure(match["a"], match["ua"] or unit).value_bytes
        last = figure(match["b"], unit).value_bytes
        label = (match["label"] or text).lower()
        live = any(word in label for word in ("live", "alloc"))
        yield (
            Kind.SERIES,
            {
                ("live" if live else "held") + "_first": float(first),
                ("live" if live else "held") + "_last": float(last),
            },
        )
