"""The metric catalogue, and the collector that renders the board. A scrape touches memory only.

Each family is a row of data: a name, a type, a help text and a function from the board's view to samples.
A family that raises is left out and counted; it never costs the rest of the page.
"""

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from fragscope import __version__
from fragscope.model import MEMORY_CAUSES, Cause, Condition, Measures, Phase, Reason, Verdict
from fragscope.serve.board import Board, TargetView, View

_PSEUDO_OOM = (Phase.SUSPECTED, Phase.CONFIRMED)

Sampled = tuple[dict[str, str], float]
Render = Callable[[View], Iterable[Sampled]]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family: `labels` beyond target (and namespace, pod, container where configured)."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    render: Render

    def samples(self, view: View) -> Metric:
        """The family as of a view; without samples where its evidence is missing."""
        metric = self.empty()
        suffix = {"counter": "_total", "info": "_info"}.get(self.kind, "")
        for labels, value in self.render(view):
            metric.add_sample(metric.name + suffix, labels, value)
        return metric

    def empty(self) -> Metric:
        """The family's head alone."""
        base = self.name.removesuffix("_total") if self.kind == "counter" else self.name
        return Metric(base.removesuffix("_info") if self.kind == "info" else base, self.help, self.kind)


def _targets(render: Callable[[TargetView], Iterable[Sampled]]) -> Render:
    def rows(view: View) -> Iterator[Sampled]:
        for target in view.targets:
            own = {"target": target.name, **target.labels}
            for labels, value in render(target):
                yield {**own, **labels}, value

    return rows


def _verdicts(render: Callable[[Verdict], Iterable[Sampled]]) -> Render:
    def rows(target: TargetView) -> Iterator[Sampled]:
        for verdict in target.assessment.verdicts if target.assessment is not None else ():
            own = {"engine": verdict.engine or "", "model_name": verdict.model_name or ""}
            for labels, value in render(verdict):
                yield {**own, **labels}, value

    return _targets(rows)


def _measures(render: Callable[[Measures], Iterable[Sampled]]) -> Render:
    def rows(target: TargetView) -> Iterable[Sampled]:
        return render(target.assessment.measures) if target.assessment is not None else ()

    return _targets(rows)


def _maybe(value: float | None, **labels: str) -> Iterator[Sampled]:
    if value is not None:
        yield labels, float(value)


def _known(verdict: Verdict) -> bool:
    return verdict.phase is not Phase.UNKNOWN


def _suspected(verdict: Verdict) -> Iterator[Sampled]:
    if _known(verdict):
        yield {}, float(verdict.phase in _PSEUDO_OOM)


def _ticket(verdict: Verdict) -> Iterator[Sampled]:
    if _known(verdict):
        yield {}, float(verdict.ticket)


def _fragmentation_suspected(verdict: Verdict) -> Iterator[Sampled]:
    if _known(verdict):
        yield {}, float(verdict.fragmentation_suspected)


def _fragmentation_confirmed(verdict: Verdict) -> Iterator[Sampled]:
    if _known(verdict):
        yield {}, float(verdict.phase is Phase.CONFIRMED and verdict.cause == Cause.FRAGMENTATION)


def _one_hot_cause(verdict: Verdict) -> Iterator[Sampled]:
    episode = verdict.cause if verdict.cause in set(Cause) else str(Cause.NONE)
    return (({"cause": str(cause)}, float(cause == episode)) for cause in Cause)


def _conditions(verdict: Verdict) -> Iterator[Sampled]:
    """Without the engine's word only what holds is known, not what does not."""
    blind = "engine" in verdict.missing and Condition.ENGINE_DOWN not in verdict.conditions
    for condition in Condition:
        holds = condition in verdict.conditions
        if holds or not blind:
            yield {"condition": str(condition)}, float(holds)


def _probabilities(verdict: Verdict) -> Iterator[Sampled]:
    if _known(verdict):
        for cause in MEMORY_CAUSES:
            yield {"cause": str(cause)}, verdict.probabilities.get(cause, 0.0)


def _outcomes(measures: Measures) -> Iterator[Sampled]:
    for (band, outcome), total in measures.outcomes.items():
        yield {"kv_band": str(band), "outcome": str(outcome)}, total


def _per_gpu(attribute: str) -> Render:
    return _measures(lambda m: (row for g in m.gpus for row in _maybe(getattr(g, attribute), gpu=g.gpu)))


def _per_engine(attribute: str) -> Render:
    return _measures(
        lambda m: (
            row for e in m.engines for row in _maybe(getattr(e, attribute), engine=e.engine, model_name=e.model_name)
        )
    )


def _advice(attribute: str) -> Render:
    return _targets(
        lambda target: (
            row
            for e in target.advice
            for row in _maybe(getattr(e, attribute), engine=e.engine, model_name=e.model_name)
        )
    )


def _log_odds(attribute: str) -> Render:
    return _measures(lambda m: _maybe(getattr(m.log_odds, attribute)) if m.log_odds is not None else ())


def _failures(attribute: str) -> Render:
    return _measures(lambda m: _maybe(getattr(m.failures, attribute)) if m.failures is not None else ())


def _engine_up(measures: Measures) -> Iterator[Sampled]:
    if measures.engine_up is not None:
        yield {}, float(measures.engine_up)


def _sources(attribute: str) -> Render:
    def rows(target: TargetView) -> Iterator[Sampled]:
        for source in target.sources:
            yield from _maybe(getattr(source, attribute), source=source.source)

    return _targets(rows)


_WHOLE_ROWS = 2


def _source_failures(target: TargetView) -> Iterator[Sampled]:
    for i, source in enumerate(target.sources):
        # Ten series for the engine's page and the first GPU source; for the others only what has happened.
        for reason in Reason if i < _WHOLE_ROWS else source.failures:
            yield {"source": source.source, "reason": str(reason)}, float(source.failures.get(reason, 0))


def _gpu_info(target: TargetView) -> Iterator[Sampled]:
    for gpu in target.gpus:
        labels = {
            "gpu": gpu.gpu,
            "unique_id": gpu.unique_id or "",
            "card": gpu.card,
            "render": gpu.render or "",
        }
        yield {**labels, "rule": gpu.rule}, 1.0


def _partitions(attribute: str) -> Render:
    def rows(target: TargetView) -> Iterator[Sampled]:
        for gpu in target.gpus:
            for part in gpu.partitions:
                yield from _maybe(getattr(part, attribute), gpu=gpu.gpu, partition=str(part.number))

    return _targets(rows)


def _differences(target: TargetView) -> Iterator[Sampled]:
    for gpu in target.gpus:
        for found in gpu.differences:
            yield {"gpu": gpu.gpu, "source": found.source}, float(found.difference_bytes)


def _build(_: View) -> Iterator[Sampled]:
    # Images set the revision at build time; a source checkout has none.
    revision = os.environ.get("FRAGSCOPE_REVISION", "")
    yield {"version": __version__, "revision": revision, "python_version": platform.python_version()}, 1.0


_E = ("engine", "model_name")

CATALOGUE: tuple[Family, ...] = (
    Family(
        "fragscope_pseudo_oom_suspected",
        "gauge",
        "1 while a failure for lack of memory outside the KV pool is suspected or confirmed, 0 while not; "
        "absent while unknown. The one to alert on.",
        _E,
        _verdicts(_suspected),
    ),
    Family(
        "fragscope_pseudo_oom_ticket",
        "gauge",
        "1 while such a failure is likely enough for a ticket (ticket_probability, 3:1), suspected ones included, "
        "0 while not; absent while unknown.",
        _E,
        _verdicts(_ticket),
    ),
    Family(
        "fragscope_fragmentation_suspected",
        "gauge",
        "1 while, in addition, the cause is or may be fragmentation, 0 while not; absent while unknown.",
        _E,
        _verdicts(_fragmentation_suspected),
    ),
    Family(
        "fragscope_fragmentation_confirmed",
        "gauge",
        "1 while the allocator's own numbers say fragmentation, 0 while not; absent while unknown.",
        _E,
        _verdicts(_fragmentation_confirmed),
    ),
    Family(
        "fragscope_verdict_phase",
        "gauge",
        "1 for the phase that holds, 0 for the others.",
        (*_E, "phase"),
        _verdicts(lambda v: (({"phase": str(phase)}, float(phase is v.phase)) for phase in Phase)),
    ),
    Family(
        "fragscope_verdict_cause",
        "gauge",
        "1 for the cause of the episode on top, 0 for the others; none: no episode in the last hold_s.",
        (*_E, "cause"),
        _verdicts(_one_hot_cause),
    ),
    Family(
        "fragscope_condition_active",
        "gauge",
        "1 while the condition holds, 0 while not; zeros are absent while the engine gives no evidence.",
        (*_E, "condition"),
        _verdicts(_conditions),
    ),
    Family(
        "fragscope_cause_probability",
        "gauge",
        "Probability 0..1 of each memory cause as the explanation of the open or leading episode; 0 without one.",
        (*_E, "cause"),
        _verdicts(_probabilities),
    ),
    Family(
        "fragscope_verdict_since_timestamp_seconds",
        "gauge",
        "When the present phase began.",
        _E,
        _verdicts(lambda v: _maybe(v.since)),
    ),
    Family(
        "fragscope_request_outcomes_total",
        "counter",
        "Requests by how they ended and by the KV cache usage at that time (low < 0.85, high >= 0.95); "
        "nothing is counted while /health fails.",
        ("kv_band", "outcome"),
        _measures(_outcomes),
    ),
    Family(
        "fragscope_kv_usage_failure_log_odds",
        "gauge",
        "Log odds ratio of failure at low against high KV usage; negative: failures go with a full cache; "
        "absent until both were seen.",
        (),
        _log_odds("value"),
    ),
    Family(
        "fragscope_kv_usage_failure_log_odds_lower",
        "gauge",
        "Lower 95 % bound of the log odds ratio.",
        (),
        _log_odds("lower"),
    ),
    Family(
        "fragscope_kv_usage_failure_log_odds_upper",
        "gauge",
        "Upper 95 % bound of the log odds ratio.",
        (),
        _log_odds("upper"),
    ),
    Family(
        "fragscope_request_failure_ratio",
        "gauge",
        "Server-side failures over outcomes, half-life 5 min; 0: none failed; absent before the first outcome and "
        "while the engine is dead.",
        (),
        _failures("ratio"),
    ),
    Family(
        "fragscope_request_failure_lower_bound_ratio",
        "gauge",
        "Lower 95 % bound of the failure ratio (Wilson).",
        (),
        _failures("lower_ratio"),
    ),
    Family(
        "fragscope_request_failure_upper_bound_ratio",
        "gauge",
        "Upper 95 % bound of the failure ratio (Wilson).",
        (),
        _failures("upper_ratio"),
    ),
    Family(
        "fragscope_kv_usage_ratio",
        "gauge",
        "KV cache usage 0..1 at the last poll; absent when the engine does not say.",
        _E,
        _per_engine("kv_usage_ratio"),
    ),
    Family(
        "fragscope_kv_usage_peak_ratio",
        "gauge",
        "Highest KV cache usage 0..1 in the last peak_window_s.",
        _E,
        _per_engine("kv_usage_peak_ratio"),
    ),
    Family(
        "fragscope_gpu_vram_size_bytes",
        "gauge",
        "VRAM of the GPU, on NVIDIA without the driver's reserve; absent when it cannot be read.",
        ("gpu",),
        _per_gpu("total_bytes"),
    ),
    Family(
        "fragscope_gpu_vram_used_bytes",
        "gauge",
        "VRAM in use by anybody; absent when it cannot be read.",
        ("gpu",),
        _per_gpu("used_bytes"),
    ),
    Family(
        "fragscope_gpu_vram_used_peak_bytes",
        "gauge",
        "Highest VRAM use in the last peak_window_s, at the GPU feed's own rate.",
        ("gpu",),
        _per_gpu("peak_used_bytes"),
    ),
    Family(
        "fragscope_gpu_vram_own_bytes",
        "gauge",
        "VRAM of the engine's own processes; absent when that cannot be told.",
        ("gpu",),
        _per_gpu("own_bytes"),
    ),
    Family(
        "fragscope_gpu_vram_growth_bytes_per_second",
        "gauge",
        "Slope of the VRAM staircase; absent while it does not grow.",
        ("gpu",),
        _per_gpu("growth_bytes_per_s"),
    ),
    Family(
        "fragscope_gpu_vram_time_to_exhaustion_seconds",
        "gauge",
        "Until free VRAM no longer meets the engine's need, at the present slope; absent while it does not grow.",
        ("gpu",),
        _per_gpu("exhaustion_s"),
    ),
    Family(
        "fragscope_block_waste_ratio",
        "gauge",
        "Internal fragmentation: share 0..1 of used KV slots that hold no token; absent without work.",
        _E,
        _per_engine("block_waste_ratio"),
    ),
    Family(
        "fragscope_advised_block_size_tokens",
        "gauge",
        "The --block-size that is worth it for the lengths served; 0: no change; absent before a request has finished.",
        _E,
        _advice("block_size_tokens"),
    ),
    Family(
        "fragscope_advised_gpu_memory_utilization_change_ratio",
        "gauge",
        "By how much to move --gpu-memory-utilization, at most 0.03 up or down; 0: no change; absent until a day of "
        "VRAM under load was seen, unless less is free than a step takes.",
        _E,
        _advice("utilization_change_ratio"),
    ),
    Family(
        "fragscope_advised_split",
        "gauge",
        "1 while long and short prompts should not share one pool; 0: no change; absent without lengths or usage.",
        _E,
        _advice("split"),
    ),
    Family(
        "fragscope_advised_rolling_restart",
        "gauge",
        "1 while growth or fragmentation leaves less than a day; 0: no change; absent while it is not known.",
        _E,
        _advice("rolling_restart"),
    ),
    Family(
        "fragscope_head_of_line_blocking_ratio",
        "gauge",
        "Share 0..1 of prompts that would block the queue at the highest KV usage (95th percentile of a day); 0: none; "
        "absent without lengths.",
        _E,
        _advice("blocking_ratio"),
    ),
    Family(
        "fragscope_memory_failures_total",
        "counter",
        "Episodes with a memory cause, counted when they close.",
        ("cause",),
        _measures(lambda m: (({"cause": str(cause)}, float(n)) for cause, n in m.memory_failures.items())),
    ),
    Family(
        "fragscope_engine_restarts_total",
        "counter",
        "Restarts seen, by whether somebody stopped the engine on purpose.",
        ("kind",),
        _measures(lambda m: (({"kind": kind}, float(n)) for kind, n in m.restarts.items())),
    ),
    Family(
        "fragscope_requests_lost_total",
        "counter",
        "Requests that were in flight when an engine died (at least).",
        (),
        _measures(lambda m: _maybe(m.lost_total)),
    ),
    Family(
        "fragscope_engine_up",
        "gauge",
        "1 when /metrics answered the last poll and /health did not fail, 0 when not; absent before the first poll.",
        (),
        _measures(_engine_up),
    ),
    Family(
        "fragscope_evidence_available",
        "gauge",
        "1 for each kind of evidence that the verdict can rest on now, 0 for each that is missing.",
        ("evidence",),
        _measures(lambda m: (({"evidence": kind}, float(there)) for kind, there in m.available.items())),
    ),
    Family(
        "fragscope_target_info",
        "info",
        "1; which version of the engine answers.",
        ("version",),
        _measures(lambda m: [({"version": m.version or ""}, 1.0)]),
    ),
    Family(
        "fragscope_gpu_info",
        "info",
        "1; who the GPU is, and which rule says that it belongs to the target.",
        ("gpu", "unique_id", "card", "render", "rule"),
        _targets(_gpu_info),
    ),
    Family(
        "fragscope_gpu_partition_vram_size_bytes",
        "gauge",
        "VRAM of one partition, inside its GPU's and never added to it; absent where the GPU is whole or KFD's "
        "topology cannot be read.",
        ("gpu", "partition"),
        _partitions("total_bytes"),
    ),
    Family(
        "fragscope_gpu_partition_vram_used_bytes",
        "gauge",
        "VRAM in use of one partition; absent where the driver does not say.",
        ("gpu", "partition"),
        _partitions("used_bytes"),
    ),
    Family(
        "fragscope_gpu_source_difference_bytes",
        "gauge",
        "VRAM in use by another source, beyond what the speaking one showed around that read; 0: they agree; "
        "absent where nothing else is read.",
        ("gpu", "source"),
        _targets(_differences),
    ),
    Family(
        "fragscope_source_up",
        "gauge",
        "1 when the source's last read succeeded, 0 when not.",
        ("source",),
        _sources("up"),
    ),
    Family(
        "fragscope_source_last_success_timestamp_seconds",
        "gauge",
        "When the source last read well; absent before.",
        ("source",),
        _sources("last_success_at"),
    ),
    Family(
        "fragscope_source_last_read_duration_seconds",
        "gauge",
        "How long the source's last read took.",
        ("source",),
        _sources("last_duration_s"),
    ),
    Family(
        "fragscope_source_read_failures_total",
        "counter",
        "Failed reads and unusable values, by reason.",
        ("source", "reason"),
        _targets(_source_failures),
    ),
    Family(
        "fragscope_detector_failures_total",
        "counter",
        "Ticks in which the target could not be judged because of a bug; the log holds the traceback.",
        (),
        _targets(lambda target: _maybe(target.detector_failures_total)),
    ),
    Family(
        "fragscope_incidents_written_total",
        "counter",
        "Incident files written; 0 without state_dir.",
        (),
        lambda view: _maybe(view.kept.incidents_total),
    ),
    Family(
        "fragscope_state_write_failures_total",
        "counter",
        "State and incident files that could not be written.",
        (),
        lambda view: _maybe(view.kept.failures_total),
    ),
    Family(
        "fragscope_build_info",
        "info",
        "1; what this daemon is.",
        ("version", "revision", "python_version"),
        _build,
    ),
)


class BoardCollector(Collector):
    """Renders the board's last view; families whose evidence is missing are not exposed."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._failures = 0

    def describe(self) -> Iterable[Metric]:
        """The catalogue, so that registering does not collect."""
        return (family.empty() for family in CATALOGUE)

    def collect(self) -> Iterator[Metric]:
        """One view for the whole page."""
        began = time.perf_counter()
        view = self._board.view
        for family in CATALOGUE:
            try:
                metric = family.samples(view)
            except Exception:  # noqa: BLE001 - one family must not cost the page
                self._failures += 1
                continue
            if metric.samples:
                yield metric
        failed = Metric("fragscope_exposition_failures", "Families left out of a page because they raised.", "counter")
        failed.add_sample("fragscope_exposition_failures_total", {}, float(self._failures))
        yield failed
        took = Metric("fragscope_collect_duration_seconds", "How long rendering this page's families took.", "gauge")
        took.add_sample("fragscope_collect_duration_seconds", {}, time.perf_counter() - began)
        yield took


def registry(board: Board) -> CollectorRegistry:
    """Our families and the daemon's own process metrics."""
    made = CollectorRegistry()
    made.register(BoardCollector(board))
    ProcessCollector(registry=made)
    return made
