"""What survives a restart: state files and incident files, written by a thread of their own.

A full or read-only disk is logged on change and counted; it never stops the daemon and never delays a tick.
"""

import contextlib
import gzip
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import structlog

from fragscope.serve.flight import Incident
from fragscope.wire import decode, encode

log = structlog.get_logger("fragscope")

INCIDENTS = "incidents"


@dataclass(frozen=True, slots=True)
class Limits:
    """How many incident files are kept, and how many bytes of them."""

    files: int = 20
    size_bytes: int = 200 * 2**20


@dataclass(frozen=True, slots=True)
class Kept:
    """What the keeper has done so far."""

    incidents_total: int = 0
    failures_total: int = 0


NOTHING_KEPT = Kept()


class Keeper(threading.Thread):
    """Writes the newest state of every target and every incident; what is superseded is never written."""

    def __init__(self, folder: Path, limits: Limits, stop: threading.Event) -> None:
        super().__init__(name="keeper", daemon=True)
        self._folder = folder
        self._limits = limits
        self._stopping = stop
        self._lock = threading.Lock()
        self._states: dict[Path, Mapping[str, Any]] = {}
        self._incidents: dict[str, bytes] = {}
        self._something = threading.Event()
        self._broken = False
        self.kept = Kept()

    def keep_state(self, target: str, state: Mapping[str, Any]) -> None:
        """Hands over a target's state; returns at once."""
        with self._lock:
            self._states[state_file(self._folder, target)] = state
        self._something.set()

    def keep_incident(self, incident: Incident) -> None:
        """Hands over an incident; returns at once. The same name again replaces the file."""
        with self._lock:
            self._incidents[incident.name] = incident.content
        self._something.set()

    def run(self) -> None:
        """Writes until stopped, and what is left then."""
        while not self._stopping.is_set():
            self._something.wait(0.5)
            self.flush()
        self.flush()

    def flush(self) -> None:
        """Writes everything handed over so far."""
        with self._lock:
            self._something.clear()
            states, self._states = self._states, {}
            incidents, self._incidents = self._incidents, {}
        for path, state in states.items():
            self._write(path, sealed(encode(state).encode()))
        for name, content in incidents.items():
            if self._write(self._folder / INCIDENTS / name, gzip.compress(content)):
                self.kept = Kept(self.kept.incidents_total + 1, self.kept.failures_total)
        if incidents:
            self._prune()

    def _write(self, path: Path, content: bytes) -> bool:
        """Whole or not at all: a reader never meets half a file."""
        fresh = path.with_name(f".{path.name}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_bytes(content)
            fresh.replace(path)
        except OSError as error:
            self._failed(path, error)
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            return False
        if self._broken:
            log.info("files can be written again", folder=str(self._folder))
        self._broken = False
        return True

    def _failed(self, path: Path, error: OSError) -> None:
        self.kept = Kept(self.kept.incidents_total, self.kept.failures_total + 1)
        if not self._broken:
            log.warning("a file cannot be written", path=str(path), error=error.strerror or str(error))
        self._broken = True

    def _prune(self) -> None:
        """Deletes the oldest incidents beyond the limits; names sort by time."""
        try:
            files = sorted((self._folder / INCIDENTS).glob("*.jsonl.gz"), reverse=True)
            size = 0
            for count, path in enumerate(files, start=1):
                size += path.stat().st_size
                if count > self._limits.files or size > self._limits.size_bytes:
                    path.unlink()
        except OSError as error:
            self._failed(self._folder / INCIDENTS, error)


def state_file(folder: Path, target: str) -> Path:
    """Where a target's state lies."""
    return folder / f"state-{quote(target, safe='')[:200]}.json"


def sealed(content: bytes) -> bytes:
    """The content behind its checksum."""
    return b"%08x\n%s" % (zlib.crc32(content), content)


def opened(raw: bytes) -> bytes:
    """What was sealed. Raises ValueError where it is not whole."""
    checksum, _, content = raw.partition(b"\n")
    if checksum != b"%08x" % zlib.crc32(content):
        raise ValueError("it is damaged: its checksum does not fit")
    return content


def read_state(folder: Path, target: str, max_age_s: float) -> tuple[Any, float] | None:
    """(what was written, its age in seconds), or None where there is nothing of use, which the log says."""
    path = state_file(folder, target)
    try:
        age_s = max(0.0, time.time() - path.stat().st_mtime)
        plain = decode(opened(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("state is not used", path=str(path), why=str(error))
        return None
    if age_s > max_age_s:
        log.warning("state is not used", path=str(path), why=f"it is {age_s:.0f} s old")
        return None
    return plain, age_s
