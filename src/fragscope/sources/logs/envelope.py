r"""What container runtimes wrap around a line, pure: Kubernetes' CRI format, docker's json-file, or nothing.

CRI: `2025-10-15T00:02:38.756689123Z stdout F text`, with P for a piece of a line that goes on (Kubernetes, "CRI
container log format"). docker: `{"log":"text\n","stream":"stdout","time":"..."}`, a piece where `log` lacks its
newline. Each line is recognised by itself, so a file may change its format.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from fragscope.sources.logs.splitter import LINE_CAP_BYTES

CRI = "Kubernetes (CRI)"
DOCKER = "docker JSON"
PLAIN = "plain text"

_CRI = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)) (stdout|stderr) ([FP])(?::\S*)? ?(.*)", re.DOTALL
)
_DOCKER_HEAD = '{"log":'


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the engine; `wall` is the runtime's own stamp in unix seconds, None where there is none."""

    text: str
    wall: float | None = None
    form: str = PLAIN


@dataclass(slots=True)
class _Pieces:
    """The pieces so far of one line of one stream."""

    wall: float | None
    form: str
    texts: list[str] = field(default_factory=list)
    size: int = 0


class Unwrapper:
    """Takes envelopes off and joins pieces, stream by stream; a joined line keeps the cap as well."""

    def __init__(self, cap: int = LINE_CAP_BYTES) -> None:
        self._cap = cap
        self._open: dict[str, _Pieces] = {}

    def feed(self, raw: Iterable[bytes]) -> list[Entry]:
        """The engine's lines that these lines of the file complete; invalid UTF-8 is replaced."""
        entries = []
        for line in raw:
            entry = self._unwrap(line.decode("utf-8", "replace"))
            if entry is not None:
                entries.append(entry)
        return entries

    def finish(self) -> list[Entry]:
        """The lines of which only pieces came: nothing more of them is expected."""
        entries = [Entry("".join(p.texts), p.wall, p.form) for p in self._open.values()]
        self._open.clear()
        return entries

    def _unwrap(self, line: str) -> Entry | None:
        match = _CRI.fullmatch(line)
        if match is not None:
            stamp, stream, tag, text = match.groups()
            return self._piece(stream, text, stamp, CRI, ended=tag == "F")
        docker = _docker(line)
        if docker is not None:
            text, stream, stamp = docker
            return self._piece(stream, text.removesuffix("\n"), stamp, DOCKER, ended=text.endswith("\n"))
        return Entry(line)

    def _piece(self, stream: str, text: str, stamp: str, form: str, *, ended: bool) -> Entry | None:
        before = self._open.pop(stream, None)
        if before is None and ended:
            return Entry(text, unix_seconds(stamp), form)
        pieces = before or _Pieces(unix_seconds(stamp), form)
        kept = text[: self._cap - pieces.size]
        if kept:
            pieces.texts.append(kept)
            pieces.size += len(kept)
        if ended:
            return Entry("".join(pieces.texts), pieces.wall, form)
        self._open[stream] = pieces
        return None


def _docker(line: str) -> tuple[str, str, str] | None:
    """(log, stream, time) of a line of docker's json-file driver; None where it is none."""
    if not line.startswith(_DOCKER_HEAD):
        return None
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        return None
    text, stream, stamp = (parsed.get(key) for key in ("log", "stream", "time"))
    if not isinstance(text, str) or not isinstance(stamp, str):
        return None
    return text, "stderr" if stream == "stderr" else "stdout", stamp


def unix_seconds(stamp: str) -> float | None:
    """Unix seconds of an RFC 3339 stamp with its zone; None where it is none."""
    try:
        at = datetime.fromisoformat(stamp)
    except ValueError:
        return None
    return at.timestamp() if at.tzinfo is not None else None
