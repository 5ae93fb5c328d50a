"""Samples from anywhere to the ground that advice stands on: what was seen, and what the detector made of it."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from fragscope.advise.observed import Observed
from fragscope.app import build_core
from fragscope.detect.detector import Detector
from fragscope.detect.parameters import Parameters
from fragscope.model import Assessment, Cause, Sample
from fragscope.recording import Line, Tally, read_lines
from fragscope.replay import Replayer, replay
from fragscope.serve.clock import Clock
from fragscope.serve.feeds import EnginePoll
from fragscope.settings import Settings

ParametersOf = Callable[[str], Parameters]


class Gathered:
    """What a stretch of samples came to: the engines' and GPUs' past, the detector's last cause, notes for people."""

    def __init__(self, parameters_of: ParametersOf, full_ratio: float) -> None:
        self.observed = Observed(full_ratio)
        self.notes: list[str] = []
        self._parameters_of = parameters_of
        self._detectors: dict[str, Detector] = {}
        self._causes: dict[tuple[str, str | None], str] = {}

    def sample(self, sample: Sample) -> None:
        """One sample that nobody has judged yet, in order of time."""
        detector = self._detectors.get(sample.target)
        if detector is None:
            detector = self._detectors[sample.target] = Detector(sample.target, self._parameters_of(sample.target))
        self.observed.observe(sample)
        self.judged(detector.observe(sample))

    def judged(self, assessment: Assessment) -> None:
        """What a detector says of a sample."""
        for verdict in assessment.verdicts:
            self._causes[verdict.target, verdict.engine] = verdict.cause

    def cause_of(self, target: str, engine: str) -> str:
        """The last cause or condition of an engine; `none` without a verdict."""
        return self._causes.get((target, engine), str(Cause.NONE))


def from_samples(samples: Iterable[Sample], parameters_of: ParametersOf, full_ratio: float) -> Gathered:
    """Any samples in order of time: the seam for further sources. Whatever these raise comes through."""
    gathered = Gathered(parameters_of, full_ratio)
    for sample in samples:
        gathered.sample(sample)
    return gathered


def from_recordings(files: Sequence[str], parameters_of: ParametersOf, full_ratio: float) -> Gathered:
    """Recordings, read as one stream. Raises OSError where one cannot be opened."""
    gathered, tally = Gathered(parameters_of, full_ratio), Tally()
    for assessment in replay(_lines(files, tally), Replayer(parameters_of, gathered.observed.observe)):
        gathered.judged(assessment)
    note = tally.sentence()
    if note is not None:
        gathered.notes.append(note)
    return gathered


def _lines(files: Sequence[str], tally: Tally) -> Iterator[Line]:
    for file in files:
        yield from read_lines(file, tally)


def from_targets(settings: Settings, seconds: float) -> Gathered:
    """Live targets, watched for so long; Ctrl-C ends the watch early and what was seen counts."""
    named = {target.name: target for target in settings.targets}
    gathered = Gathered(lambda name: settings.parameters(named[name]), settings.advice.full_ratio)

    def tap(sample: Sample, poll: EnginePoll | None) -> None:
        if poll is not None:
            gathered.sample(sample)

    stop = threading.Event()
    core = build_core(settings, Clock(), stop, tap)
    core.start()
    try:
        # The last step's poll falls due as the time ends; a little longer lets it in.
        stop.wait(seconds + min(1.0, settings.interval_s))
    except KeyboardInterrupt:
        gathered.notes.append("the watch was ended early")
    stop.set()
    core.poller.join(2)
    return gathered
