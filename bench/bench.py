"""Measures what fragscope costs against its aims: `python -m bench.bench [--quick]`; exit code 1 if one is missed.

Pages are recorded from vLLM 0.32 and come over HTTP from another process; the GPU is a simulated sysfs tree.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.daemon_cost import memory_figure, share_figures
from bench.figure import FULL, QUICK, Effort, Figure
from bench.poll_cost import detect_figures, parse_figures, poll_figures
from bench.recorded_pages import eight_engines, recorded
from fragscope import report

NOTES = (
    "Times are CPU times of the measuring process, medians; pages are fetched from another process.",
    "8 engines: the page of one, its per-engine samples repeated for engine 0 to 7, the server's own once.",
    "prometheus_client parses the whole page; ours also makes the engine's reading. Their values were equal.",
    "Memory: samples taken at --interval 0.1 instead of 1, to save time; then every page was asked for once.",
    "Shares of a core: one server polled every second, one simulated GPU read 20 times a second; sysfs alone is asked.",
)


def figures(effort: Effort, sysfs_root: Path) -> Iterator[Figure]:
    """Every figure, one after another."""
    pages = recorded()
    warm = effort.warm_polls
    yield from poll_figures(pages, sysfs_root, "1 engine", 2.5, warm, effort.polls)
    yield from parse_figures(pages, effort.parses)
    many = eight_engines(pages)
    yield from poll_figures(many, sysfs_root, "8 engines", 10.0, warm, effort.wide_polls)
    yield from detect_figures(pages, effort.observes)
    yield memory_figure(pages, sysfs_root, effort.samples)
    yield from share_figures(pages, sysfs_root, effort.share_s, effort.feed_s)


def main() -> int:
    """Prints the table; 1 if an aim is missed."""
    parser = argparse.ArgumentParser(description="What fragscope costs, against its aims.")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes, and coarser")
    effort = QUICK if parser.parse_args().quick else FULL
    with tempfile.TemporaryDirectory(prefix="fragscope-bench-") as folder:
        found = list(figures(effort, Path(folder) / "sys"))
    out = report.console()
    report.table(out, "", ("what", "measured", "aim", "ok?"), (figure.cells() for figure in found))
    for note in NOTES:
        report.say(out, note)
    return 1 if any(figure.met is False for figure in found) else 0


if __name__ == "__main__":
    sys.exit(main())
