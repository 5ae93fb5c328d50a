"""`make evaluate-explain`: the public out-of-memory reports through `explain`, as a confusion table by label.

Prints it, and with --write puts it into docs/explain.md between its markers.
"""

import argparse
import collections
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fragscope.detect.parameters import Parameters
from fragscope.explain.postmortem import PostMortem

REPOSITORY = Path(__file__).resolve().parent.parent
CASES = REPOSITORY / "tests" / "data" / "oom-cases"
PAGE = REPOSITORY / "docs" / "explain.md"
BEGIN, END = "<!-- evaluate-explain: begin -->", "<!-- evaluate-explain: end -->"

CAUSES_OF: dict[str, tuple[str, ...]] = {
    "startup_fragmentation": ("fragmentation",),
    "leak_growth": ("memory_growth",),
    "engine_dead_other": ("engine_fault",),
    "unknown": ("unexplained", "memory_undetermined"),
}
"""The causes that a label of the reports stands for; the other labels are causes themselves."""

FACTS = frozenset(
    {
        *("tried", "total", "free", "allocated", "reserved_unallocated", "reserved_total", "private_pools", "in_use"),
        *("processes_in_use", "allowed", "running", "waiting", "swapped", "kv_usage", "cpu_kv_usage", "prompt_tps"),
        *("gen_tps", "max_model_len", "requested", "kv_needed", "kv_available", "kv_tokens", "total_vm", "anon_rss"),
        *("shmem_rss", "exit_code"),
    }
)
"""What a report's text must yield exactly."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What `explain` says of a report; 'nothing' where it finds no incident."""

    cause: str
    probability: float


def outcome(case: dict[str, Any]) -> Outcome:
    """The first incident of a report's excerpt."""
    mortem = PostMortem(Parameters())
    told = [each for line in case["excerpt"].split("\n") for each in mortem.feed(line)] + list(mortem.close())
    if not told:
        return Outcome("nothing", 1.0)
    return Outcome(str(told[0].judged.cause), told[0].judged.probability)


def table(cases: list[dict[str, Any]]) -> str:
    """The confusion table and the rates, in Markdown."""
    said: dict[str, collections.Counter[str]] = {}
    right = {"high": [0, 0], "medium": [0, 0], "low": [0, 0]}
    for case in cases:
        told = outcome(case)
        said.setdefault(case["label"], collections.Counter())[told.cause] += 1
        count = right[case["confidence"]]
        count[0] += told.cause in CAUSES_OF.get(case["label"], (case["label"],))
        count[1] += 1
    lines = ["| label (reports) | right | what was said instead |", "|---|---|---|"]
    for label in sorted(said):
        good = CAUSES_OF.get(label, (label,))
        hits = sum(said[label][cause] for cause in good)
        wrong = ", ".join(f"{cause} {n}" for cause, n in said[label].most_common() if cause not in good)
        lines.append(f"| {label} ({said[label].total()}) | {hits} | {wrong or '-'} |")
    rates = "; ".join(f"{name} {hit} of {n}" for name, (hit, n) in right.items())
    sure = [right["high"][i] + right["medium"][i] for i in (0, 1)]
    lines += ["", (f"Right by the label's own confidence: {rates}. High and medium together: "
              f"{sure[0]} of {sure[1]} ({100 * sure[0] / sure[1]:.0f} %).")]  # fmt: skip
    return "\n".join(lines)


def main() -> int:
    """Prints the table; with --write also into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into docs/explain.md")
    written = parser.parse_args().write
    text = table([json.loads(path.read_text()) for path in sorted(CASES.glob("*.json"))])
    sys.stdout.write(text + "\n")
    if written:
        page = PAGE.read_text()
        before, _, rest = page.partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
