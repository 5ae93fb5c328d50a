"""The report on docs/evaluation.md, between two markers: what stands around it is written by people."""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from evaluation.seeds import of_tuning, spoken
from evaluation.sheets import Sheet

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs" / "evaluation.md"
BEGIN = "<!-- evaluation -->"
END = "<!-- end of evaluation -->"


def refusal(seeds: Iterable[int], settings: Iterable[str], *, partial: bool) -> str | None:
    """Why these figures must not be written; None if they may."""
    tuning = of_tuning(seeds)
    if tuning:
        return f"seeds {spoken(tuning)} are for tuning; the page holds figures of seeds that nothing was tuned on"
    if list(settings):
        return "the page holds figures of the defaults; leave out --set"
    if partial:
        return "the page holds every scenario, tier and rule in full; leave out what narrows or replaces them"
    return None


def write(report: str, path: Path = PAGE) -> None:
    """Replaces what stands between the markers. Raises ValueError where they are missing."""
    text = path.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{path} has no {BEGIN} and {END}: the report has no place there")
    path.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{report}\n{END}", text, flags=re.DOTALL))


def report_of(header: str, sheets: Iterable[Sheet]) -> str:
    """The header and the tables."""
    return "\n\n".join([header, *(sheet.markdown() for sheet in sheets)])


def header_of(seeds: Iterable[int], scenarios: int, hours: float, interval_s: float, took_s: float) -> str:
    """What was run, so that anybody can run it again."""
    listed = list(seeds)
    return (
        f"Commit {commit()}; {scenarios} scenarios, seeds {spoken(listed)} ({len(listed)} each), {hours:.0f} simulated "
        f"hours; a poll every {interval_s:g} s; took {took_s / 60:.0f} min."
    )


def commit() -> str:
    """The commit that was run, and whether the code was changed since."""
    name = _git("rev-parse", "--short=12", "HEAD") or "unknown"
    dirty = _git("status", "--porcelain", "--", "src", "evaluation")
    return f"{name} with uncommitted changes" if dirty else name


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)  # noqa: S603, S607 - git by name, fixed words
    return done.stdout.strip()
