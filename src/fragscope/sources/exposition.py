"""Prometheus text to the families somebody wants, by prometheus_client's own parsers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from fragscope.model import Reason
from fragscope.sources.scrape import Body, Failure, short

_QUOTED_CHARS = 60
_STALE_HEADS = 4
_PARSER_ERRORS = (ValueError, LookupError, TypeError, AttributeError, AssertionError, OverflowError)
"""What prometheus_client's parsers raise on bad text: not only ValueError, as fuzzing showed."""


class Row(NamedTuple):
    """One sample of a family."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Page:
    """The wanted families of one exposition; a family that is only announced has no rows.

    `first_name` is the first sample's name, to say what a foreign page looks like.
    """

    families: Mapping[str, tuple[Row, ...]]
    malformed: tuple[str, ...] = ()
    first_name: str | None = None


@dataclass(frozen=True, slots=True)
class _Known:
    """What a line's part before its last word was found to be: a wanted row, a wanted TYPE, or nothing of interest."""

    name: str
    labels: Mapping[str, str] | None = None
    announces: str | None = None
    steady: bool = True
    """False where a timestamp follows the value: then the head holds the value and is never met again."""


class Parser:
    """Turns expositions into pages; remembers line heads, so that a repeated page costs a fifth of a parse.

    `wanted` maps a sample's name to the name it is kept under, or to None.
    """

    def __init__(self, wanted: Callable[[str], str | None]) -> None:
        self._wanted = wanted
        self._heads: dict[str, _Known] = {}

    def parse(self, body: Body) -> Page | Failure:
        """The page, or why the text as a whole is not one (empty, HTML, torn)."""
        failure = _not_a_page(body)
        if failure is not None:
            return failure
        if "openmetrics" in body.content_type:
            return self._openmetrics(body.text)
        return self._text(body.text)

    def _text(self, text: str) -> Page:
        heads = self._heads
        families: dict[str, list[Row]] = {}
        malformed: list[str] = []
        lines = text.split("\n")
        for line in lines:
            head, _, value = line.rpartition(" ")
            known = heads.get(head)
            if known is not None and known.labels is not None and "_" not in value:
                try:
                    families.setdefault(known.name, []).append(Row(known.labels, float(value)))
                except ValueError:
                    malformed.append(line)
            elif known is None or known.labels is not None:
                self._meet(line, head, families, malformed)
            elif known.announces is not None:
                families.setdefault(known.announces, [])
        if len(heads) > _STALE_HEADS * len(lines):
            # Series come and go; what is still there is learned again.
            self._heads = {}
        page = {name: tuple(rows) for name, rows in families.items()}
        return Page(page, tuple(malformed), _first_name(lines, malformed))

    def _meet(self, line: str, head: str, families: dict[str, list[Row]], malformed: list[str]) -> None:
        """A line that is not known yet, or whose value looks wrong."""
        if not line or line.isspace():
            return
        if line[0] == "#":
            words = line.split(None, 3)
            announced = self._wanted(words[2]) if len(words) > 2 and words[1] == "TYPE" else None
            if announced is not None:
                families.setdefault(announced, [])
            self._heads[head] = _Known("#", announces=announced)
            return
        try:
            known, number = self._learn(line)
        except ValueError:
            malformed.append(line)
            return
        if known.steady and head:
            self._heads[head] = known
        if known.labels is not None:
            families.setdefault(known.name, []).append(Row(known.labels, number))

    def _learn(self, line: str) -> tuple[_Known, float]:
        """Reads a new line with the real parser; raises ValueError where it is none."""
        try:
            samples = [sample for family in parse_text(line + "\n") for sample in family.samples]
        except _PARSER_ERRORS as error:
            raise ValueError(f"not a sample: {line!r}") from error
        if len(samples) != 1:
            raise ValueError(f"not one sample: {line!r}")
        sample = samples[0]
        kept = self._wanted(sample.name)
        steady = sample.timestamp is None
        try:
            value = float(sample.value)
        except OverflowError as error:
            raise ValueError(f"no number: {line!r}") from error
        if kept is None:
            return _Known(sample.name, steady=steady), value
        return _Known(kept, sample.labels, steady=steady), value

    def _openmetrics(self, text: str) -> Page | Failure:
        families: dict[str, list[Row]] = {}
        first_name: str | None = None
        try:
            for family in parse_openmetrics(text):  # type: ignore[no-untyped-call]
                kept = self._wanted(family.name)
                if kept is not None:
                    families.setdefault(kept, [])
                for sample in family.samples:
                    first_name = first_name or sample.name
                    kept = self._wanted(sample.name)
                    if kept is not None:
                        families.setdefault(kept, []).append(Row(sample.labels, float(sample.value)))
        except _PARSER_ERRORS as error:
            return Failure(Reason.MALFORMED, f"not OpenMetrics: {short(str(error))}")
        return Page({name: tuple(rows) for name, rows in families.items()}, (), first_name)


def _first_name(lines: list[str], malformed: list[str]) -> str | None:
    """The first sample's name, to say what a foreign page looks like."""
    for line in lines:
        if line and line[0] != "#" and not line.isspace() and line not in malformed:
            return line.split("{", 1)[0].split(None, 1)[0]
    return None


def _not_a_page(body: Body) -> Failure | None:
    start = body.text.lstrip()[:_QUOTED_CHARS]
    if not start:
        return Failure(Reason.MALFORMED, "empty")
    if start.startswith(("<", "[", '{"')) or "text/html" in body.content_type:
        words = " ".join(start.split())
        return Failure(Reason.MALFORMED, f"not an exposition: it begins with {words!r}")
    if not body.text.endswith("\n"):
        return Failure(Reason.MALFORMED, "cut in the middle: no newline at its end")
    return None
