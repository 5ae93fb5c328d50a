"""Real vLLM 0.32 pages, repeated without end: every lap its counters go on rising, as a living server's do."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby
from pathlib import Path

from fragscope.recording import ExpositionLine, GpuLine, Tally, read_lines

_RECORDING = Path(__file__).parents[1] / "tests" / "data" / "vllm-0.32" / "healthy.jsonl.gz"
_RISING = ("_total", "_count", "_sum", "_bucket")
_ENGINE = 'engine="0"'
_STARTED = re.compile(r"^process_start_time_seconds .*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Pages with the same lines, one second apart, and what the GPU showed beside them."""

    at: float
    texts: tuple[str, ...]
    gpus: tuple[GpuLine, ...]


def recorded() -> Recorded:
    """The healthy recording, from where every line of its last page has appeared."""
    lines = list(read_lines(str(_RECORDING), Tally()))
    polls = [(line.at, line.text) for line in lines if isinstance(line, ExpositionLine) and line.text is not None]
    whole = set(_values(polls[-1][1]))
    polls = [(at, text) for at, text in polls if set(_values(text)) == whole]
    gpus = tuple(line for line in lines if isinstance(line, GpuLine))
    return Recorded(polls[0][0], tuple(text for _, text in polls), gpus)


def eight_engines(pages: Recorded) -> Recorded:
    """The same with every per-engine sample eight times (engine 0 to 7); what belongs to the server stays once."""
    return replace(pages, texts=tuple(map(_eightfold, pages.texts)))


def born(pages: Recorded, at: float) -> Recorded:
    """The same with another start of the server, so that its age fits the clock of whoever polls it."""
    line = f"process_start_time_seconds {at}"
    return replace(pages, texts=tuple(_STARTED.sub(line, text) for text in pages.texts))


def successive(texts: Sequence[str]) -> Iterator[str]:
    """The pages, lap after lap; a counter begins each lap where it ended the one before."""
    first, last = _values(texts[0]), _values(texts[-1])
    rises = {head: last[head] - first[head] for head in last if _rises(head) and last[head] > first[head]}
    for lap in count():
        for text in texts:
            yield "\n".join(_lifted(line, rises, lap) for line in text.split("\n")) if lap else text


def _lifted(line: str, rises: dict[str, float], laps: int) -> str:
    head, _, value = line.rpartition(" ")
    rise = rises.get(head)
    return line if rise is None else f"{head} {float(value) + laps * rise}"


def _values(text: str) -> dict[str, float]:
    parts = (line.rpartition(" ") for line in text.split("\n") if line and line[0] != "#")
    return {head: float(value) for head, _, value in parts}


def _rises(head: str) -> bool:
    return head.partition("{")[0].endswith(_RISING)


def _eightfold(text: str) -> str:
    lines: list[str] = []
    for own, group in groupby(text.split("\n"), lambda line: line[:1] != "#" and _ENGINE in line):
        block = list(group)
        copies = [f'engine="{i}"' for i in range(8)] if own else [_ENGINE]
        lines += [line.replace(_ENGINE, copy) for copy in copies for line in block]
    return "\n".join(lines)
