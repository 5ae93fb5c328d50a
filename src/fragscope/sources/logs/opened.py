"""One open log file: what is new in it, in bounded bites, through truncation and copytruncate."""

import contextlib
import gzip
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from fragscope.model import Gap, Part, Reason
from fragscope.sources.logs.envelope import Entry, Unwrapper
from fragscope.sources.logs.places import gap_of
from fragscope.sources.logs.splitter import Splitter

BITE_BYTES = 2**20
"""Read at most this much at once."""
LAG_BYTES = 32 * 2**20
"""A writer this far ahead is not caught up with; reading goes on near the end."""
PAST_BYTES = 256 * 2**10
"""How much of what was written before is read."""
_UNZIPPED_BYTES = 256 * 2**20
_HEAD_BYTES = 64


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a file was read, and its first bytes: an inode's number is soon another file's."""

    offset: int
    head: bytes


class OpenFile:
    """A regular file held open, read from `offset` on."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        status = os.fstat(descriptor)
        self.key = (status.st_dev, status.st_ino)
        self.modified_at = status.st_mtime
        self.size_bytes = status.st_size
        self._mark = Mark(0, os.pread(descriptor, _HEAD_BYTES, 0))
        self._splitter = Splitter()
        self._unwrapper = Unwrapper()
        self.skipped_bytes = 0

    @property
    def mark(self) -> Mark:
        """How far it was read."""
        return self._mark

    def resume(self, mark: Mark) -> bool:
        """Goes on where a reader left this file; False if it is another file by now."""
        same = self._mark.head.startswith(mark.head) and mark.offset <= self.size_bytes
        if same:
            self._mark = Mark(mark.offset, self._mark.head)
        return same

    def past(self) -> list[Entry]:
        """The whole lines of its last 256 KiB; what is written later is for `read`."""
        size = self.size_bytes
        start = max(0, size - PAST_BYTES)
        # One byte more tells whether the first line is whole.
        raw = os.pread(self._descriptor, size - max(0, start - 1), max(0, start - 1))
        self._splitter = Splitter(amid_line=start > 0)
        self._mark = Mark(size, self._mark.head)
        return self._unwrapper.feed(self._splitter.feed(raw))

    def read(self) -> tuple[list[Entry], bool]:
        """The lines that were completed since, and whether there is more. Raises OSError."""
        status = os.fstat(self._descriptor)
        size, self.modified_at = status.st_size, status.st_mtime
        entries = self._begin_again(size)
        offset = self._mark.offset
        if size - offset > LAG_BYTES:
            entries += self.finish()
            self._splitter = Splitter(amid_line=True)
            self.skipped_bytes += size - BITE_BYTES - offset
            offset = size - BITE_BYTES
        if offset < size:
            offset = self._next_written(offset, size)
        raw = os.pread(self._descriptor, min(BITE_BYTES, max(0, size - offset)), offset)
        self._mark = Mark(offset + len(raw), self._mark.head)
        entries += self._unwrapper.feed(self._splitter.feed(raw))
        return entries, bool(raw) and self._mark.offset < size

    def finish(self) -> list[Entry]:
        """What was begun and has no end: nothing more of it is expected."""
        return self._unwrapper.feed(self._splitter.finish()) + self._unwrapper.finish()

    def close(self) -> None:
        """Lets go of the file."""
        os.close(self._descriptor)

    def _begin_again(self, size: int) -> list[Entry]:
        """At the beginning if the file was truncated, even if it has grown beyond where we were."""
        head = os.pread(self._descriptor, _HEAD_BYTES, 0)
        if size >= self._mark.offset and head.startswith(self._mark.head):
            self._mark = Mark(self._mark.offset, head)
            return []
        unfinished = self.finish()
        self._splitter = Splitter()
        self._mark = Mark(0, head)
        return unfinished

    def _next_written(self, offset: int, size: int) -> int:
        """Past a hole: who writes on at its old position after a truncation leaves one, of any size."""
        try:
            return min(size, os.lseek(self._descriptor, offset, os.SEEK_DATA))
        except (OSError, AttributeError):
            return offset


def open_file(path: Path) -> OpenFile | Gap:
    """The file, without ever waiting for one (a pipe nobody writes to), or why it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return gap_of(path, error)
    try:
        if S_ISREG(os.fstat(descriptor).st_mode):
            return OpenFile(path, descriptor)
        gap = Gap(Part.LOG, Reason.UNSUPPORTED, f"{path} is no regular file; a pipe or a device cannot be followed")
    except OSError as error:
        gap = gap_of(path, error)
    os.close(descriptor)
    return gap


def past_of(path: Path, limit_bytes: int, oldest_at: float) -> tuple[list[Entry], float]:
    """(the last lines of a file that was rotated away, its time of modification); none if older than `oldest_at`."""
    opened = open_file(path)
    if isinstance(opened, Gap):
        return [], oldest_at
    try:
        if opened.modified_at < oldest_at or limit_bytes <= 0:
            return [], opened.modified_at
        if path.suffix == ".gz":
            raw, whole = _unzipped_end(path, limit_bytes)
            unwrapper, splitter = Unwrapper(), Splitter(amid_line=not whole)
            entries = unwrapper.feed(splitter.feed(raw) + splitter.finish()) + unwrapper.finish()
        else:
            entries = opened.past() + opened.finish()
    except OSError:
        return [], opened.modified_at
    finally:
        opened.close()
    return entries, opened.modified_at


def _unzipped_end(path: Path, limit_bytes: int) -> tuple[bytes, bool]:
    """(the end of what a gzip file holds, whether that is all of it), at constant memory.

    What is beyond 256 MiB is not looked at: then there is no end to speak of, and nothing is returned. Of a damaged
    file there is what came before the damage.
    """
    end, seen = bytearray(), 0
    with contextlib.suppress(EOFError, zlib.error, gzip.BadGzipFile), gzip.open(path) as stream:
        while piece := stream.read(2**18):
            seen += len(piece)
            end += piece
            del end[:-limit_bytes]
            if seen > _UNZIPPED_BYTES:
                return b"", True
    return bytes(end), seen <= limit_bytes
