"""What a detector has learned as plain values, and back: so that a restarted daemon neither forgets nor re-fires.

Only classes of the detector and of `model` are made again, and only if their fields are still the ones
that were written: a snapshot of another version is refused, never guessed at. Parameters are not part of
it: the running ones apply.
"""

import inspect
import math
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import ModuleType
from typing import Any

from fragscope import __version__, model
from fragscope.detect import (
    allocator,
    attribution,
    correlation,
    detector,
    engine,
    episodes,
    forecast,
    judgement,
    measures,
    outcomes,
    signals,
    staircase,
    statistics,
    testimony,
    verdict,
    waterfall,
    window,
)
from fragscope.detect import vram as vram_module
from fragscope.detect.detector import Detector
from fragscope.detect.parameters import Parameters

FORMAT = 1

_MODULES: tuple[ModuleType, ...] = (
    model,
    allocator,
    attribution,
    correlation,
    detector,
    engine,
    episodes,
    forecast,
    judgement,
    measures,
    outcomes,
    signals,
    staircase,
    statistics,
    testimony,
    verdict,
    vram_module,
    waterfall,
    window,
)
_NOTHING = (lambda: None).__code__
_PLAIN = (str, int, bool, type(None))


class SnapshotError(ValueError):
    """The snapshot cannot be used, and why."""


def _classes() -> dict[str, type[Any]]:
    return {
        name: kind
        for module in _MODULES
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if kind.__module__ == module.__name__
    }


_CLASSES = _classes()


def dump(learned: Detector) -> dict[str, Any]:
    """The detector's state as JSON-ready values."""
    state = _Writer().write(learned)
    return {"format": FORMAT, "shape": _shape(), "state": state}


def load(plain: Any, target: str, parameters: Parameters) -> Detector:
    """The detector as it was, under the parameters of now. Raises SnapshotError."""
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        raise SnapshotError("it has another format")
    if plain.get("shape") != _shape():
        raise SnapshotError("it was written by another version")
    try:
        learned = _Reader(parameters).read(plain["state"])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise SnapshotError(f"it is damaged: {type(error).__name__}: {error}") from error
    if not isinstance(learned, Detector) or learned.target != target:
        raise SnapshotError(f"it is not of target {target}")
    return learned


def _shape() -> str:
    """What the classes look like: a snapshot with another look was written by another version."""
    names = [f"{name}({','.join(_field_names(kind))})" for name, kind in sorted(_CLASSES.items())]
    return f"{__version__} {zlib.crc32(' '.join(names).encode()):08x}"


def _field_names(kind: type[Any]) -> list[str]:
    if is_dataclass(kind):
        return [item.name for item in fields(kind)]
    slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ()) if isinstance(name, str)]
    # What a plain class has is what its constructor names.
    return slots or list(getattr(kind.__init__, "__code__", _NOTHING).co_names)


class _Writer:
    """Objects to plain values; an object that is met again is written as a reference."""

    def __init__(self) -> None:
        self._met: dict[int, int] = {}

    def write(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return {"!": "enum", "of": type(value).__name__, "is": value.value}
        if isinstance(value, float):
            return value if math.isfinite(value) else {"!": "float", "is": str(value)}
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, (list, tuple, deque, set, frozenset)):
            return self._sequence(value)
        if isinstance(value, Mapping):
            return {"!": "dict", "is": [[self.write(key), self.write(item)] for key, item in value.items()]}
        return self._object(value)

    def _sequence(self, value: Any) -> Any:
        items = [self.write(item) for item in value]
        if isinstance(value, list):
            return items
        kind = "deque" if isinstance(value, deque) else "tuple" if isinstance(value, tuple) else "set"
        return {"!": kind, "is": items, "most": getattr(value, "maxlen", None)}

    def _object(self, value: Any) -> Any:
        if isinstance(value, Parameters):
            return {"!": "parameters"}
        name = type(value).__name__
        if _CLASSES.get(name) is not type(value):
            raise TypeError(f"{name} is no part of a detector")
        if id(value) in self._met:
            return {"!": "again", "is": self._met[id(value)]}
        self._met[id(value)] = number = len(self._met)
        named = getattr(value, "__dict__", None)
        if named is None:
            named = {name: getattr(value, name) for name in _field_names(type(value))}
        written = {key: self.write(item) for key, item in named.items()}
        return {"!": "object", "of": name, "as": number, "is": written}


class _Reader:
    """Plain values to objects; nothing is called but `__new__` of the detector's own classes."""

    def __init__(self, parameters: Parameters) -> None:
        self._made: dict[int, Any] = {}
        self._readers: dict[str, Callable[[dict[str, Any]], Any]] = {
            "parameters": lambda _: parameters,
            "enum": self._enum,
            "float": lambda value: float(value["is"]),
            "tuple": lambda value: tuple(self.read(item) for item in value["is"]),
            "set": lambda value: {self.read(item) for item in value["is"]},
            "deque": lambda value: deque((self.read(item) for item in value["is"]), maxlen=value["most"]),
            "dict": lambda value: {self.read(key): self.read(item) for key, item in value["is"]},
            "again": lambda value: self._made[value["is"]],
            "object": self._object,
        }

    def read(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.read(item) for item in value]
        if not isinstance(value, dict):
            return value
        return self._readers[value["!"]](value)

    def _enum(self, value: dict[str, Any]) -> Any:
        return _CLASSES[value["of"]](value["is"])

    def _object(self, value: dict[str, Any]) -> Any:
        kind = _CLASSES[value["of"]]
        made = self._made[value["as"]] = object.__new__(kind)
        for name, item in value["is"].items():
            object.__setattr__(made, name, self.read(item))
        return made
