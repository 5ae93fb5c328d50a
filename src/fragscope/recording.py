"""Recordings: JSON lines of what the witnesses said, read with patience and written compactly.

A line that is no JSON or lacks a field is counted and skipped, a kind nobody knows is skipped, and a
truncated end loses only its last line. The format is described in docs/recordings.md.
"""

import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from fragscope.model import Sample

STDIN = "-"
_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class ExpositionLine:
    """One poll: the page as scraped or an error, and the status of `/health` (0: unreachable)."""

    at: float
    target: str | None = None
    text: str | None = None
    error: str | None = None
    health: int | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU of a `gpu` line."""

    gpu: str
    total_bytes: int
    used_bytes: int
    peak_used_bytes: int | None = None
    own_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class GpuLine:
    """What one source said of a target's GPUs."""

    at: float
    devices: list[Device]
    target: str | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class AllocatorLine:
    """What the allocator inside one worker said of itself."""

    at: float
    gpu: str
    pid: int
    allocated_bytes: int
    reserved_bytes: int
    inactive_split_bytes: int
    retries_total: int
    ooms_total: int
    target: str | None = None
    largest_free_bytes: int | None = None
    config: str | None = None


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of the engine's log."""

    at: float
    line: str
    target: str | None = None


@dataclass(frozen=True, slots=True)
class LabelLine:
    """Ground truth for scoring; the detector never sees it."""

    at: float
    until: float
    cause: str
    target: str | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class SampleLine:
    """A whole sample as fragscope writes it."""

    sample: Sample

    @property
    def at(self) -> float:
        """The sample's time."""
        return self.sample.at

    @property
    def target(self) -> str:
        """The sample's target."""
        return self.sample.target


Line = ExpositionLine | GpuLine | AllocatorLine | LogLine | LabelLine | SampleLine

_REMARKS = frozenset({"verdict"})
"""Kinds that are for people: an incident file ends with the verdict it was written for."""

_KINDS: dict[str, type[Any]] = {
    "exposition": ExpositionLine,
    "gpu": GpuLine,
    "allocator": AllocatorLine,
    "log": LogLine,
    "label": LabelLine,
}


@dataclass(slots=True)
class Tally:
    """What reading came to, by the way."""

    lines: int = 0
    malformed: int = 0
    unknown_kinds: dict[str, int] = field(default_factory=dict)
    truncated: bool = False

    def sentence(self) -> str | None:
        """What a reader should know, or None if all was well."""
        parts = []
        if self.malformed:
            parts.append(f"{self.malformed} of {self.lines} lines were malformed and skipped")
        if self.unknown_kinds:
            parts.append(f"lines of unknown kind were skipped: {', '.join(sorted(self.unknown_kinds))}")
        if self.truncated:
            parts.append("the compressed stream is cut off; what came before was read")
        return "; ".join(parts) or None


def read_lines(path: str, tally: Tally) -> Iterator[Line]:
    """The lines of a recording: a plain or gzipped file, or '-' for standard input.

    Raises OSError where the file cannot be opened.
    """
    if path == STDIN:
        yield from _parse(sys.stdin.buffer, tally)
        return
    with Path(path).open("rb") as stream:
        yield from _parse(stream, tally)


def _parse(stream: IO[bytes], tally: Tally) -> Iterator[Line]:
    for raw in _raw_lines(stream, tally):
        if not raw.strip():
            continue
        tally.lines += 1
        line = parse_line(raw, tally)
        if line is not None:
            yield line


def _raw_lines(stream: IO[bytes], tally: Tally) -> Iterator[bytes]:
    buffered = io.BufferedReader(stream) if isinstance(stream, io.RawIOBase) else stream
    peek = getattr(buffered, "peek", None)
    zipped = peek is not None and peek(2)[:2] == _GZIP_MAGIC
    source: Any = gzip.GzipFile(fileobj=buffered) if zipped else buffered
    try:
        yield from source
    except (EOFError, zlib.error, gzip.BadGzipFile):
        tally.truncated = True


def parse_line(raw: bytes, tally: Tally) -> Line | None:
    """One line's words; None where it is malformed or of an unknown kind, which `tally` counts."""
    try:
        parsed = msgspec.json.decode(raw)
        kind = parsed["kind"]
        if kind == "sample":
            return SampleLine(msgspec.convert(parsed, Sample))
        if kind in _REMARKS:
            return None
        if kind not in _KINDS:
            tally.unknown_kinds[str(kind)] = tally.unknown_kinds.get(str(kind), 0) + 1
            return None
        line: Line = msgspec.convert(parsed, _KINDS[kind])
    except (msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError):
        tally.malformed += 1
        return None
    return line


def encode_sample(sample: Sample) -> bytes:
    """A `sample` line without its newline; what is not known is left out."""
    return msgspec.json.encode({"kind": "sample", **_pruned(msgspec.to_builtins(sample))})


def encode_line(line: ExpositionLine | GpuLine | AllocatorLine | LogLine | LabelLine) -> bytes:
    """A raw line without its newline."""
    kind = next(kind for kind, of in _KINDS.items() if isinstance(line, of))
    return msgspec.json.encode({"kind": kind, **_pruned(msgspec.to_builtins(line))})


def _pruned(value: dict[str, Any]) -> dict[str, Any]:
    return {name: _prune(item) for name, item in value.items() if item is not None and item not in ([], ())}


def _prune(value: Any) -> Any:
    if isinstance(value, dict):
        return _pruned(value)
    if isinstance(value, (list, tuple)):
        return [_prune(item) for item in value]
    return value
