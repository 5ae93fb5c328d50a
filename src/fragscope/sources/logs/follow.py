"""Follows a log through whatever happens to its files: rotation, truncation, restarts, refusals, absence.

By polling: a look costs a stat() and two short reads, and works on every file system.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fragscope.model import Gap, Part, Reason
from fragscope.sources.logs.dating import dated
from fragscope.sources.logs.envelope import Entry
from fragscope.sources.logs.opened import PAST_BYTES, Mark, OpenFile, open_file, past_of
from fragscope.sources.logs.places import Place, gap_of, rotated_last, succeeds

NAME = "log"
GRACE_S = 5.0
"""Between a rename and the new file there is nothing for a moment; and who holds the old file may still write to it."""
QUIET_S = 1.0
"""An unfinished line this old is all there will be of it; and a file this quiet may be left for a newer one."""
_MARKS_KEPT = 8


@dataclass(frozen=True, slots=True)
class Stretch:
    """Lines that follow each other in one file; `wall` of a line is when it was written, None: just now."""

    path: Path
    lines: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at the log brought; `more`: there is more to read at once.

    `following` is the file that is the log now, `modified_at` when it was last written to (unix seconds).
    """

    stretches: tuple[Stretch, ...] = ()
    following: Path | None = None
    modified_at: float | None = None
    gap: Gap | None = None
    more: bool = False
    skipped_bytes: int = 0


class Follower:
    """Looks at one target's log and keeps its place in it; a look may block as long as the file system does.

    `oldest_at`: what was written before (unix seconds) is not told.
    """

    def __init__(
        self,
        where: str,
        oldest_at: float,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._place = Place(where)
        self._now = now
        self._wall = wall
        self._heard_until = oldest_at
        self._current: OpenFile | None = None
        self._left: list[tuple[OpenFile, float]] = []
        self._marks: dict[tuple[int, int], Mark] = {}
        self._lost_at: float | None = None
        self._gap: Gap | None = None
        self._grew_at = float("-inf")

    def look(self) -> Look:
        """What is new since the last look."""
        now = self._now()
        past: list[Stretch] = []
        self._gap = self._find(now, past)
        stretches, more = self._drain(now)
        if self._gap is None:
            self._heard_until = self._wall()
        told = (*past, *stretches)
        current = self._current
        if current is None:
            return Look(told, gap=self._gap, more=more)
        skipped, current.skipped_bytes = current.skipped_bytes, 0
        return Look(told, current.path, current.modified_at, self._gap, more, skipped)

    def close(self) -> None:
        """Lets go of all files."""
        for opened, _ in self._left:
            opened.close()
        if self._current is not None:
            self._current.close()
        self._left, self._current = [], None

    def _find(self, now: float, past: list[Stretch]) -> Gap | None:
        """Turns to the file that is the log now; what it held before goes to `past`."""
        found = self._place.newest()
        if isinstance(found, Gap):
            return self._lost(found, now)
        try:
            status = os.stat(found)  # noqa: PTH116 - the identity that a rename does not change
        except OSError as error:
            return self._lost(gap_of(found, error), now)
        current = self._current
        if current is not None and (status.st_dev, status.st_ino) == current.key:
            current.path, self._lost_at = found, None
            return self._may_still(found)
        if current is not None and self._stays_with(current.path, found, now):
            return self._may_still(current.path)
        fresh = open_file(found)
        if isinstance(fresh, Gap):
            return self._lost(fresh, now)
        self._turn_to(fresh, now, past)
        self._lost_at = None
        return None

    def _turn_to(self, fresh: OpenFile, now: float, past: list[Stretch]) -> None:
        before = self._current
        for opened, until in self._left:
            if opened.key == fresh.key:
                # Back to a file that is still held.
                self._left.remove((opened, until))
                self._leave(opened)
                break
        mark = self._marks.pop(fresh.key, None)
        resumed = mark is not None and fresh.resume(mark)
        follows = before is not None and self._gap is None and succeeds(fresh.path, before.path)
        if not resumed and not follows:
            past += self._past_of(fresh)
        if before is not None:
            self._left.append((before, now + GRACE_S))
        self._current = fresh
        self._grew_at = now

    def _past_of(self, fresh: OpenFile) -> list[Stretch]:
        """The end of the newest rotated file, and of this one, as far as they are not older than what was heard."""
        stretches = []
        rotated = rotated_last(fresh.path)
        if rotated is not None and not self._knows(rotated):
            entries, modified_at = past_of(rotated, PAST_BYTES - fresh.size_bytes, self._heard_until)
            stretches.append(self._dated(rotated, entries, modified_at))
        stretches.append(self._dated(fresh.path, fresh.past(), fresh.modified_at))
        return [stretch for stretch in stretches if stretch.lines]

    def _knows(self, path: Path) -> bool:
        """Whether this file was followed: what it holds has been heard."""
        try:
            status = path.stat()
        except OSError:
            return True
        held = [opened.key for opened, _ in self._left] + ([self._current.key] if self._current is not None else [])
        return (status.st_dev, status.st_ino) in (*held, *self._marks)

    def _dated(self, path: Path, entries: list[Entry], modified_at: float) -> Stretch:
        times = dated(entries, modified_at)
        pairs = zip(entries, times, strict=True)
        return Stretch(path, tuple(replace(entry, wall=at) for entry, at in pairs if at >= self._heard_until))

    def _stays_with(self, path: Path, found: Path, now: float) -> bool:
        """Two files of a directory that grow at once must not be read in turns."""
        busy = now - self._grew_at < QUIET_S
        return busy and not succeeds(found, path) and os.path.exists(path)  # noqa: PTH110 - never raises

    def _may_still(self, path: Path) -> Gap | None:
        """An open file stays readable when its permission is taken away; its successor will not be."""
        if os.access(path, os.R_OK):
            return None
        return Gap(Part.LOG, Reason.DENIED, f"{path} may not be read any longer")

    def _lost(self, gap: Gap, now: float) -> Gap | None:
        if self._current is None or gap.reason is not Reason.ABSENT:
            return gap
        if self._lost_at is None:
            self._lost_at = now
        if now - self._lost_at < GRACE_S:
            return self._gap
        self._leave(self._current)
        self._current = None
        return gap

    def _drain(self, now: float) -> tuple[list[Stretch], bool]:
        stretches, more = [], False
        for opened, until in list(self._left):
            entries, rest = self._read(opened)
            if now >= until and not rest:
                entries += opened.finish()
                self._left.remove((opened, until))
                self._leave(opened)
            stretches.append(Stretch(opened.path, tuple(entries)))
            more |= rest
        current = self._current
        if current is not None:
            before = current.mark
            entries, rest = self._read(current)
            if current.mark != before:
                self._grew_at = now
            elif now - self._grew_at >= QUIET_S:
                entries += current.finish()
            stretches.append(Stretch(current.path, tuple(entries)))
            more |= rest
        return [stretch for stretch in stretches if stretch.lines], more

    def _read(self, opened: OpenFile) -> tuple[list[Entry], bool]:
        try:
            return opened.read()
        except OSError as error:
            # A stale handle of a network file system heals only by opening anew.
            if opened is self._current:
                self._gap = gap_of(opened.path, error)
                self._current = None
                self._leave(opened)
            return [], False

    def _leave(self, opened: OpenFile) -> None:
        self._marks[opened.key] = opened.mark
        while len(self._marks) > _MARKS_KEPT:
            self._marks.pop(next(iter(self._marks)))
        opened.close()
