"""What a history did not hold: metrics that nobody scraped, and what cannot be said without them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fragscope.model import GpuReading
from fragscope.sources.query_api import Answer

_V = "vllm:"


@dataclass(frozen=True, slots=True)
class Subject:
    """Something that samples should show: the names that would show it (any), and what is lost without."""

    metric: str
    names: frozenset[str]
    loss: str


def _subject(metric: str, loss: str, *others: str) -> Subject:
    return Subject(metric, frozenset({metric, *others}), loss)


SUBJECTS = (
    _subject(_V + "kv_cache_usage_perc", "how full the KV pool was", _V + "gpu_cache_usage_perc"),
    _subject(_V + "num_requests_running", "concurrency"),
    _subject(_V + "num_requests_waiting", "whether requests waited"),
    _subject(_V + "num_preemptions", "preemptions"),
    _subject(_V + "request_prompt_tokens_bucket", "the distribution of prompt lengths"),
    _subject(_V + "request_generation_tokens_bucket", "the distribution of answer lengths"),
    _subject(_V + "request_success", "how requests ended"),
    _subject(_V + "cache_config_info", "block size, number of blocks and gpu_memory_utilization"),
    _subject("http_requests", "failures by HTTP status (vLLM before 0.8.3 has none)"),
    _subject("process_start_time_seconds", "restarts, except by counters that begin anew"),
)
"""Names as vllm.wanted gives them. Metrics that only some versions have (rejections, sleep) are no loss."""
_GPU = "fragscope_gpu_vram_used_bytes or gpu_used_vram"
_PEAK = "fragscope_gpu_vram_used_peak_bytes"


@dataclass(frozen=True, slots=True)
class Absent:
    """A metric nobody has, or that only these targets lack, and what is not known for that."""

    metric: str
    loss: str
    targets: tuple[str, ...] = ()

    def sentence(self) -> str:
        """For people."""
        where = f" for {', '.join(self.targets)}" if self.targets else ""
        return f"{self.metric} is absent{where}: {self.loss} cannot be said"


@dataclass(slots=True)
class _Seen:
    names: set[str] = field(default_factory=set)
    gpu: bool = False
    peak: bool = False


class Coverage:
    """Fills while a history is read; complete when its last sample was taken."""

    def __init__(self) -> None:
        self._targets: dict[str, _Seen] = {}
        self._unplaced = 0
        self._native: set[str] = set()
        self._warnings: dict[str, None] = {}
        self.malformed = 0

    @property
    def targets(self) -> tuple[str, ...]:
        """The servers that were found, by name."""
        return tuple(sorted(self._targets))

    def note(self, answer: Answer) -> None:
        """What a server said beside its answer."""
        self._native |= set(answer.native_histograms)
        self._warnings |= dict.fromkeys(answer.warnings)

    def seen(self, target: str, names: Iterable[str], gpus: Sequence[GpuReading], malformed: int = 0) -> None:
        """What one sample rests on."""
        seen = self._targets.setdefault(target, _Seen())
        seen.names.update(names)
        seen.gpu |= bool(gpus)
        seen.peak |= any(gpu.peak_used_bytes is not None for gpu in gpus)
        self.malformed += malformed

    def unplaced(self, count: int) -> None:
        """GPUs of one moment that could be nobody's or anybody's."""
        self._unplaced = max(self._unplaced, count)

    def absent(self) -> tuple[Absent, ...]:
        """What was not there; () of a history that holds everything."""
        lacking: list[tuple[str, str, list[str]]] = []
        for subject in SUBJECTS:
            without = [name for name, seen in self._targets.items() if not subject.names & seen.names]
            lacking.append((subject.metric, subject.loss, without))
        blind = [name for name, seen in self._targets.items() if not seen.gpu]
        lacking.append((_GPU, "how much VRAM was used", blind))
        flat = [name for name, seen in self._targets.items() if seen.gpu and not seen.peak]
        lacking.append((_PEAK, "VRAM peaks between two scrapes", flat))
        everybody = len(self._targets)
        return tuple(
            Absent(metric, loss, () if len(names) == everybody else tuple(sorted(names)))
            for metric, loss, names in lacking
            if names or not everybody
        )

    def sentences(self) -> tuple[str, ...]:
        """Everything a reader of the samples should know, for people; () if all was well."""
        said = (
            [] if self._targets else ["no vLLM metric was found in this time; check the address, the times and --match"]
        )
        said += [absent.sentence() for absent in self.absent()] if self._targets else []
        if self._unplaced:
            said.append(f"{self._unplaced} GPUs could not be given to a server; narrow it with --match")
        if self._native:
            said.append(f"stored as native histograms, which are not read: {', '.join(sorted(self._native))}")
        if self.malformed:
            said.append(f"{self.malformed} values were impossible and left out")
        return (*said, *(f"Prometheus warns: {warning}" for warning in self._warnings))
