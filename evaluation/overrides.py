"""Trying other constants: `--set weights.prior=-2 --set hold_s=600`."""

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, TypeVar

from fragscope.detect.parameters import Parameters

Frozen = TypeVar("Frozen", bound=Any)
_WEIGHTS = "weights."


def overridden(settings: Iterable[str]) -> Parameters:
    """The defaults with some replaced. Raises ValueError for an unknown name or a value that is no number."""
    parameters = Parameters()
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"{setting!r} sets nothing: write name=value")
        if name.startswith(_WEIGHTS):
            weights = _with(parameters.weights, name.removeprefix(_WEIGHTS), value)
            parameters = replace(parameters, weights=weights)
        else:
            parameters = _with(parameters, name, value)
    return parameters


def _with(frozen: Frozen, name: str, value: str) -> Frozen:
    known = {item.name: getattr(frozen, item.name) for item in fields(frozen)}
    kind = type(known.get(name))
    if kind not in (int, float):
        raise ValueError(f"{name!r} is no number of {type(frozen).__name__}; docs/configuration.md lists them")
    try:
        number = kind(value)
    except ValueError as error:
        raise ValueError(f"{name} is set to {value!r}, which is no number like {known[name]}") from error
    changed: Frozen = replace(frozen, **{name: number})
    return changed
