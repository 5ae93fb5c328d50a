"""`demo`: the real daemon over a simulated vLLM and GPU, saying what it thinks as it changes its mind."""

import tempfile
import threading
from pathlib import Path

from rich.console import Console

from fragscope import report
from fragscope.app import build_core, build_web, hold_signals, wait_for_signal
from fragscope.model import Verdict
from fragscope.serve.board import Board
from fragscope.serve.clock import Clock
from fragscope.settings import Settings, load
from fragscope.simulate.scenarios import SCENARIOS
from fragscope.simulate.world import World
from fragscope.wire import encode, verdict_object

_LOOK_S = 0.1


def demo_settings(url: str, sysfs_root: Path, listen_address: str) -> Settings:
    """The daemon's settings beside the simulated engine; everything else is its default."""
    flags = {
        "targets": [{"name": "demo", "url": url, "planned_stop_file": sysfs_root / "planned-stop"}],
        "sysfs_root": sysfs_root,
        "gpu_sources": ["sysfs"],  # the machine's own GPUs and processes have no part in it
        "web_listen_address": listen_address,
    }
    return load(flags=flags)


def run(
    name: str,
    *,
    speed: float,
    seed: int,
    seconds: float | None,
    listen_address: str,
    out: Console,
    as_json: bool,
) -> None:
    """Runs a scenario until the time is over or a signal comes. Raises ListenError."""
    scenario = SCENARIOS[name]
    clock = Clock(speed)
    stop = threading.Event()
    with tempfile.TemporaryDirectory(prefix="fragscope-demo-") as folder:
        world = World(scenario, seed, Path(folder) / "sys", clock.now)
        hold_signals()
        world.begin()
        try:
            settings = demo_settings(world.server.url, Path(folder) / "sys", listen_address)
            core = build_core(settings, clock, stop)
            web = build_web(settings, core)
            core.start()
            web.start()
            if not as_json:
                _where_to_look(out, scenario.story, world.server.url, web.address[1], speed)
            teller = threading.Thread(target=_tell, args=(core.board, stop, clock, out, as_json), daemon=True)
            teller.start()
            wait_for_signal(seconds)
            stop.set()
            teller.join(2)
            web.stop()
        finally:
            world.end()


def _where_to_look(out: Console, story: str, engine_url: str, port: int, speed: float) -> None:
    report.say(out, f"Scenario: {story}. Time runs {speed:g} times as fast. Ctrl-C ends it.")
    report.say(out, f"  simulated vLLM   {engine_url}/metrics")
    report.say(out, f"  status page      http://127.0.0.1:{port}/")
    report.say(out, f"  metrics          http://127.0.0.1:{port}/metrics")
    report.say(out, f"  verdicts         http://127.0.0.1:{port}/api/v1/verdicts\n")


def _tell(board: Board, stop: threading.Event, clock: Clock, out: Console, as_json: bool) -> None:  # noqa: FBT001
    """Prints the history as it grows."""
    began = clock.now()
    told: Verdict | None = None
    while not stop.wait(_LOOK_S):
        history = board.view.history
        for verdict in history[_after(history, told) :]:
            told = verdict
            if as_json:
                out.print(encode(verdict_object(verdict)), markup=False)
            else:
                out.print(report.change_line(verdict, max(0.0, verdict.at - began) / clock.speed))


def _after(history: tuple[Verdict, ...], told: Verdict | None) -> int:
    """The index behind the verdict that was told last."""
    if told is None:
        return 0
    return next((i + 1 for i, verdict in enumerate(history) if verdict is told), 0)
