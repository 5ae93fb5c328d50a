"""Rules and routes as shipped, checked with the real tools."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fragscope.model import Condition, Outcome, Phase
from fragscope.serve.collector import CATALOGUE
from fragscope.serve.feeds import SourceStatus
from tests.paths import REPOSITORY

PROMETHEUS = REPOSITORY / "deploy" / "prometheus"
ALERTMANAGER = REPOSITORY / "deploy" / "alertmanager" / "alertmanager.yml"
RULE_FILES = sorted(path for path in PROMETHEUS.glob("*.yaml"))
RULE_TESTS = sorted((PROMETHEUS / "tests").glob("*.yaml"))
PAGES = {"FragscopePseudoOOMSuspected", "FragscopePseudoOOMConfirmed", "FragscopeEngineDown", "FragscopeEngineStalled"}
NOT_OURS = {"up", "kube_pod_labels", "http_requests_total"}

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is missing (apt: prometheus)")
needs_amtool = pytest.mark.skipif(
    shutil.which("amtool") is None, reason="amtool is missing (apt: prometheus-alertmanager)"
)


def rules(path: Path) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for path in RULE_FILES for rule in rules(path) if "alert" in rule]


def tool(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


@needs_promtool
@pytest.mark.parametrize("path", RULE_FILES, ids=lambda path: path.name)
def test_promtool_finds_no_fault(path: Path) -> None:
    done = tool("promtool", "check", "rules", "--lint=all", "--lint-fatal", path)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_the_example_configuration_is_valid() -> None:
    done = tool("promtool", "check", "config", PROMETHEUS / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.name)
def test_the_rules_do_what_their_tests_say(path: Path) -> None:
    done = tool("promtool", "test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_to_fire_and_not_to_fire() -> None:
    fires: dict[str, int] = {}
    quiet: dict[str, int] = {}
    for path in RULE_TESTS:
        for test in yaml.safe_load(path.read_text())["tests"]:
            for row in test.get("alert_rule_test", []):
                count = fires if row["exp_alerts"] else quiet
                count[row["alertname"]] = count.get(row["alertname"], 0) + 1
    for rule in alerts():
        assert fires.get(rule["alert"]), f"{rule['alert']} is never seen firing"
        if rule["alert"].startswith("Fragscope"):
            assert quiet.get(rule["alert"], 0) >= 3, f"{rule['alert']} is not seen resolved and quiet"


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_says_what_a_person_needs(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert rule["labels"]["component"] == "fragscope"
    assert {"summary", "description", "runbook_url"} <= set(rule["annotations"])
    assert "$" not in rule["annotations"]["summary"], "a summary is a static sentence"
    page = rule["annotations"]["runbook_url"].rpartition("/")[2]
    assert (REPOSITORY / "docs" / "runbooks" / page).exists(), page


def test_only_what_is_below_nine_to_one_never_pages() -> None:
    by_name = {rule["alert"]: rule["labels"]["severity"] for rule in alerts()}
    assert by_name["FragscopePseudoOOMConfirmed"] == "critical"
    assert by_name["FragscopePseudoOOMSuspected"] == "warning"
    assert by_name["FragscopePseudoOOMTicket"] == by_name["FragscopeMemoryWatch"] == "info"
    without = [rule["alert"] for rule in rules(PROMETHEUS / "without-sidecar.yaml") if "alert" in rule]
    assert {by_name[name] for name in without} == {"info"}


@pytest.mark.parametrize("path", RULE_FILES, ids=lambda path: path.name)
def test_every_metric_in_a_rule_is_exported(path: Path) -> None:
    known = {family.name for family in CATALOGUE} | NOT_OURS
    for rule in rules(path):
        for name in re.findall(r"\b(?:fragscope_\w+|kube_\w+|up|http_requests_total)(?=[{\[)\s])", rule["expr"]):
            assert name in known, f"{rule.get('alert') or rule.get('record')} asks for {name}"


def test_every_label_value_in_a_rule_is_one_of_ours() -> None:
    words = {*map(str, Phase), *map(str, Condition), *map(str, Outcome), "low", "mid", "high", "engine", "gpu"}
    for path in RULE_FILES:
        for rule in rules(path):
            for _, values in re.findall(r"\b(phase|condition|outcome|kv_band|evidence)=~?\"([^\"]+)\"", rule["expr"]):
                assert set(values.split("|")) <= words, rule


def test_sources_have_the_names_that_dashboards_use() -> None:
    assert SourceStatus("vllm").source == "vllm"


@needs_amtool
def test_alertmanagers_configuration_is_valid() -> None:
    done = tool("amtool", "check-config", ALERTMANAGER)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_amtool
@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_goes_where_it_belongs(rule: dict[str, Any]) -> None:
    labels = [f"alertname={rule['alert']}", *(f"{name}={value}" for name, value in rule["labels"].items())]
    done = tool("amtool", "config", "routes", "test", f"--config.file={ALERTMANAGER}", *labels)
    assert done.stdout.strip() == ("page" if rule["alert"] in PAGES else "tickets")


def test_nothing_but_its_own_confirmation_silences_a_pseudo_oom() -> None:
    inhibitions = yaml.safe_load(ALERTMANAGER.read_text())["inhibit_rules"]
    over = [rule for rule in inhibitions if any("PseudoOOM" in matcher for matcher in rule["target_matchers"])]
    assert [rule["source_matchers"] for rule in over] == [['alertname="FragscopePseudoOOMConfirmed"']]
    for rule in inhibitions:
        assert {"namespace", "pod", "container", "target"} <= set(rule["equal"]), "never across targets"
