"""Feeds, tick and board, with fakes for the outside and real threads only where hanging is the claim."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fragscope.advise.live import EngineAdvice, LiveAdvisor
from fragscope.app import build_core
from fragscope.detect.detector import Detector
from fragscope.model import Assessment, EngineReading, Fact, Gap, Part, Phase, Reason, Sample
from fragscope.serve.board import Board, View
from fragscope.serve.clock import Clock
from fragscope.serve.feeds import EngineFeed, EnginePoll, Visitor
from fragscope.serve.gpu_feed import GpuFeed
from fragscope.serve.poller import Poller, Watch
from fragscope.settings import Settings, load
from fragscope.sources.scrape import Access, Client
from tests.servers import answering, never_answering, page, serving
from tests.sources.test_bad_input import GOOD
from tests.sources.test_sysfs import add_card

GPU = "0000:c1:00.0"


class FakeClock(Clock):
    """Time that moves only when told to, or when somebody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 1000.0

    def now(self) -> float:
        return self.at

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        self.at += seconds
        return stop.is_set()


class FakeVisitor(Visitor):
    """Says what it was told to say."""

    def __init__(self, polls: list[EnginePoll]) -> None:
        self.polls = polls

    def poll(self) -> EnginePoll:
        return self.polls.pop(0)


def good(at: float) -> EnginePoll:
    tokens = 100 * at
    return EnginePoll(at, (EngineReading(at, "0", "m", kv_usage_ratio=0.2, running=1, generation_tokens_total=tokens),))


def refused(at: float) -> EnginePoll:
    return EnginePoll(at, gap=Gap(Part.ENGINE, Reason.REFUSED, "connection refused"))


class Broken(Detector):
    """Raises at every sample."""

    def observe(self, _sample: Sample) -> Assessment:
        raise RuntimeError("a bug")


def watch_of(feed: EngineFeed, **given: object) -> Watch:
    return Watch("vllm", "http://x", {}, feed, Detector("vllm"), 15.0, lambda: Detector("vllm"), **given)  # type: ignore[arg-type]


def eventually(claim: object, within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not claim():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    add_card(tmp_path, 1, GPU)
    return tmp_path


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_the_tick_takes_last_and_peak_and_starts_a_new_peak(sysfs: Path, stop: threading.Event) -> None:
    clock = FakeClock()
    feed = GpuFeed(sysfs, 20, clock, stop)
    used = sysfs / "devices" / "pci" / GPU / "mem_info_vram_used"
    for value in (5 * 2**30, 90 * 2**30, 7 * 2**30):
        used.write_text(str(value))
        feed.step()
        clock.at += 0.05
    first, second = feed.take().readings[GPU], feed.take().readings[GPU]
    assert (first.used_bytes, first.peak_used_bytes) == (7 * 2**30, 90 * 2**30)
    assert second.peak_used_bytes == 7 * 2**30


def test_the_running_feed_sees_a_peak_between_two_looks_and_a_card_that_comes_back(
    sysfs: Path, stop: threading.Event
) -> None:
    feed = GpuFeed(sysfs, 500, Clock(), stop)
    feed.start()
    eventually(lambda: GPU in feed.take().readings)
    used = sysfs / "devices" / "pci" / GPU / "mem_info_vram_used"
    peaks: list[int | None] = []

    def peak() -> bool:
        peaks.append(feed.take().readings[GPU].peak_used_bytes)
        return peaks[-1] == 90 * 2**30

    used.write_text(str(90 * 2**30))
    eventually(peak, 0.9)
    used.write_text("not a number")
    used.rename(used.with_name("hidden"))
    used.with_name("hidden").rename(used)
    used.write_text(str(91 * 2**30))
    eventually(lambda: feed.take().readings[GPU].used_bytes == 91 * 2**30)


def test_a_feed_slower_than_a_look_reads_at_its_own_pace(sysfs: Path, stop: threading.Event) -> None:
    feed = GpuFeed(sysfs, 0.5, FakeClock(), stop)
    assert feed.row() == 2.0
    assert set(feed.take().readings) == {GPU}


def test_cards_that_appear_and_vanish_are_followed(sysfs: Path, stop: threading.Event) -> None:
    clock = FakeClock()
    feed = GpuFeed(sysfs, 20, clock, stop)
    feed.step()
    add_card(sysfs, 2, "0000:c6:00.0")
    clock.at += 11
    feed.step()
    assert set(feed.take().readings) == {GPU, "0000:c6:00.0"}
    (sysfs / "class" / "drm" / "card1" / "device").unlink()
    for _ in range(2):
        clock.at += 11
        feed.step()
    assert set(feed.take().readings) == {"0000:c6:00.0"}


def test_a_failing_card_is_counted_once_a_second_and_not_twenty_times(sysfs: Path, stop: threading.Event) -> None:
    clock = FakeClock()
    feed = GpuFeed(sysfs, 20, clock, stop)
    (sysfs / "devices" / "pci" / GPU / "mem_info_vram_used").write_text("0\n")
    for _ in range(41):
        feed.step()
        clock.at += 0.05
    assert feed.status.failures[Reason.BLIND] in (2, 3)
    assert not feed.status.up


def test_a_blind_card_is_a_gap_and_not_zero(sysfs: Path, stop: threading.Event) -> None:
    (sysfs / "devices" / "pci" / GPU / "mem_info_vram_used").write_text("0\n")
    seen = samples_of_one_tick(sysfs, stop, [good(1000)])
    assert seen[0].gpus == ()
    assert Reason.BLIND in {gap.reason for gap in seen[0].gaps if gap.part is Part.GPU}


def samples_of_one_tick(sysfs: Path, stop: threading.Event, polls: list[EnginePoll]) -> list[Sample]:
    clock = FakeClock()
    gpu_feed = GpuFeed(sysfs, 20, clock, stop)
    gpu_feed.step()
    feed = EngineFeed("vllm", FakeVisitor(list(polls)), 5.0, clock, stop)
    for _ in polls:
        feed.step()
    seen: list[Sample] = []
    tick = Poller(
        [watch_of(feed)],
        gpu_feed,
        Board(View(0.0)),
        clock,
        stop,
        interval_s=5.0,
        tap=lambda sample, _: seen.append(sample),
    )
    tick.tick()
    return seen


def test_every_poll_becomes_one_sample_and_none_is_counted_twice(sysfs: Path, stop: threading.Event) -> None:
    seen = samples_of_one_tick(sysfs, stop, [good(1000), refused(1005), refused(1010)])
    assert [bool(sample.engines) for sample in seen] == [True, False, False]
    assert [sample.at for sample in seen] == [1000, 1005, 1010]


def test_a_tick_without_a_poll_is_no_data_and_no_failure(sysfs: Path, stop: threading.Event) -> None:
    (sample,) = samples_of_one_tick(sysfs, stop, [])
    assert sample.engines == ()
    assert [gap for gap in sample.gaps if gap.part is Part.ENGINE] == []


def test_a_feed_backs_off_only_a_minute_after_the_last_good_reading(stop: threading.Event) -> None:
    clock = FakeClock()
    feed = EngineFeed("vllm", FakeVisitor([good(1000), *[refused(0)] * 40]), 5.0, clock, stop)
    feed.step()
    delays = []
    for _ in range(40):
        delays.append(feed.step())
        clock.at += delays[-1]
    patient = [delay for delay in delays[:11] if delay < 5.5]
    assert len(patient) >= 11
    assert 25 < delays[-1] < 32


def test_a_reader_that_raises_goes_on(stop: threading.Event) -> None:
    class Raising(FakeVisitor):
        def poll(self) -> EnginePoll:
            if len(self.polls) == 1:
                stop.set()
            found = self.polls.pop(0)
            if found.engines:
                return found
            raise RuntimeError("a bug")

    clock = FakeClock()
    feed = EngineFeed("vllm", Raising([good(1000), refused(1005), good(1010)]), 5.0, clock, stop)
    feed.run()
    assert [poll.at for poll in feed.take()] == [1000, 1010]


def test_the_planned_stop_marker_is_a_fact_of_its_time(tmp_path: Path) -> None:
    marker = tmp_path / "planned-stop"
    with serving(answering({"/metrics": page(GOOD.encode())})) as url:
        clock = Clock()
        visitor = Visitor("vllm", Client(url), clock, marker)
        before = visitor.poll()
        marker.touch()
        os.utime(marker, (time.time() - 30, time.time() - 30))
        told, again = visitor.poll(), visitor.poll()
    assert before.facts == again.facts == ()
    (fact,) = told.facts
    assert fact.what is Fact.PLANNED_STOP
    assert clock.now() - fact.at == pytest.approx(30, abs=1)


def test_wall_time_that_is_set_back_an_hour_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    before = clock.now()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    assert 0 <= clock.now() - before < 5


def test_speed_shrinks_waiting_and_stretches_time() -> None:
    clock = Clock(speed=100)
    began, real = clock.now(), time.monotonic()
    clock.wait(threading.Event(), 10)
    assert time.monotonic() - real < 1
    assert clock.now() - began >= 10


def settings_for(url: str, sysfs: Path, **more: object) -> Settings:
    flags = {"targets": [{"name": "llama", "url": url}], "sysfs_root": sysfs, "interval_s": 0.1, **more}
    return load(flags=flags, env={})


def test_a_hung_target_delays_neither_ticks_nor_its_neighbour(sysfs: Path, stop: threading.Event) -> None:
    with serving(never_answering) as hung, serving(answering({"/metrics": page(GOOD.encode())})) as fine:
        both = [{"name": "hung", "url": hung}, {"name": "fine", "url": fine}]
        core = build_core(settings_for("http://x", sysfs, targets=both), Clock(), stop)
        core.start()
        time.sleep(1.5)
        view = core.board.view
    assert view.ticks >= 10
    by_name = {target.name: target for target in view.targets}
    fine_view = by_name["fine"].assessment
    assert fine_view is not None
    assert fine_view.verdicts[0].engine == "0"
    hung_view = by_name["hung"].assessment
    assert hung_view is not None
    assert hung_view.verdicts[0].phase is Phase.UNKNOWN


def test_a_hung_sysfs_read_delays_no_tick_and_becomes_missing_evidence(tmp_path: Path, stop: threading.Event) -> None:
    device = add_card(tmp_path, 1, GPU)
    (device / "mem_info_vram_used").unlink()
    os.mkfifo(device / "mem_info_vram_used")
    with serving(answering({"/metrics": page(GOOD.encode())})) as url:
        core = build_core(settings_for(url, tmp_path), Clock(), stop)
        core.start()
        eventually(lambda: core.board.view.ticks >= 10)
        assessment = core.board.view.targets[0].assessment
    assert assessment is not None
    assert "gpu" in assessment.verdicts[0].missing
    assert assessment.verdicts[0].phase is Phase.UNKNOWN


def test_the_first_verdict_comes_within_three_intervals(sysfs: Path, stop: threading.Event) -> None:
    with serving(answering({"/metrics": page(GOOD.encode())})) as url:
        core = build_core(settings_for(url, sysfs, interval_s=1.0), Clock(), stop)
        began = time.monotonic()
        core.start()
        eventually(lambda: core.board.view.history and core.board.view.history[-1].phase is Phase.CLEAR)
    assert time.monotonic() - began < 3.0


def test_one_targets_trouble_does_not_stop_the_others(sysfs: Path, stop: threading.Event) -> None:
    clock = FakeClock()
    gpu_feed = GpuFeed(sysfs, 20, clock, stop)
    gpu_feed.step()
    watches = []
    for _ in range(2):
        feed = EngineFeed("vllm", FakeVisitor([good(1000)]), 5.0, clock, stop)
        feed.step()
        watches.append(watch_of(feed))
    watches[0].detector = Broken("vllm")
    board = Board(View(0.0))
    Poller(watches, gpu_feed, board, clock, stop, interval_s=5.0).tick()
    assert [target.assessment is not None for target in board.view.targets] == [False, True]


def test_a_detector_that_keeps_raising_is_counted_and_replaced(sysfs: Path, stop: threading.Event) -> None:
    clock = FakeClock()
    gpu_feed = GpuFeed(sysfs, 20, clock, stop)
    gpu_feed.step()
    feed = EngineFeed("vllm", FakeVisitor([good(1000 + 5 * i) for i in range(5)]), 5.0, clock, stop)
    watch = watch_of(feed)
    watch.detector = Broken("vllm")
    board = Board(View(0.0))
    poller = Poller([watch], gpu_feed, board, clock, stop, interval_s=5.0)
    for _ in range(4):
        feed.step()
        poller.tick()
    assert board.view.targets[0].detector_failures_total == 3
    assert board.view.targets[0].assessment is not None


def test_advice_that_raises_costs_no_verdict(sysfs: Path, stop: threading.Event) -> None:
    class BrokenAdvisor(LiveAdvisor):
        def observe(self, _sample: Sample, _assessment: Assessment) -> tuple[EngineAdvice, ...]:
            raise RuntimeError("a bug")

    clock = FakeClock()
    gpu_feed = GpuFeed(sysfs, 20, clock, stop)
    gpu_feed.step()
    feed = EngineFeed("vllm", FakeVisitor([good(1000)]), 5.0, clock, stop)
    feed.step()
    board = Board(View(0.0))
    Poller([watch_of(feed, advisor=BrokenAdvisor())], gpu_feed, board, clock, stop, interval_s=5.0).tick()
    target = board.view.targets[0]
    assert target.assessment is not None
    assert (target.advice, target.detector_failures_total) == ((), 0)


def test_half_a_days_refusals_do_not_break_the_back_off(stop: threading.Event) -> None:
    clock = FakeClock()
    feed = EngineFeed("vllm", FakeVisitor([refused(0)] * 3000), 5.0, clock, stop)
    delays = [feed.step() for _ in range(3000)]
    assert 25 < delays[-1] < 32


def test_a_late_tick_is_skipped_and_not_made_up_for(sysfs: Path, stop: threading.Event) -> None:
    class Slow(Poller):
        ticked: list[float]

        def tick(self) -> None:
            self.ticked.append(clock.at)
            clock.at += 12.0 if len(self.ticked) == 1 else 0.0
            if len(self.ticked) == 4:
                stop.set()

    clock = FakeClock()
    poller = Slow([], GpuFeed(sysfs, 20, clock, stop), Board(View(0.0)), clock, stop, interval_s=5.0)
    poller.ticked = []
    poller.run()
    steps = [b - a for a, b in zip(poller.ticked, poller.ticked[1:], strict=False)]
    assert steps == pytest.approx([15, 5, 5], abs=0.1)


def test_access_deadlines_hold_for_health_as_well() -> None:
    def slow_health(connection: object) -> None:
        answering({"/metrics": page(GOOD.encode()), "/health": b""})(connection)  # type: ignore[arg-type]

    with serving(slow_health) as url:
        visitor = Visitor("vllm", Client(url, Access(0.3, 0.3)), Clock(), None)
        began = time.monotonic()
        poll = visitor.poll()
    assert poll.health == 0
    assert poll.engines[0].healthy is None, "no answer to ask: /metrics alone speaks"
    assert time.monotonic() - began < 1.5
