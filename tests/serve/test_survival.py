"""What survives: incident files, and a killed daemon that neither forgets nor re-fires."""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fragscope.detect.snapshot import SnapshotError, dump, load
from fragscope.model import Cause, Fact, Phase, Sample
from fragscope.recording import Tally, read_lines
from fragscope.replay import Replayer, Timeline, replay
from fragscope.serve.flight import AFTERMATH_S, FlightRecorder, Incident
from fragscope.serve.keeper import INCIDENTS, Keeper, Limits, opened, read_state, sealed, state_file
from tests.serve.test_exposition import series
from tests.stories import CARD, GIB, Story, crash_without_room


def recorded(story: Story, recorder: FlightRecorder, what: Callable[[], object]) -> list[Incident]:
    """The incidents of a stretch of the story."""
    found: list[Incident] = []
    observe = story.detector.observe

    def watched(sample: Sample):  # type: ignore[no-untyped-def] # noqa: ANN202
        assessment = observe(sample)
        incident = recorder.observe(sample, assessment)
        if incident is not None:
            found.append(incident)
        return assessment

    story.detector.observe = watched  # type: ignore[method-assign]
    what()
    story.detector.observe = observe  # type: ignore[method-assign]
    return found


def test_a_restored_detector_goes_on_as_if_nothing_had_happened() -> None:
    story = Story(interval_s=1.0)
    story.serve(ticks=120)
    crash_without_room(story)
    written = msgspec.json.encode(dump(story.detector))
    twin = Story(interval_s=1.0)
    twin.detector = load(msgspec.json.decode(written), "vllm", twin.parameters)
    twin.at, twin.started_at, twin.used_bytes = story.at, story.started_at, story.used_bytes
    twin.counters, twin.tokens = dict(story.counters), story.tokens
    for each in (story, twin):
        each.refuse(ticks=3)
        each.restart()
        each.serve(used=int(0.905 * CARD), ticks=5)
    assert twin.last == story.last
    assert twin.verdict.phase is Phase.SUSPECTED


def test_every_kind_of_state_can_be_written() -> None:
    story = Story(with_log=True)
    story.serve(usage=0.97, waiting=3, preempted=1, server_errors=2, rejected=9, client_errors=4, hang_ups=3, ticks=60)
    story.say(Fact.OOM, tried=2.0 * GIB, free=1.0 * GIB, total=CARD, reserved_unallocated=9.0 * GIB)
    story.serve(healthy=False, ticks=3)
    story.time_out(ticks=2)
    again = load(msgspec.json.decode(msgspec.json.encode(dump(story.detector))), "vllm", story.parameters)
    assert dump(again) == dump(story.detector)


def damaged(plain: dict[str, object]) -> list[tuple[object, str]]:
    return [
        ([], "another format"),
        ({**plain, "format": 0}, "another format"),
        ({**plain, "shape": "0.0.1 deadbeef"}, "another version"),
        ({**plain, "state": {"!": "object", "of": "Popen", "as": 0, "is": {}}}, "damaged"),
        ({**plain, "state": {"!": "dict", "is": []}}, "not of target"),
        ({**plain, "state": None}, "not of target"),
    ]


@pytest.mark.parametrize("number", range(6))
def test_a_snapshot_that_is_not_ours_is_refused_with_a_reason(number: int) -> None:
    plain, why = damaged(dump(Story().detector))[number]
    with pytest.raises(SnapshotError, match=why):
        load(plain, "vllm", Story().parameters)


def test_a_snapshot_of_another_target_is_refused() -> None:
    with pytest.raises(SnapshotError, match="not of target other"):
        load(dump(Story().detector), "other", Story().parameters)


def test_an_incident_is_written_at_once_and_again_with_what_followed() -> None:
    story, recorder = Story(), FlightRecorder(900)
    first = recorded(story, recorder, lambda: crash_without_room(story))
    later = recorded(story, recorder, lambda: story.refuse(ticks=int(AFTERMATH_S / 5) + 1))
    assert len(first) == len(later) == 1
    assert first[0].name == later[0].name
    assert len(later[0].content) > len(first[0].content)


def test_an_incident_replays_to_the_verdict_it_was_written_for(tmp_path: Path) -> None:
    story, recorder = Story(), FlightRecorder(900)
    (incident,) = recorded(story, recorder, lambda: crash_without_room(story))
    path = tmp_path / incident.name
    path.write_bytes(gzip.compress(incident.content))
    tally, told = Tally(), Timeline()
    for assessment in replay(read_lines(str(path), tally), Replayer()):
        list(told.observe(assessment))
    ((final, _),) = told.finals()
    assert (final.phase, final.cause) == (Phase.SUSPECTED, Cause.MEMORY_UNDETERMINED)
    assert tally.sentence() is None


def test_a_healthy_run_writes_no_incident() -> None:
    story, recorder = Story(), FlightRecorder(900)
    assert recorded(story, recorder, lambda: story.serve(ticks=500)) == []


def test_the_recorder_forgets_what_is_too_old_or_too_much() -> None:
    story, recorder = Story(interval_s=1.0), FlightRecorder(60)
    recorded(story, recorder, lambda: story.serve(ticks=500))
    tape = recorder._tapes["vllm"]
    assert 60 <= len(tape.lines) <= 62
    assert tape.size_bytes == sum(len(line) for _, line in tape.lines)


def test_targets_never_share_a_state_file(tmp_path: Path) -> None:
    assert state_file(tmp_path, "a/b") != state_file(tmp_path, "a_b")
    assert state_file(tmp_path, "../b").parent == tmp_path


def keeper_of(folder: Path, limits: Limits | None = None) -> Keeper:
    return Keeper(folder, limits or Limits(), threading.Event())


def test_the_oldest_incidents_go_first(tmp_path: Path) -> None:
    keeper = keeper_of(tmp_path, Limits(files=3))
    for i in range(6):
        keeper.keep_incident(Incident(f"2026010{i}T000000Z-vllm-x.jsonl.gz", b"x"))
        keeper.flush()
    kept = sorted(path.name[:8] for path in (tmp_path / INCIDENTS).iterdir())
    assert kept == ["20260103", "20260104", "20260105"]
    assert keeper.kept.incidents_total == 6


def test_incidents_are_bounded_in_bytes(tmp_path: Path) -> None:
    keeper = keeper_of(tmp_path, Limits(files=100, size_bytes=5000))
    for i in range(6):
        keeper.keep_incident(Incident(f"2026010{i}T000000Z-vllm-x.jsonl.gz", os.urandom(2000)))
        keeper.flush()
    assert sum(path.stat().st_size for path in (tmp_path / INCIDENTS).iterdir()) <= 5000


def test_a_disk_that_cannot_be_written_is_counted_and_survived(tmp_path: Path) -> None:
    blocked = tmp_path / "state"
    blocked.write_text("a file where the folder should be")
    keeper = keeper_of(blocked)
    keeper.keep_state("vllm", {"x": 1})
    keeper.keep_incident(Incident("a.jsonl.gz", b"x"))
    keeper.flush()
    assert keeper.kept.failures_total >= 2
    assert keeper.kept.incidents_total == 0


def test_only_the_newest_state_is_written(tmp_path: Path) -> None:
    keeper = keeper_of(tmp_path)
    for i in range(5):
        keeper.keep_state("vllm", {"n": i})
    keeper.flush()
    assert json.loads(opened(state_file(tmp_path, "vllm").read_bytes())) == {"n": 4}
    assert [path.name for path in tmp_path.iterdir()] == ["state-vllm.json"]


def test_state_that_is_corrupt_or_too_old_is_ignored(tmp_path: Path) -> None:
    path = state_file(tmp_path, "vllm")
    assert read_state(tmp_path, "vllm", 100) is None
    path.write_bytes(b'{"format": 1, "sha')
    assert read_state(tmp_path, "vllm", 100) is None
    whole = sealed(b'{"format": 1}')
    path.write_bytes(whole.replace(b"1}", b"2}"))
    assert read_state(tmp_path, "vllm", 100) is None
    path.write_bytes(whole)
    assert read_state(tmp_path, "vllm", 100) is not None
    os.utime(path, (time.time() - 1000, time.time() - 1000))
    assert read_state(tmp_path, "vllm", 100) is None


def start(port: int, url: str, sysfs: Path, state: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "FRAGSCOPE_SYSFS_ROOT": str(sysfs),
        "FRAGSCOPE_STATE_DIR": str(state),
        "FRAGSCOPE_TARGETS__0__NAME": "demo",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "fragscope", "serve", "--target", f"demo={url}", "--interval", "0.3",
         "--web.listen-address", f"127.0.0.1:{port}"],
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )  # fmt: skip


def page(port: int) -> dict[str, float]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as answer:
            return series(answer.read().decode())
    except OSError:
        return {}


def wait_for(port: int, claim: Callable[[dict[str, float]], bool], within_s: float = 40.0) -> dict[str, float]:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        shown = page(port)
        if claim(shown):
            return shown
        time.sleep(0.1)
    raise AssertionError(f"not within {within_s} s; last: {page(port)}")


def total(shown: dict[str, float], name: str) -> float:
    return sum(value for head, value in shown.items() if head.startswith(name))


def test_a_daemon_killed_while_suspecting_comes_back_suspecting(tmp_path: Path) -> None:
    from fragscope.simulate.scenarios import SCENARIOS  # noqa: PLC0415
    from fragscope.simulate.world import World  # noqa: PLC0415
    from tests.test_prometheus import free_port  # noqa: PLC0415

    began = time.time()
    world = World(SCENARIOS["pseudo-oom"], 1, tmp_path / "sys", lambda: began + (time.time() - began) * 20)
    world.begin()
    port, state = free_port(), tmp_path / "state"
    suspected = 'fragscope_pseudo_oom_suspected{engine="0",model_name="demo-llama",target="demo"}'
    daemon = start(port, world.server.url, tmp_path / "sys", state)
    try:
        before = wait_for(port, lambda shown: shown.get(suspected) == 1)
        time.sleep(0.7)
        before = page(port) or before
        daemon.send_signal(signal.SIGKILL)
        daemon.wait(5)
        daemon = start(port, world.server.url, tmp_path / "sys", state)
        after = wait_for(port, lambda shown: suspected in shown)
    finally:
        daemon.terminate()
        daemon.wait(10)
        world.end()
    assert after[suspected] == 1, "the first thing it says is what it said last"
    # One interval's worth may be lost: at most what came in while nobody looked.
    answered = "fragscope_request_outcomes_total"
    assert total(after, answered) >= total(before, answered) - 0.05 * total(before, answered)
    assert list((state / INCIDENTS).glob("*.jsonl.gz"))
