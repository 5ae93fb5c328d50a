"""Verdicts as the JSON objects of the contract (docs/verdicts.md): for replay, check and the API."""

from typing import Any

import msgspec

from fragscope.model import Measures, Verdict


def verdict_object(verdict: Verdict) -> dict[str, Any]:
    """A verdict as plain values; engine and model_name are left out while no engine is known."""
    plain: dict[str, Any] = msgspec.to_builtins(verdict)
    if verdict.engine is None:
        del plain["engine"], plain["model_name"]
    return plain


def measures_object(measures: Measures) -> dict[str, Any]:
    """A target's measures as plain values."""
    outcomes = [
        {"kv_band": str(band), "outcome": str(outcome), "total": total}
        for (band, outcome), total in measures.outcomes.items()
    ]
    return {
        "at": measures.at,
        "target": measures.target,
        "engine_up": measures.engine_up,
        "version": measures.version,
        "outcomes": outcomes,
        "failures": msgspec.to_builtins(measures.failures),
        "log_odds": msgspec.to_builtins(measures.log_odds),
        "gpus": msgspec.to_builtins(measures.gpus),
        "engines": msgspec.to_builtins(measures.engines),
        "available": dict(measures.available),
    }


def decode(raw: bytes) -> Any:
    """Plain values of a JSON text. Raises ValueError where it is none."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


def encode(plain: Any) -> str:
    """One line of JSON; NaN and infinity become null, never invalid JSON."""
    return msgspec.json.encode(plain).decode()
