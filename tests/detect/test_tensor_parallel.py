"""A group of GPUs that serves one engine: the worst one speaks, and is named."""

from fragscope.model import EngineReading, Gap, GpuReading, Sample
from tests.stories import CARD, GIB, NO_LOG, Story, crash_without_room

CALM, FULL = "0000:05:00.0", "0000:e5:00.0"


class Group(Story):
    """Eight GPUs, of which only the last does what the story says."""

    def _observe(self, engines: tuple[EngineReading, ...], gaps: tuple[Gap, ...]) -> None:
        calm = tuple(GpuReading(self.at, f"0000:{n}5:00.0", CARD, int(0.9 * CARD)) for n in range(7))
        gpus = (*calm, GpuReading(self.at, FULL, CARD, self.used_bytes))
        self.last = self.detector.observe(Sample(self.at, "vllm", engines, gpus, (), (), (*gaps, NO_LOG)))
        self.at += self.interval_s


def test_one_full_gpu_of_eight_speaks_and_is_named() -> None:
    verdict = crash_without_room(Group())
    assert verdict.phase == "suspected"
    (headroom,) = (row for row in verdict.evidence if row.signal == "headroom")
    assert headroom.sentence.startswith(f"{FULL} had ")
    assert FULL in verdict.sentence
    assert CALM not in verdict.sentence


def test_a_group_with_room_everywhere_is_exonerated_by_its_worst() -> None:
    story = Group()
    story.serve(ticks=6)
    for used in range(12):
        story.serve(used=int(0.5 * CARD) + used * GIB)
    verdict = story.refuse(ticks=2)
    (headroom,) = (row for row in verdict.evidence if row.signal == "headroom")
    assert FULL not in headroom.sentence
    assert headroom.weight < 0
