"""The board: the one thing threads share, an immutable view that is swapped whole."""

from collections.abc import Mapping
from dataclasses import dataclass

from fragscope.advise.live import EngineAdvice
from fragscope.model import Assessment, Gap, Verdict
from fragscope.serve.feeds import SourceStatus
from fragscope.serve.keeper import NOTHING_KEPT, Kept
from fragscope.sources.gpu.crosscheck import Difference
from fragscope.sources.gpu.device import Partition


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """Who a GPU is, which rule says that it belongs to the target, its parts, and what other sources show."""

    gpu: str
    unique_id: str | None
    card: str
    render: str | None
    rule: str
    partitions: tuple[Partition, ...] = ()
    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True, slots=True)
class TargetView:
    """What is known of one target; `assessment` is None before its first sample."""

    name: str
    url: str
    labels: Mapping[str, str]
    assessment: Assessment | None = None
    sources: tuple[SourceStatus, ...] = ()
    gpus: tuple[GpuInfo, ...] = ()
    gaps: tuple[Gap, ...] = ()
    detector_failures_total: int = 0
    advice: tuple[EngineAdvice, ...] = ()


@dataclass(frozen=True, slots=True)
class View:
    """Everything that a scrape or the status page can show."""

    at: float
    targets: tuple[TargetView, ...] = ()
    history: tuple[Verdict, ...] = ()
    ticks: int = 0
    kept: Kept = NOTHING_KEPT


class Board:
    """Holds the last published view; reading it takes no lock."""

    def __init__(self, view: View) -> None:
        self.view = view

    def publish(self, view: View) -> None:
        """Replaces the view."""
        self.view = view
