"""`python -m fragscope.simulate SCENARIO --seed N --hours H --out FILE.jsonl.gz`: a scenario as a recording."""

import argparse
import gzip
import sys
from pathlib import Path

from fragscope.recording import encode_line
from fragscope.simulate.catalogue import SCENARIOS
from fragscope.simulate.run import generate


def main(arguments: list[str] | None = None) -> int:
    """Writes the recording; returns 0."""
    stories = "\n".join(f"  {one.name:22} {one.story}" for one in SCENARIOS.values())
    parser = argparse.ArgumentParser(
        prog="python -m fragscope.simulate",
        description="Write a simulated run as a recording with label lines.",
        epilog=f"scenarios:\n{stories}\n\nexample: python -m fragscope.simulate slow-leak --seed 3 --out run.jsonl.gz",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", choices=sorted(SCENARIOS), metavar="SCENARIO")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same run (default 0)")
    parser.add_argument("--hours", type=float, help="length of the run (default: the scenario's own)")
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between polls, whole (default 5)")
    parser.add_argument("--out", type=Path, required=True, help="FILE.jsonl or FILE.jsonl.gz")
    asked = parser.parse_args(arguments)
    if asked.hours is not None and asked.hours <= 0:
        parser.error(f"--hours is {asked.hours}, but must be above 0")
    opened = gzip.open if asked.out.suffix == ".gz" else open
    try:
        lines = generate(asked.scenario, asked.seed, asked.hours, asked.interval)
        with opened(asked.out, "wb") as out:
            for line in lines:
                out.write(encode_line(line) + b"\n")
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{asked.out} cannot be written: {error.strerror or error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
