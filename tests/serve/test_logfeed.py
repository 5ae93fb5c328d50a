"""From a line in a followed file to a verdict: the log's feed, the tick, and what is published."""

import gzip
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fragscope.app import Core, build_core
from fragscope.model import Cause, Fact, Gap, Part, Phase, Reason, Sample, Verdict
from fragscope.serve.board import Board, View
from fragscope.serve.clock import Clock
from fragscope.serve.feeds import EngineFeed, EnginePoll, GpuFeed
from fragscope.serve.keeper import INCIDENTS
from fragscope.serve.logfeed import LogFeed, LogIntake
from fragscope.serve.poller import Poller
from fragscope.settings import load
from fragscope.simulate.scenarios import SCENARIOS
from fragscope.simulate.world import World
from fragscope.sources.logs.envelope import Entry
from fragscope.sources.logs.follow import Follower, Look, Stretch
from tests.explain.test_lines import OOM as HIP
from tests.serve.test_daemon import FakeClock, FakeVisitor, eventually, good, refused, watch_of
from tests.serve.test_exposition import page_of, value
from tests.sources.logs import append
from tests.sources.test_sysfs import add_card

GONE = Gap(Part.LOG, Reason.ABSENT, "it is not there")
DEATH = "EngineDeadError: EngineCore encountered an issue."


class FakeFollower(Follower):
    """Says what it was told to say."""

    def __init__(self, *looks: Look) -> None:
        self.looks = list(looks)

    def look(self) -> Look:
        return self.looks.pop(0) if self.looks else Look()


CUT = "HIP out of memory. Tried to allocate 2.00 GiB."


def lines(*texts: str, wall: float | None = None, path: str = "/vllm.log") -> Look:
    return Look((Stretch(Path(path), tuple(Entry(text, wall) for text in texts)),))


def feed_of(*looks: Look, clock: Clock | None = None, keep_lines: bool = False) -> LogFeed:
    feed = LogFeed(
        "vllm", FakeFollower(*looks), clock or FakeClock(), threading.Event(), interval_s=5.0, keep_lines=keep_lines
    )
    for _ in looks:
        feed.step()
    return feed


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_line_is_a_fact_of_the_time_it_was_read() -> None:
    intake = feed_of(lines(HIP)).take()
    (fact,) = intake.facts
    assert (fact.what, fact.at, intake.gap) == (Fact.OOM, 1000.0, None)


def test_a_stamped_line_is_a_fact_of_its_own_time_and_never_of_the_future() -> None:
    for ago_s, expected in ((300.0, 700.0), (-300.0, 1000.0)):
        (fact,) = feed_of(lines(HIP, wall=time.time() - ago_s)).take().facts
        assert fact.at == pytest.approx(expected, abs=1)


def test_a_fact_is_told_once() -> None:
    feed = feed_of(lines(HIP))
    assert len(feed.take().facts) == 1
    assert feed.take().facts == ()


def test_a_flood_of_death_notices_does_not_crowd_out_the_message_that_explains_them() -> None:
    facts = feed_of(lines(*[DEATH] * 5000, HIP)).take().facts
    assert len(facts) < 100
    assert facts[-1].what is Fact.OOM


def test_lines_are_kept_only_for_a_recording_and_no_more_than_fit() -> None:
    assert feed_of(lines(HIP)).take().lines == ()
    kept = feed_of(lines(*["x" * 2**16] * 200), keep_lines=True).take().lines
    assert 0 < sum(len(text) for _, text in kept) <= 4 * 2**20


def test_a_message_is_complete_when_the_log_has_been_quiet_or_another_file_begins() -> None:
    clock = FakeClock()
    feed = feed_of(clock=clock)
    feed._follower = FakeFollower(lines("HIP out of"), lines("memory."), Look(), Look(), Look(), lines(CUT))
    for _ in range(3):
        feed.step()
    assert feed.take().facts == ()
    clock.at += 1.0
    feed.step()
    assert [(fact.what, fact.at) for fact in feed.take().facts] == [(Fact.OOM, 1000.0)]
    feed.step()
    assert feed.take().facts == (), "and not again"
    feed.step()
    feed._follower = FakeFollower(lines("the next file", path="/1.log"))
    feed.step()
    assert [fact.what for fact in feed.take().facts] == [Fact.OOM]


def test_a_missing_log_is_counted_once_an_interval() -> None:
    clock = FakeClock()
    feed = LogFeed("vllm", FakeFollower(*[Look(gap=GONE)] * 21), clock, threading.Event(), interval_s=5.0)
    for _ in range(21):
        clock.at += feed.step()
    assert feed.status.failures[Reason.ABSENT] in (2, 3)
    assert not feed.status.up
    feed.step()
    assert feed.status.up


def samples_of_one_tick(tmp_path: Path, polls: list[EnginePoll], log: LogFeed | None, clock: Clock) -> list[Sample]:
    stop = threading.Event()
    add_card(tmp_path, 1, "0000:c1:00.0")
    gpu_feed = GpuFeed(tmp_path, 20, clock, stop)
    gpu_feed.step()
    feed = EngineFeed("vllm", FakeVisitor(list(polls)), 5.0, clock, stop)
    for _ in polls:
        feed.step()
    seen: list[Sample] = []
    watch = watch_of(feed, log=log)
    Poller(
        [watch], gpu_feed, Board(View(0.0)), clock, stop, interval_s=5.0, tap=lambda sample, _: seen.append(sample)
    ).tick()
    return seen


def log_gaps(sample: Sample) -> list[Reason]:
    return [gap.reason for gap in sample.gaps if gap.part is Part.LOG]


def test_while_the_log_is_open_nothing_of_it_is_missing(tmp_path: Path) -> None:
    (sample,) = samples_of_one_tick(tmp_path, [good(1000)], feed_of(Look()), FakeClock())
    assert log_gaps(sample) == []


def test_a_log_that_is_not_there_and_one_that_nobody_named_are_missing(tmp_path: Path) -> None:
    for log in (feed_of(Look(gap=GONE)), None):
        (sample,) = samples_of_one_tick(tmp_path / str(log), [good(1000)], log, FakeClock())
        assert log_gaps(sample) == [Reason.ABSENT]


def test_a_hung_read_of_the_log_becomes_missing_evidence(tmp_path: Path) -> None:
    clock = FakeClock()
    log = feed_of(Look(), clock=clock)
    clock.at += 60
    (sample,) = samples_of_one_tick(tmp_path, [good(1060)], log, clock)
    assert log_gaps(sample) == [Reason.STALE]


@pytest.mark.parametrize(("written_at", "expected"), [(5000.0, [Reason.STALE]), (6990.0, []), (8000.0, [])])
def test_a_file_that_the_engine_never_wrote_to_does_not_vouch_for_it(
    tmp_path: Path, written_at: float, expected: list[Reason]
) -> None:
    poll = good(1000)
    started = EnginePoll(poll.at, tuple(replace(engine, started_at=7000.0) for engine in poll.engines))
    log = feed_of(Look(following=Path("/vllm.log"), modified_at=written_at))
    (sample,) = samples_of_one_tick(tmp_path, [started], log, FakeClock())
    assert log_gaps(sample) == expected


def test_facts_go_to_the_poll_that_followed_them_and_the_latest_to_the_last(tmp_path: Path) -> None:
    clock = FakeClock()
    looks = []
    for at in (1001, 1004, 1009):
        clock.at = at
        looks.append(lines(HIP, wall=time.time() - (1010 - at)))
    clock.at = 1010
    log = feed_of(*looks, clock=clock)
    seen = samples_of_one_tick(tmp_path, [good(1002), good(1005), refused(1008)], log, clock)
    assert [len(sample.log_facts) for sample in seen] == [1, 1, 1]


class Live:
    """A daemon's core beside a simulated engine whose log is a file."""

    def __init__(self, tmp_path: Path, stop: threading.Event, where: object, **more: object) -> None:
        self.seen: list[Sample] = []
        self.world = World(SCENARIOS["healthy"], 1, tmp_path / "sys", time.time)
        self.world.begin()
        target = {"name": "llama", "url": self.world.server.url, "log": str(where)}
        settings = load(flags={"targets": [target], "sysfs_root": tmp_path / "sys", "interval_s": 0.5, **more}, env={})
        self.core: Core = build_core(settings, Clock(), stop, lambda sample, _: self.seen.append(sample))

    @property
    def verdict(self) -> Verdict | None:
        assessment = self.core.board.view.targets[0].assessment
        return assessment.verdicts[0] if assessment is not None else None

    def phase(self) -> Phase | None:
        return self.verdict.phase if self.verdict is not None else None


def test_an_out_of_memory_line_in_the_followed_file_confirms_within_one_tick(
    tmp_path: Path, stop: threading.Event
) -> None:
    log = tmp_path / "vllm.log"
    append(log, "INFO 11-30 15:00:00 [core.py:1] serving\n")
    live = Live(tmp_path, stop, log)
    live.core.start()
    try:
        eventually(lambda: live.phase() is Phase.CLEAR)
        page = page_of(live.core.board.view)
        assert value(page, "fragscope_evidence_available", evidence="log") == 1
        assert value(page, "fragscope_source_up", source="log") == 1
        ticks = live.core.board.view.ticks
        append(log, HIP + "\n")
        eventually(lambda: live.phase() is Phase.CONFIRMED)
        assert live.core.board.view.ticks - ticks <= 2, "the tick under way, and the one after it"
    finally:
        live.world.end()
    assert live.verdict is not None
    assert live.verdict.cause == Cause.FRAGMENTATION
    assert "log" not in live.verdict.missing
    assert any(sample.log_facts for sample in live.seen)


def test_a_missing_log_does_not_keep_the_daemon_from_judging(tmp_path: Path, stop: threading.Event) -> None:
    live = Live(tmp_path, stop, tmp_path / "none" / "vllm.log")
    live.core.start()
    try:
        eventually(lambda: live.phase() is Phase.CLEAR)
    finally:
        live.world.end()
    page = page_of(live.core.board.view)
    assert value(page, "fragscope_evidence_available", evidence="log") == 0
    assert value(page, "fragscope_source_up", source="log") == 0
    assert (value(page, "fragscope_source_read_failures_total", source="log", reason="absent") or 0) >= 1


def restarts(folder: Path, died_s_ago: float) -> None:
    """The log of the restart before, which ends with the allocator's message, and an empty new one."""
    folder.mkdir()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000000000Z", time.gmtime(time.time() - died_s_ago))
    append(folder / "0.log", f"{stamp} stderr F {HIP}\n{stamp} stderr F {DEATH}\n")
    os.utime(folder / "0.log", (time.time() - died_s_ago,) * 2)
    append(folder / "1.log", "")


def test_a_crash_just_before_our_own_start_is_seen(tmp_path: Path, stop: threading.Event) -> None:
    restarts(tmp_path / "logs", died_s_ago=20)
    live = Live(tmp_path, stop, tmp_path / "logs")
    live.world.server.down()
    live.core.start()
    eventually(lambda: live.phase() is Phase.CONFIRMED)
    live.world.end()


@pytest.mark.parametrize("engine_up", [True, False])
def test_an_old_out_of_memory_message_is_not_taken_for_a_new_one(
    tmp_path: Path, stop: threading.Event, engine_up: bool
) -> None:
    restarts(tmp_path / "logs", died_s_ago=600)
    live = Live(tmp_path, stop, tmp_path / "logs")
    if not engine_up:
        live.world.server.down()
    live.core.start()
    eventually(lambda: live.core.board.view.ticks >= 4)
    live.world.end()
    assert live.seen[0].log_facts or live.seen[1].log_facts, "it was read"
    assert live.verdict is not None
    assert live.verdict.phase is (Phase.CLEAR if engine_up else Phase.UNKNOWN)
    assert (live.verdict.cause, live.verdict.episodes) == (Cause.NONE if engine_up else live.verdict.cause, 0)


def test_what_was_heard_before_a_restart_of_ours_is_not_heard_twice(tmp_path: Path, stop: threading.Event) -> None:
    log, first_stop = tmp_path / "vllm.log", threading.Event()
    append(log, "")
    first = Live(tmp_path / "first", first_stop, log, state_dir=tmp_path / "state")
    first.core.start()
    eventually(lambda: first.phase() is Phase.CLEAR)
    append(log, HIP + "\n")
    eventually(lambda: first.phase() is Phase.CONFIRMED)
    time.sleep(1.0)
    first_stop.set()
    first.world.end()
    assert first.core.keeper is not None
    first.core.keeper.join(2)
    (incident,) = (tmp_path / "state" / INCIDENTS).glob("*.gz")
    assert b'"what":"oom"' in gzip.decompress(incident.read_bytes())
    os.utime(log, (time.time() - 2.0,) * 2)
    again = Live(tmp_path / "again", stop, log, state_dir=tmp_path / "state")
    again.core.start()
    eventually(lambda: again.core.board.view.ticks >= 3)
    again.world.end()
    assert [fact for sample in again.seen for fact in sample.log_facts] == []
    assert again.phase() is Phase.CONFIRMED


def test_an_intake_that_nobody_took_is_empty() -> None:
    feed = LogFeed("vllm", FakeFollower(), FakeClock(), threading.Event(), interval_s=5.0)
    assert feed.take() == LogIntake(gap=Gap(Part.LOG, Reason.ABSENT, "not read yet"))
