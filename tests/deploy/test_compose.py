"""The compose files, as far as they can be tested without an engine."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.tools import COMPOSE, yaml

FILES = ("compose.yaml", "compose.demo.yaml")


def services(name: str) -> dict[str, dict[str, Any]]:
    """Its services, with what they extend."""
    found: dict[str, dict[str, Any]] = yaml.safe_load((COMPOSE / name).read_text())["services"]
    for key, service in found.items():
        if "extends" in service:
            wanted = service.pop("extends")
            found[key] = services(wanted["file"])[wanted["service"]] | service
    return found


def mounts(name: str) -> list[tuple[str, str]]:
    return [
        (source, target)
        for service in services(name).values()
        for source, target, *_ in (volume.split(":") for volume in service.get("volumes", []))
    ]


@pytest.mark.parametrize("name", FILES)
def test_what_is_mounted_exists(name: str) -> None:
    volumes = yaml.safe_load((COMPOSE / name).read_text())["volumes"]
    for source, _ in mounts(name):
        if source.startswith("."):
            assert (COMPOSE / source).exists(), source
        else:
            assert source in volumes


@pytest.mark.parametrize("name", FILES)
def test_every_image_is_pinned_to_a_version(name: str) -> None:
    for service in services(name).values():
        assert re.fullmatch(r"[a-z0-9/-]+:v?\d+\.\d+\.\d+", service["image"]), service["image"]


@pytest.mark.parametrize("name", FILES)
def test_nothing_listens_beyond_the_machine(name: str) -> None:
    for service in services(name).values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


@pytest.mark.parametrize("name", FILES)
def test_fragscope_is_built_here_and_may_do_nothing(name: str) -> None:
    fragscope = services(name)["fragscope"]
    assert (COMPOSE / fragscope["build"] / "Dockerfile").is_file()
    assert fragscope["read_only"] is True
    assert fragscope["cap_drop"] == ["ALL"]
    assert fragscope["mem_limit"] == "128m"
    assert "devices" not in fragscope


def test_a_stop_announces_itself_where_fragscope_looks() -> None:
    both = services("compose.yaml")
    assert both["vllm"]["pre_stop"] == [{"command": ["/bin/sh", "-c", "touch /run/fragscope/planned-stop"]}]
    assert "run:/run/fragscope" in both["vllm"]["volumes"]
    assert "run:/run/fragscope:ro" in both["fragscope"]["volumes"]


def test_prometheus_scrapes_what_runs_by_the_rules_that_are_mounted() -> None:
    config = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    assert targets == {"fragscope": ["fragscope:23724"], "vllm": ["vllm:8000"]}
    assert set(targets) <= set(services("compose.yaml"))
    rules = [target for _, target in mounts("compose.yaml") if Path(target).match(config["rule_files"][0])]
    assert len(rules) == 2
    assert not any("without" in target for target in rules)


def test_grafana_finds_its_dashboard_and_prometheus() -> None:
    grafana = COMPOSE.parent.parent / "grafana" / "provisioning"
    provider = yaml.safe_load((grafana / "dashboards" / "fragscope.yaml").read_text())["providers"][0]
    assert any(Path(target).parent == Path(provider["options"]["path"]) for _, target in mounts("compose.yaml"))
    source = yaml.safe_load((grafana / "datasources" / "prometheus.yaml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
