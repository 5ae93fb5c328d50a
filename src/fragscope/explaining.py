"""`explain`: logs, recordings and incident files to readable accounts of each failure."""

import codecs
import gzip
import io
import itertools
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from fragscope import report
from fragscope.detect.parameters import Parameters
from fragscope.explain.accounting import bar
from fragscope.explain.findings import Finding, Kind
from fragscope.explain.postmortem import ALARMING, Explanation, PostMortem, evidence_of
from fragscope.explain.reader import LINE_MAX_CHARS
from fragscope.model import LogFact
from fragscope.recording import STDIN, LogLine, SampleLine, Tally, parse_line
from fragscope.sources.logs.envelope import PLAIN, Unwrapper
from fragscope.wire import encode

_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK = 1 << 16
_RECORDED_MAX_BYTES = 16 << 20
_BATCH_LINES = 64
_BAR_WIDTH = 60
_MOST_INCIDENTS = 10_000
_BAR_FROM_BYTES = 8 << 20


@dataclass(slots=True)
class _Count:
    lines: int = 0
    unreadable: int = 0
    before: int = 0


def explain_files(files: list[str], parameters: Parameters, out: Console, *, as_json: bool) -> int:
    """Prints every incident; returns 1 where one has a memory cause, a full pool or a lack of host memory, else 0.

    Raises OSError where a file cannot be opened.
    """
    for file in files:
        if file != STDIN:
            # Half an answer would look like a whole one to a script.
            Path(file).open("rb").close()
    count, alarming = _Count(), False
    found: list[dict[str, Any]] = []
    for file in files:
        for explanation in _explain_file(file, parameters, count):
            alarming |= explanation.judged.cause in ALARMING
            if as_json:
                found += [incident_object(explanation, file)] if len(found) < _MOST_INCIDENTS else []
            else:
                _print(out, explanation, file if len(files) > 1 else None)
    if as_json:
        plain = {"incidents": found, "lines_read": count.lines, "lines_unreadable": count.unreadable}
        out.print(encode(plain), markup=False)
    else:
        _print_end(out, count, found_any=alarming)
    return 1 if alarming else 0


def incident_object(explanation: Explanation, file: str | None = None) -> dict[str, Any]:
    """One incident as plain values (docs/explain.md)."""
    incident, judged, oom = explanation.incident, explanation.judged, explanation.incident.oom
    facts: dict[str, Any] = dict(incident.facts)
    if oom is not None and oom.processes:
        facts["processes_in_use"] = list(oom.processes)
    plain: dict[str, Any] = {
        "file": file,
        "first_line": incident.first_line,
        "lines": incident.lines,
        "at": _at(explanation),
        "printed_at": next((each.stamp for each in incident.findings if each.stamp), None),
        "stage": str(incident.stage),
        "cause": str(judged.cause),
        "probabilities": {str(cause): round(p, 4) for cause, p in judged.probabilities.items()},
        "facts": {name: _whole(value) for name, value in facts.items()},
        "uncertainty_bytes": dict(oom.uncertainties) if oom is not None else {},
        "missing": list(oom.missing) if oom is not None else [],
        "sentence": explanation.sentence,
        "remedy": " ".join(explanation.advice.do),
        "would_not_help": list(explanation.advice.vain),
        "evidence": [{"signal": signal, "sentence": sentence} for signal, sentence in evidence_of(explanation)],
    }
    return {name: value for name, value in plain.items() if value is not None}


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _at(explanation: Explanation) -> float | None:
    return next((each.at for each in explanation.incident.findings if each.at is not None), None)


def _explain_file(file: str, parameters: Parameters, count: _Count) -> Iterator[Explanation]:
    mortem = PostMortem(parameters)
    count.before = count.lines
    with _open(file) as (stream, advance):
        raw = _lines(stream, count)
        first = next(raw, b"")
        lines = _chain(first, raw)
        if _is_recording(first):
            for line in lines:
                yield from _feed_recording(mortem, line, count)
        elif _is_wrapped(first):
            yield from _explain_wrapped(mortem, lines, count, advance)
        else:
            for batch in iter(lambda: list(itertools.islice(lines, _BATCH_LINES)), []):
                yield from mortem.feed_batch([_decoded(line, count) for line in batch])
                advance()
    yield from mortem.close()


def _explain_wrapped(
    mortem: PostMortem, lines: Iterator[bytes], count: _Count, advance: Callable[[], None]
) -> Iterator[Explanation]:
    """A container runtime's log: pieces of a line are joined, and each line has its own time."""
    unwrapper = Unwrapper()
    for batch in iter(lambda: list(itertools.islice(lines, _BATCH_LINES)), []):
        for entry in unwrapper.feed(_decoded(line, count).rstrip("\n").encode() for line in batch):
            yield from mortem.feed(entry.text, entry.wall)
        advance()
    for entry in unwrapper.finish():
        yield from mortem.feed(entry.text, entry.wall)


def _is_wrapped(raw: bytes) -> bool:
    entries = Unwrapper().feed([raw.rstrip(b"\n")])
    return not entries or entries[0].form != PLAIN


def _chain(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    if first:
        yield first
    yield from rest


def _lines(stream: IO[bytes], count: _Count) -> Iterator[bytes]:
    """Lines of bounded length: what is longer is cut, so that one endless line costs no memory."""
    most = _RECORDED_MAX_BYTES
    try:
        while raw := stream.readline(most):
            if count.lines == count.before:
                # A recording holds whole pages of metrics on a line; a log does not.
                most = _RECORDED_MAX_BYTES if _is_recording(raw) else LINE_MAX_CHARS
            count.lines += 1
            cut = not raw.endswith(b"\n") and len(raw) >= most
            count.unreadable += cut
            yield raw[:most]
            while cut and (rest := stream.readline(_CHUNK)) and not rest.endswith(b"\n"):
                pass
    except (EOFError, zlib.error, gzip.BadGzipFile):
        count.unreadable += 1


def _decoded(raw: bytes, count: _Count) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        count.unreadable += 1
        return raw.decode("utf-8", "replace")


def _is_recording(raw: bytes) -> bool:
    """Whether a first line is of a recording: a JSON log that has a `kind` of its own has no time in `at`."""
    if not raw.lstrip().startswith(b"{") or b'"kind"' not in raw or b'"at"' not in raw:
        return False
    tally = Tally()
    parse_line(raw, tally)
    return not (tally.malformed or tally.unknown_kinds)


def _feed_recording(mortem: PostMortem, raw: bytes, count: _Count) -> Iterator[Explanation]:
    tally = Tally()
    line = parse_line(raw, tally)
    count.unreadable += tally.malformed
    if isinstance(line, LogLine):
        yield from mortem.feed(line.line, line.at)
    elif isinstance(line, SampleLine):
        for fact in line.sample.log_facts:
            yield from mortem.take(_finding(fact, count.lines))


def _finding(fact: LogFact, number: int) -> Finding:
    """The daemon's fact, as if its line had been read here."""
    kinds = {str(kind): kind for kind in Kind}
    kind = kinds.get(str(fact.what), Kind.SHUTDOWN)
    return Finding(kind, number, number, facts=fact.facts, words=fact.words, at=fact.at)


@contextmanager
def _open(file: str) -> Iterator[tuple[IO[bytes], Callable[[], None]]]:
    if file == STDIN:
        yield _unzipped(sys.stdin.buffer), lambda: None
        return
    path = Path(file)
    with path.open("rb") as plain:
        stream = _unzipped(plain)
        with _progress(path) as progress:
            task = progress.add_task(path.name, total=path.stat().st_size)
            yield stream, lambda: progress.update(task, completed=plain.tell())


def _unzipped(stream: IO[bytes]) -> IO[bytes]:
    """The stream without gzip, and as UTF-8 where PowerShell wrote UTF-16."""
    head = cast("io.BufferedReader", stream).peek(4)[:4]
    if head.startswith(_GZIP_MAGIC):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=stream))
    if (head.startswith(codecs.BOM_UTF16_LE) and head[3:] == b"\0") or (
        head.startswith(codecs.BOM_UTF16_BE) and head[2:3] == b"\0"
    ):
        recoder = codecs.EncodedFile(stream, "utf-8", "utf-16", "replace")
        return cast("IO[bytes]", recoder)
    return stream


def _progress(path: Path) -> Progress:
    """A bar on a terminal for files that take more than a moment; silent elsewhere."""
    console = Console(stderr=True)
    small = path.stat().st_size < _BAR_FROM_BYTES
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=small or not console.is_terminal)


def _print(out: Console, explanation: Explanation, file: str | None) -> None:
    incident, judged = explanation.incident, explanation.judged
    where = (
        f"line {incident.first_line}" if incident.lines == 1 else f"lines {incident.first_line} to {incident.last_line}"
    )
    when = next((each.stamp for each in incident.findings if each.stamp), None)
    at = _at(explanation)
    if when is None and at is not None:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
    head = ", ".join(
        each for each in (file, where, when, f"while {incident.stage}" if incident.stage != "unknown" else None) if each
    )
    report.say(
        out,
        f"\n{judged.cause}  {100 * judged.probability:.0f} %  ({head})",
        "bold red" if judged.cause in ALARMING else "bold",
    )
    report.say(out, f"  {explanation.sentence}")
    if explanation.division:
        report.say(out, f"  [{bar(explanation.division, _BAR_WIDTH)}]")
        sizes = (f"{each.letter} {each.name} {each.size_bytes / 2**30:.2f} GiB" for each in explanation.division)
        report.say(out, "  " + "  ".join(sizes), "dim")
    for signal, sentence in evidence_of(explanation):
        report.say(out, f"  {sentence}", "dim" if signal in ("missing", "ranks") else None)
    others = [
        f"{name} {100 * p:.0f} %" for name, p in judged.probabilities.items() if name != judged.cause and p >= 0.01
    ]
    if others:
        report.say(out, f"  Else: {', '.join(others)}.", "dim")
    for each in explanation.advice.do:
        report.say(out, f"  Do: {each}")
    for each in explanation.advice.vain:
        report.say(out, f"  Would not help: {each}")


def _print_end(out: Console, count: _Count, *, found_any: bool) -> None:
    note = f", {count.unreadable} not readable in full" if count.unreadable else ""
    ending = "" if found_any else "; no memory failure among them"
    report.say(out, f"\n{count.lines} lines read{note}{ending}.", "dim")
