"""One simulated server: traffic into its engines, memory under its workers, its deaths and restarts.

What an observer may see is asked of it between steps: `poll`, `gpus`, `allocators`, `take_lines`.
"""

import random
from enum import Enum
from heapq import heappop, heappush
from typing import Any

from fragscope.model import AllocatorReading, CacheConfig, EngineReading, Histogram
from fragscope.simulate.allocator import MIB, Device, OutOfMemoryError
from fragscope.simulate.happenings import FOREVER, Happening, Plan, What
from fragscope.simulate.lengths import Lengths
from fragscope.simulate.logs import Lines, Pids, Scribe, oom_message
from fragscope.simulate.pool import Capacity, Pool
from fragscope.simulate.truth import Truth
from fragscope.simulate.worker import NoRoomToStartError, Worker


class Life(Enum):
    """What an observer meets."""

    UP = "up"
    DYING = "dying"
    """The engine is dead and the server still answers, with frozen gauges."""
    DOWN = "down"


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
        self._traffic = random.Random(f"{seed}/{plan.target}/traffic")  # noqa: S311 - repeatable on purpose
        self._fate = random.Random(f"{seed}/{plan.target}/fate")  # noqa: S311
        self._memory = random.Random(f"{seed}/{plan.target}/memory")  # noqa: S311
        self._lengths = Lengths(plan.demand.trace, plan.build.model.max_model_len, self._traffic)
        self._began = began
        self._at = began
        self._coming = sorted(plan.happenings, key=lambda h: h.at)
        self._active: list[Happening] = []
        self._lines: list[tuple[float, int, str]] = []
        self._line_number = 0
        self._bursting_until = 0.0
        self._calm_until = 0.0
        self._exit_at = self._freed_at = self._load_at = self._up_at = FOREVER
        self._tenant_bytes = [0] * len(plan.gpus)
        self._owed: dict[int, float] = {}
        self._logged: dict[int, tuple[float, float, float]] = {}
        self.started_at = began - self._fate.uniform(60, 86400)
        self.pids = self._new_pids()
        self.workers = [
            [Worker(plan.build, self._device(e, r), self._memory, self.pids.worker + r) for r in range(self._ranks)]
            for e in range(plan.engines)
        ]
        self.pools: list[Pool] = []
        self._boot()

    @property
    def _ranks(self) -> int:
        return self.plan.build.tensor_parallel

    @property
    def scribe(self) -> Scribe:
        """Who writes this process's lines."""
        return Scribe(self.plan.dialect.version, self.pids)

    def _device(self, engine: int, rank: int) -> Device:
        return self.devices[engine * self._ranks + rank]

    def _new_pids(self) -> Pids:
        first = 1000 + int(self._fate.random() * 60000)
        return Pids(first, first + 127, first + 206, 0, self.plan.build.tensor_parallel)

    # Births and deaths

    def _boot(self) -> None:
        """All workers load. Raises NoRoomToStartError."""
        plan, blocks = self.plan, []
        per_token = plan.build.model.kv_bytes_per_token // self._ranks
        for workers in self.workers:
            pool_bytes = min(worker.boot() for worker in workers)
            blocks.append(pool_bytes // (per_token * plan.build.block_size))
        self.pools = [self._pool(count) for count in blocks]
        self.http = {"2xx": 0, "4xx": 0, "5xx": 0}
        self.refused_total = 0
        self.sleeping = False
        self._settled = dict.fromkeys(range(plan.engines), (0, 0, 0))

    def _pool(self, blocks: int) -> Pool:
        c = self.plan.capacity
        blocks = c.num_blocks or blocks
        fields = {name: getattr(c, name) for name in c.__dataclass_fields__}
        return Pool(Capacity(**{**fields, "num_blocks": blocks}), self.plan.build.model.max_model_len, self._traffic)

    def _say(self, at: float, lines: Lines) -> None:
        for delay, text in lines:
            self._line_number += 1
            heappush(self._lines, (at + delay, self._line_number, text))

    def _die(self, at: float, exit_after_s: float) -> int:
        """The engine is dead from `at`, the server answers for a moment longer; returns what was in flight."""
        fate = self._fate
        in_flight = sum(pool.running + pool.waiting for pool in self.pools)
        self.life = Life.DYING
        self._exit_at = at + exit_after_s
        self._freed_at = self._exit_at + fate.uniform(0.3, 2.5)
        low, high = self.plan.restart_s
        self._up_at = self._exit_at + fate.uniform(low, high)
        self._load_at = self._up_at - fate.uniform(0.3, 0.6) * (self._up_at - self._exit_at)
        return in_flight

    def _out_of_memory(self, at: float, oom: OutOfMemoryError, engine: int, rank: int, one_off: int = 0) -> None:
        pool, worker = self.pools[engine], self.workers[engine][rank]
        message = oom_message(oom, engine * self._ranks + rank)
        self.pids = Pids(self.pids.api, self.pids.core, worker.pid, rank, self._ranks)
        self._say(at, self.scribe.failed_step(at, f"torch.OutOfMemoryError: {message}", pool.running, pool.usage_ratio))
        self._die(at, self._fate.uniform(0.2, 0.8))
        tenant = self._tenant_bytes[engine * self._ranks + rank]
        self.truth.memory_failure(at, self.plan.target, oom, worker, tenant, one_off)

    def _driver_refused(self, at: float, engine: int, rank: int) -> None:
        pool, worker = self.pools[engine], self.workers[engine][rank]
        words = ("torch.AcceleratorError: HIP error: out of memory", "RuntimeError: HIP error: hipErrorOutOfMemory")
        error = words[int(self._fate.random() * len(words))]
        self._say(at, self.scribe.failed_step(at, error, pool.running, pool.usage_ratio))
        self._die(at, self._fate.uniform(0.2, 0.8))
        self.truth.driver_failure(at, self.plan.target, worker, self._tenant_bytes[engine * self._ranks + rank])

    # Time

    def step(self, at: float, seconds: float) -> None:
        """Everything between `at - seconds` and `at`."""
        self._at = at
        self._turn(at)
        if self.life is Life.UP and not self.sleeping:
            self._serve(at, seconds)
        elif self.life is Life.DYING:
            self.http["5xx"] += self._arrivals(seconds)
        if self.life is Life.DYING and at >= self._exit_at:
            self.life = Life.DOWN
        if self.life is not Life.UP:
            self._come_back(at)

    def _come_back(self, at: float) -> None:
        if at >= self._freed_at:
            self._freed_at = FOREVER
            for worker in self._all_workers():
                worker.end()
        if at >= self._load_at and self.life is Life.DOWN and self._freed_at == FOREVER:
            self._load_at = FOREVER
            self._load(at)
        if at >= self._up_at and self._load_at == FOREVER and self.life is Life.DOWN:
            self.life = Life.UP
            self._up_at = self._exit_at = FOREVER
            self.truth.recovered(at, self.plan.target)
            self._say(at, self.scribe.started(at, self.pools[0].capacity.num_blocks * self.plan.build.block_size))

    def _load(self, at: float) -> None:
        self.pids = self._new_pids()
        self.started_at = at - self._fate.uniform(2, 8)
        try:
            self._boot()
        except NoRoomToStartError as refused:
            for worker in self._all_workers():
                worker.end()
            build = self.plan.build
            self._say(at, self.scribe.no_room(at, refused.free_bytes, build.total_bytes, build.utilization))
            low, high = self.plan.restart_s
            self._load_at = at + self._fate.uniform(low, high) / 2
            self._up_at = self._load_at + self._fate.uniform(low, high) / 2

    def _all_workers(self) -> list[Worker]:
        return [worker for workers in self.workers for worker in workers]

    # Happenings

    def _turn(self, at: float) -> None:
        since = at - self._began
        while self._coming and self._coming[0].at <= since:
            happening = self._coming.pop(0)
            self._active.append(happening)
            self._begin(at, happening)
        for happening in [h for h in self._active if h.until <= since]:
            self._active.remove(happening)
            self._end(at, happening)

    def _begin(self, at: float, h: Happening) -> None:
        if h.what is What.TENANT_JUMP:
            self._tenant_takes(h, int(h.amount))
        elif self.life is Life.UP:
            start = _STARTS.get(h.what)
            if start is not None:
                start(self, at, h)

    def _end(self, at: float, h: Happening) -> None:
        if h.what in (What.TENANT, What.TENANT_JUMP):
            gpu = h.engine * self._ranks + h.rank
            self.devices[gpu].give(self._tenant_bytes[gpu])
            self._tenant_bytes[gpu] = 0
        elif h.what is What.STALL and self.pools:
            self.pools[h.engine].stalled = False
        elif h.what is What.SLEEP and self.sleeping:
            self.sleeping = False
            for worker in self._all_workers():
                worker.wake()
        elif h.what is What.ZOMBIE and self.life is Life.DYING:
            self._exit_at = at

    def _tenant_takes(self, h: Happening, size: int) -> None:
        gpu = h.engine * self._ranks + h.rank
        size = min(size, self.devices[gpu].free_bytes)
        if size > 0 and self.devices[gpu].take(size):
            self._tenant_bytes[gpu] += size

    def _start_stall(self, _: float, h: Happening) -> None:
        self.pools[h.engine].stalled = True

    def _start_sleep(self, _: float, h: Happening) -> None:
        for pool in self.pools:
            pool.lose_all()
        for worker in self._all_workers():
            worker.sleep(h.amount)
        self.sleeping = True

    def _start_peak(self, at: float, h: Happening) -> None:
        for rank, worker in enumerate(self.workers[h.engine]):
            try:
                worker.one_off(int(h.amount))
            except OutOfMemoryError as oom:
                self._out_of_memory(at, oom, h.engine, rank, one_off=2 * int(h.amount))
                return

    def _start_adapter(self, at: float, h: Happening) -> None:
        for rank, worker in enumerate(self.workers[h.engine]):
            try:
                worker.adapter(int(h.amount))
            except OutOfMemoryError as oom:
                self._out_of_memory(at, oom, h.engine, rank)
                return

    def _start_kill(self, at: float, h: Happening) -> None:
        scribe, fate = self.scribe, self._fate
        at -= fate.random() * 0.9
        busy = sum(pool.running + pool.waiting for pool in self.pools)
        if h.how == "core":
            self._say(at, [*scribe.core_vanished(at), *[(d, t) for d, t in scribe.shutdown(at, in_flight=False)[3:]]])
            self._die(at, fate.uniform(0.3, 4.0))
        elif h.how == "fault":
            self._say(at, scribe.worker_fault(at, 1 + h.engine * self._ranks + h.rank))
            self._die(at, fate.uniform(0.2, 1.0))
        elif h.how == "exception":
            error = "AssertionError: expected all tensors of the batch to have one length"
            self._say(at, scribe.failed_step(at, error, self.pools[0].running, self.pools[0].usage_ratio))
            self._die(at, fate.uniform(0.2, 0.8))
        else:
            self._die(at, 0.0)
        self.truth.death(at, self.plan.target, _CAUSE_OF[h.how], f"{h.how}, {busy} in flight")

    def _start_zombie(self, at: float, h: Happening) -> None:
        at -= self._fate.random() * 0.9
        self._say(at, self.scribe.core_vanished(at))
        self._die(at, h.until - h.at)
        self.truth.death(at, self.plan.target, "engine_fault", "the server outlives its engine")

    def _start_rollout(self, at: float, h: Happening) -> None:
        left = sum(pool.running + pool.waiting for pool in self.pools)
        self._say(at, self.scribe.shutdown(at, in_flight=left > 0))
        self._die(at, self._fate.uniform(0.5, 3.0))
        self.truth.death(at, self.plan.target, "shutdown", f"{left} in flight")

    # Traffic

    def _factor(self, what: What) -> float:
        factor = 1.0
        for h in self._active:
            if h.what is what:
                factor *= h.amount
        return factor

    def _sum(self, what: What) -> float:
        return sum(h.amount for h in self._active if h.what is what)

    def _arrivals(self, seconds: float) -> int:
        demand, rng = self.plan.demand, self._traffic
        since = self._at - self._began
        rate = demand.per_s * self._factor(What.LOAD)
        if demand.daily_swing:
            # A slow swell instead of a day: a run is hours long.
            phase = since / 7200.0 % 1.0
            rate *= 1 + demand.daily_swing * (4 * abs(phase - 0.5) - 1)
        if demand.burst_factor > 1:
            rate *= self._burst(demand.burst_factor, demand.burst_period_s)
        expected, count = rate * seconds, 0
        passed = rng.expovariate(1.0)
        while passed < expected:
            count += 1
            passed += rng.expovariate(1.0)
        return count

    def _burst(self, factor: float, period_s: float) -> float:
        """A fifth of the time in bursts, at a mean rate that stays what it was."""
        rng = self._traffic
        if self._at >= self._calm_until:
            self._bursting_until = self._at + rng.expovariate(5.0 / period_s)
            self._calm_until = self._bursting_until + rng.expovariate(1.25 / period_s)
        return factor if self._at < self._bursting_until else max(0.05, (1 - 0.2 * factor) / 0.8)

    def _serve(self, at: float, seconds: float) -> None:
        self._let_in(at, seconds)
        for engine, pool in enumerate(self.pools):
            pool.step(at, seconds)
            self._settle(engine, pool)
        try:
            self._use_memory(at, seconds)
        except _Refused as refused:
            moment = at - self._fate.random() * seconds * 0.9
            if refused.oom is not None:
                self._out_of_memory(moment, refused.oom, refused.engine, refused.rank)
            else:
                self._driver_refused(moment, refused.engine, refused.rank)

    def _let_in(self, at: float, seconds: float) -> None:
        demand, rng = self.plan.demand, self._traffic
        patience = min([h.amount for h in self._active if h.what is What.HANG_UP], default=demand.patience_s)
        for _ in range(self._arrivals(seconds)):
            if self.plan.background_errors and rng.random() < self.plan.background_errors:
                self.http["5xx"] += 1
                continue
            prompt, output = self._lengths.draw()
            deadline = at + patience * (0.5 + rng.random()) if patience < FOREVER else FOREVER
            pool = self.pools[0] if len(self.pools) == 1 else self.pools[int(rng.random() * len(self.pools))]
            if not pool.arrive(prompt, output, deadline):
                self.refused_total += 1
                # A stream that loses the race for the queue is refused inside a 200.
                streamed = rng.random() < 0.3 * demand.stream_share
                self.http["2xx" if streamed else "5xx"] += 1
        self.http["5xx" if self.plan.dialect.client_errors_are_5xx else "4xx"] += self._some(
            self._sum(What.CLIENT_ERRORS) * seconds
        )
        self.http["5xx"] += self._some(self._sum(What.SERVER_ERRORS) * seconds)

    def _some(self, expected: float) -> int:
        count = 0
        if expected > 0:
            passed = self._traffic.expovariate(1.0)
            while passed < expected:
                count += 1
                passed += self._traffic.expovariate(1.0)
        return count

    def _settle(self, engine: int, pool: Pool) -> None:
        """What ended since the last step becomes an HTTP status: a client that hung up counts as served."""
        done = pool.counters.finished + pool.counters.hung_up
        self.http["2xx"] += done - self._settled[engine][0]
        self._settled[engine] = (done, 0, 0)

    def _use_memory(self, at: float, seconds: float) -> None:
        plan = self.plan
        for engine, pool in enumerate(self.pools):
            busy = pool.running > 0
            keep = 0
            if plan.keepers is not None and busy:
                keep = self._some(plan.keepers.per_s * self._factor(What.KEEPERS) * seconds)
            for rank, worker in enumerate(self.workers[engine]):
                try:
                    worker.step(at, pool.largest_chunk, pool.running, keep, plan.keepers)
                except OutOfMemoryError as oom:
                    raise _Refused(engine, rank, oom) from oom
        for h in self._active:
            if h.what in (What.LEAK, What.DRIVER_LEAK, What.TENANT):
                self._grow(h, seconds)

    def _grow(self, h: Happening, seconds: float) -> None:
        """Growth comes in lumps: what is owed is taken once a lump's worth is due."""
        key = self.plan.happenings.index(h)
        owed = self._owed.get(key, 0.0) + h.amount * seconds
        lump = (24 + 100 * self._memory.random()) * MIB
        self._owed[key] = owed
        if owed < lump:
            return
        self._owed[key] = owed - lump
        if h.what is What.TENANT:
            self._tenant_takes(h, int(lump))
            return
        worker = self.workers[h.engine][h.rank]
        if h.what is What.DRIVER_LEAK:
            if not worker.leak_outside(int(lump)):
                raise _Refused(h.engine, h.rank, None)
            return
        try:
            for _ in range(8):
                worker.leak_torch(int(lump) // 8)
        except OutOfMemoryError as oom:
            raise _Refused(h.engine, h.rank, oom) from oom

    # What can be seen

    def timing_out(self, at: float) -> bool:
        """Whether the scraper is cut off just now."""
        return any(h.what is What.GAP for h in self._active)

    def readings(self, at: float) -> tuple[EngineReading, ...]:
        """The page's figures, if it is answered; `at` is the poll's time."""
        return tuple(self._reading(at, engine, pool) for engine, pool in enumerate(self.pools))

    def _reading(self, at: float, engine: int, pool: Pool) -> EngineReading:
        c, dialect = pool.counters, self.plan.dialect
        finished = {"stop": float(c.stopped), "length": float(c.cut_at_length), "abort": 0.0, "error": 0.0}
        by_reason = {"capacity": float(pool.waiting), "deferred": 0.0} if dialect.waiting_by_reason else None
        return EngineReading(
            at=at,
            engine=str(engine),
            model_name=self.plan.build.model.name,
            kv_usage_ratio=0.0 if self.sleeping else pool.usage_ratio,
            running=float(pool.running),
            waiting=float(pool.waiting),
            waiting_by_reason=by_reason,
            preemptions_total=float(c.preemptions),
            prompt_tokens_total=float(c.prompt_tokens),
            generation_tokens_total=float(int(c.generation_tokens)),
            first_tokens_total=float(c.first_tokens),
            finished_total={reason: finished[reason] for reason in dialect.reasons},
            http_total={name: float(count) for name, count in self.http.items()},
            admission_rejections_total=float(self.refused_total) if dialect.rejections else None,
            prompt_tokens=Histogram(float(pool.prompts.count), float(pool.prompts.total), pool.prompts.buckets()),
            output_tokens=Histogram(float(pool.outputs.count), float(pool.outputs.total), pool.outputs.buckets()),
            cache_config=self._cache_config(pool),
            sleeping=self.sleeping if dialect.sleep_state else None,
            healthy=self.life is Life.UP,
            started_at=self.started_at if dialect.process_start else None,
        )

    def _cache_config(self, pool: Pool) -> CacheConfig:
        build, dialect = self.plan.build, self.plan.dialect
        total = sum(each.capacity.num_blocks for each in self.pools)
        tokens = pool.capacity.num_blocks * build.block_size
        return CacheConfig(
            block_size=build.block_size,
            num_gpu_blocks=total if dialect.num_blocks else None,
            gpu_memory_utilization=build.utilization,
            cache_dtype="auto",
            kv_cache_size_tokens=tokens if dialect.pool_tokens else None,
        )

    def stats_lines(self, at: float) -> list[str]:
        """What vLLM logs every ten seconds, one line per engine."""
        rows = []
        for engine, pool in enumerate(self.pools):
            c = pool.counters
            before = self._logged.get(engine, (at - 10, 0.0, 0.0))
            seconds = max(1.0, at - before[0])
            prompt, made = c.prompt_tokens - before[1], c.generation_tokens - before[2]
            self._logged[engine] = (at, c.prompt_tokens, c.generation_tokens)
            figures = (
                max(0.0, prompt / seconds),
                max(0.0, made / seconds),
                pool.running,
                pool.waiting,
                pool.usage_ratio,
            )
            rows.append(self.scribe.stats(at, engine, figures))
        return rows

    def gpus(self) -> list[tuple[str, int, int, int, int]]:
        """(gpu, total, used, highest since the last call, own) of every card."""
        rows = []
        for number, (gpu, device) in enumerate(zip(self.plan.gpus, self.devices, strict=True)):
            worker = self.workers[number // self._ranks][number % self._ranks]
            rows.append((gpu, device.total_bytes, device.used_bytes, device.peak_bytes, worker.own_bytes))
            device.peak_bytes = device.used_bytes
        return rows

    def allocators(self, at: float) -> list[AllocatorReading]:
        """What every worker that lives says of its allocator."""
        if self.life is not Life.UP:
            return []
        config = "expandable_segments:True" if self.plan.build.expandable else None
        rows = []
        for number, worker in enumerate(self._all_workers()):
            t, gpu = worker.torch, self.plan.gpus[number]
            split, largest = t.inactive_split_bytes(), t.largest_free_bytes()
            rows.append(
                AllocatorReading(at, gpu, self.pids.worker + number, t.allocated_bytes, t.reserved_bytes, split,
                                 t.retries_total, t.ooms_total, largest, config)
            )  # fmt: skip
        return rows

    def take_lines(self, until: float) -> list[tuple[float, str]]:
        """The log's lines up to then, in order."""
        rows = []
        while self._lines and self._lines[0][0] <= until:
            at, _, text = heappop(self._lines)
            rows.append((at, text))
        return rows


class _Refused(Exception):  # noqa: N818 - a refusal, not a mistake
    """A worker did not get memory; `oom` is None where it was the driver's doing and no allocator spoke."""

    def __init__(self, engine: int, rank: int, oom: OutOfMemoryError | None) -> None:
        super().__init__(engine, rank)
        self.engine, self.rank, self.oom = engine, rank, oom


_CAUSE_OF = {
    "core": "engine_fault",
    "fault": "driver_fault",
    "exception": "engine_fault",
    "host_oom": "host_oom",
    "pod": "unexplained",
}

_STARTS: dict[What, Any] = {
    What.STALL: Server._start_stall,  # noqa: SLF001 - the table of this class's own methods
    What.SLEEP: Server._start_sleep,  # noqa: SLF001
    What.PEAK: Server._start_peak,  # noqa: SLF001
    What.ADAPTER: Server._start_adapter,  # noqa: SLF001
    What.KILL: Server._start_kill,  # noqa: SLF001
    What.ZOMBIE: Server._start_zombie,  # noqa: SLF001
    What.ROLLOUT: Server._start_rollout,  # noqa: SLF001
}
