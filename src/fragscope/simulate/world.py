"""Engine, card, sysfs tree and server advancing together on somebody's clock."""

import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from fragscope.simulate.card import Card
from fragscope.simulate.engine import Engine
from fragscope.simulate.exposition import render
from fragscope.simulate.scenarios import Scenario
from fragscope.simulate.server import EngineServer

GPU = "0000:c1:00.0"
_STEP_S = 0.5
_RESTART_S = 45.0
_REAL_STEP_S = 0.02


class World(threading.Thread):
    """Runs a scenario: an engine behind HTTP, and a sysfs tree of files that shows its card."""

    def __init__(self, scenario: Scenario, seed: int, root: Path, now: Callable[[], float]) -> None:
        super().__init__(name="world", daemon=True)
        self._scenario = scenario
        self._rng = random.Random(seed)  # noqa: S311 - a simulation is meant to be repeatable
        self._now = now
        self._stopping = threading.Event()
        self._used = _sysfs_tree(root, scenario.habits.total_bytes)
        self._card = Card(scenario.habits, self._rng)
        self._engine = Engine(scenario.shape, self._rng)
        self._started_at = now()
        self._dead_at: float | None = None
        self._lock = threading.Lock()
        self.server = EngineServer(self._page)

    def begin(self) -> None:
        """Brings the engine up and lets time run."""
        self._card.load()
        self._show()
        self.server.up()
        self.start()

    def end(self) -> None:
        """Stops everything."""
        self._stopping.set()
        self.join(5)
        self.server.down()

    def run(self) -> None:
        """Follows the clock in steps of half a second."""
        at = self._now()
        while not self._stopping.wait(_REAL_STEP_S):
            while at + _STEP_S <= self._now() and not self._stopping.is_set():
                at += _STEP_S
                self.advance(at)

    def advance(self, at: float) -> None:
        """One step, up to time `at`."""
        if self._dead_at is not None:
            if at - self._dead_at >= _RESTART_S:
                self._restart(at)
            return
        with self._lock:
            self._engine.step(_STEP_S)
            fits = self._card.step(_STEP_S, busy=bool(self._engine.running))
        if not fits:
            self._die(at)
        self._show()

    def _die(self, at: float) -> None:
        self._dead_at = at
        self.server.down()
        self._card.release()

    def _restart(self, at: float) -> None:
        self._dead_at = None
        with self._lock:
            self._engine = Engine(self._scenario.shape, self._rng)
            self._started_at = at
        self._card.load()
        self._show()
        self.server.up()

    def _page(self) -> str:
        with self._lock:
            return render(self._engine, self._started_at)

    def _show(self) -> None:
        """Replaces the file, so that a reader never meets half a number."""
        fresh = self._used.with_suffix(".new")
        fresh.write_text(f"{self._card.used_bytes}\n")
        fresh.replace(self._used)


def _sysfs_tree(root: Path, total_bytes: int) -> Path:
    """A tree like /sys with one AMD card; returns the file that shows the VRAM in use."""
    shutil.rmtree(root, ignore_errors=True)
    device = root / "devices" / "pci0000:c0" / GPU
    (device / "drm" / "renderD128").mkdir(parents=True)
    files = {
        "vendor": "0x1002",
        "device": "0x74a1",
        "unique_id": "d3b0c1a2f4e59687",
        "mem_info_vram_total": str(total_bytes),
        "mem_info_vram_used": "0",
        "mem_info_gtt_used": "14229504",
    }
    for name, text in files.items():
        (device / name).write_text(text + "\n")
    card = root / "class" / "drm" / "card1"
    card.mkdir(parents=True)
    (card / "device").symlink_to(device)
    return device / "mem_info_vram_used"
