"""Every cause has its page, and every page answers the same four questions."""

import re

import pytest

from fragscope.model import MEMORY_CAUSES, Cause, Condition
from tests.paths import REPOSITORY

FOLDER = REPOSITORY / "docs" / "causes"
CAUSES = [cause for cause in Cause if cause is not Cause.NONE]
QUESTIONS = ["What it looks like", "What it is confused with", "What to do", "What would confirm it"]


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_has_a_page_that_answers_four_questions(cause: Cause) -> None:
    page = (FOLDER / f"{cause}.md").read_text()
    assert page.startswith(f"# `{cause}`\n")
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == QUESTIONS
    assert page.count("\n") < 60


def test_there_is_no_page_of_something_else() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == {*map(str, CAUSES), "README", "conditions"}


def test_the_index_names_every_page() -> None:
    index = (FOLDER / "README.md").read_text()
    linked = set(re.findall(r"\]\((\w+)\.md\)", index))
    assert linked == {*map(str, CAUSES), "conditions"}
    memory, others = index.split("Others:")
    assert all(f"({cause}.md)" in (memory if cause in MEMORY_CAUSES else others) for cause in CAUSES)


def test_every_condition_has_its_row_strongest_first() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (FOLDER / "conditions.md").read_text(), re.MULTILINE)
    assert rows == list(map(str, Condition))
