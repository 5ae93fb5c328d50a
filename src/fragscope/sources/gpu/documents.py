"""The JSON document in what a command-line tool printed, after whatever it printed before."""

import json
from typing import Any

from fragscope.model import Gap, Part, Reason
from fragscope.sources.gpu.plausible import quoted
from fragscope.sources.gpu.process import Ran, ending

_PERMISSION = ("permission needed", "permission denied", "missing the following required groups", "requires elevation")


def document(text: object) -> Any:
    """The first list or object that starts a line of `text`; None if there is none.

    amd-smi prints warnings to stdout before its JSON, and 6.4.2 several documents in a row (docs/sources.md).
    """
    if not isinstance(text, str):
        return None
    decoder = json.JSONDecoder()
    offset = 0
    for line in text.splitlines(keepends=True):
        if line[:1] in ("[", "{"):
            try:
                return decoder.raw_decode(text, offset)[0]
            except (ValueError, RecursionError):
                pass
        offset += len(line)
    return None


def no_document(tool: str, text: object, silence: str = "printed nothing") -> Gap:
    """Why there is no JSON, in the tool's own words; a missing permission is told by its wording."""
    if not isinstance(text, str):
        return Gap(Part.GPU, Reason.MALFORMED, f"{tool} printed {quoted(text)}")
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    if not lines:
        return Gap(Part.GPU, Reason.MALFORMED, f"{tool} {silence}")
    told = next((line for line in lines if any(words in line.lower() for words in _PERMISSION)), None)
    if told is not None:
        return Gap(Part.GPU, Reason.DENIED, f"{tool} says {quoted(told)}; give this user the groups render and video")
    reason = Reason.ABSENT if any("driver not initialized" in line.lower() for line in lines) else Reason.MALFORMED
    return Gap(Part.GPU, reason, f"{tool} printed no JSON but {quoted(lines[-1])}")


def failed(tool: str, ran: Ran) -> Gap:
    """Why a run that left no JSON on stdout failed: what it said on stderr, and how it ended."""
    said = no_document(tool, ran.stdout if ran.stdout.strip() else ran.stderr)
    return Gap(said.part, said.reason, f"{said.detail} ({ending(ran.code)})")
