"""The dialects of vLLM's metrics, read by the names that are there and not by version.

vLLM renames and hides metrics between releases and has no version metric (docs/vllm.md). Whatever a page
does not show is None; a NaN or an impossible ratio is None and counted as malformed.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from fragscope.model import CacheConfig, EngineReading, Gap, Histogram, Part, Reason
from fragscope.sources.exposition import Page, Row

_PREFIXES = ("ray_vllm_", "ray_vllm:", "vllm:", "vllm_")
_BARE = frozenset({"http_requests", "process_start_time_seconds"})
_ENGINE = frozenset(
    {
        "kv_cache_usage_perc",
        "gpu_cache_usage_perc",
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_swapped",
        "num_requests_waiting_by_reason",
        "num_preemptions",
        "prompt_tokens",
        "generation_tokens",
        "time_to_first_token_seconds_bucket",
        "time_to_first_token_seconds_sum",
        "time_to_first_token_seconds_count",
        "request_success",
        "admission_rejections",
        "engine_sleep_state",
        "cache_config_info",
        "request_prompt_tokens",
        "request_prompt_tokens_bucket",
        "request_prompt_tokens_sum",
        "request_prompt_tokens_count",
        "request_generation_tokens",
        "request_generation_tokens_bucket",
        "request_generation_tokens_sum",
        "request_generation_tokens_count",
    }
)
_VLLM = "vllm:"
ENGINE_PATTERN = f"({'|'.join(_PREFIXES)})({'|'.join(sorted(_ENGINE))})(_total)?"
"""Every dialect's name of what is read of an engine, as a regular expression to ask a Prometheus with."""
SERVER_PATTERN = f"({'|'.join(sorted(_BARE))})(_total)?"
"""The same for what belongs to the server: names that other programs have too."""
_NOT_COMPLETIONS = (
    "lora_adapter",
    "tokenize",
    "/render",
    "/derender",
    "/cancel",
    "count_tokens",
    "abort_requests",
)
_COMPLETIONS = ("/v1/", "/generate", "/pooling", "/inference")


def wanted(name: str) -> str | None:
    """The name a sample or TYPE line is kept under: prefix and `_total` made uniform; None for the rest."""
    if name.endswith("_created"):
        return None
    bare = name.removesuffix("_total")
    if bare in _BARE:
        return bare
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            rest = bare[len(prefix) :]
            return _VLLM + rest if rest in _ENGINE else None
    return None


@dataclass(frozen=True, slots=True)
class Answer:
    """What one page came to: a reading per engine, or a gap; and the values that could not be used."""

    engines: tuple[EngineReading, ...] = ()
    gap: Gap | None = None
    malformed: tuple[str, ...] = ()


def read(page: Page, at: float, health: int | None, version: str | None = None) -> Answer:
    """The readings of every engine on the page; `health` is the status of `/health` (None: not asked)."""
    scan = _Scan(page)
    names = scan.engines()
    if not names:
        return Answer(gap=_no_engine(page), malformed=page.malformed)
    server = _server(scan, health)
    engines = tuple(_engine(scan, name, at, version, server) for name in names)
    return Answer(engines, None, page.malformed + tuple(scan.malformed))


def _no_engine(page: Page) -> Gap:
    if any(name.startswith(_VLLM) for name in page.families):
        return Gap(Part.ENGINE, Reason.ABSENT, "vLLM's metrics are announced, but no engine has reported yet")
    if "http_requests" in page.families:
        detail = "a page of HTTP metrics without vllm: ones; was vLLM started with --disable-log-stats?"
        return Gap(Part.ENGINE, Reason.UNSUPPORTED, detail)
    if page.first_name is None and page.malformed:
        return Gap(Part.ENGINE, Reason.MALFORMED, f"not an exposition: {page.malformed[0][:60]!r}")
    like = f"it begins with {page.first_name!r}" if page.first_name else "it holds no sample"
    return Gap(Part.ENGINE, Reason.UNSUPPORTED, f"no vLLM metric on this page; {like}")


class _Scan:
    """Typed look-ups in a page; collects what could not be used."""

    def __init__(self, page: Page) -> None:
        self._families = page.families
        self.malformed: list[str] = []

    def engines(self) -> list[str]:
        """Engine labels in order of appearance; "0" where there is no such label."""
        names: dict[str, None] = {}
        for family in (
            "num_requests_running",
            "kv_cache_usage_perc",
            "gpu_cache_usage_perc",
            "generation_tokens",
        ):
            for row in self.rows(_VLLM + family):
                names[_engine_of(row)] = None
        return list(names)

    def rows(self, name: str) -> tuple[Row, ...]:
        """All rows of a family; () where it is absent."""
        return self._families.get(name, ())

    def has(self, name: str) -> bool:
        """Whether the page shows or at least announces the family."""
        return name in self._families

    def of(self, engine: str, name: str) -> list[Row]:
        """A family's usable rows of one engine; families without an engine label belong to all."""
        rows = [row for row in self.rows(_VLLM + name) if row.labels.get("engine") in (None, engine)]
        return [row for row in rows if self._usable(name, row)]

    def highest(self, engine: str, name: str) -> float | None:
        """A gauge; where every process of a server shows one, the highest is the engine's."""
        return max((row.value for row in self.of(engine, name)), default=None)

    def total(self, engine: str, name: str) -> float | None:
        """A counter, summed over whatever other labels it has."""
        rows = self.of(engine, name)
        return sum(row.value for row in rows) if rows else None

    def by(self, engine: str, name: str, label: str) -> dict[str, float] | None:
        """A family split by one label."""
        table: dict[str, float] = {}
        for row in self.of(engine, name):
            word = row.labels.get(label, "")
            table[word] = table.get(word, 0.0) + row.value
        return table or None

    def _usable(self, name: str, row: Row) -> bool:
        if math.isfinite(row.value):
            return True
        self.malformed.append(f"{name} is {row.value}")
        return False


@dataclass(frozen=True, slots=True)
class _Server:
    """What belongs to the server and not to one engine."""

    http_total: Mapping[str, float] | None
    healthy: bool | None
    started_at: float | None


def _server(scan: _Scan, health: int | None) -> _Server:
    started = [row.value for row in scan.rows("process_start_time_seconds") if math.isfinite(row.value)]
    return _Server(
        http_total=_http(scan) if scan.has("http_requests") else None,
        healthy=_healthy(health),
        started_at=started[0] if started else None,
    )


def _healthy(status: int | None) -> bool | None:
    """True for 200, False from 500 on; anything else (no answer, 404, 401) says nothing."""
    if status == 200:
        return True
    return False if status is not None and status >= 500 else None


def _http(scan: _Scan) -> dict[str, float]:
    """Completion requests by class of status."""
    classes = {"2xx": 0.0, "4xx": 0.0, "5xx": 0.0}
    for row in scan.rows("http_requests"):
        status = row.labels.get("status", "")
        name = status[:1] + "xx"
        if name in classes and _is_completion(row.labels) and math.isfinite(row.value):
            classes[name] += row.value
    return classes


def _is_completion(labels: Mapping[str, str]) -> bool:
    handler = labels.get("handler", "")
    if labels.get("method", "POST") != "POST" or not handler.startswith(_COMPLETIONS):
        return False
    return not any(word in handler for word in _NOT_COMPLETIONS)


def _engine(scan: _Scan, name: str, at: float, version: str | None, server: _Server) -> EngineReading:
    return EngineReading(
        at=at,
        engine=name,
        model_name=_model_name(scan, name),
        version=version,
        kv_usage_ratio=_usage(scan, name),
        running=scan.highest(name, "num_requests_running"),
        waiting=_waiting(scan, name),
        waiting_by_reason=scan.by(name, "num_requests_waiting_by_reason", "reason"),
        preemptions_total=scan.total(name, "num_preemptions"),
        prompt_tokens_total=scan.total(name, "prompt_tokens"),
        generation_tokens_total=scan.total(name, "generation_tokens"),
        first_tokens_total=scan.total(name, "time_to_first_token_seconds_count"),
        finished_total=scan.by(name, "request_success", "finished_reason"),
        http_total=server.http_total,
        admission_rejections_total=scan.total(name, "admission_rejections"),
        prompt_tokens=_histogram(scan, name, "request_prompt_tokens"),
        output_tokens=_histogram(scan, name, "request_generation_tokens"),
        first_token_s=_histogram(scan, name, "time_to_first_token_seconds"),
        cache_config=_cache_config(scan, name),
        sleeping=_sleeping(scan, name),
        healthy=server.healthy,
        started_at=server.started_at,
    )


def _engine_of(row: Row) -> str:
    return row.labels.get("engine", "0")


def _model_name(scan: _Scan, engine: str) -> str:
    for family in ("num_requests_running", "kv_cache_usage_perc", "gpu_cache_usage_perc"):
        for row in scan.rows(_VLLM + family):
            if _engine_of(row) == engine and row.labels.get("model_name"):
                return row.labels["model_name"]
    return ""


def _usage(scan: _Scan, engine: str) -> float | None:
    for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
        value = scan.highest(engine, name)
        if value is None:
            continue
        if 0.0 <= value <= 1.0 + 1e-6:
            return min(1.0, value)
        scan.malformed.append(f"{name} is {value}, which is no ratio")
    return None


def _waiting(scan: _Scan, engine: str) -> float | None:
    """Waiting requests; V0's swapped ones wait too."""
    waiting = scan.highest(engine, "num_requests_waiting")
    swapped = scan.highest(engine, "num_requests_swapped")
    if waiting is None:
        return None
    return waiting + (swapped or 0.0)


def _histogram(scan: _Scan, engine: str, name: str) -> Histogram | None:
    count, total = scan.total(engine, f"{name}_count"), scan.total(engine, f"{name}_sum")
    if count is None or total is None:
        return None
    return Histogram(count, total, tuple(_buckets(scan.of(engine, f"{name}_bucket"))))


def _buckets(rows: Iterable[Row]) -> list[tuple[float, float]]:
    buckets: dict[float, float] = {}
    for row in rows:
        try:
            bound = float(row.labels.get("le", ""))
        except ValueError:
            continue
        if math.isfinite(bound):
            buckets[bound] = buckets.get(bound, 0.0) + row.value
    return sorted(buckets.items())


def _cache_config(scan: _Scan, engine: str) -> CacheConfig | None:
    rows = scan.of(engine, "cache_config_info")
    if not rows:
        return None
    labels = rows[0].labels
    return CacheConfig(
        block_size=_integer(labels, "block_size"),
        num_gpu_blocks=_integer(labels, "num_gpu_blocks"),
        gpu_memory_utilization=_number(labels, "gpu_memory_utilization"),
        cache_dtype=_word(labels, "cache_dtype"),
        kv_cache_size_tokens=_integer(labels, "kv_cache_size_tokens"),
        effective_attention_block_size=_integer(labels, "effective_attention_block_size"),
        kv_cache_max_concurrency=_number(labels, "kv_cache_max_concurrency"),
        kv_cache_memory_bytes=_integer(labels, "kv_cache_memory_bytes"),
        num_gpu_blocks_override=_integer(labels, "num_gpu_blocks_override"),
        flags=_flags(labels),
    )


_TYPED = frozenset(item.name for item in fields(CacheConfig)) | {"engine", "model_name", "pid"}


def _flags(labels: Mapping[str, str]) -> dict[str, str] | None:
    """The labels that no field of CacheConfig holds, as far as they are set."""
    rest = {name: word for name, word in labels.items() if name not in _TYPED and word not in ("", "None")}
    return rest or None


def _word(labels: Mapping[str, str], name: str) -> str | None:
    word = labels.get(name)
    return None if word in (None, "", "None") else word


def _number(labels: Mapping[str, str], name: str) -> float | None:
    try:
        number = float(labels.get(name, ""))
    except ValueError:
        return None
    return number if math.isfinite(number) and number > 0 else None


def _integer(labels: Mapping[str, str], name: str) -> int | None:
    number = _number(labels, name)
    return int(number) if number is not None else None


def _sleeping(scan: _Scan, engine: str) -> bool | None:
    rows = [row for row in scan.of(engine, "engine_sleep_state") if row.labels.get("sleep_state") == "awake"]
    return rows[0].value == 0 if rows else None
