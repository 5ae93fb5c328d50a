"""The neighbours that fragscope watches, in a process of their own, so that their CPU time is not counted."""

import logging
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.recorded_pages import successive
from fragscope.simulate.scenarios import SCENARIOS
from fragscope.simulate.server import EngineServer
from fragscope.simulate.world import World

_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Where the server listens and how many pages it has served."""

    url: str
    pages_served: Callable[[], int]


@contextmanager
def neighbour(texts: tuple[str, ...], sysfs_root: Path) -> Iterator[Neighbour]:
    """A real HTTP server of recorded pages, and a simulated card under `sysfs_root`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    served = context.Value("i", 0)
    child = context.Process(target=_live, args=(texts, sysfs_root, theirs, served), daemon=True)
    child.start()
    theirs.close()
    try:
        if not ours.poll(_PATIENCE_S):
            raise TimeoutError("the server of recorded pages does not start")
        yield Neighbour(ours.recv(), lambda: served.value)
    finally:
        ours.close()
        child.join(_PATIENCE_S)


def _live(texts: tuple[str, ...], sysfs_root: Path, pipe: Any, served: Any) -> None:
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    pages = successive(texts)

    def page() -> str:
        served.value += 1
        return next(pages)

    world = World(SCENARIOS["healthy"], 1, sysfs_root, time.time)
    world.server = EngineServer(page)
    world.begin()
    pipe.send(world.server.url)
    try:
        pipe.recv()
    except EOFError:
        world.end()
