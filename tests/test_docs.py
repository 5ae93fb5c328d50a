"""What the documentation says is true: links lead somewhere, commands exist, names are names."""

import re
from pathlib import Path

import pytest
from tools.write_docs import metrics_table, settings_table

from fragscope.cli import parser
from fragscope.model import Cause, Condition, Outcome, Phase, Reason
from fragscope.serve.collector import CATALOGUE
from tests.paths import REPOSITORY

PAGES = [
    *sorted((REPOSITORY / "docs").glob("*.md")),
    *sorted((REPOSITORY / "docs" / "causes").glob("*.md")),
    *sorted(REPOSITORY.glob("*.md")),
]
SOURCES = sorted((REPOSITORY / "src").rglob("*.py"))


def page(name: str) -> str:
    return (REPOSITORY / "docs" / name).read_text()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_pages_named_in_the_code_exist() -> None:
    for path in SOURCES:
        for name in re.findall(r"docs/[a-z-]+\.md", path.read_text()):
            assert (REPOSITORY / name).exists(), f"{path.name} names {name}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_in_the_pages_are_commands(path: Path) -> None:
    for block in re.findall(r"```(?:sh|console)\n(.*?)```", path.read_text(), re.DOTALL):
        for line in block.splitlines():
            command = line.removeprefix("$ ").split("#")[0].split("|")[0].strip()
            if command.startswith("fragscope "):
                parser().parse_args(command.split()[1:])
            elif command.startswith("make "):
                assert f"\n{command.split()[1]}:" in (REPOSITORY / "Makefile").read_text(), command


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_metrics_in_the_pages_are_metrics(path: Path) -> None:
    known = {family.name for family in CATALOGUE} | {
        "fragscope_exposition_failures_total",
        "fragscope_collect_duration_seconds",
    }
    for name in re.findall(r"\bfragscope_[a-z_]+[a-z]\b", path.read_text()):
        assert name in known, f"{path.name} names {name}"


def test_the_tables_are_the_ones_the_code_gives() -> None:
    assert "\n".join(settings_table()) in page("configuration.md"), "run make docs"
    assert "\n".join(metrics_table()) in page("metrics.md"), "run make docs"


def test_the_verdicts_page_names_every_word() -> None:
    text = page("verdicts.md")
    for word in (*Phase, *Cause, *Condition, *Outcome, *Reason):
        assert f"`{word}`" in text, word


def test_the_changelog_has_this_version() -> None:
    from fragscope import __version__  # noqa: PLC0415

    assert f"## {__version__}" in (REPOSITORY / "CHANGELOG.md").read_text()


def test_nothing_names_a_machine() -> None:
    for path in [*PAGES, *SOURCES, REPOSITORY / "pyproject.toml", REPOSITORY / "Makefile"]:
        for word in ("/" + "work/", "/" + "root/", "../" + "shared"):
            assert word not in path.read_text(), f"{path.name} names {word}"


def outline(text: str) -> tuple[list[str], list[int], list[str], list[str], int]:
    """What two languages must share: code blocks, heading levels, code words, links, table rows."""
    blocks = re.findall(r"```\w*\n.*?```", text, re.DOTALL)
    prose = re.sub(r"```\w*\n.*?```", "", text, flags=re.DOTALL)
    levels = [len(mark) for mark in re.findall(r"^(#+) ", prose, re.MULTILINE)]
    words = re.findall(r"`([^`]+)`", prose)
    links = [link for link in re.findall(r"\]\(([^)]+)\)", prose) if not link.startswith("README")]
    return blocks, levels, sorted(words), links, len(re.findall(r"^\|", prose, re.MULTILINE))


def test_the_chinese_readme_keeps_step_with_the_english_one() -> None:
    english, chinese = ((REPOSITORY / name).read_text() for name in ("README.md", "README.zh-CN.md"))
    assert outline(chinese) == outline(english)
