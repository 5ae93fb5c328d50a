"""FP8: what weights and KV would shrink to, and how many more sequences fit, at most.

Weights first: on a 70B model FP8 weights alone give 2.8 times the pool, FP8 KV twice that again (docs/advise.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fragscope.advise.advice import GIB, Advice, Effect, Range, Topic, gib
from fragscope.advise.backends import version_of
from fragscope.advise.kv import footprint
from fragscope.advise.shape import ModelShape

OTHER_BYTES = 7 * GIB
"""Activations, graphs and the rest where nothing shows them: seen on a 70B model (docs/advise.md)."""
_KV_FLAG = "--kv-cache-dtype fp8"
_KV_BACKENDS = {"ROCM_AITER_UNIFIED_ATTN": (0, 25, 0)}
"""From which version vLLM's documentation lists FP8 KV; of other backends nothing is known here."""
_FP8_WORDS = ("fp8", "fp8_e4m3", "float8", "e4m3", "e5m2")


@dataclass(frozen=True, slots=True)
class Carried:
    """What a checkpoint's `quantization_config` brings along."""

    weights_fp8: bool
    weights_other: str | None
    kv_scales: bool
    sentence: str


def carried(quantization: Mapping[str, Any] | None) -> Carried:
    """Whether the checkpoint carries FP8 weights with scales, something else, or nothing, and scales for the KV."""
    if quantization is None:
        words = "the checkpoint has no quantization_config: --quantization fp8 would quantize it on load, uncalibrated"
        return Carried(False, None, False, words)
    method = str(quantization.get("quant_method") or quantization.get("quant_algo") or "unnamed").lower()
    scales = _kv_scales(quantization)
    kv = "with scales for the KV cache" if scales else "without scales for the KV cache (1.0 is used)"
    if _is_fp8(method, quantization):
        blocks = quantization.get("weight_block_size")
        how = f" in blocks of {'x'.join(map(str, blocks))}" if isinstance(blocks, list) else ""
        return Carried(True, None, scales, f"the checkpoint carries FP8 weights and their scales{how} ({method}), {kv}")
    words = f"the checkpoint is quantized by {method}, not FP8: weights stay as they are, {kv}"
    return Carried(False, method, scales, words)


def _is_fp8(method: str, quantization: Mapping[str, Any]) -> bool:
    # ModelOpt: FP8 and FP8_..., while W4A8_MXFP4_FP8 has weights of 4 bits.
    if method in ("fp8", "fbgemm_fp8", "ptpc_fp8") or str(quantization.get("quant_algo", "")).lower().startswith("fp8"):
        return True
    if method == "compressed-tensors":
        groups = quantization.get("config_groups")
        weights = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
        return any(isinstance(w, Mapping) and w.get("type") == "float" and w.get("num_bits") == 8 for w in weights)
    if method == "quark":
        whole = quantization.get("global_quant_config")
        weight = whole.get("weight") if isinstance(whole, Mapping) else None
        return isinstance(weight, Mapping) and str(weight.get("dtype", "")).lower().startswith(_FP8_WORDS)
    return False


def _kv_scales(quantization: Mapping[str, Any]) -> bool:
    if quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo"):
        return True
    return bool(quantization.get("kv_cache_group") or quantization.get("kv_cache_quant_config"))


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU's budget, and the part of the weights that lies on it; `other_bytes` None: OTHER_BYTES is assumed."""

    total_bytes: float
    utilization: float
    weights_bytes: float
    tensor_parallel: int = 1
    other_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Option:
    """One way to store things: pool in tokens, and the sequences of mean context that fit; 0 where nothing does."""

    name: str
    weights_bytes: float
    pool_tokens: float
    sequences: float | None
    flags: tuple[str, ...]

    @property
    def kv(self) -> bool:
        """Whether it shrinks the KV cache."""
        return _KV_FLAG in self.flags


def fp8_weights_bytes(shape: ModelShape, card: Card) -> float:
    """Half, but for embeddings and the output layer, which stay as they are."""
    kept = min(shape.unquantized_bytes / card.tensor_parallel, card.weights_bytes)
    return (card.weights_bytes - kept) / 2 + kept


def options(shape: ModelShape, card: Card, cache_dtype: str | None, context_tokens: float | None) -> list[Option]:
    """Now, FP8 KV, FP8 weights and both, as far as they differ from what is there."""
    have = carried(shape.quantization)
    shrinks = not have.weights_fp8 and have.weights_other is None and shape.dtype_bytes == 2
    now = _option("now", shape, card, card.weights_bytes, cache_dtype, context_tokens, ())
    found = [now]
    small = fp8_weights_bytes(shape, card)
    if shrinks:
        found.append(_option("fp8 weights", shape, card, small, cache_dtype, context_tokens, ("--quantization fp8",)))
    if not (cache_dtype or "").startswith("fp8"):
        kv = (_KV_FLAG,)
        found.append(_option("fp8 KV", shape, card, card.weights_bytes, "fp8", context_tokens, kv))
        if shrinks:
            both = ("--quantization fp8", *kv)
            found.append(_option("fp8 weights and KV", shape, card, small, "fp8", context_tokens, both))
    return found


def _option(
    name: str,
    shape: ModelShape,
    card: Card,
    weights_bytes: float,
    cache_dtype: str | None,
    context_tokens: float | None,
    flags: tuple[str, ...],
) -> Option:
    other = OTHER_BYTES if card.other_bytes is None else card.other_bytes
    per_token = footprint(shape, cache_dtype, card.tensor_parallel)
    pool_bytes = max(0.0, card.total_bytes * card.utilization - weights_bytes - other)
    tokens = pool_bytes / per_token.bytes_per_token if per_token.bytes_per_token else 0.0
    size = per_token.sequence_bytes(context_tokens, 16) if context_tokens else 0.0
    fit = pool_bytes / size if size else None
    return Option(name, weights_bytes, tokens, fit, flags)


@dataclass(frozen=True, slots=True)
class Use:
    """How the pool is used: None where it is not known whether it runs short."""

    pool_short: bool | None
    backend: str | None = None
    version: str | None = None

    @property
    def kv_supported(self) -> bool | None:
        """Whether the backend takes FP8 KV in this version; None where nothing is known of it."""
        since, known = _KV_BACKENDS.get((self.backend or "").upper().replace("-", "_")), version_of(self.version)
        return known >= since if since is not None and known is not None else None


def advise(
    shape: ModelShape | None, card: Card | None, cache_dtype: str | None, context_tokens: float | None, use: Use
) -> tuple[Advice, list[Option]]:
    """What FP8 would give, "up to"; a change only where the pool is what runs short.

    Where that is not known it is possible, not recommended. FP8 KV is not recommended for hybrids, nor to a backend
    that does not take it.
    """
    if shape is None or card is None:
        gap: tuple[str, ...] = ("model_config",) if shape is None else ()
        gap += ("weights_bytes", "gpu_memory_bytes") if card is None else ()
        words = "What FP8 would give needs the model's config.json, the size of the weights and of the card."
        return Advice(Topic.FP8, None, words, missing=gap), []
    rows, why = _known_options(shape, card, cache_dtype, context_tokens)
    if why is not None:
        return Advice(Topic.FP8, None, f"What FP8 would give is not known: {why}.", missing=("bytes_per_token",)), []
    have = carried(shape.quantization)
    numbers = {f"{row.name.replace(' ', '_')}_pool_tokens": row.pool_tokens for row in rows}
    blank = Advice(Topic.FP8, False, "", caveats=_caveats(shape, have, card, use), numbers=numbers)
    if len(rows) == 1:
        words = f"Nothing is left to shrink: {have.sentence}, and the KV cache is {cache_dtype or 'auto'}."
        return replace(blank, sentence=words), rows
    return _weighed(blank, rows, _best(rows, shape, use), have, use), rows


def _best(rows: list[Option], shape: ModelShape, use: Use) -> Option | None:
    """The option that gives most; without FP8 KV for hybrids and backends that do not take it. None without one."""
    allowed = [row for row in rows[1:] if not row.kv or not (shape.hybrid or use.kv_supported is False)]
    if not rows[0].pool_tokens:
        # What makes the model fit at all comes first, with as little change as it takes.
        return next((row for row in allowed if row.pool_tokens), allowed[-1] if allowed else None)
    return allowed[-1] if allowed else None


def _weighed(blank: Advice, rows: list[Option], best: Option | None, have: Carried, use: Use) -> Advice:
    now, sizes = rows[0], _sizes(rows)
    if best is None:
        words = f"{sizes}; {have.sentence}. Only FP8 KV is left, which is not recommended here (see below)."
        return replace(blank, change=False, sentence=words)
    if not now.pool_tokens:
        if not best.pool_tokens:
            words = f"{sizes}. The weights do not fit, in FP8 neither: more GPUs or a smaller model are needed."
            return replace(blank, sentence=words)
        words = f"{sizes}. As it is, the weights leave no pool; {have.sentence}."
        return replace(blank, change=True, sentence=words, flags=best.flags)
    factor = best.pool_tokens / now.pool_tokens
    words = f"{sizes}: up to {factor:.1f} times the pool with {best.name}; {have.sentence}."
    if use.pool_short is None:
        words += " Possible, not recommended: whether the pool is what runs short is not known."
        return replace(blank, change=None, sentence=words, missing=("kv_usage",))
    if not use.pool_short:
        words += " The pool was not what limited this server, so it would not serve more for that alone."
        return replace(blank, sentence=words)
    effect = Effect("sequences that fit", Range(0.0, factor - 1, factor - 1), "ratio")
    return replace(blank, change=True, sentence=words, flags=best.flags, effect=effect)


def _known_options(
    shape: ModelShape, card: Card, cache_dtype: str | None, context_tokens: float | None
) -> tuple[list[Option], str | None]:
    """The options, or why there are none."""
    if not shape.full_layers + shape.window_layers:
        return [], "no layer keeps keys and values, only a state of fixed size, which FP8 KV does not shrink"
    try:
        return options(shape, card, cache_dtype, context_tokens), None
    except ValueError as error:
        return [], str(error)


def _sizes(rows: list[Option]) -> str:
    parts = []
    for row in rows:
        fit = f", {row.sequences:.0f} sequences" if row.sequences is not None else ""
        parts.append(f"{row.name}: weights {gib(row.weights_bytes)}, {row.pool_tokens / 1000:,.1f}k tokens{fit}")
    return "; ".join(parts)


def _caveats(shape: ModelShape, have: Carried, card: Card, use: Use) -> tuple[str, ...]:
    said = ["'up to': --max-num-seqs and compute bind first; check answers on your own evaluation before and after"]
    if not have.kv_scales:
        said.append("FP8 KV without calibrated scales may cost accuracy, most at long contexts")
    listed = "vLLM's documentation lists it for ROCM_AITER_UNIFIED_ATTN from 0.25"
    if use.kv_supported is False:
        said.append(f"FP8 KV is not for this server: {listed}, and this is {use.version}")
    elif use.kv_supported is None:
        said.append(f"FP8 KV depends on the backend: {listed}; nothing is known of {use.backend or 'yours'} here")
    if have.weights_other is None and not have.weights_fp8:
        said.append("quantizing on load needs room for the full weights first; a checkpoint with FP8 scales does not")
    if shape.hybrid:
        said.append("hybrid: FP8 KV shrinks only attention layers, at short contexts by nothing (vllm#55196)")
    if card.other_bytes is None:
        said.append(f"{gib(OTHER_BYTES)} were assumed for activations, graphs and the rest")
    return tuple(said)
