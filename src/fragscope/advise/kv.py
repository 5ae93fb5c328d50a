"""KV bytes per token from a Hugging Face `config.json`: GQA, MQA, MLA, sliding windows, hybrids.

Formulas: docs/advise.md, after vLLM's `kv_cache_interface.py` (page sizes of the attention specs).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fragscope.advise.advice import gib, percent
from fragscope.model import CacheConfig

_MODEL_DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "half": 2, "float32": 4, "float": 4}
_CACHE_DTYPE_BYTES = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1, "float16": 2, "bfloat16": 2, "float32": 4}
FP8_DS_MLA = "fp8_ds_mla"
_FP8_DS_MLA_BYTES_PER_LAYER = 656
"""512 B of FP8 latent, 16 B of scales, 128 B of bf16 rotary part (vLLM, `fp8_ds_mla` of FlashMLA)."""
_STATE_WORDS = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "short_conv", "gated_delta_net")
_WINDOW_WORDS = ("sliding_attention", "sliding_window", "chunked_attention", "local_attention")
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
_AGREE_RATIO = 0.05


class Kind(StrEnum):
    """How a model's attention keeps its keys and values."""

    MHA = "MHA"
    GQA = "GQA"
    MQA = "MQA"
    MLA = "MLA"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides the size of its KV cache; `hybrid`: some layers keep a state of fixed size instead."""

    kind: Kind
    full_layers: int
    window_layers: int
    window_tokens: int | None
    kv_heads: int
    head_dim: int
    latent_dim: int
    dtype_bytes: int
    hybrid: bool
    state_layers: int
    max_model_len: int | None
    quantization: Mapping[str, Any] | None
    unquantized_bytes: float
    """Embeddings and output layer, which quantization leaves alone; 0 where the file does not say."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """KV bytes per GPU: `bytes_per_token` up to the window, `bytes_beyond_window` per further token.

    `copies` says how often tensor parallelism stores the same heads (1: not at all).
    """

    bytes_per_token: float
    bytes_beyond_window: float
    window_tokens: int | None
    copies: float

    def sequence_bytes(self, tokens: float, block_size: int = 1) -> float:
        """What a sequence of so many tokens takes on each GPU, its last block half empty on average."""
        held = tokens + (block_size - 1) / 2
        if self.window_tokens is None or held <= self.window_tokens:
            return held * self.bytes_per_token
        return self.window_tokens * self.bytes_per_token + (held - self.window_tokens) * self.bytes_beyond_window


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a `config.json` describes; of a multimodal model the language part.

    Raises ValueError with a sentence where the file lacks what is needed.
    """
    inner = _language_part(config)
    layers = _need(inner, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    heads = _need(inner, "num_attention_heads", "n_head", "num_heads", "n_heads")
    latent = _latent_dim(inner)
    kv_heads = 1 if latent else _kv_heads(inner, heads)
    kinds = _layer_kinds(inner, layers)
    state = sum(kind == "state" for kind in kinds)
    none = sum(kind == "none" for kind in kinds)
    window = _window(inner)
    in_window = sum(kind == "window" for kind in kinds) if window else 0
    return ModelShape(
        kind=_kind(latent, kv_heads, heads),
        full_layers=len(kinds) - state - none - in_window,
        window_layers=in_window,
        window_tokens=window if in_window else None,
        kv_heads=kv_heads,
        head_dim=0 if latent else _head_dim(inner, heads),
        latent_dim=latent,
        dtype_bytes=_dtype_bytes(config, inner),
        hybrid=state > 0 or none > 0,
        state_layers=state,
        max_model_len=_first(inner, "max_position_embeddings", "n_positions", "max_seq_len"),
        quantization=_quantization(config, inner),
        unquantized_bytes=_unquantized_bytes(config, inner),
    )


def special_load(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What of a model asks for more room outside the pool: images or sound, a mixture of experts."""
    inner = _language_part(config)
    said = []
    if any(isinstance(config.get(name), Mapping) for name in ("vision_config", "audio_config", "visual")):
        said.append("images or sound")
    if _first(inner, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts") is not None:
        said.append("a mixture of experts")
    return tuple(said)


def _language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in _NESTED:
        inner = config.get(name)
        if isinstance(inner, Mapping):
            deeper = _language_part(inner)
            if _first(deeper, "num_hidden_layers", "n_layer", "num_layers", "n_layers") is not None:
                return deeper
    return config


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _need(config: Mapping[str, Any], *names: str) -> int:
    value = _first(config, *names)
    if value is None:
        shown = config.get(names[0])
        raise ValueError(f"{names[0]} is {shown!r}; a config.json as Hugging Face writes it names a number above 0")
    return value


def _latent_dim(config: Mapping[str, Any]) -> int:
    rank = _first(config, "kv_lora_rank")
    return rank + (_first(config, "qk_rope_head_dim") or 0) if rank is not None else 0


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        return 1
    return _first(config, "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num") or heads


def _kind(latent: int, kv_heads: int, heads: int) -> Kind:
    if latent:
        return Kind.MLA
    if kv_heads == 1:
        return Kind.MQA
    return Kind.MHA if kv_heads == heads else Kind.GQA


def _head_dim(config: Mapping[str, Any], heads: int) -> int:
    return _first(config, "head_dim") or _need(config, "hidden_size", "n_embd", "d_model") // heads


def _dtype_bytes(config: Mapping[str, Any], inner: Mapping[str, Any]) -> int:
    for where in (inner, config):
        for name in ("dtype", "torch_dtype"):
            word = where.get(name)
            if isinstance(word, str):
                return _MODEL_DTYPE_BYTES.get(word.removeprefix("torch."), 2)
    return 2


def _quantization(config: Mapping[str, Any], inner: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for where in (config, inner):
        for name in ("quantization_config", "compression_config"):
            found = where.get(name)
            if isinstance(found, Mapping):
                return found
    return None


def _unquantized_bytes(config: Mapping[str, Any], inner: Mapping[str, Any]) -> float:
    vocabulary = _first(inner, "vocab_size") or _first(config, "vocab_size") or 0
    hidden = _first(inner, "hidden_size", "n_embd", "d_model") or 0
    tied = inner.get("tie_word_embeddings", config.get("tie_word_embeddings")) is True
    return float(vocabulary * hidden * _dtype_bytes(config, inner) * (1 if tied else 2))


def _window(config: Mapping[str, Any]) -> int | None:
    if config.get("use_sliding_window") is False:
        return None
    return _first(config, "sliding_window", "attention_chunk_size")


def _layer_kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    """Per layer: full, window, state (a fixed state instead of keys and values) or none."""
    listed = config.get("layer_types") or config.get("layers_block_type") or config.get("block_types")
    if isinstance(listed, list) and listed:
        return [_word_kind(str(word)) for word in listed[:layers]]
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        return [{"*": "full", "M": "state"}.get(letter, "none") for letter in pattern]
    indices = config.get("attn_layer_indices") or config.get("full_attn_idxs")
    if isinstance(indices, list) and indices:
        return ["full" if i in indices else "state" for i in range(layers)]
    return _periodic_kinds(config, layers)


def _word_kind(word: str) -> str:
    if word in _WINDOW_WORDS:
        return "window"
    if word in _STATE_WORDS:
        return "state"
    return "none" if word in ("mlp", "moe") else "full"


def _periodic_kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    interval = _first(config, "full_attention_interval")
    if interval:
        return ["full" if (i + 1) % interval == 0 else "state" for i in range(layers)]
    period = _first(config, "attn_layer_period")
    if period:
        offset = config.get("attn_layer_offset") or 0
        return ["full" if i % period == offset else "state" for i in range(layers)]
    every = _first(config, "sliding_window_pattern", "_sliding_window_pattern")
    if every:
        return ["full" if (i + 1) % every == 0 else "window" for i in range(layers)]
    if "ssm_cfg" in config or config.get("model_type") in ("mamba", "mamba2", "falcon_mamba"):
        return ["state"] * layers
    if config.get("use_sliding_window") is True:
        # Qwen2: the first max_window_layers attend to everything.
        first = _first(config, "max_window_layers") or 0
        return ["full" if i < first else "window" for i in range(layers)]
    return ["window" if _window(config) else "full"] * layers


def footprint(shape: ModelShape, cache_dtype: str | None = None, tensor_parallel: int = 1) -> Footprint:
    """KV bytes per token on each GPU: `2 * layers * ceil(kv_heads / TP) * head_dim * bytes`.

    MLA: `layers * (kv_lora_rank + rope_dim) * bytes` whatever TP is. `cache_dtype` is vLLM's
    `--kv-cache-dtype`; None and auto take the model's. Raises ValueError for a type nobody knows, for
    fp8_ds_mla without MLA, and for TP below 1.
    """
    if tensor_parallel < 1:
        raise ValueError(f"tensor parallel size is {tensor_parallel}; it must be at least 1")
    per_layer, copies = _layer_bytes(shape, cache_dtype, tensor_parallel)
    everywhere = per_layer * (shape.full_layers + shape.window_layers)
    beyond = per_layer * shape.full_layers
    return Footprint(everywhere, beyond if shape.window_tokens else everywhere, shape.window_tokens, copies)


def _layer_bytes(shape: ModelShape, cache_dtype: str | None, tensor_parallel: int) -> tuple[float, float]:
    if cache_dtype == FP8_DS_MLA:
        if shape.kind is not Kind.MLA:
            raise ValueError(f"the KV cache type is {FP8_DS_MLA}, which only MLA models have")
        return _FP8_DS_MLA_BYTES_PER_LAYER, tensor_parallel
    size = cache_dtype_bytes(cache_dtype, shape.dtype_bytes)
    if shape.kind is Kind.MLA:
        return shape.latent_dim * size, tensor_parallel
    heads = math.ceil(shape.kv_heads / tensor_parallel)
    return 2 * heads * shape.head_dim * size, heads * tensor_parallel / shape.kv_heads


def cache_dtype_bytes(cache_dtype: str | None, model_bytes: int) -> int:
    """Bytes of one stored number. Raises ValueError for a type nobody knows."""
    if cache_dtype in (None, "auto"):
        return model_bytes
    if cache_dtype not in _CACHE_DTYPE_BYTES:
        known = ", ".join(["auto", *_CACHE_DTYPE_BYTES, FP8_DS_MLA])
        raise ValueError(f"the KV cache type is {cache_dtype!r}; known are {known}")
    return _CACHE_DTYPE_BYTES[cache_dtype]


def pool_tokens(config: CacheConfig, engines: int = 1) -> float | None:
    """Tokens that one engine's pool holds; None where the page does not say.

    `num_gpu_blocks` is the sum over `engines` and no measure of a hybrid's capacity; `kv_cache_size_tokens`
    (vLLM 0.24 and later) is per engine and right for both.
    """
    if config.kv_cache_size_tokens:
        return float(config.kv_cache_size_tokens)
    if is_hybrid(config) or not config.num_gpu_blocks or not config.block_size:
        return None
    return config.num_gpu_blocks / max(1, engines) * config.block_size


def fixed_by(config: CacheConfig) -> str | None:
    """The setting that sizes the pool in place of gpu_memory_utilization; None where the ratio does."""
    if config.num_gpu_blocks_override is not None:
        return "num_gpu_blocks_override"
    return "kv_cache_memory_bytes" if config.kv_cache_memory_bytes is not None else None


def block_of(config: CacheConfig) -> int | None:
    """The block size in effect: what vLLM raised it to where it says so."""
    return config.effective_attention_block_size or config.block_size


def is_hybrid(config: CacheConfig) -> bool:
    """Whether the pool's own words show Mamba or linear-attention layers beside attention."""
    effective = config.effective_attention_block_size
    if effective and config.block_size and effective != config.block_size:
        return True
    flags = config.flags or {}
    return "mamba_block_size" in flags or "mamba_page_size_padded" in flags


@dataclass(frozen=True, slots=True)
class Check:
    """The formula against what the engine shows; `agrees` is None where it shows too little."""

    agrees: bool | None
    sentence: str
    shown_bytes_per_token: float | None = None


def check(expected: Footprint, config: CacheConfig, engines: int = 1) -> Check:
    """Bytes per token that `kv_cache_memory_bytes` and the pool's tokens imply, against the formula.

    The label is per GPU; a pool whose blocks were overridden says nothing. Within 5 % is agreement: a block and
    rounding are lost at the end of the pool.
    """
    tokens = pool_tokens(config, engines)
    if config.num_gpu_blocks_override is not None:
        return Check(None, "not checked: num_gpu_blocks_override sets the pool whatever memory there is")
    if not config.kv_cache_memory_bytes or not tokens:
        return Check(None, "not checked: cache_config_info shows no pair of bytes and tokens")
    shown = config.kv_cache_memory_bytes / tokens
    off = abs(shown - expected.bytes_per_token) / expected.bytes_per_token
    if off <= _AGREE_RATIO:
        return Check(
            True, f"cache_config_info agrees: {shown:.0f} B per token from {gib(config.kv_cache_memory_bytes)}", shown
        )
    words = f"cache_config_info shows {shown:.0f} B per token, {percent(off)} off the formula's"
    return Check(False, f"{words} {expected.bytes_per_token:.0f} B: is it the model's config.json and TP size?", shown)
