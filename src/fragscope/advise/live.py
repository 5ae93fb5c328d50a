"""The advice as gauges, folded along with every tick: 0 means *no change*, None that the evidence does not reach.

A day is kept in slots of ten minutes. Nothing is written down: after a restart of the daemon the ratio is
advised on again after a day, the rest within minutes.
"""

from collections import deque
from dataclasses import dataclass, field

from fragscope.advise import blocks, memory, restart, split
from fragscope.advise.advice import Advice
from fragscope.advise.backends import UNKNOWN
from fragscope.advise.kv import block_of, fixed_by, is_hybrid, pool_tokens
from fragscope.advise.lengths import Lengths, from_histograms
from fragscope.advise.memory import Setting
from fragscope.advise.observed import budget_of
from fragscope.advise.parameters import AdviceParameters
from fragscope.advise.room import NEED_DEFAULT_RATIO, NEED_MIN_BYTES, Growth, Room, Trend
from fragscope.advise.split import Queue
from fragscope.model import Assessment, EngineReading, GpuReading, Phase, Sample

_SLOT_S = 600.0
_SLOTS = 144
_TRANSIENT_MAX_RATIO = 0.04
_REFRESH_S = 60.0
"""Advice from histograms changes slowly: it is worked out once a minute."""


@dataclass(frozen=True, slots=True)
class EngineAdvice:
    """What the gauges show of one engine; 0: no change, None: not known (the gauge is absent)."""

    engine: str
    model_name: str
    block_size_tokens: float | None = None
    utilization_change_ratio: float | None = None
    split: float | None = None
    rolling_restart: float | None = None
    blocking_ratio: float | None = None


@dataclass(slots=True)
class _GpuSlot:
    number: int
    free_bytes: float
    step_bytes: float = 0.0
    polls: int = 0
    busy: int = 0


@dataclass(slots=True)
class _GpuDay:
    """One GPU's day: the least free and the largest step of each slot."""

    total_bytes: float = 0.0
    used_bytes: float = 0.0
    peaks_seen: bool = False
    slots: deque[_GpuSlot] = field(default_factory=lambda: deque(maxlen=_SLOTS))

    def observe(self, reading: GpuReading, *, busy: bool) -> None:
        peak = max(reading.used_bytes, reading.peak_used_bytes or 0)
        step = peak - self.used_bytes if self.used_bytes else 0.0
        step = step if step <= _TRANSIENT_MAX_RATIO * reading.total_bytes else 0.0
        free = float(max(0, reading.total_bytes - peak))
        self.total_bytes, self.used_bytes = reading.total_bytes, reading.used_bytes
        self.peaks_seen |= reading.peak_used_bytes is not None
        number = int(reading.at // _SLOT_S)
        if not self.slots or self.slots[-1].number != number:
            self.slots.append(_GpuSlot(number, free))
        slot = self.slots[-1]
        slot.free_bytes = min(slot.free_bytes, free)
        slot.step_bytes = max(slot.step_bytes, step)
        slot.polls += 1
        slot.busy += busy

    def room(self, gpu: str, growth_bytes_per_s: float | None, parameters: AdviceParameters) -> Room:
        """The same room as in the long run, with the second-least slot as the first percentile of a day."""
        frees = sorted(slot.free_bytes for slot in self.slots)
        step = max(slot.step_bytes for slot in self.slots)
        growth = growth_bytes_per_s or 0.0
        if growth < parameters.growth_min_bytes_per_s:
            growth = 0.0
        return Room(
            gpu,
            self.total_bytes,
            frees[len(frees) // 100],
            step if step >= NEED_MIN_BYTES else NEED_DEFAULT_RATIO * self.total_bytes,
            parameters.margin_ratio * self.total_bytes,
            Trend(growth, Growth.UNKNOWN if growth else Growth.NONE),
            len(self.slots) * _SLOT_S,
            sum(slot.busy / slot.polls for slot in self.slots) * _SLOT_S,
            self.peaks_seen,
            0.0,
        )


@dataclass(slots=True)
class _EngineSlot:
    number: int
    usage_ratio: float = 0.0
    polls: int = 0
    queued: int = 0
    queued_not_full: int = 0


@dataclass(slots=True)
class _EngineDay:
    """One engine's day: usage at its highest and the queue of each slot; and the advice of the last minute."""

    slots: deque[_EngineSlot] = field(default_factory=lambda: deque(maxlen=_SLOTS))
    refreshed_at: float = float("-inf")
    block_size_tokens: float | None = None
    split: float | None = None
    blocking_ratio: float | None = None

    def observe(self, reading: EngineReading, full_ratio: float) -> None:
        if reading.kv_usage_ratio is None:
            return
        number = int(reading.at // _SLOT_S)
        if not self.slots or self.slots[-1].number != number:
            self.slots.append(_EngineSlot(number))
        slot, queued = self.slots[-1], (reading.waiting or 0.0) > 0
        slot.usage_ratio = max(slot.usage_ratio, reading.kv_usage_ratio)
        slot.polls += 1
        slot.queued += queued
        slot.queued_not_full += queued and reading.kv_usage_ratio < full_ratio

    def queue(self, tokens: float | None) -> Queue | None:
        if tokens is None or not self.slots:
            return None
        usages = sorted(slot.usage_ratio for slot in self.slots)
        polls = sum(slot.polls for slot in self.slots)
        queued = sum(slot.queued for slot in self.slots) / polls
        not_full = sum(slot.queued_not_full for slot in self.slots) / polls
        high = usages[min(len(usages) - 1, int(0.95 * len(usages)))]
        return Queue(tokens, high, sum(usages) / len(usages), queued, not_full)


class LiveAdvisor:
    """Advice about one target, sample by sample."""

    def __init__(self, parameters: AdviceParameters | None = None) -> None:
        self._p = parameters or AdviceParameters()
        self._gpus: dict[str, _GpuDay] = {}
        self._engines: dict[str, _EngineDay] = {}
        self._gpu_at = float("-inf")
        self._watched_budget: tuple[float | None, ...] | None = None
        self._utilization: tuple[float | None, float | None] = (None, None)

    def observe(self, sample: Sample, assessment: Assessment) -> tuple[EngineAdvice, ...]:
        """What the gauges show after this sample; nothing of engines that did not answer."""
        for gone in set(self._engines) - {reading.engine for reading in sample.engines}:
            if sample.engines:
                del self._engines[gone]
        self._observe_gpus(sample)
        return tuple(self._engine(reading, sample, assessment) for reading in sample.engines)

    def _observe_gpus(self, sample: Sample) -> None:
        budget = next((budget_of(e.cache_config) for e in sample.engines if e.cache_config), None)
        if budget is not None and budget != self._watched_budget:
            # What was free under another budget says nothing of this one.
            self._gpus.clear()
            self._watched_budget = budget
        serving = bool(sample.engines) and all(not e.sleeping and e.running is not None for e in sample.engines)
        warm = all(e.started_at is None or sample.at - e.started_at >= _SLOT_S for e in sample.engines)
        if not sample.gpus or not serving or not warm:
            return
        busy = any(e.running for e in sample.engines)
        for reading in sample.gpus:
            self._gpus.setdefault(reading.gpu, _GpuDay()).observe(reading, busy=busy)
        for gone in set(self._gpus) - {reading.gpu for reading in sample.gpus}:
            del self._gpus[gone]

    def _engine(self, reading: EngineReading, sample: Sample, assessment: Assessment) -> EngineAdvice:
        day = self._engines.setdefault(reading.engine, _EngineDay())
        day.observe(reading, self._p.full_ratio)
        if reading.at - day.refreshed_at >= _REFRESH_S:
            day.refreshed_at = reading.at
            self._refresh(day, reading, len(sample.engines))
        return EngineAdvice(
            reading.engine,
            reading.model_name,
            day.block_size_tokens,
            self._change(reading, sample.at, assessment),
            day.split,
            self._restart(reading, assessment),
            day.blocking_ratio,
        )

    def _refresh(self, day: _EngineDay, reading: EngineReading, engines: int) -> None:
        day.block_size_tokens = day.split = day.blocking_ratio = None
        lengths = from_histograms(reading.prompt_tokens, reading.output_tokens, self._p)
        config = reading.cache_config
        block = block_of(config) if config is not None else None
        if lengths is None or config is None or block is None:
            return
        tokens = pool_tokens(config, engines)
        geometry = blocks.Geometry(block, is_hybrid(config), pool_tokens=tokens)
        advised = blocks.advise(lengths, geometry, UNKNOWN, self._p)
        day.block_size_tokens = _gauge(advised, advised.numbers.get("advised_block_size", 0.0))
        self._refresh_split(day, lengths, day.queue(tokens))

    def _refresh_split(self, day: _EngineDay, lengths: Lengths, queue: Queue | None) -> None:
        advised = split.advise(lengths.prompts, queue, [], self._p)
        day.split = _gauge(advised, 1.0)
        day.blocking_ratio = advised.numbers.get("blocking_ratio")

    def _change(self, reading: EngineReading, at: float, assessment: Assessment) -> float | None:
        """Worked out once a minute; one ratio is set for all GPUs, so the tightest decides."""
        if reading.cache_config is not None and fixed_by(reading.cache_config) is not None:
            return 0.0
        now = reading.cache_config.gpu_memory_utilization if reading.cache_config is not None else None
        if at - self._gpu_at < _REFRESH_S and self._utilization[0] == now:
            return self._utilization[1]
        self._gpu_at = at
        growth = {gpu.gpu: gpu.growth_bytes_per_s for gpu in assessment.measures.gpus}
        rooms = [day.room(gpu, growth.get(gpu), self._p) for gpu, day in self._gpus.items()]
        room = min(rooms, key=lambda r: r.spare_bytes(self._p.horizon_s) / r.total_bytes, default=None)
        advised = memory.advise(room, Setting(now, special=None), self._p)
        self._utilization = (now, _gauge(advised, advised.numbers.get("change_ratio", 0.0)))
        return self._utilization[1]

    def _restart(self, reading: EngineReading, assessment: Assessment) -> float | None:
        verdict = next((v for v in assessment.verdicts if v.engine in (reading.engine, None)), None)
        if verdict is None or verdict.phase is Phase.UNKNOWN:
            return None
        left = [gpu.exhaustion_s for gpu in assessment.measures.gpus if gpu.exhaustion_s is not None]
        advised = restart.advise(verdict.cause, min(left, default=None), (), restart.Fleet(1, None), self._p)
        return _gauge(advised, 1.0)


def _gauge(advice: Advice, value: float) -> float | None:
    """A change as its value, no change as 0, not known as None."""
    if advice.change is None:
        return None
    return value if advice.change else 0.0
