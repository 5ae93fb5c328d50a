"""What the dashboard's file promises, without a Prometheus: Grafana would take it, and every panel explains itself."""

import itertools
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fragscope.model import Phase
from fragscope.serve.collector import CATALOGUE
from tests.grafana.dashboard import ANNOTATIONS, DASHBOARD, FOLDER, PANELS, QUERIES, ROWS, VARIABLES, Query

VLLM = {
    "vllm:request_prompt_tokens_sum",
    "vllm:request_prompt_tokens_count",
    "vllm:request_generation_tokens_sum",
    "vllm:request_generation_tokens_count",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
}
"""fragscope never exports these again; the user's Prometheus joins them."""

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
every_panel = pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
every_query = pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)


def selectors(node: Any) -> Iterator[Any]:
    """Every vector selector below a node of promql-parser."""
    if type(node).__name__ == "VectorSelector":
        yield node
    below = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "vector_selector", "param")]
    for child in [*below, *(getattr(node, "args", None) or [])]:
        if child is not None and not isinstance(child, str | float):
            yield from selectors(child)


def parsed(query: Query) -> list[Any]:
    promql = pytest.importorskip("promql_parser", reason="promql-parser is not installed (pip)")
    return list(selectors(promql.parse(query.expression)))


def test_the_address_of_the_dashboard_is_stable() -> None:
    assert DASHBOARD["uid"] == "fragscope-engine"
    assert "id" not in DASHBOARD, "ids belong to one Grafana"


def test_it_is_written_for_grafana_11_and_later() -> None:
    assert DASHBOARD["schemaVersion"] == 39
    assert {panel["type"] for panel in PANELS} <= {"stat", "bargauge", "timeseries", "state-timeline", "table"}


def test_it_opens_on_a_sane_range_and_refreshes_at_a_sane_pace() -> None:
    assert DASHBOARD["time"] == {"from": "now-1h", "to": "now"}
    assert DASHBOARD["refresh"] == "30s"
    assert DASHBOARD["refresh"] in DASHBOARD["timepicker"]["refresh_intervals"]


def test_ids_are_unique() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_titles_are_unique() -> None:
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    assert len(titles) == len(set(titles))


def test_no_panel_lies_on_another_or_beyond_the_edge() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        for cell in itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])):
            assert cell not in taken, f"{panel['title']} lies on {taken[cell]}"
            assert cell[0] < 24, f"{panel['title']} is too wide"
            taken[cell] = panel["title"]


def test_there_is_a_row_for_each_question() -> None:
    assert [row["title"] for row in ROWS] == [
        "Verdict now, and why",
        "Timeline",
        "KV usage against outcomes",
        "VRAM",
        "Lengths and waste",
        "Evidence and sources",
    ]


@every_panel
def test_every_panel_says_in_one_sentence_what_to_do_with_it(panel: dict[str, Any]) -> None:
    description = panel["description"]
    assert description.endswith(".")
    assert ". " not in description
    assert len(description) > 60


@every_panel
def test_every_panel_says_what_absence_means(panel: dict[str, Any]) -> None:
    absence = panel["fieldConfig"]["defaults"]["noValue"]
    assert absence
    assert absence not in {"0", "-", "No data", "N/A"}


@every_panel
def test_every_panel_has_a_unit_or_words_for_its_values(panel: dict[str, Any]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults.get("unit") or (panel["type"] == "state-timeline" and defaults["mappings"])


@every_panel
def test_every_panel_asks_the_chosen_prometheus(panel: dict[str, Any]) -> None:
    assert panel["datasource"] == DATASOURCE
    assert panel["targets"]
    assert all(target["datasource"] == DATASOURCE for target in panel["targets"])


@every_panel
def test_the_first_threshold_of_every_panel_has_no_lower_end(panel: dict[str, Any]) -> None:
    first, *others = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert first["value"] is None
    values = [step["value"] for step in others]
    assert values == sorted(values)


@pytest.mark.parametrize("title", ["Phase", "Phase over time"])
def test_phases_have_their_names_and_a_colour_each(title: str) -> None:
    panel = next(panel for panel in PANELS if panel["title"] == title)
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    options = mapping["options"]
    assert [options[str(i)]["text"] for i in range(len(Phase))] == [str(phase) for phase in Phase]
    assert len({option["color"] for option in options.values()}) == len(Phase)
    for number, phase in enumerate(Phase):
        assert f'phase="{phase}"}} * {number}' in panel["targets"][0]["expr"]


def test_variables_are_filled_from_our_own_series() -> None:
    assert list(VARIABLES) == ["datasource", "namespace", "target", "engine"]
    names = {family.name for family in CATALOGUE}
    for name in ("namespace", "target", "engine"):
        found = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", VARIABLES[name]["query"]["query"])
        assert found is not None
        assert found[1] in names
        assert found[2] == name
        assert VARIABLES[name]["datasource"] == DATASOURCE


def test_series_without_a_namespace_are_found_too() -> None:
    assert VARIABLES["namespace"]["includeAll"]
    assert VARIABLES["namespace"]["allValue"] == ".*"


@every_query
def test_every_query_keeps_to_the_chosen_engine(query: Query) -> None:
    per_engine = {family.name for family in CATALOGUE if "engine" in family.labels} | VLLM
    for selector in re.finditer(r"([a-z_:]+)\{([^}]*)\}", query.written):
        assert 'namespace=~"$namespace"' in selector[2]
        assert ('target="$target"' in selector[2]) == (selector[1] not in VLLM)
        assert ('engine=~"$engine|"' in selector[2]) == (selector[1] in per_engine)


@every_query
def test_vllms_series_are_joined_with_the_engine_that_fragscope_watches(query: Query) -> None:
    if "vllm:" in query.written:
        assert " and on (namespace, pod, model_name, engine) fragscope_" in query.written


@every_query
def test_every_query_parses_and_names_only_metrics_that_exist(query: Query) -> None:
    known = {family.name for family in CATALOGUE} | VLLM
    found = parsed(query)
    assert found
    assert {selector.name for selector in found} <= known


def test_every_vllm_name_on_the_list_is_used() -> None:
    assert {name for name in VLLM if any(name in query.written for query in QUERIES)} == VLLM


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt install prometheus)")
def test_the_oldest_prometheus_we_promise_takes_every_query(tmp_path: Path) -> None:
    rules = "".join(
        f"      - record: dashboard:query_{number}\n        expr: |-\n          {query.expression}\n"
        for number, query in enumerate(QUERIES)
    )
    file = tmp_path / "rules.yml"
    file.write_text(f"groups:\n  - name: dashboard\n    rules:\n{rules}")
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(QUERIES)} rules found" in done.stdout


def test_phase_changes_and_restarts_are_marked() -> None:
    rises, restarts = ANNOTATIONS
    assert 'phase=~"suspected|confirmed"' in rises["target"]["expr"]
    assert " unless " in rises["target"]["expr"]
    assert "fragscope_engine_restarts_total" in restarts["target"]["expr"]
    assert all(annotation["enable"] and annotation["datasource"] == DATASOURCE for annotation in ANNOTATIONS)


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (pip)")
    sources = yaml.safe_load((FOLDER / "provisioning/datasources/prometheus.yaml").read_text())
    (source,) = sources["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    folders = yaml.safe_load((FOLDER / "provisioning/dashboards/fragscope.yaml").read_text())
    (provider,) = folders["providers"]
    assert provider["type"] == "file"
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"
    mentioned = re.findall(r"[\w-]+\.json", (FOLDER / "provisioning/dashboards/fragscope.yaml").read_text())
    assert mentioned
    assert all((FOLDER / name).exists() for name in mentioned)
