"""The caching allocator's out-of-memory message in its common form (PyTorch 2.1 and later, HIP and CUDA).

Sizes are printed with two decimals, so a GiB figure is right to about 5 MiB. What each figure means is in
docs/logs.md. The other variants of the message, and wrapped or escaped text, are not read yet.
"""

import re
from collections.abc import Mapping

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)"
_MESSAGE = re.compile(r"(?:HIP|CUDA) out of memory\.")
_FIELDS = {
    "tried": re.compile(rf"Tried to allocate {_SIZE}"),
    "total": re.compile(rf"has a total capac?ity of {_SIZE}"),
    "free": re.compile(rf"of which {_SIZE} is free"),
    "in_use": re.compile(rf"this process has {_SIZE} memory in use"),
    "allowed": re.compile(rf"{_SIZE} allowed;"),
    "allocated": re.compile(rf"Of the allocated memory {_SIZE} is allocated by PyTorch"),
    "private_pools": re.compile(rf"with {_SIZE} allocated in private pools"),
    "reserved_unallocated": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
}


def read_oom(line: str) -> Mapping[str, float] | None:
    """The message's figures in bytes, those it has; None where the line is no such message."""
    start = _MESSAGE.search(line)
    if start is None:
        return None
    message = line[start.start() :]
    following = _MESSAGE.search(message, 1)
    if following is not None:
        message = message[: following.start()]
    facts: dict[str, float] = {}
    for name, pattern in _FIELDS.items():
        match = pattern.search(message)
        if match is not None:
            facts[name] = round(float(match[1]) * _UNITS[match[2]])
    return facts
