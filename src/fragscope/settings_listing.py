"""Every setting as a table: where its value came from, and what it means."""

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fragscope.advise.parameters import AdviceParameters
from fragscope.detect.parameters import Thresholds
from fragscope.settings import ENV_PREFIX, NESTED, Settings, Target, config_from, plain


def origins(
    settings: Settings, config: Path | None, flags: Mapping[str, Any] | None = None
) -> list[tuple[str, Any, str]]:
    """(key, value, where it came from) of every setting, flattened with dots."""
    given = _flat(plain(flags))
    table: dict[str, Any] = {}
    config = config or config_from(os.environ)
    if config is not None:
        table = tomllib.loads(config.read_text())
    file_keys = _flat(table)
    env_keys = {
        name.removeprefix(ENV_PREFIX).lower().replace(NESTED, "."): name
        for name in os.environ
        if name.startswith(ENV_PREFIX)
    }
    rows = []
    for key, value in _flat(settings.model_dump(mode="json")).items():
        rows.append((key, value, _origin(key, given, env_keys, file_keys, config)))
    return rows


def _origin(
    key: str, flags: Mapping[str, Any], env: Mapping[str, str], file: Mapping[str, Any], config: Path | None
) -> str:
    if _covers(flags, key):
        return "flag"
    name = next((env[k] for k in env if key == k or key.startswith(k + ".")), None)
    if name is not None:
        return f"environment ({name})"
    return f"file ({config})" if _covers(file, key) else "default"


def _covers(keys: Mapping[str, Any], key: str) -> bool:
    return any(key == k or key.startswith(k + ".") for k in keys)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested tables and lists as dotted keys; empty ones as themselves."""
    items: Iterator[tuple[Any, Any]]
    if isinstance(value, Mapping) and value:
        items = iter(value.items())
    elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
        items = iter(enumerate(value))
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in items:
        flat.update(_flat(item, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def documented() -> Iterator[tuple[str, Any, str]]:
    """(key, default, what it means) of every setting, for the documentation."""
    for name, info in Settings.model_fields.items():
        if name == "targets":
            for key, inner in Target.model_fields.items():
                yield (
                    f"targets.N.{key}",
                    inner.get_default(call_default_factory=True),
                    inner.description or "",
                )
        elif name == "thresholds":
            yield from _parameters("thresholds", Thresholds())
        elif name == "advice":
            yield from _parameters("advice", AdviceParameters())
        else:
            yield name, info.get_default(call_default_factory=True), info.description or ""


def _parameters(prefix: str, parameters: Any) -> Iterator[tuple[str, Any, str]]:
    for item in fields(parameters):
        value = getattr(parameters, item.name)
        if item.name == "weights":
            yield from _parameters(f"{prefix}.weights", value)
        else:
            yield f"{prefix}.{item.name}", value, item.metadata["why"]
