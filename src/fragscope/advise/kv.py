"""KV bytes per token, and the tokens that a pool holds, from a model's shape and `cache_config_info`.

Formulas: docs/advise.md, after vLLM's `kv_cache_interface.py` (page sizes of the attention specs) and
`kv_cache_utils.py` (groups of layers).
"""

import math
from dataclasses import dataclass

from fragscope.advise.advice import gib, percent
from fragscope.advise.shape import Kind, ModelShape
from fragscope.model import CacheConfig

_CACHE_DTYPE_BYTES = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1, "float16": 2, "bfloat16": 2, "float32": 4}
FP8_DS_MLA = "fp8_ds_mla"
_FP8_DS_MLA_BYTES_PER_LAYER = 656
"""512 B of FP8 latent, 16 B of scales, 128 B of bf16 rotary part (vLLM, `fp8_ds_mla` of FlashMLA)."""
_AGREE_RATIO = 0.05
_ALIKE_RATIO = 1.25
"""vLLM makes one group of each kind of layer where their numbers differ by less (`kv_cache_utils.py`)."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """KV bytes per GPU: `bytes_per_token` up to the window, `bytes_beyond_window` per further token.

    `copies` says how often tensor parallelism stores the same heads (1: not at all). vLLM keeps layers in
    `groups` of equal size, None where that is not known; `padding` is what they hold over what is needed (1: nothing).
    """

    bytes_per_token: float
    bytes_beyond_window: float
    window_tokens: int | None
    copies: float
    groups: int | None = 1
    padding: float = 1.0

    def sequence_bytes(self, tokens: float, block_size: int = 1) -> float:
        """What a sequence of so many tokens takes on each GPU, its last block half empty on average."""
        held = tokens + (block_size - 1) / 2
        if self.window_tokens is None or held <= self.window_tokens:
            return held * self.bytes_per_token
        return self.window_tokens * self.bytes_per_token + (held - self.window_tokens) * self.bytes_beyond_window


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
    groups, padding = _groups(shape)
    last = beyond if shape.window_tokens else everywhere
    return Footprint(everywhere, last, shape.window_tokens, copies, groups, padding)


def _groups(shape: ModelShape) -> tuple[int | None, float]:
    """How many groups vLLM keeps the layers in, and how much they are padded: as large as the rarer kind of layer."""
    full, window = shape.full_layers, shape.window_layers
    if shape.hybrid or not full + window:
        return None, 1.0
    if not full or not window:
        return 1, 1.0
    few, many = min(full, window), max(full, window)
    size = many if many < _ALIKE_RATIO * few else few
    groups = math.ceil(full / size) + math.ceil(window / size)
    return groups, groups * size / (full + window)


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


def pool_tokens(config: CacheConfig, engines: int = 1, groups: int | None = None) -> float | None:
    """Tokens that one engine's pool holds; None where the page does not say.

    `kv_cache_size_tokens` (vLLM 0.24 and later) is per engine and always right. Without it the tokens are
    `num_gpu_blocks` (the sum over `engines`) // groups of layers * block size; with windows beside full layers there
    are several groups, so without knowing the model (`groups` None) it is not known. No measure of a hybrid.
    """
    if config.kv_cache_size_tokens:
        return float(config.kv_cache_size_tokens)
    if groups is None or is_hybrid(config) or not config.num_gpu_blocks or not config.block_size:
        return None
    return float(config.num_gpu_blocks / max(1, engines) // groups * config.block_size)


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
    tokens = pool_tokens(config, engines, expected.groups)
    wanted = expected.bytes_per_token * expected.padding
    if not wanted:
        return Check(None, "not checked: no layer keeps keys and values, only a fixed state per sequence")
    if config.num_gpu_blocks_override is not None:
        return Check(None, "not checked: num_gpu_blocks_override sets the pool whatever memory there is")
    if not config.kv_cache_memory_bytes or not tokens:
        return Check(None, "not checked: cache_config_info shows no pair of bytes and tokens")
    shown = config.kv_cache_memory_bytes / tokens
    off = abs(shown - wanted) / wanted
    if off <= _AGREE_RATIO:
        return Check(
            True, f"cache_config_info agrees: {shown:.0f} B per token from {gib(config.kv_cache_memory_bytes)}", shown
        )
    words = f"cache_config_info shows {shown:.0f} B per token, {percent(off)} off the formula's"
    return Check(False, f"{words} {wanted:.0f} B: is it the model's config.json and TP size?", shown)
