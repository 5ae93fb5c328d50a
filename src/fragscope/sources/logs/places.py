"""Where the log is: a file, the newest of a directory or of a pattern, and the file that was rotated away last."""

import glob
import re
from dataclasses import dataclass
from os import stat_result
from pathlib import Path
from stat import S_ISDIR

from fragscope.model import Gap, Part, Reason

_MAGIC = re.compile(r"[*?[]")
_RESTART = re.compile(r"(\d+)\.log")
"""The kubelet names a container's files by its restarts: 0.log, 1.log, ..."""
_ROTATED = re.compile(r".*\.log[-.].+|.*\.(gz|bz2|xz|zst|\d+)")
_COMPRESSED_OTHERWISE = (".bz2", ".xz", ".zst")


@dataclass(frozen=True, slots=True)
class Place:
    """What the setting says: a path, or a pattern with * ? [ ] of files or of directories."""

    words: str

    def newest(self) -> Path | Gap:
        """The file to follow now, or why there is none."""
        if not _MAGIC.search(self.words):
            return self._newest_of([Path(self.words)])
        found = [Path(name) for name in glob.glob(self.words)]  # noqa: PTH207 - Path.glob needs a root
        if not found:
            return Gap(Part.LOG, Reason.ABSENT, f"nothing matches {self.words}")
        return self._newest_of([path for path in found if not _ROTATED.fullmatch(path.name)] or found)

    def _newest_of(self, paths: list[Path]) -> Path | Gap:
        candidates: list[tuple[Path, stat_result]] = []
        gap = None
        for path in paths:
            try:
                candidates += _files_of(path)
            except OSError as error:
                gap = gap_of(path, error)
        if candidates:
            return max(_heads(candidates), key=lambda item: item[1].st_mtime_ns)[0]
        return gap or Gap(Part.LOG, Reason.ABSENT, f"{self.words} holds no file whose name ends in .log")


def _files_of(path: Path) -> list[tuple[Path, stat_result]]:
    """The path itself, or the logs of the directory that it is."""
    status = path.stat()
    if not S_ISDIR(status.st_mode):
        return [(path, status)]
    found = []
    for file in path.glob("*.log"):
        try:
            status = file.stat()
        except FileNotFoundError:
            # Gone since it was listed, or a link that leads nowhere.
            continue
        if not S_ISDIR(status.st_mode):
            found.append((file, status))
    if not found:
        # glob() passes over what it may not read without a word.
        next(path.iterdir(), None)
    return found


def _heads(candidates: list[tuple[Path, stat_result]]) -> list[tuple[Path, stat_result]]:
    """Of the files numbered by restarts in one directory only the highest: an old one may be touched late."""
    highest: dict[Path, int] = {}
    for path, _ in candidates:
        highest[path.parent] = max(highest.get(path.parent, -1), _restart_of(path))
    return [item for item in candidates if _restart_of(item[0]) == highest[item[0].parent]]


def _restart_of(path: Path) -> int:
    match = _RESTART.fullmatch(path.name)
    return int(match[1]) if match is not None else -1


def succeeds(path: Path, before: Path) -> bool:
    """Whether `path` goes on where `before` ended: the same name after a rotation, or a later restart's."""
    if path == before:
        return True
    return path.parent == before.parent and _restart_of(path) > _restart_of(before) >= 0


def rotated_last(path: Path) -> Path | None:
    """The file that was rotated away last, plain or gzipped, or the log of the restart before; None without one."""
    try:
        siblings = [(file, file.stat()) for file in path.parent.iterdir() if _came_before(file.name, path)]
    except OSError:
        return None
    files = [(file, status) for file, status in siblings if not S_ISDIR(status.st_mode)]
    return max(files, key=lambda item: item[1].st_mtime_ns)[0] if files else None


def _came_before(name: str, path: Path) -> bool:
    if name == path.name or name.endswith(_COMPRESSED_OTHERWISE):
        return False
    restart = _restart_of(path)
    if restart > 0 and name == f"{restart - 1}.log":
        return True
    if name.startswith((path.name + ".", path.name + "-")):
        return True
    # logrotate's `extension .log` puts the date before it.
    return re.fullmatch(rf"{re.escape(path.stem)}[-.]\d[-\d.T]*{re.escape(path.suffix)}(\.gz)?", name) is not None


def gap_of(path: Path, error: OSError) -> Gap:
    """The system's refusal as a gap."""
    if isinstance(error, FileNotFoundError):
        words = "leads nowhere" if path.is_symlink() else "does not exist"
        return Gap(Part.LOG, Reason.ABSENT, f"{path} {words}")
    if isinstance(error, PermissionError):
        return Gap(Part.LOG, Reason.DENIED, f"{path} may not be read: {error.strerror}")
    return Gap(Part.LOG, Reason.STALE, f"{path} cannot be read: {error.strerror or error}")
