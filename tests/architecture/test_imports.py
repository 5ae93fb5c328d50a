"""The import rule of docs/architecture.md, read from the code: imports only go down."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import REPOSITORY

SOURCE = REPOSITORY / "src" / "fragscope"
PURE_RINGS = ("detect", "explain")
ALLOWED_IN_PURE = {
    "__future__", "bisect", "collections", "dataclasses", "enum", "functools", "inspect", "itertools", "math",
    "operator", "re", "types", "typing", "zlib",
}  # fmt: skip
"""Nothing here knows a clock, a file, a thread or a socket (inspect looks at our own classes only)."""

# Who may import which of our own modules: a module's own package is always allowed.
ALLOWED: dict[str, tuple[str, ...]] = {
    "model": (),
    "detect": ("model",),
    "explain": ("model",),
    "sources": ("model",),
    "recording": ("model",),
    "wire": ("model",),
    "replay": ("model", "detect", "explain", "recording", "sources.exposition", "sources.scrape", "sources.vllm"),
    # A run tells its facts through the reader of log lines, and writes recordings.
    "simulate": ("model", "explain.lines", "recording"),
    "serve": ("model", "detect", "explain", "recording", "sources", "wire", ""),
    "settings": ("detect.parameters",),
}
ANYTHING = {"app", "cli", "check", "demo", "record", "replaying", "report", "__main__", "__init__"}

# The only rooms in which a third-party library may be met.
HOMES: dict[str, tuple[str, ...]] = {
    "requests": ("sources.scrape",),
    "urllib3": ("sources.scrape",),
    "prometheus_client": ("sources.exposition", "serve"),
    "starlette": ("serve.http", "simulate.server"),
    "uvicorn": ("serve.http", "simulate.server"),
    "structlog": ("serve", "app", "cli"),
    "pydantic": ("settings",),
    "pydantic_settings": ("settings",),
    "msgspec": ("recording", "wire"),
    "rich": ("report", "check", "demo", "replaying"),
}


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__") or "__init__"
        yield name, path


def imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import hides where it leads"
            assert node.module is not None
            yield node.lineno, node.module
            if node.module == "fragscope":
                yield from ((node.lineno, f"fragscope.{alias.name}") for alias in node.names)


def ring_of(name: str) -> str:
    return name.split(".", maxsplit=1)[0]


def ours(module: str) -> str | None:
    if module == "fragscope" or not module.startswith("fragscope."):
        return None
    return module.removeprefix("fragscope.")


def within(name: str, place: str) -> bool:
    return name == place or name.startswith(place + ".")


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=[name for name, _ in modules()])
def test_imports_only_go_down(name: str, path: Path) -> None:
    ring = ring_of(name)
    for line, module in imports(path):
        own = ours(module)
        if own is None or ring in ANYTHING or ring_of(own) == ring or own.startswith("__"):
            continue
        allowed = any(within(own, place) for place in ALLOWED[ring] if place)
        assert allowed, f"{path}:{line}: {name} must not import {own}"


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=[name for name, _ in modules()])
def test_the_core_does_not_touch_the_world(name: str, path: Path) -> None:
    if ring_of(name) not in (*PURE_RINGS, "model"):
        return
    for line, module in imports(path):
        top = module.split(".")[0]
        assert top == "fragscope" or top in ALLOWED_IN_PURE, f"{path}:{line}: the pure core imports {module}"


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=[name for name, _ in modules()])
def test_third_parties_stay_in_their_rooms(name: str, path: Path) -> None:
    for line, module in imports(path):
        top = module.split(".")[0]
        if top in HOMES:
            at_home = any(within(name, place) for place in HOMES[top])
            assert at_home, f"{path}:{line}: {top} belongs in {', '.join(HOMES[top])}"
        else:
            known = top == "fragscope" or top in sys.stdlib_module_names
            assert known, f"{path}:{line}: {top} has no room of its own; add it to HOMES and pyproject"


def test_every_module_is_in_the_picture() -> None:
    picture = (REPOSITORY / "docs" / "architecture.md").read_text()
    for name, path in modules():
        if name.startswith("__") or path.name == "__init__.py":
            continue
        assert path.name in picture or path.stem in picture, f"{path.name} is missing in docs/architecture.md"
