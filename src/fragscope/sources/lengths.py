"""Request lengths from a CSV file: one row a request, plain or gzipped, streamed."""

import csv
import gzip
import io
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

STDIN = "-"
_PROMPT = ("prompt_tokens", "contexttokens", "input_length", "input_tokens", "num_prefill_tokens", "request tokens")
_OUTPUT = (
    "output_tokens",
    "generatedtokens",
    "output_length",
    "completion_tokens",
    "generation_tokens",
    "response tokens",
)
"""Names that public traces and vLLM's own benchmarks give the two columns."""
_LONGEST_TOKENS = 100_000_000
_GZIP_MAGIC = b"\x1f\x8b"


class LengthsError(ValueError):
    """The file is no list of lengths."""


@dataclass(slots=True)
class LengthsTally:
    """What reading came to, by the way."""

    rows: int = 0
    malformed: int = 0
    truncated: bool = False

    def sentence(self) -> str | None:
        """What a reader should know, or None if all was well."""
        said = []
        if self.malformed:
            said.append(f"{self.malformed} of {self.rows} rows held no two lengths and were skipped")
        if self.truncated:
            said.append("the compressed stream is cut off; what came before was read")
        return "; ".join(said) or None


def read_lengths(path: str, tally: LengthsTally) -> Iterator[tuple[int, int]]:
    """(prompt tokens, output tokens) of each row; `-` is standard input.

    The header names the columns; two columns without a header are prompt and output. Raises OSError, and
    LengthsError where no two columns can be told.
    """
    with ExitStack() as stack:
        raw: IO[bytes] = sys.stdin.buffer if path == STDIN else stack.enter_context(Path(path).open("rb"))
        text = _text(raw)
        # Whoever opened the file closes it, and nobody closes standard input.
        stack.callback(text.detach)
        try:
            yield from _pairs(csv.reader(text), tally)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            tally.truncated = True


def _text(raw: IO[bytes]) -> io.TextIOWrapper:
    peek = getattr(raw, "peek", None)
    zipped = peek is not None and peek(2)[:2] == _GZIP_MAGIC
    return io.TextIOWrapper(
        cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if zipped else raw, "utf-8-sig", "replace", ""
    )


def _pairs(rows: Iterable[Sequence[str]], tally: LengthsTally) -> Iterator[tuple[int, int]]:
    columns: tuple[int, int] | None = None
    try:
        for row in rows:
            if not row:
                continue
            if columns is None:
                columns = _columns(row)
                if columns is not None:
                    continue
                columns = (0, 1)
                if len(row) != len(columns) or _pair(row, columns) is None:
                    shown = ", ".join(row)[:80]
                    raise LengthsError(
                        f"no columns prompt_tokens and output_tokens in {shown!r}; name them in the first line"
                    )
            tally.rows += 1
            pair = _pair(row, columns)
            if pair is None:
                tally.malformed += 1
            else:
                yield pair
    except csv.Error as error:
        raise LengthsError(f"not a CSV file: {error}") from error


def _columns(header: Sequence[str]) -> tuple[int, int] | None:
    names = [name.strip().lower() for name in header]
    found = [next((names.index(name) for name in wanted if name in names), None) for wanted in (_PROMPT, _OUTPUT)]
    prompt, output = found
    return (prompt, output) if prompt is not None and output is not None else None


def _pair(row: Sequence[str], columns: tuple[int, int]) -> tuple[int, int] | None:
    try:
        prompt, output = (int(float(row[i])) for i in columns)
    except (ValueError, IndexError, OverflowError):
        return None
    if not 0 <= prompt <= _LONGEST_TOKENS or not 0 <= output <= _LONGEST_TOKENS or prompt + output < 1:
        return None
    return prompt, output
