"""VRAM in a Prometheus: the series of fragscope itself and of AMD's device-metrics-exporter, and whose they are.

A GPU is given to a target only where nothing else is possible (docs/prometheus-history.md); a guess would
show the headroom of somebody else's card.
"""

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fragscope.model import Gap, GpuReading, Part, Reason

FRAGSCOPE = "fragscope"
EXPORTER = "device-metrics-exporter"
_MIB = 2**20
_SIZE, _USED, _OWN = "size", "used", "own"
_NAMES = {
    "fragscope_gpu_vram_size_bytes": (FRAGSCOPE, _SIZE),
    "fragscope_gpu_vram_used_bytes": (FRAGSCOPE, _USED),
    "fragscope_gpu_vram_own_bytes": (FRAGSCOPE, _OWN),
    "gpu_total_vram": (EXPORTER, _SIZE),
    "gpu_used_vram": (EXPORTER, _USED),
}
"""The exporter's figures are MiB and called MB (its HELP); it may be configured to put a prefix before its names."""
PATTERN = "|".join(_NAMES)
PEAKS = ("fragscope_gpu_vram_used_peak_bytes", "gpu_used_vram")
"""What a step's highest is taken of; fragscope's own peak is of 20 readings a second, the exporter's of its scrapes."""
_WHOLE = ("", "NA", "0")
_PEAK = "peak"

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a series was scraped; the labels that Prometheus gives a target, "" where it has none."""

    cluster: str = ""
    namespace: str = ""
    pod: str = ""
    container: str = ""
    job: str = ""
    instance: str = ""

    @property
    def host(self) -> str:
        """The instance without its port."""
        return self.instance.rpartition(":")[0] or self.instance

    def shares_pod(self, other: "Place") -> bool:
        """Whether both name one pod; what only one of them says does not part them."""
        alike = all(
            not mine or not theirs or mine == theirs
            for mine, theirs in ((self.cluster, other.cluster), (self.namespace, other.namespace))
        )
        return bool(self.pod) and self.pod == other.pod and alike


def place_of(labels: Labels) -> Place:
    """Where the series was scraped."""
    return Place(*(labels.get(name, "") for name in ("cluster", "namespace", "pod", "container", "job", "instance")))


def watched_place(labels: Labels) -> Place:
    """The place an exporter speaks of: where its labels met Prometheus' own, they were renamed exported_*."""
    exported = {
        name: labels[f"exported_{name}"] for name in ("namespace", "pod", "container") if f"exported_{name}" in labels
    }
    return place_of({**labels, **exported})


@dataclass(slots=True)
class Card:
    """The series of one GPU as one exporter shows it."""

    source: str
    gpu: str
    watcher: str
    place: Place
    figures: dict[str, "array[float]"] = field(default_factory=dict)

    def shown(self, index: int) -> bool:
        """Whether anything is said at this moment."""
        return not math.isnan(self._figure(_USED, index)) or not math.isnan(self._figure(_SIZE, index))

    def reading(self, index: int, at: float) -> GpuReading | Gap:
        """The figures in bytes; nothing used of a card that is there is blindness, since firmware alone takes some."""
        size, used = self._figure(_SIZE, index), self._figure(_USED, index)
        if math.isnan(size) or math.isnan(used) or size <= 0:
            return Gap(Part.GPU, Reason.ABSENT, f"{self.source} shows size or use of {self.gpu}, but not both")
        if used <= 0:
            return Gap(Part.GPU, Reason.BLIND, f"{self.source} says that nothing of {self.gpu} is used")
        unit = 1 if self.source == FRAGSCOPE else _MIB
        peak, own = self._figure(_PEAK, index), self._figure(_OWN, index)
        return GpuReading(
            at=at,
            gpu=self.gpu,
            total_bytes=int(size) * unit,
            used_bytes=int(used) * unit,
            peak_used_bytes=None if math.isnan(peak) else int(max(peak, used)) * unit,
            own_bytes=None if math.isnan(own) else int(own) * unit,
            source=f"prometheus:{self.source}",
        )

    def _figure(self, name: str, index: int) -> float:
        values = self.figures.get(name)
        return math.nan if values is None else values[index]


def cards(
    figures: Iterable[tuple[Labels, "array[float]"]], peaks: Iterable[tuple[Labels, "array[float]"]]
) -> list[Card]:
    """The GPUs of one answer; `peaks` come without a name, as max_over_time leaves them."""
    found: dict[tuple[tuple[str, str], ...], Card] = {}
    for labels, values in figures:
        named = _NAMES.get(labels.get("__name__", ""))
        card = None if named is None else _card(named[0], labels)
        if named is None or card is None:
            continue
        found.setdefault(_identity(labels), card).figures[named[1]] = values
    for labels, values in peaks:
        known = found.get(_identity(labels))
        if known is not None:
            known.figures[_PEAK] = values
    return [found[identity] for identity in sorted(found)]


def _identity(labels: Labels) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, value) for name, value in labels.items() if name != "__name__"))


def _card(source: str, labels: Labels) -> Card | None:
    """None where the series does not say which GPU it is about."""
    if source == FRAGSCOPE:
        gpu, watcher = labels.get("gpu", ""), f"{labels.get('instance', '')} {labels.get('target', '')}"
    else:
        gpu, watcher = _exporters_name(labels), labels.get("instance", "")
    return Card(source, gpu, watcher, watched_place(labels)) if gpu else None


def _exporters_name(labels: Labels) -> str:
    """The exporter shows no PCI address; a partition is a card of its own here and never added to another."""
    name = labels.get("serial_number") or labels.get("gpu_uuid") or labels.get("gpu_id", "")
    partition = labels.get("gpu_partition_id", "")
    return name if not name or partition in _WHOLE else f"{name}/{partition}"


class Placement:
    """Which target a card belongs to, from all that has been seen up to now; None where more than one is possible."""

    def __init__(self) -> None:
        self._targets: set[Place] = set()
        self._watchers: set[tuple[str, str]] = set()
        self._host_cards: dict[str, set[str]] = {}
        self._decided: dict[tuple[str, Place, str, str], Place | None] = {}

    def meet_target(self, place: Place) -> None:
        """A place where vLLM was seen."""
        if place not in self._targets:
            self._targets.add(place)
            self._decided.clear()

    def meet_card(self, card: Card) -> None:
        """A card that shows figures."""
        hosted = self._host_cards.setdefault(card.place.host, set())
        watcher = (card.place.host, card.watcher)
        if card.gpu not in hosted or (card.source == FRAGSCOPE and watcher not in self._watchers):
            hosted.add(card.gpu)
            self._watchers |= {watcher} if card.source == FRAGSCOPE else set()
            self._decided.clear()

    def target_of(self, card: Card) -> Place | None:
        """The only target it can belong to."""
        key = (card.source, card.place, card.watcher, card.gpu)
        if key not in self._decided:
            self._decided[key] = self._decide(card)
        return self._decided[key]

    def _decide(self, card: Card) -> Place | None:
        same_pod = [target for target in self._targets if target.shares_pod(card.place)]
        if same_pod:
            same_container = [target for target in same_pod if target.container == card.place.container]
            return _only(same_pod) or _only(same_container)
        host = card.place.host
        if card.source == EXPORTER and (card.place.pod or len(self._host_cards[host]) > 1):
            return None
        same_host = [target for target in self._targets if host and target.host == host]
        if same_host:
            watchers = [watcher for watcher in self._watchers if watcher[0] == host]
            return _only(same_host) if len(watchers) <= 1 else None
        # A compose file gives every service a host name of its own: one server and one fragscope are a pair.
        alone = card.source == FRAGSCOPE and len(self._watchers) == 1
        return _only(list(self._targets)) if alone else None


def _only(places: list[Place]) -> Place | None:
    return places[0] if len(places) == 1 else None
