"""`python -m evaluation`: runs, a progress bar, tables, and on request the page and a file of episodes."""

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from evaluation import page
from evaluation.naive import NAIVE
from evaluation.overrides import overridden
from evaluation.running import Job, watch_all
from evaluation.scoring import Mistake, RunScore
from evaluation.seeds import of_judging, parse_seeds
from evaluation.sheets import sheets
from evaluation.stage import INTERVAL_S, SIMULATOR, Theatre, recorded
from evaluation.tiers import TIERS
from evaluation.watched import EpisodeRow
from fragscope import report

_WIDE = 240
"""Characters that the tables take; a narrower terminal scrolls or wraps."""
_EXAMPLE = """examples:
  python -m evaluation --write                              # the held-out seeds, into docs/evaluation.md
  python -m evaluation --seeds tuning --rules none --set weights.prior=-2
  python -m evaluation --seeds 0..4 --scenarios healthy --tiers T0,T3 --episodes episodes.jsonl
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m evaluation",
        description="How often fragscope and the naive rules are right, on simulated runs.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--seeds", default="held-out", help="tuning, held-out, 0..9, or a list (default: held-out)")
    made.add_argument("--scenarios", default="", help="names with commas (default: all)")
    made.add_argument("--recordings", nargs="+", default=[], metavar="FILE", help="labelled recordings instead")
    made.add_argument("--tiers", default="", help=f"of {', '.join(t.name for t in TIERS)}; or none (default: all)")
    made.add_argument("--rules", default="", help=f"of {', '.join(NAIVE)}; or none (default: all)")
    made.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="another constant; repeatable")
    made.add_argument("--interval", type=float, default=INTERVAL_S, help="seconds between polls")
    made.add_argument("--hours", type=float, help="how long each run is (default: as its scenario says)")
    made.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="how many at once")
    made.add_argument("--episodes", type=Path, help="write every episode as a line of JSON to this file")
    made.add_argument("--mistakes", type=Path, help="write every miss, false alarm and wrong cause to this file")
    made.add_argument("--write", action="store_true", help="write the tables into docs/evaluation.md")
    return made


def main(words: Sequence[str] | None = None, theatre: Theatre = SIMULATOR, path: Path = page.PAGE) -> int:
    """0, or 2 where the command line makes no sense."""
    asked = parser().parse_args(words)
    if asked.recordings:
        theatre = Theatre(recorded, tuple(asked.recordings))
        asked.seeds = "0"
    try:
        seeds, jobs = _jobs(asked, theatre)
    except ValueError as error:
        return _refuse(str(error))
    partial = bool(asked.scenarios or asked.tiers or asked.rules or asked.hours or asked.recordings)
    refused = page.refusal(seeds, asked.set, partial=partial) if asked.write else None
    if refused is not None:
        return _refuse(refused)
    began = time.monotonic()
    scores = _run(jobs, asked.processes)
    took_s = time.monotonic() - began
    _print(scores)
    if asked.episodes is not None:
        _save((row for score in scores for row in score.episodes), asked.episodes)
    if asked.mistakes is not None:
        _save((mistake for score in scores for mistake in score.mistakes), asked.mistakes)
    if asked.write:
        hours = sum(s.seconds for s in scores if s.run.observer == TIERS[0].name) / 3600
        header = page.header_of(seeds, len({job.scenario for job in jobs}), hours, asked.interval, took_s)
        page.write(page.report_of(header, sheets(scores)), path)
    return 0


def _jobs(asked: argparse.Namespace, theatre: Theatre) -> tuple[tuple[int, ...], list[Job]]:
    seeds = parse_seeds(asked.seeds)
    judging = of_judging(seeds)
    if asked.set and judging:
        raise ValueError("constants are tried on tuning seeds only: add --seeds tuning")
    scenarios = _names(asked.scenarios, theatre.scenarios, "scenario")
    tiers = _names(asked.tiers, tuple(tier.name for tier in TIERS), "tier")
    rules = _names(asked.rules, tuple(NAIVE), "rule")
    parameters = overridden(asked.set)
    jobs = [
        Job(theatre.play, scenario, seed, asked.interval, tiers, rules, parameters, asked.hours)
        for seed in seeds
        for scenario in scenarios
    ]
    return seeds, jobs


def _names(text: str, known: tuple[str, ...], kind: str) -> tuple[str, ...]:
    if not text:
        return known
    if text == "none":
        return ()
    for name in text.split(","):
        if name not in known:
            raise ValueError(f"{kind} {name!r} is unknown; there are {', '.join(known)}")
    return tuple(text.split(","))


def _run(jobs: list[Job], processes: int) -> list[RunScore]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    scores: list[RunScore] = []
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        for found in progress.track(watch_all(jobs, processes), total=len(jobs), description="runs"):
            scores += found
    order = {name: rank for rank, name in enumerate((*NAIVE, *(tier.name for tier in TIERS)))}
    return sorted(scores, key=lambda s: (order[s.run.observer], s.run.scenario, s.run.seed))


def _print(scores: list[RunScore]) -> None:
    out = Console(width=max(_WIDE, Console().width), highlight=False)
    for sheet in sheets(scores):
        report.table(out, f"\n{sheet.title}", sheet.columns, sheet.rows)


def _save(rows: Iterable[EpisodeRow | Mistake], path: Path) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def _refuse(why: str) -> int:
    print(f"evaluation: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
