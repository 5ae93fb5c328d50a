"""Where the runs come from: fragscope's own simulator, or labelled recordings of anybody's."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from evaluation.running import Play, Stage
from fragscope.model import Sample
from fragscope.recording import LabelLine, Tally, read_lines
from fragscope.replay import Replayer
from fragscope.simulate.catalogue import SCENARIOS
from fragscope.simulate.run import samples

INTERVAL_S = 5.0
"""The daemon's default between two polls."""


@dataclass(frozen=True, slots=True)
class Theatre:
    """What can be played, and by whom."""

    play: Stage
    scenarios: tuple[str, ...]


def play(scenario: str, seed: int, interval_s: float, hours: float | None) -> Play:
    """A scenario of the simulator, as long as it usually is where `hours` is None."""
    labels: list[LabelLine] = []

    def without_labels() -> Iterator[Sample]:
        for each in samples(scenario, seed, hours, interval_s):
            if isinstance(each, LabelLine):
                labels.append(each)
            else:
                yield each

    return Play(without_labels(), labels)


def recorded(file: str, _seed: int, _interval_s: float, _hours: float | None) -> Play:
    """A recording with its `label` lines, joined into samples as `replay` joins them. Raises OSError."""
    taken: deque[Sample] = deque()
    replayer = Replayer(tap=taken.append)

    def joined() -> Iterator[Sample]:
        for line in read_lines(file, Tally()):
            deque(replayer.feed(line), maxlen=0)
            while taken:
                yield taken.popleft()
        deque(replayer.finish(), maxlen=0)
        yield from taken

    return Play(joined(), replayer.labels)


SIMULATOR = Theatre(play, tuple(sorted(SCENARIOS)))
