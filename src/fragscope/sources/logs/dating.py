"""When the lines were written that were there before anybody read them, pure.

vLLM stamps its lines `MM-DD hh:mm:ss`: no year, no zone, and lines that workers print raw have none. The distance
between two such stamps needs neither, so a line is dated by its distance from the last stamp of its file, and that
one by the file's time of modification.
"""

import re
from collections.abc import Sequence
from itertools import accumulate

from fragscope.sources.logs.envelope import Entry

_STAMP = re.compile(r"(?<!\d)(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?!\d)")
_LOOKED_AT = 200
"""The stamp stands behind the process tag and the level; digits further on are the message's own."""
_MONTHS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_DAYS_BEFORE = (0, *accumulate(_MONTHS))
_DAY_S = 86400.0
_YEAR_S = 366 * _DAY_S


def dated(entries: Sequence[Entry], modified_at: float) -> list[float]:
    """The time of each entry in unix seconds, not later than `modified_at`, the file's time of modification.

    The runtime's stamp counts where there is one. An entry without any stamp is as old as the one above it; a
    file without a single stamp is as old as its modification.
    """
    seconds = [_second_of_year(entry.text) if entry.wall is None else None for entry in entries]
    reference = next((second for second in reversed(seconds) if second is not None), None)
    times: list[float | None] = []
    latest: float | None = None
    for entry, second in zip(entries, seconds, strict=True):
        if entry.wall is not None:
            latest = min(entry.wall, modified_at)
        elif second is not None and reference is not None:
            latest = modified_at - _age_s(reference, second)
        times.append(latest)
    first = next((at for at in times if at is not None), modified_at)
    return [first if at is None else at for at in times]


def _age_s(reference: float, second: float) -> float:
    """How long before `reference`; processes that write one file overtake each other by a little."""
    distance_s = reference - second
    if distance_s < -_YEAR_S / 2:
        return distance_s + _YEAR_S
    return max(0.0, distance_s)


def _second_of_year(text: str) -> float | None:
    match = _STAMP.search(text, 0, _LOOKED_AT)
    if match is None:
        return None
    month, day, hour, minute, second = map(int, match.groups())
    if not 1 <= month <= 12 or not 1 <= day <= _MONTHS[month - 1] or hour > 23 or minute > 59:
        return None
    return (_DAYS_BEFORE[month - 1] + day - 1) * _DAY_S + hour * 3600 + minute * 60 + second
