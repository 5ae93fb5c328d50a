"""Takes the wrapping off a log line: container formats, colours, escapes, prefixes. Pure text work.

What the wrappings look like, and where they come from, is in docs/logs.md.
"""

import html
import json
import re
from dataclasses import dataclass

_COLOUR = re.compile(r"(?:\x1b|\^\[)\[[0-9;]*[A-Za-z]")
_SPACE = re.compile(r"\s+")
_MARKS = str.maketrans("", "", "*`\\\x00")

_STAMP = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?: ?Z|[+-]\d\d:?\d\d)?"
_LEVEL = r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)"
_PIECES = (
    rf"{_STAMP}(?: std(?:out|err) [FP])?(?: - [\w.]+ - {_LEVEL} -)?",
    r"\[rank\d+\]:",
    r"\[[WEIF]\d* [\d:.]* ?[\w.]+\.(?:cpp|h):\d+\]",
    r"\([A-Za-z][\w .]*(?:rank=\d+ )?pid=\d+(?:, ip=[\d.a-f:]+)?\)",
    rf"{_LEVEL}(?: +\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?)?(?: +\[?[\w/.<>-]+:\d+\])",
    rf"{_LEVEL} +\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?",
    rf"{_LEVEL}:? +(?:\[[\w/.]+(?::\d+)?\])?",
    r"\[(?:[Ee]rror|[Ii]nfo|[Ww]arn(?:ing)?)\]",
    r"\(Process\)",
    r"[\w.-]+ +\|(?= )",
    r"\[vllm\]",
    r"\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?(?=  )",
)
_PREFIX = re.compile(r"\s*(?:" + "|".join(_PIECES) + r")(?=\s|$) ?")
_PROCESS = re.compile(r"\(([A-Za-z]\w*(?: TP\d+)?(?: rank=\d+)?) pid=(\d+)")
_CLOCK = re.compile(rf"{_STAMP}|(?<!\d)\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?")
_MOST_PIECES = 8
_LEVELS = re.compile(_LEVEL)
_QUOTES_CLIENTS = (
    "Received request ",
    "Generated response ",
    "prompt: '",
    'prompt: "',
    "params: SamplingParams(",
    "input_value=",
)
"""vLLM with --enable-log-requests, and pydantic's account of a bad body."""


@dataclass(frozen=True, slots=True)
class Plain:
    """A line without its wrapping: the message, the time as printed and the process that spoke, where told."""

    text: str
    stamp: str | None = None
    process: str | None = None
    level: str | None = None


def clean(raw: str) -> str:
    """The line without colours, carriage returns and the escapes that HTML or JSON added."""
    line = raw.rstrip("\r\n")
    if "\x1b" in line or "^[" in line:
        line = _COLOUR.sub("", line)
    if "&" in line:
        line = html.unescape(line)
    return line.replace("\r", " ").replace('\\"', '"').replace("\\n", " ").replace("\\t", " ")


def plain(raw: str) -> Plain:
    """The message of a line and what its prefixes told; prefixes can be nested and doubled."""
    line = clean(raw)
    end = 0
    for _ in range(_MOST_PIECES):
        match = _PREFIX.match(line, end)
        if match is None or match.end() == end:
            break
        end = match.end()
    prefix = line[:end]
    stamp, process = _CLOCK.search(prefix), _PROCESS.findall(prefix)
    who = f"{process[-1][0]} pid={process[-1][1]}" if process else None
    level = _LEVELS.search(prefix)
    return Plain(line[end:], stamp[0] if stamp else None, who, level[0] if level else None)


def unpack(raw: str) -> list[str]:
    """The lines of a JSON log record (python-json-logger), each with its level and time; else the line itself."""
    if not raw.startswith("{") or '"message"' not in raw:
        return [raw]
    try:
        record = json.loads(raw)
        message, level, stamp = record["message"], record.get("levelname", "INFO"), record.get("asctime", "")
        lines = str(message).splitlines()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [raw]
    return [f"{stamp} {level} {line}" if stamp else f"{level} {line}" for line in lines] or [raw]


def is_user_text(raw: str) -> bool:
    """Whether the line quotes what a client sent: words in a prompt are evidence of nothing."""
    return any(marker in raw for marker in _QUOTES_CLIENTS)


def squeeze(text: str) -> str:
    """The text without any white space, emphasis or backslash: what wrapping in mid-word cannot damage."""
    return _SPACE.sub("", text).translate(_MARKS)


def stamp(raw: str) -> str | None:
    """The time as printed, without the work of taking prefixes off."""
    match = _CLOCK.search(raw)
    return match[0] if match else None
