"""All advice about an engine, put together from what was seen and what was told."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fragscope.advise import blocks, fp8, memory, replicas, restart, split
from fragscope.advise.advice import Advice, Topic, gib
from fragscope.advise.backends import COMMON_SIZES, BackendRule, rule_for, version_of
from fragscope.advise.kv import Footprint, block_of, check, fixed_by, footprint, is_hybrid, pool_tokens
from fragscope.advise.lengths import Lengths, Steps, Waste, from_histograms
from fragscope.advise.observed import EnginePast, Observed
from fragscope.advise.parameters import AdviceParameters
from fragscope.advise.room import Growth, Room, tightest
from fragscope.advise.shape import Kind, ModelShape
from fragscope.advise.split import HourRow, by_hour
from fragscope.model import CacheConfig, Cause

DEFAULT_BLOCK_SIZE = 16
"""vLLM's own, where no engine shows one."""
DEFAULT_MODEL_LEN = 131_072
_SEQUENCES = 256
_SHORT_POOL_RATIO = 0.9


@dataclass(frozen=True, slots=True)
class Question:
    """What the asker knows beside what can be seen; None: not told. `weights_bytes` are those of the whole model."""

    shape: ModelShape | None = None
    special: tuple[str, ...] | None = None
    """What asks for more room outside the pool; None: the model is not known."""
    backend: str | None = None
    weights_bytes: float | None = None
    gpu_memory_bytes: float | None = None
    utilization: float | None = None
    block_size: int | None = None
    tensor_parallel: int | None = None
    cache_dtype: str | None = None
    lengths: Lengths | None = None


@dataclass(frozen=True, slots=True)
class WasteRow:
    """One block size: its waste, what it costs, and whether the backend takes it."""

    waste: Waste
    costs: blocks.Costs
    accepted: bool
    current: bool


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """Everything there is to say of one engine (or of a list of lengths, then without a target)."""

    target: str | None
    engine: str | None
    model_name: str | None
    version: str | None
    block_size: int
    pool_tokens: float | None
    lengths: Lengths | None
    facts: tuple[str, ...]
    waste: tuple[WasteRow, ...]
    hours: tuple[HourRow, ...]
    fp8: tuple[fp8.Option, ...]
    advice: tuple[Advice, ...]


@dataclass(frozen=True, slots=True)
class _Ground:
    """What the parts have in common."""

    config: CacheConfig
    block_size: int
    rule: BackendRule
    print_of: Footprint | None
    tensor_parallel: int
    pool_tokens: float | None
    total_bytes: float | None
    utilization: float | None
    lengths: Lengths | None
    doubt: str | None = None
    """Why the formula for KV bytes cannot be used."""
    absent: tuple[str, ...] = ()
    """Histograms of lengths that the engine does not show."""

    @property
    def bytes_per_token(self) -> float | None:
        """On one GPU: by the formula, else by what the engine shows."""
        if self.print_of is not None:
            return self.print_of.bytes_per_token or None
        shown = self.config.kv_cache_memory_bytes
        if shown and self.pool_tokens and self.config.num_gpu_blocks_override is None:
            return shown / self.pool_tokens
        return None


def fleet_answer(observed: Observed) -> Advice:
    """Whether the engines of each model agree."""
    return replicas.advise(observed.engines.values())


def engine_answer(
    past: EnginePast, observed: Observed, question: Question, cause: str, parameters: AdviceParameters
) -> EngineAnswer:
    """All advice about one engine; `cause` is the detector's."""
    mates = observed.engines_of(past.target)
    gpus = observed.gpus_of(past.target)
    room = tightest(gpus, parameters)
    ground = _ground(past, question, len(mates), max(1, len(gpus) // len(mates)), room, parameters)
    fleet = [other for other in observed.engines.values() if other.model_name == past.model_name]
    hours = by_hour(past.hours, ground.pool_tokens)
    queue = split.queue_of(past, ground.pool_tokens, len(fleet))
    small, rows = _fp8(ground, question, fp8.Use(_pool_short(past), question.backend, past.version))
    advice = (
        *_block_advice(ground, question, _live(past, ground), parameters),
        memory.advise(room, _setting(past, ground, question), parameters),
        split.advise(_prompts(ground), queue, hours, parameters, pool_known=ground.pool_tokens is not None),
        small,
        _restart(cause, room, hours, fleet, parameters),
    )
    return EngineAnswer(
        past.target,
        past.engine,
        past.model_name,
        past.version,
        ground.block_size,
        ground.pool_tokens,
        ground.lengths,
        tuple(_facts(ground, question, past.version, len(mates))),
        _waste_rows(ground, question),
        tuple(hours),
        tuple(rows),
        advice,
    )


def lengths_answer(question: Question, parameters: AdviceParameters) -> EngineAnswer:
    """What lengths alone (and a model, if told) allow to say."""
    ground = _ground(None, question, 1, 1, None, parameters)
    small, rows = _fp8(ground, question, fp8.Use(None, question.backend))
    advice = [*_block_advice(ground, question, None, parameters)]
    if question.shape is not None:
        advice.append(small)
    facts = tuple(_facts(ground, question, None, 1))
    return EngineAnswer(
        None,
        None,
        None,
        None,
        ground.block_size,
        ground.pool_tokens,
        ground.lengths,
        facts,
        _waste_rows(ground, question),
        (),
        tuple(rows),
        tuple(advice),
    )


def _ground(
    past: EnginePast | None,
    question: Question,
    engines: int,
    gpus: int,
    room: Room | None,
    parameters: AdviceParameters,
) -> _Ground:
    config = (past.config if past is not None else None) or CacheConfig()
    ranks = question.tensor_parallel or gpus
    dtype = question.cache_dtype or config.cache_dtype
    print_of, doubt = _footprint(question.shape, dtype, ranks)
    lengths = question.lengths
    if lengths is None and past is not None:
        lengths = from_histograms(past.prompts.lifetime, past.outputs.lifetime, parameters)
    total = question.gpu_memory_bytes or (room.total_bytes if room is not None else None)
    utilization = config.gpu_memory_utilization or question.utilization
    ground = _Ground(
        config,
        block_of(config) or question.block_size or DEFAULT_BLOCK_SIZE,
        rule_for(question.backend, past.version if past is not None else None),
        print_of,
        ranks,
        pool_tokens(config, engines, print_of.groups if print_of is not None else None),
        total,
        utilization,
        lengths,
        doubt,
        _absent(past),
    )
    return ground if ground.pool_tokens is not None else replace(ground, pool_tokens=_expected_pool(ground, question))


def _absent(past: EnginePast | None) -> tuple[str, ...]:
    if past is None:
        return ()
    shown = {
        "vllm:request_prompt_tokens": past.prompts.lifetime,
        "vllm:request_generation_tokens": past.outputs.lifetime,
    }
    return tuple(name for name, histogram in shown.items() if histogram is None)


def _prompts(ground: _Ground) -> Steps | None:
    return ground.lengths.prompts if ground.lengths is not None else None


def _footprint(shape: ModelShape | None, dtype: str | None, ranks: int) -> tuple[Footprint | None, str | None]:
    """KV bytes per token, or why they are not known: an engine may show a type nobody knows here."""
    if shape is None:
        return None, None
    try:
        return footprint(shape, dtype, ranks), None
    except ValueError as error:
        return None, f"KV bytes per token are not known: {error}"


def _expected_pool(ground: _Ground, question: Question) -> float | None:
    """The pool that the budget leaves, where no engine shows one."""
    if ground.print_of is None or None in (ground.total_bytes, ground.utilization, question.weights_bytes):
        return None
    weights = (question.weights_bytes or 0.0) / ground.tensor_parallel
    room = (ground.total_bytes or 0.0) * (ground.utilization or 0.0) - weights - fp8.OTHER_BYTES
    return max(0.0, room) / ground.print_of.bytes_per_token if ground.print_of.bytes_per_token else None


def _live(past: EnginePast, ground: _Ground) -> blocks.Live | None:
    if not past.busy_polls or ground.pool_tokens is None or ground.config.block_size is None:
        return None
    used = past.usage_sum / past.busy_polls * ground.pool_tokens
    return blocks.live_waste(ground.block_size, past.running_sum / past.busy_polls, used)


def _block_advice(
    ground: _Ground, question: Question, live: blocks.Live | None, parameters: AdviceParameters
) -> tuple[Advice, ...]:
    if ground.lengths is None:
        words = "No request has finished, so nothing is known of lengths: wait for traffic, or give --lengths FILE.csv."
        if ground.absent:
            words = f"There is no {' and no '.join(ground.absent)}, so lengths are not known; --lengths FILE.csv tells."
        return (Advice(Topic.BLOCK_SIZE, None, words, missing=ground.absent or ("lengths",)),)
    per_token = ground.bytes_per_token
    step = 0.01 * ground.total_bytes / per_token if ground.total_bytes and per_token else None
    shape = question.shape
    geometry = blocks.Geometry(
        ground.block_size,
        is_hybrid(ground.config) or (shape is not None and shape.hybrid),
        shape.kind is Kind.MLA if shape is not None else None,
        ground.pool_tokens,
        step,
    )
    return (blocks.advise(ground.lengths, geometry, ground.rule, parameters, live),)


def _setting(past: EnginePast, ground: _Ground, question: Question) -> memory.Setting:
    fixed = fixed_by(ground.config)
    return memory.Setting(
        ground.utilization,
        bool(question.special) if question.special is not None else None,
        len(past.pools) or 1,
        ground.pool_tokens,
        ground.bytes_per_token,
        question.special or (),
        fixed,
        ground.config.kv_cache_memory_bytes if fixed == "kv_cache_memory_bytes" else None,
    )


def _fp8(ground: _Ground, question: Question, use: fp8.Use) -> tuple[Advice, list[fp8.Option]]:
    card, dtype = _card(ground, question), question.cache_dtype or ground.config.cache_dtype
    context = ground.lengths.context_tokens.point if ground.lengths is not None else None
    return fp8.advise(question.shape, card, dtype, context, use)


def _card(ground: _Ground, question: Question) -> fp8.Card | None:
    if ground.total_bytes is None or question.weights_bytes is None or ground.utilization is None:
        return None
    weights = question.weights_bytes / ground.tensor_parallel
    other = None
    if ground.config.block_size is not None and ground.bytes_per_token is not None and ground.pool_tokens is not None:
        left = ground.total_bytes * ground.utilization - weights - ground.pool_tokens * ground.bytes_per_token
        other = left if left > 0 else None
    return fp8.Card(ground.total_bytes, ground.utilization, weights, ground.tensor_parallel, other)


def _pool_short(past: EnginePast) -> bool | None:
    """Whether the pool limits: nine tenths full at its 95th percentile, or a queue while full; None: not seen."""
    usage = past.usage.quantile(0.95)
    if usage is None:
        return None
    return usage >= _SHORT_POOL_RATIO or past.queued_full_polls > 0


def _restart(
    cause: str, room: Room | None, hours: Sequence[HourRow], fleet: Sequence[EnginePast], parameters: AdviceParameters
) -> Advice:
    """The detector's cause, or where it has none what the long trend says."""
    usages = [usage for past in fleet if (usage := past.usage.quantile(0.95)) is not None]
    group = restart.Fleet(len(fleet), max(usages, default=None))
    left = room.time_left_s() if room is not None else None
    if cause in (Cause.NONE, Cause.MEMORY_UNDETERMINED) and room is not None:
        cause = _cause_of(room.trend.kind) or cause
    if cause == Cause.NONE and room is None:
        words = "Whether a restart would help is not known: GPU memory was not seen, or not for long enough."
        return Advice(Topic.RESTART, None, words, missing=("gpu",))
    given = restart.advise(cause, left, hours, group, parameters)
    if given.change and room is not None and room.trend.kind is Growth.UNKNOWN:
        doubt = "what grows cannot be told from outside; if it is another process's memory, a restart does not help"
        given = replace(given, caveats=(*given.caveats, doubt))
    return given


def _cause_of(kind: Growth) -> Cause | None:
    return {
        Growth.LIVE: Cause.MEMORY_GROWTH,
        Growth.NON_TORCH: Cause.MEMORY_GROWTH,
        Growth.UNKNOWN: Cause.MEMORY_GROWTH,
        Growth.CACHED: Cause.FRAGMENTATION,
        Growth.EXTERNAL: Cause.EXTERNAL_PROCESS,
    }.get(kind)


def _waste_rows(ground: _Ground, question: Question) -> tuple[WasteRow, ...]:
    if ground.lengths is None:
        return ()
    longest = (question.shape.max_model_len if question.shape is not None else None) or DEFAULT_MODEL_LEN
    sizes = sorted({*COMMON_SIZES, ground.block_size})
    return tuple(
        WasteRow(
            waste,
            blocks.costs(waste.block_size, ground.pool_tokens, _SEQUENCES, longest),
            ground.rule.accepts(waste.block_size),
            waste.block_size == ground.block_size,
        )
        for waste in blocks.table(ground.lengths, tuple(sizes))
    )


def _facts(ground: _Ground, question: Question, version: str | None, engines: int) -> list[str]:
    said = []
    if ground.lengths is not None:
        of = ground.lengths
        said.append(
            f"{of.count:,.0f} requests: prompts of {of.prompt_mean_tokens:,.0f} and answers of "
            f"{of.output_mean_tokens:,.0f} tokens on average; {of.context_tokens.point:,.0f} tokens held per sequence"
        )
    if ground.print_of is not None and question.shape is not None:
        said.append(_kv_words(ground, question.shape, engines))
    if ground.pool_tokens is not None:
        size = f" ({gib(ground.pool_tokens * ground.bytes_per_token)} per GPU)" if ground.bytes_per_token else ""
        shown = "the budget leaves a pool of about" if _told(ground, engines) is None else "the pool holds"
        said.append(f"{shown} {ground.pool_tokens:,.0f} tokens{size}")
    elif ground.config.num_gpu_blocks:
        said.append(
            "how many tokens the pool holds is not known: this vLLM shows no kv_cache_size_tokens, and blocks times "
            "their size is wrong where layers are kept in several groups; --model-config tells"
        )
    if ground.doubt is not None:
        said.append(ground.doubt)
    known, (stale, fixed) = version_of(version), blocks.STALE_BLOCK_VERSIONS
    if ground.config.effective_attention_block_size is None and known is not None and stale <= known < fixed:
        said.append(f"vLLM {version} may show the block size of before it raised it; newer versions do not")
    return said


def _told(ground: _Ground, engines: int) -> float | None:
    """The pool as the engine shows it."""
    return pool_tokens(ground.config, engines, ground.print_of.groups if ground.print_of is not None else None)


def _kv_words(ground: _Ground, shape: ModelShape, engines: int) -> str:
    found = ground.print_of
    assert found is not None  # noqa: S101 - the caller has asked, for mypy
    words = f"{shape.kind}: {found.bytes_per_token:,.0f} B of KV per token on each of {ground.tensor_parallel} GPUs"
    if found.window_tokens is not None:
        words += f", {found.bytes_beyond_window:,.0f} B beyond the window of {found.window_tokens}"
    if found.copies > 1 and shape.kind is not Kind.MLA:
        words += f" (stored {found.copies:g} times: more GPUs than KV heads)"
    if found.groups is not None and found.groups > 1:
        words += f"; vLLM keeps the layers in {found.groups} groups, as long as its hybrid KV cache manager is on"
    if shape.hybrid:
        words += f"; hybrid: {shape.state_layers} layers keep a fixed state per sequence, which comes on top"
    return f"{words}; {check(found, ground.config, engines).sentence}"
