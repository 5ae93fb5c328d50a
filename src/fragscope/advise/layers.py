"""Which layers of a model keep what, from a Hugging Face `config.json` or the defaults of its class in Transformers."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

L = TypeVar("L", str, list[Any])

_STATE_WORDS = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "short_conv", "gated_delta_net")
_WINDOW_WORDS = ("sliding_attention", "sliding_window", "chunked_attention", "local_attention")
_PURE_STATE = ("mamba", "mamba2", "falcon_mamba")
_ALL_WINDOWED = ("mistral", "mixtral", "starcoder2", "phi3", "phimoe")
"""Whose `sliding_window` holds for every layer."""
_WINDOW_OFF = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_vl_text", "qwen2_5_vl_text")
"""Whose window holds only where `use_sliding_window` says so."""

_GEMMA2 = {
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_size": 2304,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
}
_GEMMA3 = {**_GEMMA2, "sliding_window_pattern": 6}
_LLAMA4 = {
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 5120,
    "attention_chunk_size": 8192,
    "sliding_window_pattern": 4,
}
_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma": {"head_dim": 256},
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "gpt_oss": {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128, "sliding_window_pattern": 2},
}
"""What published files leave out, by `model_type` (Transformers, `configuration_*.py` of each); of `pattern` layers
the last attends to everything, the others to their window or chunk."""


class Layer(StrEnum):
    """What a layer keeps: all keys and values, those of a window, a state of fixed size, all and a state, nothing."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"
    BOTH = "both"
    NONE = "none"


class UnknownWindowsError(ValueError):
    """A window is named, but neither the file nor the model's type says which layers have it."""


def with_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The file with what its `model_type` takes where it is silent."""
    return {**_DEFAULTS.get(str(config.get("model_type")), {}), **config}


def first(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of the fields that is a whole number above 0."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def count(config: Mapping[str, Any], *names: str) -> int | None:
    """The same, of fields that must not be anything else. Raises ValueError for text or a list."""
    for name in names:
        if isinstance(config.get(name), str | list | Mapping | float):
            words = f"{name} is {config[name]!r}; a config.json that can be used has one whole number there"
            raise ValueError(words)  # noqa: TRY004 - a bad file, no bug
    return first(config, *names)


def need(config: Mapping[str, Any], *names: str) -> int:
    """The same, of fields that must be there. Raises ValueError."""
    value = count(config, *names)
    if value is None:
        shown = config.get(names[0])
        raise ValueError(f"{names[0]} is {shown!r}; a config.json as Hugging Face writes it names a number above 0")
    return value


def window_of(config: Mapping[str, Any]) -> int | None:
    """The window or chunk in tokens; None without one, or where it is switched off."""
    off = config.get("model_type") in _WINDOW_OFF and config.get("use_sliding_window") is not True
    if config.get("use_sliding_window") is False or (off and "layer_types" not in config):
        return None
    return first(config, "sliding_window", "attention_chunk_size")


def layer_kinds(config: Mapping[str, Any], layers: int) -> list[Layer]:
    """Per layer what it keeps. Raises UnknownWindowsError, and ValueError for lists that are too short."""
    listed = config.get("layer_types") or config.get("layers_block_type") or config.get("block_types")
    if isinstance(listed, list) and listed:
        return [_word_kind(str(word)) for word in _long_enough(listed, layers)[:layers]]
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        letters = {"*": Layer.FULL, "M": Layer.STATE}
        return [letters.get(letter, Layer.NONE) for letter in _long_enough(pattern, layers)]
    return _hybrid_kinds(config, layers) or _window_kinds(config, layers)


def _long_enough(listed: L, layers: int) -> L:
    if len(listed) < layers:
        words = f"num_hidden_layers is {layers}, but the list of layer types has {len(listed)}; is the file whole?"
        raise ValueError(words)
    return listed


def _word_kind(word: str) -> Layer:
    if word in _WINDOW_WORDS:
        return Layer.WINDOW
    if word in _STATE_WORDS:
        return Layer.STATE
    return Layer.NONE if word in ("mlp", "moe") else Layer.FULL


def _every(period: int, layers: int, other: Layer) -> list[Layer]:
    """The last of each period attends to everything."""
    return [Layer.FULL if (i + 1) % period == 0 else other for i in range(layers)]


def _hybrid_kinds(config: Mapping[str, Any], layers: int) -> list[Layer] | None:
    """Of models with a state beside attention; None for others."""
    types = config.get("attn_type_list")
    if isinstance(types, list) and types:
        # MiniMax-Text-01: 1 is softmax attention, 0 is lightning attention.
        return [Layer.FULL if kind == 1 else Layer.STATE for kind in _long_enough(types, layers)[:layers]]
    indices = _full_indices(config)
    if indices:
        return [Layer.FULL if i in indices else Layer.STATE for i in range(layers)]
    interval = first(config, "full_attention_interval")
    if interval:
        return _every(interval, layers, Layer.STATE)
    period = count(config, "attn_layer_period")
    if period:
        offset = count(config, "attn_layer_offset") or 0
        return [Layer.FULL if i % period == offset else Layer.STATE for i in range(layers)]
    return _alike(config, layers)


def _alike(config: Mapping[str, Any], layers: int) -> list[Layer] | None:
    if config.get("model_type") == "falcon_h1":
        return [Layer.BOTH] * layers
    pure = "ssm_cfg" in config or config.get("model_type") in _PURE_STATE
    return [Layer.STATE] * layers if pure else None


def _full_indices(config: Mapping[str, Any]) -> list[int]:
    """Numbers from 0 of the layers that attend; Kimi-Linear counts from 1."""
    linear = config.get("linear_attn_config")
    listed = linear.get("full_attn_layers") if isinstance(linear, Mapping) else None
    if isinstance(listed, list):
        return [i - 1 for i in listed if isinstance(i, int)]
    indices = config.get("attn_layer_indices") or config.get("full_attn_idxs")
    return indices if isinstance(indices, list) else []


def _window_kinds(config: Mapping[str, Any], layers: int) -> list[Layer]:
    """Of models with windows beside full attention, or without either."""
    if window_of(config) is None:
        return [Layer.FULL] * layers
    chunked = config.get("no_rope_layers")
    if isinstance(chunked, list) and chunked and "attention_chunk_size" in config:
        # Llama 4: layers with rotary positions are chunked.
        return [Layer.WINDOW if rope else Layer.FULL for rope in _long_enough(chunked, layers)[:layers]]
    letters = config.get("sliding_window_pattern")
    if isinstance(letters, str) and letters and set(letters) <= set("LG"):
        return [Layer.WINDOW if letters[i % len(letters)] == "L" else Layer.FULL for i in range(layers)]
    every = first(config, "sliding_window_pattern", "_sliding_window_pattern")
    if every:
        return _every(every, layers, Layer.WINDOW)
    if config.get("use_sliding_window") is True:
        # Qwen2: the first max_window_layers attend to everything.
        full = first(config, "max_window_layers") or 0
        return [Layer.FULL if i < full else Layer.WINDOW for i in range(layers)]
    if config.get("model_type") in _ALL_WINDOWED:
        return [Layer.WINDOW] * layers
    raise UnknownWindowsError(
        f"config.json names a window of {window_of(config)} tokens, but neither it nor its model_type "
        f"({config.get('model_type')}) says which layers have one; KV bytes per token are not known"
    )
