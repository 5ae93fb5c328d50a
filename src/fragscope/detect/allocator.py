"""What the caching allocators inside the workers did lately: retries, out-of-memory errors, stranded bytes.

A retry is the allocator giving back all of its cache because the device had nothing left. Retries alone
are harmless (a healthy run of a real GPU had ten in half a minute); with a rising inactive split they are
a forecast, and before a death they are evidence (docs/detector.md).
"""

from collections import deque
from dataclasses import dataclass, field

from fragscope.detect.parameters import Parameters
from fragscope.detect.statistics import Spacing
from fragscope.model import AllocatorReading, Fact, LogFact

_WORKERS_KEPT = 64
"""More workers than any server has on one node; beyond it the one that was silent longest goes."""


@dataclass(frozen=True, slots=True)
class Held:
    """The allocators of one GPU together, at their last reading before a moment; bytes."""

    gpu: str
    allocated_bytes: int
    reserved_bytes: int
    inactive_split_bytes: int
    retries: int
    """Retries in the window before the moment."""
    expandable: bool
    """Segments can grow, so nothing is stranded between them (PyTorch's expandable_segments)."""


@dataclass(slots=True)
class _Worker:
    """One worker's allocator on one GPU."""

    first_at: float
    last: AllocatorReading
    rises: deque[tuple[float, int]] = field(default_factory=deque)
    """(when, how many) retries were added."""


class Allocators:
    """Follows every worker's counters through resets, and forgets the workers that fell silent."""

    def __init__(self, parameters: Parameters) -> None:
        self._p = parameters
        self._workers: dict[tuple[str, int], _Worker] = {}
        self._spacing = Spacing()

    def observe(self, target: str, readings: tuple[AllocatorReading, ...], at: float) -> tuple[LogFact, ...]:
        """Takes one sample's readings; returns the out-of-memory errors that were counted since.

        The first reading of a worker only sets its baseline.
        """
        if not readings and not self._workers:
            return ()
        self._spacing.observe(at)
        facts = []
        for reading in readings:
            fact = self._read(target, reading)
            if fact is not None:
                facts.append(fact)
        self._forget(at)
        return tuple(facts)

    def _read(self, target: str, reading: AllocatorReading) -> LogFact | None:
        key = reading.gpu, reading.pid
        worker = self._workers.get(key)
        if worker is None:
            self._workers[key] = _Worker(reading.at, reading)
            return None
        before = worker.last
        if reading.at <= before.at:
            return None
        worker.last = reading
        retries = _rise(reading.retries_total, before.retries_total)
        if retries > 0:
            worker.rises.append((reading.at, retries))
        ooms = _rise(reading.ooms_total, before.ooms_total)
        if ooms <= 0:
            return None
        return LogFact(reading.at, target, Fact.OOM, {"ooms": float(ooms)}, "the allocator's own counter")

    def _forget(self, at: float) -> None:
        since = at - self._p.forecast_window_s
        for worker in self._workers.values():
            while worker.rises and worker.rises[0][0] < since:
                worker.rises.popleft()
        silent = [key for key, worker in self._workers.items() if worker.last.at < since]
        if len(self._workers) - len(silent) > _WORKERS_KEPT:
            silent.append(min(self._workers, key=lambda key: self._workers[key].last.at))
        for key in silent:
            del self._workers[key]

    def held(self, gpu: str | None, at: float, window_s: float) -> Held | None:
        """The allocators on `gpu` (where none is, or None: on the GPU with the most stranded) as of `at`.

        Retries are those of the last `window_s`. Workers that were first seen later belong to another process.
        None without a fresh reading.
        """
        if not self._workers:
            return None
        names = {worker.last.gpu for worker in self._workers.values()}
        found = [held for name in sorted(names) if (held := self._on(name, at, window_s)) is not None]
        own = next((held for held in found if held.gpu == gpu), None)
        return own or max(found, key=lambda held: held.inactive_split_bytes, default=None)

    def _on(self, gpu: str, at: float, window_s: float) -> Held | None:
        workers = [w for w in self._workers.values() if w.last.gpu == gpu and w.first_at <= at]
        workers = [w for w in workers if w.last.at >= at - self._spacing.fresh_s(self._p.stale_after_s)]
        if not workers:
            return None
        since = at - window_s
        return Held(
            gpu=gpu,
            allocated_bytes=sum(w.last.allocated_bytes for w in workers),
            reserved_bytes=sum(w.last.reserved_bytes for w in workers),
            inactive_split_bytes=sum(w.last.inactive_split_bytes for w in workers),
            retries=sum(count for w in workers for when, count in w.rises if when >= since),
            expandable=any(_expandable(w.last) for w in workers),
        )

    def on(self, gpu: str, at: float) -> Held | None:
        """The allocators on exactly this GPU now; retries over the forecast's window."""
        return self._on(gpu, at, self._p.forecast_window_s) if self._workers else None

    def clear(self) -> None:
        """Forgets everything: the target was forgotten."""
        self._workers.clear()


def times(count: int) -> str:
    """How often, in words."""
    return "once" if count == 1 else f"{count} times"


def _rise(now: int, before: int) -> int:
    return now - before if now >= before else now


def _expandable(reading: AllocatorReading) -> bool:
    return reading.config is not None and "expandable_segments:true" in reading.config.lower().replace(" ", "")
