"""Rewrites the tables of docs/configuration.md and docs/metrics.md from the code; a test compares them."""

import re
from collections.abc import Iterable
from pathlib import Path

from fragscope.serve.collector import CATALOGUE
from fragscope.settings_listing import documented

DOCS = Path(__file__).resolve().parent.parent / "docs"


def settings_table() -> list[str]:
    """A row per setting."""
    return ["| key | default | meaning |", "|---|---|---|"] + [
        f"| `{key}` | `{default}` | {meaning} |" for key, default, meaning in documented()
    ]


def metrics_table() -> list[str]:
    """A row per family."""
    rows = ["| family | labels beyond target | type | meaning |", "|---|---|---|---|"]
    for family in CATALOGUE:
        labels = " ".join(f"`{label}`" for label in family.labels)
        rows.append(f"| `{family.name}` | {labels} | {family.kind} | {family.help} |")
    return rows


def write(page: str, rows: Iterable[str]) -> None:
    """Replaces what stands between the page's two marker lines."""
    path = DOCS / page
    table = "\n".join(rows)
    begin, end = "<!-- table -->", "<!-- end of table -->"
    text = path.read_text()
    path.write_text(re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n{table}\n{end}", text, flags=re.DOTALL))


if __name__ == "__main__":
    write("configuration.md", settings_table())
    write("metrics.md", metrics_table())
