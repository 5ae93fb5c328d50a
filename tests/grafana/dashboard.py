"""The dashboard as the tests read it."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.paths import REPOSITORY

FOLDER = REPOSITORY / "grafana"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "fragscope-engine.json").read_text())
ROWS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] == "row"]
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ANNOTATIONS: list[dict[str, Any]] = [a for a in DASHBOARD["annotations"]["list"] if not a.get("builtIn")]
VARIABLES: dict[str, dict[str, Any]] = {v["name"]: v for v in DASHBOARD["templating"]["list"]}

_VALUES = {
    "namespace": ".*",
    "target": "demo",
    "engine": "0",
    "__rate_interval": "1m",
    "__interval": "15s",
    "__range": "1h",
}


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of the dashboard, and where it stands."""

    where: str
    written: str
    instant: bool

    @property
    def expression(self) -> str:
        """As Prometheus gets it, for the demo's only engine."""
        return re.sub(r"\$\{?(\w+)\}?", lambda found: _VALUES[found[1]], self.written)


def _queries() -> Iterator[Query]:
    for panel in PANELS:
        for target in panel["targets"]:
            yield Query(f"{panel['title']} {target['refId']}", target["expr"], target["instant"])
    for annotation in ANNOTATIONS:
        yield Query(f"annotation {annotation['name']}", annotation["target"]["expr"], instant=False)


QUERIES: tuple[Query, ...] = tuple(_queries())
