"""A Prometheus' memory of vLLM and its GPUs, as the samples a live poll would have made.

What is asked for, what it costs a server and what cannot be known afterwards is told in
docs/prometheus-history.md. Reading is lazy and in time order; one chunk is in memory at a time.
"""

import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from fragscope.model import Gap, GpuReading, Part, Reason, Sample
from fragscope.sources import vllm
from fragscope.sources.coverage import Coverage
from fragscope.sources.exposition import Page, Row
from fragscope.sources.gpu.history import FRAGSCOPE, PATTERN, PEAKS, Card, Place, Placement, cards, place_of
from fragscope.sources.matchers import Matcher, MatchError, parse, selector, without
from fragscope.sources.query_api import MAX_POINTS, Answer, Grid, HistoryError, QueryApi, Series, TooMuchError
from fragscope.sources.scrape import Access

__all__ = ["TOKEN_VARIABLE", "History", "HistoryError", "MatchError", "Progress", "QueryApi", "Span", "access"]

TOKEN_VARIABLE = "FRAGSCOPE_PROMETHEUS_TOKEN"  # noqa: S105 - a name, not a token
"""The environment variable with a bearer token for Prometheus."""
DEFAULT_STEP_S = 60.0
"""Between samples: a usual scrape interval is 15 to 60 s, and a week at 60 s is 10 080 samples a server."""
DEFAULT_CHUNK_S = 6 * 3600.0
"""Asked for at once: 360 points of some 150 series are 1.4 MB an engine, far below any server's limits."""
_OF_VLLM = frozenset({"engine", "model_name"})
_ALWAYS_ADDED = frozenset({"__name__", "job", "instance", "namespace", "pod", "container"})
_OF_ANOTHER_CONTAINER = _OF_VLLM | {"job", "instance", "container"}


@dataclass(frozen=True, slots=True)
class Span:
    """What to read: unix seconds, both ends included where they fall on a multiple of the step.

    `match` is a label selector for everything, `gpu_match` another one for GPU series; None leaves of `match`
    what can hold for a GPU (not engine, model_name, job, instance, container). Raises MatchError, HistoryError.
    """

    start_at: float
    end_at: float
    step_s: float = DEFAULT_STEP_S
    chunk_s: float = DEFAULT_CHUNK_S
    match: str = ""
    gpu_match: str | None = None

    def __post_init__(self) -> None:
        numbers = (self.start_at, self.end_at, self.step_s, self.chunk_s)
        if not all(math.isfinite(number) for number in numbers) or self.step_s < 0.001 or self.chunk_s <= 0:
            raise HistoryError(f"a step of {self.step_s:g} s and chunks of {self.chunk_s:g} s must be above 0")
        if self.end_at < self.start_at:
            raise HistoryError(f"the history would end at {self.end_at:g}, before it begins at {self.start_at:g}")
        if not self.grid().points:
            raise HistoryError(f"no multiple of {self.step_s:g} s lies in this time; take a smaller step")
        parse(self.match)
        parse(self.gpu_match or "")

    def grid(self) -> Grid:
        """Every moment: multiples of the step, so that the same history gives the same samples again."""
        step_ms = round(1000 * self.step_s)
        first = math.ceil(round(1000 * self.start_at) / step_ms)
        last = math.floor(round(1000 * self.end_at) / step_ms)
        return Grid(first * step_ms, step_ms, max(0, last - first + 1))


@dataclass(frozen=True, slots=True)
class Progress:
    """How far reading is: moments done of all, the time reached (unix seconds), samples given so far."""

    done: int
    total: int
    at: float
    samples: int


def access(environment: Mapping[str, str], ca_file: Path | None = None, total_timeout_s: float = 60.0) -> Access:
    """How to reach a Prometheus: the token of FRAGSCOPE_PROMETHEUS_TOKEN, a CA bundle, a deadline per query.

    User and password stand in the address. Raises HistoryError for a token that no header can carry.
    """
    token = environment.get(TOKEN_VARIABLE, "").strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise HistoryError(f"{TOKEN_VARIABLE} holds spaces, line breaks or other signs that no token has")
    return Access(connect_timeout_s=5.0, total_timeout_s=total_timeout_s, token=token or None, ca_file=ca_file)


class History:
    """The samples of a span, once. `coverage` fills while they are read and says what was not there."""

    def __init__(self, api: QueryApi, span: Span, progress: Callable[[Progress], None] | None = None) -> None:
        self.coverage = Coverage()
        self._api = api
        self._span = span
        self._progress = progress
        self._queries = _queries(span)
        self._placement = Placement()
        self._names = _Names()
        self._present: set[Place] = set()

    def samples(self) -> Iterator[Sample]:
        """Samples in time order, at one moment by target. Raises HistoryError, also in the middle."""
        grid = self._span.grid()
        points = max(1, min(MAX_POINTS, round(1000 * self._span.chunk_s) // grid.step_ms))
        done = given = 0
        while done < grid.points:
            first_ms = grid.first_ms + done * grid.step_ms
            piece, chunk = self._fetched(Grid(first_ms, grid.step_ms, min(points, grid.points - done)))
            if piece.points < min(points, grid.points - done):
                # What was too much once will be so again.
                points = piece.points
            for index in range(piece.points):
                for sample in self._moment(chunk, index, (first_ms + index * grid.step_ms) / 1000):
                    given += 1
                    yield sample
            done += piece.points
            if self._progress is not None:
                last_ms = first_ms + (piece.points - 1) * grid.step_ms
                self._progress(Progress(done, grid.points, last_ms / 1000, given))

    def _fetched(self, grid: Grid) -> tuple[Grid, "_Chunk"]:
        """The chunk, or its first half, quarter, ... where it is too much for one answer."""
        while True:
            try:
                engines, server, figures, peaks = (self._asked(query, grid) for query in self._queries)
            except TooMuchError as error:
                if grid.points == 1:
                    raise HistoryError(f"{error}; even one moment is too much, so narrow it with --match") from error
                grid = Grid(grid.first_ms, grid.step_ms, grid.points // 2)
            else:
                found = cards(_pairs(figures), _pairs(peaks))
                return grid, _Chunk(_columns(engines + server), found)

    def _asked(self, query: str, grid: Grid) -> tuple[Series, ...]:
        answer: Answer = self._api.range(query, grid)
        self.coverage.note(answer)
        return answer.series

    def _moment(self, chunk: "_Chunk", index: int, at: float) -> Iterator[Sample]:
        pages = {place: page for place, columns in chunk.columns.items() if (page := _page(columns, index))}
        for place in sorted(pages, key=_order):
            self._placement.meet_target(place)
            self._names.meet(place)
        gpus, unplaced = self._gpus(chunk.cards, index, at)
        present = set(pages) | set(gpus)
        for place in sorted(present | self._present, key=self._names.of):
            yield self._sample(place, at, pages.get(place), gpus.get(place, []), unplaced)
        self._present = present

    def _sample(
        self, place: Place, at: float, page: Page | None, gpus: list[GpuReading | Gap], unplaced: int
    ) -> Sample:
        name = self._names.of(place)
        gaps = [each for each in gpus if isinstance(each, Gap)]
        readings = tuple(each for each in gpus if isinstance(each, GpuReading))
        if not gpus:
            gaps.append(_no_gpu(unplaced))
        if page is None:
            gaps.append(Gap(Part.ENGINE, Reason.ABSENT, "Prometheus has nothing of vLLM at this time"))
            self.coverage.seen(name, (), readings)
            return Sample(at, name, gpus=readings, gaps=tuple(gaps))
        answer = vllm.read(page, at, health=None)
        self.coverage.seen(name, page.families, readings, len(answer.malformed))
        if answer.gap is not None:
            gaps.append(answer.gap)
        return Sample(at, name, answer.engines, readings, gaps=tuple(gaps))

    def _gpus(self, found: list[Card], index: int, at: float) -> tuple[dict[Place, list[GpuReading | Gap]], int]:
        """What is said of each target's GPUs at this moment, and how many GPUs nobody can be given."""
        shown = [card for card in found if card.shown(index)]
        for card in shown:
            self._placement.meet_card(card)
        placed: dict[Place, list[Card]] = {}
        unplaced = 0
        for card in shown:
            place = self._placement.target_of(card)
            if place is None:
                unplaced += 1
            else:
                placed.setdefault(place, []).append(card)
        self.coverage.unplaced(unplaced)
        return {place: [card.reading(index, at) for card in _best(of)] for place, of in placed.items()}, unplaced


@dataclass(slots=True)
class _Column:
    """One series of a server, under the name that vllm.read knows."""

    name: str
    labels: Mapping[str, str]
    values: "array[float]"


@dataclass(frozen=True, slots=True)
class _Chunk:
    columns: Mapping[Place, list[_Column]]
    cards: list[Card]


@dataclass(slots=True)
class _Names:
    """A name for each target that stays: pod or address, and the job where two would have the same."""

    _given: dict[Place, str] = field(default_factory=dict)

    def meet(self, place: Place) -> None:
        if place in self._given:
            return
        port = place.instance.rpartition(":")[2]
        pod = "/".join(filter(None, (place.cluster, place.namespace, place.pod)))
        choices = [
            pod if place.pod else place.instance or place.job or "vllm",
            f"{pod}:{port}" if place.pod else f"{place.job}/{place.instance}",
            "/".join(filter(None, (pod, place.container, place.job, place.instance))),
        ]
        taken = set(self._given.values())
        free = [name for name in choices if name not in taken]
        self._given[place] = free[0] if free else f"{choices[-1]} ({len(taken)})"

    def of(self, place: Place) -> str:
        return self._given[place]


def _queries(span: Span) -> tuple[str, str, str, str]:
    """Engine, server, VRAM, VRAM peaks. Names that everybody has are asked for only beside vLLM's own."""
    every = parse(span.match)
    server: tuple[Matcher, ...] = without(every, _OF_VLLM)
    gpu = without(every, _OF_ANOTHER_CONTAINER) if span.gpu_match is None else parse(span.gpu_match)
    engines = selector(vllm.ENGINE_PATTERN, every)
    step = f"[{round(1000 * span.step_s)}ms]"
    peaks = " or ".join(f"max_over_time({selector(name, gpu)}{step})" for name in PEAKS)
    beside = f"{selector(vllm.SERVER_PATTERN, server)} and on (job, instance, namespace, pod) {engines}"
    return engines, beside, selector(PATTERN, gpu), peaks


def _pairs(series: tuple[Series, ...]) -> list[tuple[Mapping[str, str], "array[float]"]]:
    return [(each.labels, each.values) for each in series]


def _columns(series: tuple[Series, ...]) -> dict[Place, list[_Column]]:
    columns: dict[Place, list[_Column]] = {}
    for each in series:
        kept = vllm.wanted(each.labels.get("__name__", ""))
        if kept is not None:
            columns.setdefault(place_of(each.labels), []).append(_Column(kept, each.labels, each.values))
    for place, each_place in columns.items():
        # Prometheus sorts its answers, its relatives do not; engines are read in the order of appearance.
        each_place.sort(key=lambda column: (column.name, sorted(column.labels.items())))
        columns[place] = _as_exposed(each_place)
    return columns


def _as_exposed(columns: list[_Column]) -> list[_Column]:
    """The columns without what Prometheus has put on: labels that every series of a server shares.

    An info metric's labels are vLLM's settings; an address among them would make each replica look set differently.
    """
    shared = set.intersection(*(set(column.labels.items()) for column in columns))
    added = {name for name, _ in shared} - _OF_VLLM | _ALWAYS_ADDED
    return [
        replace(column, labels={name: word for name, word in column.labels.items() if name not in added})
        for column in columns
    ]


def _page(columns: list[_Column], index: int) -> Page | None:
    """What the server's page would have shown; None where it shows nothing of vLLM."""
    families: dict[str, list[Row]] = {}
    for column in columns:
        value = column.values[index]
        if not math.isnan(value):
            families.setdefault(column.name, []).append(Row(column.labels, value))
    if not any(name.startswith("vllm:") for name in families):
        return None
    return Page({name: tuple(rows) for name, rows in families.items()})


def _order(place: Place) -> tuple[str, ...]:
    return (place.cluster, place.namespace, place.pod, place.container, place.job, place.instance)


def _best(found: list[Card]) -> list[Card]:
    """One witness for each card: fragscope's own figures, which have peaks, before the exporter's of the same cards."""
    own = [card for card in found if card.source == FRAGSCOPE]
    return list({card.gpu: card for card in own or found}.values())


def _no_gpu(unplaced: int) -> Gap:
    if unplaced:
        detail = f"{unplaced} GPUs in Prometheus, and no way to tell whose they are"
        return Gap(Part.GPU, Reason.UNASSIGNED, detail)
    return Gap(Part.GPU, Reason.ABSENT, "Prometheus has no VRAM series of it at this time")
