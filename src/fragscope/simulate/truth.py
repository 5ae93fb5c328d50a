"""What really happened, for scoring: every death with its cause, from the simulator's inside.

A memory failure is called after what made it, by a counterfactual: of the pathologies that were switched
on (a leak, another tenant, a one-off request) the largest without which the request had been served, if it
is larger than what the allocator held stranded; else fragmentation if compaction would have served it;
else the card was simply too full.
"""

from dataclasses import dataclass

from fragscope.simulate.allocator import GIB, OutOfMemoryError
from fragscope.simulate.worker import Worker

MEMORY, DEATH, CONDITION = "memory", "death", "condition"


@dataclass(slots=True)
class Episode:
    """A death: from the failure to the first answer of the next process; `until` is None while it lasts."""

    at: float
    target: str
    cause: str
    kind: str
    note: str
    until: float | None = None


class Truth:
    """Keeps the episodes of a run; an episode is handed out once, when it is over."""

    def __init__(self) -> None:
        self.open: list[Episode] = []
        self._over: list[Episode] = []

    def memory_failure(
        self, at: float, target: str, oom: OutOfMemoryError, worker: Worker, tenant_bytes: int, one_off_bytes: int
    ) -> None:
        """The allocator gave up."""
        lacking = oom.tried_bytes - oom.free_bytes
        stranded = oom.stranded_bytes
        made = {
            "memory_growth": worker.leaked_bytes,
            "external_process": tenant_bytes,
            "transient_peak": one_off_bytes,
        }
        cause, most = max(made.items(), key=lambda item: item[1])
        if most < max(lacking, stranded, 1):
            cause = "fragmentation" if stranded >= lacking else "vram_exhausted"
        note = (
            f"tried {oom.tried_bytes / GIB:.2f} GiB, free {oom.free_bytes / GIB:.2f}, stranded {stranded / GIB:.2f}, "
            f"split {worker.torch.inactive_split_bytes() / GIB:.2f}, leaked {worker.leaked_bytes / GIB:.2f}, "
            f"tenant {tenant_bytes / GIB:.2f}, one-off {one_off_bytes / GIB:.2f}"
        )
        self.open.append(Episode(at, target, cause, MEMORY, note))

    def driver_failure(self, at: float, target: str, worker: Worker, tenant_bytes: int) -> None:
        """The driver gave up on memory that torch knows nothing of."""
        leaked = worker.leaked_bytes
        cause = "external_process" if tenant_bytes > leaked else "memory_growth"
        note = f"outside torch; leaked {leaked / GIB:.2f} GiB, tenant {tenant_bytes / GIB:.2f}"
        self.open.append(Episode(at, target, cause, MEMORY, note))

    def death(self, at: float, target: str, cause: str, note: str) -> None:
        """The engine died of something else."""
        self.open.append(Episode(at, target, cause, DEATH, note))

    def recovered(self, at: float, target: str) -> None:
        """The target answers again."""
        for episode in [each for each in self.open if each.target == target]:
            episode.until = at
            self.open.remove(episode)
            self._over.append(episode)

    def take_over(self) -> list[Episode]:
        """The episodes that ended since the last call."""
        over, self._over = self._over, []
        return over
