"""Files and functions stay small: good taste alone does not keep them so."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.paths import REPOSITORY

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 45
TABLES = {"collector.py"}
"""The metric catalogue is data, a row a family; it may be longer."""


def sources() -> Iterator[Path]:
    yield from sorted((REPOSITORY / "src").rglob("*.py"))


def test_files_stay_small() -> None:
    long = {path.name: n for path in sources() if (n := len(path.read_text().splitlines())) > MAX_FILE_LINES}
    assert not {name: n for name, n in long.items() if name not in TABLES}


def test_functions_stay_small() -> None:
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                own = lines - _docstring_lines(node)
                assert own <= MAX_FUNCTION_LINES, f"{path.name}:{node.lineno} {node.name} has {own} lines"


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(node) is None:
        return 0
    first = node.body[0]
    return (first.end_lineno or 0) - first.lineno + 1


def test_nothing_is_called_a_helper() -> None:
    for path in sources():
        assert path.stem not in {"utils", "util", "helpers", "helper", "manager", "data", "common", "misc"}
