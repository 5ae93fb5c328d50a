"""Lengths of real requests: small samples of public traces (traces/SOURCES.md names them and their licences)."""

import random
from functools import cache
from importlib.resources import files

TRACES = ("azure_conv", "azure_code", "mooncake_conv", "mooncake_synth", "servegen_r1", "servegen_mlarge")


@cache
def table() -> dict[str, tuple[tuple[int, int], ...]]:
    """(prompt, output) tokens of every request, by trace."""
    text = files("fragscope.simulate").joinpath("traces", "lengths.csv").read_text(encoding="utf-8")
    rows: dict[str, list[tuple[int, int]]] = {name: [] for name in TRACES}
    for line in text.splitlines()[1:]:
        trace, prompt, output = line.split(",")
        rows[trace].append((int(prompt), int(output)))
    return {name: tuple(of) for name, of in rows.items()}


class Lengths:
    """Draws lengths from one trace, cut to what a model's context holds."""

    def __init__(self, trace: str, max_model_len: int, rng: random.Random) -> None:
        limit = max_model_len * 15 // 16
        self._rows = tuple(
            (min(prompt, limit), min(output, max_model_len - min(prompt, limit))) for prompt, output in table()[trace]
        )
        self._rng = rng

    def draw(self) -> tuple[int, int]:
        """(prompt, output) tokens of the next request."""
        rows = self._rows
        return rows[int(self._rng.random() * len(rows))]

    def mean(self) -> tuple[float, float, float]:
        """Mean prompt, mean output, and the context a request holds on average while it decodes."""
        n = len(self._rows)
        output = sum(o for _, o in self._rows) / n
        context = sum(o * (p + o / 2) for p, o in self._rows) / n / output
        return sum(p for p, _ in self._rows) / n, output, context
