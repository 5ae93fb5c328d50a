"""Where the runs come from: fragscope's own simulator."""

from dataclasses import dataclass

from evaluation.running import Play, Stage

INTERVAL_S = 5.0
"""The daemon's default between two polls."""


@dataclass(frozen=True, slots=True)
class Theatre:
    """What can be played, and by whom."""

    play: Stage
    scenarios: tuple[str, ...]


def play(scenario: str, seed: int, interval_s: float) -> Play:
    """Not yet."""
    raise NotImplementedError(scenario, seed, interval_s)


SIMULATOR = Theatre(play, ())
