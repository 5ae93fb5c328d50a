"""What a log tells of the stack it came from; advice is gated on it."""

import re
from dataclasses import dataclass, replace

CUES = (
    "PyTorch version",
    "torch==",
    "ROCM used",
    "LLM engine (v",
    "server version",
    "enable_sleep_mode",
    "expandable_segments",
    "torch ",
)
_TORCH = re.compile(r"(?:PyTorch version: ?|\btorch==)(\d{1,3}\.\d{1,3})[\w.]*(?:\+(rocm|cu|cpu))?")
_ROCM = re.compile(r"ROCM used to build PyTorch ?: (\d{1,3}\.\d{1,3})|\+rocm(\d{1,3}\.\d{1,3})")
_VLLM = re.compile(r"(?:LLM engine \(v|server version:? v?)(\d{1,3}\.\d{1,3})")
_SLEEP = re.compile(r"enable_sleep_mode['\"]?[=:] ?True")


@dataclass(frozen=True, slots=True)
class Stack:
    """Versions as (major, minor), None where the log does not say."""

    torch: tuple[int, int] | None = None
    rocm: tuple[int, int] | None = None
    vllm: tuple[int, int] | None = None
    sleep_mode: bool | None = None
    expandable_refused: bool = False
    expandable_on: bool = False


def learn(stack: Stack, line: str) -> Stack:
    """The stack with what this line adds."""
    if not any(cue in line for cue in CUES):
        return stack
    torch, rocm, vllm = _TORCH.search(line), _ROCM.search(line), _VLLM.search(line)
    if torch is not None:
        stack = replace(stack, torch=_version(torch[1]))
    if rocm is not None:
        stack = replace(stack, rocm=_version(rocm[1] or rocm[2]))
    if vllm is not None:
        stack = replace(stack, vllm=_version(vllm[1]))
    if _SLEEP.search(line):
        stack = replace(stack, sleep_mode=True)
    elif "enable_sleep_mode=False" in line:
        stack = replace(stack, sleep_mode=False)
    if "expandable_segments:True" in line and "try setting" not in line:
        stack = replace(stack, expandable_on=True)
    if "expandable_segments not supported" in line:
        stack = replace(stack, expandable_refused=True)
    return stack


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
