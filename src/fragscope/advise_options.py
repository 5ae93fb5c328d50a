"""The options of `advise`: what is looked at, and what is told beside it."""

import argparse
import re
from pathlib import Path
from typing import Any

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def add_options(made: Any) -> None:
    """Adds them to the command's parser; targets and durations are the same as of other commands."""
    made.add_argument("--recording", action="append", metavar="FILE", help="look at a recording; may be repeated")
    made.add_argument("--lengths", metavar="FILE", help="CSV with prompt_tokens and output_tokens; - is standard input")
    made.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="before and after a change: two recordings, or with --prometheus two windows (14d/7d 7d/now)",
    )
    made.add_argument("--prometheus", metavar="URL", help="look at the history of a Prometheus")
    made.add_argument("--query-range", metavar="TIME", help="how far back (default: 7d)")
    made.add_argument("--query-step", metavar="TIME", help="between its samples (default: 60s)")
    made.add_argument("--match", metavar="SELECTOR", help="label selector for every query")
    made.add_argument("--gpu-match", metavar="SELECTOR", help="another one for GPU series")
    made.add_argument("--model-config", type=Path, metavar="FILE", help="config.json of the model, or its folder")
    made.add_argument("--weights-bytes", type=_size, metavar="BYTES", help="weights of the whole model, e.g. 131.4GiB")
    made.add_argument("--gpu-memory-bytes", type=_size, metavar="BYTES", help="memory of one GPU, e.g. 192GiB")
    made.add_argument("--gpu-memory-utilization", type=_ratio, metavar="RATIO", help="where no engine shows it")
    made.add_argument("--tensor-parallel-size", type=_count, metavar="N", help="default: the target's GPUs, else 1")
    made.add_argument("--block-size", type=_count, metavar="N", help="where no engine shows it (default: 16)")
    made.add_argument("--kv-cache-dtype", metavar="TYPE", help="where no engine shows it: auto, fp8, fp8_ds_mla")
    made.add_argument("--backend", metavar="NAME", help="attention backend as vLLM logs it, e.g. ROCM_ATTN")
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw a .png, .svg or .pdf (extra: fragscope[plot])")


def stray_options(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Options for Prometheus that were given without one."""
    names = ("query_range", "query_step", "match", "gpu_match")
    given = [name for name in names if getattr(arguments, name) is not None]
    return () if arguments.prometheus is not None else tuple(f"--{name.replace('_', '-')}" for name in given)


def _size(text: str) -> float:
    found = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]*)", text)
    unit = _UNITS.get(found[2].upper()) if found is not None else None
    try:
        size = float(found[1]) * unit if found is not None and unit is not None else 0.0
    except ValueError:
        size = 0.0
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write bytes, or 192GiB or 206GB")
    return size


def _ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no ratio above 0 and up to 1")
    return ratio


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)
