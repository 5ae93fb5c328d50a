"""One simulated server: traffic into its engines, memory under its workers, its deaths and restarts."""

import random
from dataclasses import replace
from enum import Enum
from heapq import heappop, heappush

from fragscope.simulate.allocator import MIB, Device, OutOfMemoryError
from fragscope.simulate.happenings import FOREVER, Happening, Plan, What
from fragscope.simulate.logs import Lines, Pids, Scribe, oom_message
from fragscope.simulate.pool import Pool
from fragscope.simulate.traffic import Traffic
from fragscope.simulate.truth import Truth
from fragscope.simulate.worker import NoRoomToStartError, Worker

_GROWING = (What.LEAK, What.DRIVER_LEAK, What.TENANT)
_LOAD_STEPS = 20
_DRIVER_WORDS = (
    "torch.AcceleratorError: HIP error: out of memory",
    "RuntimeError: HIP error: hipErrorOutOfMemory",
)


class Life(Enum):
    """What an observer meets."""

    UP = "up"
    DYING = "dying"
    """The engine is dead and the server still answers, with frozen gauges."""
    DOWN = "down"


class Refused(Exception):  # noqa: N818 - a refusal, not a mistake
    """A worker did not get memory; `oom` is None where the driver refused and no allocator spoke."""

    def __init__(self, rank: tuple[int, int], oom: OutOfMemoryError | None) -> None:
        super().__init__(rank)
        self.rank, self.oom = rank, oom


class Server:
    """Advances by steps; the same plan, seed and steps give the same history."""

    def __init__(self, plan: Plan, seed: str, began: float, truth: Truth) -> None:
        self.plan = plan
        self.life = Life.UP
        self.truth = truth
        self.devices = [Device(plan.build.total_bytes, plan.build.idle_bytes) for _ in plan.gpus]
        self.http = {"2xx": 0, "4xx": 0, "5xx": 0}
        self.refused_total = 0
        self.sleeping = False
        self.active: list[Happening] = []
        self.fate = _stream(seed, plan, "fate")
        self._rng = _stream(seed, plan, "traffic")
        self._traffic = Traffic(plan, self._rng, began)
        self._memory = _stream(seed, plan, "memory")
        self._began = began
        self._coming = sorted(plan.happenings, key=lambda h: h.at)
        self._lines: list[tuple[float, int, str]] = []
        self._line_number = 0
        self._exit_at = self._freed_at = self._load_at = self._up_at = FOREVER
        self._loading = [0] * len(plan.gpus)
        self._load_from = 0.0
        self._tenant_bytes = [0] * len(plan.gpus)
        self._owed: dict[Happening, float] = {}
        self._settled: dict[int, int] = {}
        self.started_at = began - self.fate.uniform(20, 86400)
        self.pids = self._new_pids()
        ranks = range(plan.build.tensor_parallel)
        self.workers = [
            [Worker(plan.build, self._device((e, r)), self._memory) for r in ranks] for e in range(plan.engines)
        ]
        self.pools: list[Pool] = []
        self._boot()

    @property
    def scribe(self) -> Scribe:
        """Who writes this process's lines."""
        return Scribe(self.pids)

    def all_workers(self) -> list[Worker]:
        """The workers in the order of their cards."""
        return [worker for workers in self.workers for worker in workers]

    def in_flight(self) -> int:
        """Requests running and waiting on all engines."""
        return sum(pool.running + pool.waiting for pool in self.pools)

    def _gpu(self, rank: tuple[int, int]) -> int:
        return rank[0] * self.plan.build.tensor_parallel + rank[1]

    def _device(self, rank: tuple[int, int]) -> Device:
        return self.devices[self._gpu(rank)]

    def _new_pids(self) -> Pids:
        first = 1000 + int(self.fate.random() * 60000)
        return Pids(first, first + 127, first + 206, 0, self.plan.build.tensor_parallel)

    def _boot(self) -> None:
        """All workers load. Raises NoRoomToStartError."""
        build, blocks = self.plan.build, []
        per_token = build.model.kv_bytes_per_token // build.tensor_parallel
        for number, worker in enumerate(self.all_workers()):
            worker.pid = self.pids.worker + number
        for workers in self.workers:
            pool_bytes = min([worker.boot() for worker in workers])
            blocks.append(pool_bytes // (per_token * build.block_size))
        longest = build.model.max_model_len
        self.pools = [Pool(replace(self.plan.capacity, num_blocks=count), longest, self._rng) for count in blocks]
        self.http = {"2xx": 0, "4xx": 0, "5xx": 0}
        self.refused_total = 0
        self.sleeping = False
        self._settled = dict.fromkeys(range(self.plan.engines), 0)

    def say(self, at: float, lines: Lines) -> None:
        """Puts lines into the log, each at its delay after `at`."""
        for delay, text in lines:
            self._line_number += 1
            heappush(self._lines, (at + delay, self._line_number, text))

    def take_lines(self, until: float) -> list[tuple[float, str]]:
        """The log's lines up to then, in order; each is taken once."""
        rows = []
        while self._lines and self._lines[0][0] <= until:
            at, _, text = heappop(self._lines)
            rows.append((at, text))
        return rows

    # Deaths and restarts

    def die(self, at: float, exit_after_s: float) -> None:
        """The engine is dead from `at`; the server answers until it exits, frozen, and comes back after a while."""
        fate = self.fate
        self.life = Life.DYING
        # Half of the time the answers of the last moment are counted before the page is gone.
        if fate.random() < 0.5:
            streams = int(self.in_flight() * self.plan.demand.stream_share)
            self.http["2xx"] += streams
            self.http["5xx"] += self.in_flight() - streams
        low, high = self.plan.restart_s
        self._exit_at = at + exit_after_s
        # A dead engine core frees its memory although its server stays.
        self._freed_at = at + min(exit_after_s, 2.0) + fate.uniform(0.3, 2.5)
        self._up_at = self._exit_at + fate.uniform(low, high)
        self._load_at = self._up_at - fate.uniform(0.15, 0.4) * (self._up_at - self._exit_at)

    def exit_now(self, at: float) -> None:
        """A server that outlived its engine ends."""
        late_s = at - self._exit_at
        self._exit_at, self._load_at, self._up_at = at, self._load_at + late_s, self._up_at + late_s

    def out_of_memory(self, at: float, oom: OutOfMemoryError, rank: tuple[int, int], one_off_bytes: int = 0) -> None:
        """A worker's allocator gave up in a step: the whole server goes."""
        pool, worker = self.pools[rank[0]], self.workers[rank[0]][rank[1]]
        self.pids = replace(self.pids, worker=worker.pid, rank=rank[1])
        error = f"torch.OutOfMemoryError: {oom_message(oom, self._gpu(rank))}"
        self.say(at, self.scribe.failed_step(at, error, pool.running, pool.usage_ratio))
        self.truth.memory_failure(at, self.plan.target, oom, worker, self._tenant_bytes[self._gpu(rank)], one_off_bytes)
        self.die(at, self.fate.uniform(0.2, 0.8))

    def _driver_refused(self, at: float, rank: tuple[int, int]) -> None:
        pool, worker = self.pools[rank[0]], self.workers[rank[0]][rank[1]]
        error = _DRIVER_WORDS[int(self.fate.random() * len(_DRIVER_WORDS))]
        self.say(at, self.scribe.failed_step(at, error, pool.running, pool.usage_ratio))
        self.truth.driver_failure(at, self.plan.target, worker, self._tenant_bytes[self._gpu(rank)])
        self.die(at, self.fate.uniform(0.2, 0.8))

    def _come_back(self, at: float) -> None:
        if at >= self._freed_at:
            self._freed_at = FOREVER
            for worker in self.all_workers():
                worker.end()
            self._load_from = max(at, self._exit_at)
        if self.life is not Life.DOWN or self._freed_at < FOREVER:
            return
        if self._load_at < FOREVER:
            self._load_weights(at)
        if at >= self._load_at:
            self._load_at = FOREVER
            self._load(at)
        elif at >= self._up_at and self._load_at == FOREVER:
            self.life = Life.UP
            self._up_at = self._exit_at = FOREVER
            self.truth.recovered(at, self.plan.target)
            self.say(at, self.scribe.started(self.pools[0].capacity.num_blocks * self.plan.build.block_size))

    def _load_weights(self, at: float) -> None:
        """Weights arrive bit by bit, from a third of the wait on."""
        build = self.plan.build
        begin = self._load_from + (self._load_at - self._load_from) / 3
        share = (at - begin) / max(1.0, self._load_at - begin)
        if share <= 0:
            return
        wanted = int(build.model.weights_bytes / build.tensor_parallel * min(1.0, share))
        for gpu, device in enumerate(self.devices):
            more = wanted - self._loading[gpu]
            if more > build.model.weights_bytes // _LOAD_STEPS // build.tensor_parallel and device.take(more):
                self._loading[gpu] += more

    def _load(self, at: float) -> None:
        for gpu, device in enumerate(self.devices):
            device.give(self._loading[gpu])
            self._loading[gpu] = 0
        self.pids = self._new_pids()
        self.started_at = self._load_from + self.fate.uniform(1, 6)
        try:
            self._boot()
        except NoRoomToStartError as refused:
            for worker in self.all_workers():
                worker.end()
            build = self.plan.build
            self.say(at, self.scribe.no_room(at, refused.free_bytes, build.total_bytes, build.utilization))
            low, high = self.plan.restart_s
            self._load_from = at
            self._load_at = at + self.fate.uniform(low, high) / 2
            self._up_at = self._load_at + self.fate.uniform(low, high) / 4

    # Time

    def due(self, since: float) -> tuple[list[Happening], list[Happening]]:
        """What begins and what ends now, `since` seconds after the run began."""
        begins = []
        while self._coming and self._coming[0].at <= since:
            begins.append(self._coming.pop(0))
        self.active += begins
        ends = [h for h in self.active if h.until <= since]
        self.active = [h for h in self.active if h.until > since]
        return begins, ends

    def step(self, at: float, seconds: float) -> None:
        """Everything between `at - seconds` and `at`."""
        if self.life is Life.UP and not self.sleeping:
            self._serve(at, seconds)
        elif self.life is Life.DYING:
            self.http["5xx"] += self._traffic.arrivals(at, seconds, self._factor(What.LOAD))
        if self.life is Life.DYING and at >= self._exit_at:
            self.life = Life.DOWN
        if self.life is not Life.UP:
            self._come_back(at)

    def _serve(self, at: float, seconds: float) -> None:
        self._let_in(at, seconds)
        for engine, pool in enumerate(self.pools):
            pool.step(at, seconds)
            # What ended becomes an HTTP status: a client that hung up counts as served.
            done = pool.counters.finished + pool.counters.hung_up
            self.http["2xx"] += done - self._settled[engine]
            self._settled[engine] = done
        try:
            self._use_memory(at, seconds)
        except Refused as refused:
            moment = at - self.fate.random() * seconds * 0.9
            if refused.oom is not None:
                self.out_of_memory(moment, refused.oom, refused.rank)
            else:
                self._driver_refused(moment, refused.rank)

    def _let_in(self, at: float, seconds: float) -> None:
        demand, rng, http = self.plan.demand, self._rng, self.http
        patience_s = min([h.amount for h in self.active if h.what is What.HANG_UP], default=demand.patience_s)
        for _ in range(self._traffic.arrivals(at, seconds, self._factor(What.LOAD))):
            if self.plan.background_errors and rng.random() < self.plan.background_errors:
                http["5xx"] += 1
                continue
            prompt, output = self._traffic.draw()
            deadline = at + patience_s * (0.5 + rng.random()) if patience_s < FOREVER else FOREVER
            pool = self.pools[0] if len(self.pools) == 1 else self.pools[int(rng.random() * len(self.pools))]
            if not pool.arrive(prompt, output, deadline):
                self.refused_total += 1
                # A stream that loses the race for the queue is refused inside a 200.
                http["2xx" if rng.random() < 0.3 * demand.stream_share else "5xx"] += 1
        bad = "5xx" if self.plan.dialect.client_errors_are_5xx else "4xx"
        http[bad] += self._traffic.some(self._sum(What.CLIENT_ERRORS) * seconds)
        http["5xx"] += self._traffic.some(self._sum(What.SERVER_ERRORS) * seconds)

    def _factor(self, what: What) -> float:
        factor = 1.0
        for h in self.active:
            if h.what is what:
                factor *= h.amount
        return factor

    def _sum(self, what: What) -> float:
        return sum(h.amount for h in self.active if h.what is what)

    # Memory

    def _use_memory(self, at: float, seconds: float) -> None:
        keepers = self.plan.keepers
        for engine, pool in enumerate(self.pools):
            keep = 0
            if keepers is not None and pool.running:
                keep = self._traffic.some(keepers.per_s * self._factor(What.KEEPERS) * seconds)
            for rank, worker in enumerate(self.workers[engine]):
                try:
                    worker.step(at, pool.largest_chunk, pool.running, keep, keepers)
                except OutOfMemoryError as oom:
                    raise Refused((engine, rank), oom) from oom
        for h in self.active:
            if h.what in _GROWING:
                self._grow(h, seconds)

    def _grow(self, h: Happening, seconds: float) -> None:
        """Growth comes in lumps: what is owed is taken once a lump's worth is due."""
        owed = self._owed.get(h, 0.0) + h.amount * seconds
        lump = int((24 + 100 * self._memory.random()) * MIB)
        self._owed[h] = owed
        if owed < lump:
            return
        self._owed[h] = owed - lump
        if h.what is What.TENANT:
            self.tenant_takes(h, lump)
            return
        rank = (h.engine, h.rank)
        worker = self.workers[h.engine][h.rank]
        if h.what is What.DRIVER_LEAK:
            if not worker.leak_outside(lump):
                raise Refused(rank, None)
            return
        try:
            for _ in range(8):
                worker.leak_torch(lump // 8)
        except OutOfMemoryError as oom:
            raise Refused(rank, oom) from oom

    def tenant_takes(self, h: Happening, size: int) -> None:
        """Another process takes memory of a card, as much as there is."""
        gpu = self._gpu((h.engine, h.rank))
        size = min(size, self.devices[gpu].free_bytes)
        if size > 0 and self.devices[gpu].take(size):
            self._tenant_bytes[gpu] += size

    def tenant_leaves(self, h: Happening) -> None:
        """And gives it back."""
        gpu = self._gpu((h.engine, h.rank))
        self.devices[gpu].give(self._tenant_bytes[gpu])
        self._tenant_bytes[gpu] = 0


def _stream(seed: str, plan: Plan, what: str) -> random.Random:
    """Random numbers of their own for each concern, so that one draw more here changes nothing there."""
    return random.Random(f"{seed}/{plan.target}/{what}")  # noqa: S311 - repeatable on purpose
