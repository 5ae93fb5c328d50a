"""A card's memory around an engine: what is reserved, what climbs, and what one step wants at once."""

import random
from dataclasses import dataclass

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Habits:
    """How an engine uses memory outside its pool; sizes in bytes, rates per second."""

    total_bytes: int = 192 * GIB
    idle_bytes: int = 283 * MIB
    utilization: float = 0.92
    transient_bytes: int = 2 * GIB
    climbs_per_s: float = 0.0
    climb_bytes: int = 0


class Card:
    """Memory that an engine holds; a step that wants more than is free fails, as an allocator would."""

    def __init__(self, habits: Habits, rng: random.Random) -> None:
        self._habits = habits
        self._rng = rng
        self._climbed = 0
        self.used_bytes = habits.idle_bytes

    def load(self) -> None:
        """The engine takes its weights and its pool."""
        self._climbed = 0
        self.used_bytes = self._level()

    def release(self) -> None:
        """The engine is gone."""
        self.used_bytes = self._habits.idle_bytes

    def step(self, seconds: float, *, busy: bool) -> bool:
        """One step of the engine; False if it asked for more memory than was free."""
        habits = self._habits
        if self._rng.random() < habits.climbs_per_s * seconds:
            self._climbed += int(habits.climb_bytes * self._rng.uniform(0.5, 1.5))
        want = int(habits.transient_bytes * self._rng.uniform(0.3, 1.0)) if busy else 0
        level = self._level()
        if level + want > habits.total_bytes:
            return False
        self.used_bytes = level + want
        return True

    def _level(self) -> int:
        return int(self._habits.total_bytes * self._habits.utilization) + self._climbed
