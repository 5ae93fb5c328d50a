"""What of a model decides the size of its KV cache, from a Hugging Face `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fragscope.advise.layers import Layer, count, first, layer_kinds, need, window_of, with_defaults

_MODEL_DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "half": 2, "float32": 4, "float": 4}
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")


class Kind(StrEnum):
    """How a model's attention keeps its keys and values."""

    MHA = "MHA"
    GQA = "GQA"
    MQA = "MQA"
    MLA = "MLA"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides the size of its KV cache; `hybrid`: some layers keep a state of fixed size."""

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


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a `config.json` describes; of a multimodal model the language part.

    What published files leave out is what the model's class in Transformers takes. Raises UnknownWindowsError
    where nobody can say which layers have a window, and ValueError with a sentence where the file lacks what is needed.
    """
    inner = with_defaults(_language_part(config))
    layers = need(inner, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    heads = need(inner, "num_attention_heads", "n_head", "num_heads", "n_heads")
    latent = _latent_dim(inner)
    kv_heads = 1 if latent else _kv_heads(inner, heads)
    window = window_of(inner)
    kinds = layer_kinds(inner, layers)
    state = sum(kind in (Layer.STATE, Layer.BOTH) for kind in kinds)
    none = kinds.count(Layer.NONE)
    in_window = kinds.count(Layer.WINDOW) if window else 0
    return ModelShape(
        kind=_kind(latent, kv_heads, heads),
        full_layers=len(kinds) - kinds.count(Layer.STATE) - none - in_window,
        window_layers=in_window,
        window_tokens=window if in_window else None,
        kv_heads=kv_heads,
        head_dim=0 if latent else _head_dim(inner, heads),
        latent_dim=latent,
        dtype_bytes=_dtype_bytes(config, inner),
        hybrid=state > 0 or none > 0,
        state_layers=state,
        max_model_len=first(inner, "max_position_embeddings", "n_positions", "max_seq_len"),
        quantization=_quantization(config, inner),
        unquantized_bytes=_unquantized_bytes(config, inner),
    )


def special_load(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What of a model asks for more room outside the pool: images or sound, a mixture of experts."""
    inner = _language_part(config)
    said = []
    if any(isinstance(config.get(name), Mapping) for name in ("vision_config", "audio_config", "visual")):
        said.append("images or sound")
    if first(inner, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts") is not None:
        said.append("a mixture of experts")
    return tuple(said)


def _language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in _NESTED:
        inner = config.get(name)
        if isinstance(inner, Mapping):
            # A part that does not name its type is of the whole's.
            deeper = _language_part({"model_type": config.get("model_type"), **inner})
            if first(with_defaults(deeper), "num_hidden_layers", "n_layer", "num_layers", "n_layers") is not None:
                return deeper
    return config


def _latent_dim(config: Mapping[str, Any]) -> int:
    rank = first(config, "kv_lora_rank")
    return rank + (first(config, "qk_rope_head_dim") or 0) if rank is not None else 0


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        return 1
    return count(config, "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num") or heads


def _kind(latent: int, kv_heads: int, heads: int) -> Kind:
    if latent:
        return Kind.MLA
    if kv_heads == 1:
        return Kind.MQA
    return Kind.MHA if kv_heads == heads else Kind.GQA


def _head_dim(config: Mapping[str, Any], heads: int) -> int:
    given = count(config, "head_dim")
    if given is not None:
        return given
    hidden = need(config, "hidden_size", "n_embd", "d_model")
    if hidden < heads:
        raise ValueError(
            f"hidden_size is {hidden} with {heads} heads, so a head would have no width; is it the right file?"
        )
    return hidden // heads


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
    vocabulary = first(inner, "vocab_size") or first(config, "vocab_size") or 0
    hidden = first(inner, "hidden_size", "n_embd", "d_model") or 0
    tied = inner.get("tie_word_embeddings", config.get("tie_word_embeddings")) is True
    return float(vocabulary * hidden * _dtype_bytes(config, inner) * (1 if tied else 2))
