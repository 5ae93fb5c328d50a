"""A follower with a fake clock, and the lines it told."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fragscope.sources.logs.follow import Follower, Look

STARTED_AT = 1_796_050_800.0
"""Some wall time: 2026-11-30, when the tests' follower starts."""


@dataclass
class Watcher:
    """Looks at a log; `at` is both clocks' time, in seconds since the start."""

    where: str | Path
    lookback_s: float = 900.0
    at: float = 0.0
    last: Look = field(default_factory=Look)

    def __post_init__(self) -> None:
        self.follower = Follower(str(self.where), STARTED_AT - self.lookback_s, lambda: self.at, self._wall)

    def _wall(self) -> float:
        return STARTED_AT + self.at

    def look(self, after_s: float = 0.5) -> list[str]:
        """The lines of one look."""
        self.at += after_s
        self.last = self.follower.look()
        return [line.text for stretch in self.last.stretches for line in stretch.lines]

    def times(self) -> list[float | None]:
        """When the lines of the last look were written, in seconds since the start; None: just now."""
        return [at if at is None else at - STARTED_AT for at in self._walls()]

    def _walls(self) -> Iterator[float | None]:
        for stretch in self.last.stretches:
            yield from (line.wall for line in stretch.lines)


def append(path: Path, text: str | bytes) -> None:
    """Writes on at the end, as a log's writer does."""
    with path.open("ab") as stream:
        stream.write(text if isinstance(text, bytes) else text.encode())
