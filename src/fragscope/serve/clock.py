"""One clock for everything: monotonic, anchored once to wall time, so that a clock set back changes nothing."""

import threading
import time

_SHORT_S = 0.1


class Clock:
    """Unix seconds that never go back; `speed` makes all durations shrink alike, for the demo."""

    def __init__(self, speed: float = 1.0) -> None:
        self.speed = speed
        self._wall = time.time()
        self._anchor = time.monotonic()

    def now(self) -> float:
        """Seconds since the epoch, as far as this process is concerned."""
        return self._wall + (time.monotonic() - self._anchor) * self.speed

    def since_wall(self, wall_at: float) -> float:
        """A wall-clock time (a file's mtime) on this clock, by its age."""
        return self.now() - (time.time() - wall_at) * self.speed

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        """Waits on this clock; True if `stop` was set meanwhile."""
        real_s = max(0.0, seconds) / self.speed
        if real_s < _SHORT_S:
            # An Event's timed wait costs several times a sleep, and the GPU feed waits twenty times a second.
            time.sleep(real_s)
            return stop.is_set()
        return stop.wait(real_s)
