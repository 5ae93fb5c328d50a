"""Where the tests' own files lie."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
DATA = REPOSITORY / "tests" / "data"
VLLM_032 = DATA / "vllm-0.32"
H200 = DATA / "h200"
OOM_CASES = DATA / "oom-cases"
