"""FP8: what weights and KV would shrink to, and how many more sequences fit, at most.

Weights first: on a 70B model FP8 weights alone give 2.8 times the pool, FP8 KV twice that again (docs/advise.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fragscope.advise.advice import GIB, Advice, Effect, Range, Topic, gib
from fragscope.advise.kv import footprint
from fragscope.advise.shape import ModelShape

OTHER_BYTES = 7 * GIB
"""Activations, graphs and the rest where nothing shows them: seen on a 70B model (docs/advise.md)."""
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
    if method in ("fp8", "fbgemm_fp8", "ptpc_fp8") or "fp8" in str(quantization.get("quant_algo", "")).lower():
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
        kv = ("--kv-cache-dtype fp8",)
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


def advise(
    shape: ModelShape | None,
    card: Card | None,
    cache_dtype: str | None,
    context_tokens: float | None,
    *,
    pool_short: bool,
) -> tuple[Advice, list[Option]]:
    """What FP8 would give, "up to"; a change only where the pool is what runs short."""
    if shape is None or card is None:
        gap: tuple[str, ...] = ("model_config",) if shape is None else ()
        gap += ("weights_bytes", "gpu_memory_bytes") if card is None else ()
        words = "What FP8 would give needs the model's config.json, the size of the weights and of the card."
        return Advice(Topic.FP8, None, words, missing=gap), []
    rows, why = _known_options(shape, card, cache_dtype, context_tokens)
    if why is not None:
        return Advice(Topic.FP8, None, f"What FP8 would give is not known: {why}.", missing=("bytes_per_token",)), []
    have = carried(shape.quantization)
    now, best = rows[0], rows[-1]
    caveats = _caveats(shape, have, card)
    numbers = {f"{row.name.replace(' ', '_')}_pool_tokens": row.pool_tokens for row in rows}
    if len(rows) == 1:
        words = f"Nothing is left to shrink: {have.sentence}, and the KV cache is {cache_dtype}."
        return Advice(Topic.FP8, False, words, caveats=caveats, numbers=numbers), rows
    if not now.pool_tokens:
        words = f"{_sizes(rows)}. As it is, the weights leave no pool at u = {card.utilization:g}; {have.sentence}."
        return Advice(Topic.FP8, True, words, best.flags, None, caveats, numbers=numbers), rows
    factor = best.pool_tokens / now.pool_tokens
    words = f"{_sizes(rows)}: up to {factor:.1f} times the pool; {have.sentence}."
    if not pool_short:
        words += " The pool was not what limited this server, so it would not serve more for that alone."
        return Advice(Topic.FP8, False, words, caveats=caveats, numbers=numbers), rows
    effect = Effect("sequences that fit", Range(0.0, factor - 1, factor - 1), "ratio")
    return Advice(Topic.FP8, True, words, best.flags, effect, caveats, numbers=numbers), rows


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


def _caveats(shape: ModelShape, have: Carried, card: Card) -> tuple[str, ...]:
    said = ["'up to': --max-num-seqs and compute bind first; check answers on your own evaluation before and after"]
    if not have.kv_scales:
        said.append("FP8 KV without calibrated scales may cost accuracy, most at long contexts")
    said.append("FP8 KV depends on the backend: vLLM's documentation lists it for ROCM_AITER_UNIFIED_ATTN from 0.25")
    if have.weights_other is None and not have.weights_fp8:
        said.append("quantizing on load needs room for the full weights first; a checkpoint with FP8 scales does not")
    if shape.hybrid:
        said.append("hybrid: FP8 KV shrinks only attention layers, at short contexts by nothing (vllm#55196)")
    if card.other_bytes is None:
        said.append(f"{gib(OTHER_BYTES)} were assumed for activations, graphs and the rest")
    return tuple(said)
