"""A measured figure beside its aim, and how much effort measuring takes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Effort:
    """How long each figure is measured."""

    warm_polls: int
    polls: int
    wide_polls: int
    parses: int
    observes: int
    samples: int
    share_s: float
    feed_s: float


FULL = Effort(
    warm_polls=60, polls=400, wide_polls=300, parses=300, observes=20_000, samples=600, share_s=30.0, feed_s=10.0
)
QUICK = Effort(warm_polls=20, polls=60, wide_polls=30, parses=20, observes=1_000, samples=100, share_s=5.0, feed_s=3.0)


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table; a figure without an aim is only shown."""

    what: str
    value: float
    unit: str
    most: float | None = None
    least: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the aim is met; None where there is none."""
        if self.most is not None:
            return self.value <= self.most
        return self.value >= self.least if self.least is not None else None

    def cells(self) -> tuple[str, str, str, str]:
        """What, measured, aim, ok."""
        aim = f"<= {self.most:g} {self.unit}" if self.most is not None else ""
        aim = f">= {self.least:g} {self.unit}" if self.least is not None else aim
        ok = {True: "yes", False: "NO", None: ""}[self.met]
        return self.what, f"{self.value:.3g} {self.unit}".strip(), aim.strip(), ok
