"""The scenarios: each draws a server, its load and what happens to it from one seed."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from fragscope.simulate.allocator import GIB, MIB
from fragscope.simulate.casting import Cast, cast, gpu_names
from fragscope.simulate.dialect import DIALECTS, MULTI_API_SERVER
from fragscope.simulate.happenings import FOREVER, Condition, Happening, Plan, Script, What
from fragscope.simulate.lengths import Lengths
from fragscope.simulate.worker import Keepers


@dataclass(frozen=True, slots=True)
class Scenario:
    """One situation with a sentence for people; `hours` is its usual length."""

    name: str
    story: str
    write: Callable[[random.Random, float], Script]
    hours: float = 4.0


SCENARIOS: dict[str, Scenario] = {}


def scenario(story: str, hours: float = 4.0) -> Callable[[Callable[[random.Random, float], Script]], None]:
    """Enters a function in the catalogue under its own name."""

    def enter(write: Callable[[random.Random, float], Script]) -> None:
        name = write.__name__.strip("_").replace("_", "-")
        SCENARIOS[name] = Scenario(name, story, write, hours)

    return enter


def script(name: str, seed: int, hours: float | None = None) -> Script:
    """What happens in a scenario under a seed. Raises KeyError for an unknown name."""
    chosen = SCENARIOS[name]
    rng = random.Random(f"{name}/{seed}/script")  # noqa: S311 - repeatable on purpose
    return chosen.write(rng, (hours or chosen.hours) * 3600)


def _one(plan: Plan, *happenings: Happening, conditions: tuple[Condition, ...] = (), **marks: bool) -> Script:
    plan = replace(plan, happenings=plan.happenings + happenings)
    return Script((plan,), conditions, negative=marks.get("negative", True), hard=marks.get("hard", False))


def _onset(rng: random.Random, run_s: float, low: float = 0.2, high: float = 0.6) -> float:
    return run_s * rng.uniform(low, high)


def _ample(rng: random.Random) -> float:
    return rng.choice((0.85, 0.88, 0.90, 0.90, 0.92))


def _thin(rng: random.Random) -> float:
    return rng.choice((0.95, 0.96, 0.97))


def _either(rng: random.Random) -> float:
    return _thin(rng) if rng.random() < 0.5 else _ample(rng)


@scenario("moderate load, room everywhere")
def _healthy(rng: random.Random, _: float) -> Script:
    return _one(cast(rng, Cast(usage=rng.uniform(0.05, 0.6), utilization=_ample(rng))))


@scenario("load comes in bursts that the pool and the queue absorb")
def _healthy_bursty(rng: random.Random, _: float) -> Script:
    plan = cast(rng, Cast(usage=rng.uniform(0.1, 0.35), utilization=_ample(rng)))
    factor = rng.uniform(2.0, 3.5)
    per_s = plan.demand.per_s * 1.6 / factor
    demand = replace(plan.demand, per_s=per_s, burst_factor=factor, burst_period_s=rng.uniform(120, 1200))
    return _one(replace(plan, demand=demand))


@scenario("images: buffers outlive their steps, memory climbs for an hour and then no further")
def _multimodal_growth(rng: random.Random, run_s: float) -> Script:
    plan = cast(rng, Cast(usage=rng.uniform(0.1, 0.5), utilization=rng.choice((0.85, 0.88, 0.90))))
    keepers = _keepers(rng, plan, rng.uniform(0.1, 0.25), longest_s=min(3600.0, 0.3 * run_s))
    return _one(replace(plan, keepers=keepers))


def _keepers(rng: random.Random, plan: Plan, share: float, longest_s: float) -> Keepers:
    """Buffers whose live total in the long run is `share` of the room beside weights, pool, graphs and steps."""
    low, high = 1 * MIB, int(rng.uniform(60, 160)) * MIB
    shortest_s = longest_s / 40
    room = (1 - plan.build.utilization) * plan.build.total_bytes - plan.build.graph_bytes
    mean = (low + high) / 2 * (shortest_s + longest_s) / 2
    return Keepers(share * room / mean, low, high, shortest_s, longest_s)


@scenario("more and longer contexts than the KV pool holds: waiting and preemptions, no failure")
def _kv_exhausted(rng: random.Random, run_s: float) -> Script:
    plan = cast(rng, Cast(usage=0.45, utilization=_either(rng), roomy_batch=True, small_pool=True))
    at = _onset(rng, run_s)
    until = min(run_s, at + rng.uniform(1800, 5400))
    plan = replace(plan, demand=replace(plan.demand, patience_s=rng.choice((60.0, 120.0, 300.0))))
    load = Happening(What.LOAD, at, until, rng.uniform(3.0, 6.0))
    return _one(plan, load, conditions=(Condition(at + 120, until, "kv_exhausted"),))


@scenario("max_num_seqs is small: requests wait at low cache use")
def _scheduler_limit(rng: random.Random, run_s: float) -> Script:
    plan = cast(rng, Cast(usage=0.25, utilization=_either(rng)))
    at = _onset(rng, run_s)
    until = min(run_s, at + rng.uniform(1200, 4000))
    plan = _small_batch(rng, plan)
    plan = replace(plan, demand=replace(plan.demand, patience_s=rng.choice((60.0, 120.0, FOREVER))))
    load = Happening(What.LOAD, at, until, rng.uniform(2.0, 3.0))
    return _one(plan, load, conditions=(Condition(at + 120, until, "scheduler_limit"),))


def _small_batch(rng: random.Random, plan: Plan) -> Plan:
    """A batch so small that it, and not the pool, is the limit; the load fits it until something happens."""
    seqs = rng.choice((4, 8, 16))
    capacity = replace(plan.capacity, max_num_seqs=seqs)
    service_s = _service_s(plan, seqs)
    return replace(plan, capacity=capacity, demand=replace(plan.demand, per_s=0.55 * seqs / service_s))


def _service_s(plan: Plan, seqs: int) -> float:
    c = plan.capacity
    prompt, output, _ = Lengths(plan.demand.trace, plan.build.model.max_model_len, random.Random(0)).mean()  # noqa: S311
    return output * (1 + seqs / c.half_pace_seqs) / c.decode_pace + prompt / c.prefill_pace


@scenario("a queue limit turns requests away while the cache is nearly empty")
def _admission_limit(rng: random.Random, run_s: float) -> Script:
    plan = _small_batch(rng, cast(rng, Cast(usage=0.2, utilization=_either(rng))))
    plan = replace(plan, capacity=replace(plan.capacity, max_num_queued_reqs=rng.choice((4, 8, 32))))
    at = _onset(rng, run_s)
    until = min(run_s, at + rng.uniform(900, 3600))
    load = Happening(What.LOAD, at, until, rng.uniform(2.5, 5.0))
    dialects = DIALECTS[-2:] if rng.random() < 0.8 else DIALECTS[-3:-2]
    plan = replace(plan, dialect=rng.choice(dialects))
    return _one(plan, load, conditions=(Condition(at + 60, until, "admission_limit"),))


@scenario("the scheduler stalls: nothing runs, requests wait, the pool is empty")
def _stalled(rng: random.Random, run_s: float) -> Script:
    plan = cast(rng, Cast(usage=rng.uniform(0.05, 0.4), utilization=_either(rng)))
    plan = replace(plan, demand=replace(plan.demand, patience_s=rng.choice((120.0, 300.0, FOREVER))))
    at = _onset(rng, run_s)
    until = at + rng.uniform(400, 2400)
    stall = Happening(What.STALL, at, FOREVER)
    how = rng.choice(("pod", "core"))
    kill = Happening(What.KILL, until, how=how) if rng.random() < 0.5 else Happening(What.ROLLOUT, until)
    return _one(plan, stall, kill, conditions=(Condition(at + 240, until, "stalled"),))


@scenario("clients send bad requests, answered 400")
def _client_errors(rng: random.Random, run_s: float) -> Script:
    dialects = [dialect for dialect in DIALECTS if not dialect.client_errors_are_5xx]
    return _bad_requests(rng, run_s, replace(cast(rng, Cast(utilization=_either(rng))), dialect=rng.choice(dialects)))


@scenario("the same on a release that counts them as 5xx")
def _client_errors_as_5xx(rng: random.Random, run_s: float) -> Script:
    dialects = [dialect for dialect in DIALECTS if dialect.client_errors_are_5xx]
    return _bad_requests(rng, run_s, replace(cast(rng, Cast(utilization=_either(rng))), dialect=rng.choice(dialects)))


def _bad_requests(rng: random.Random, run_s: float, plan: Plan) -> Script:
    at = _onset(rng, run_s)
    until = min(run_s, at + rng.uniform(300, 3600))
    storm = Happening(What.CLIENT_ERRORS, at, until, plan.demand.per_s * rng.uniform(0.3, 2.0))
    conditions = () if plan.dialect.client_errors_are_5xx else (Condition(at + 60, until, "client_errors"),)
    return _one(plan, storm, conditions=conditions)


@scenario("impatient clients hang up; vLLM counts them as served")
def _hang_ups(rng: random.Random, run_s: float) -> Script:
    plan = cast(rng, Cast(usage=rng.uniform(0.1, 0.5), utilization=_either(rng)))
    at = _onset(rng, run_s)
    until = min(run_s, at + rng.uniform(600, 3600))
    seconds = _service_s(plan, 32) * rng.uniform(0.3, 0.8)
    return _one(
        plan,
        Happening(What.HANG_UP, at, until, seconds),
        conditions=(Condition(at + 120, until, "client_aborts"),),
    )


@scenario("memory leaks slowly, in torch or beside it, until a step does not fit")
def _slow_leak(rng: random.Random, run_s: float) -> Script:
    plan = cast(rng, Cast(usage=rng.uniform(0.05, 0.6), utilization=rng.choice((0.90, 0.92, 0.92, 0.95))))
    at = _onset(rng, run_s, 0.0, 0.2)
    room = (1 - plan.build.utilization) * plan.build.total_bytes
    what = What.LEAK if rng.random() < 0.6 else What.DRIVER_LEAK
    leak = Happening(what, at, amount=room / (run_s * rng.uniform(0.35, 0.9)))
    return _one(plan, leak, negative=False)


@scenario("buffers of all sizes outlive their steps, live memory is level, and one day no hole is large enough")
def _fragmentation(rng: random.Random, run_s: float) -> Script:
    plan = cast(
        rng, Cast(usage=rng.uniform(0.2, 0.7), utilization=rng.choice((0.90, 0.92, 0.93, 0.94)), big_steps=True)
    )
    keepers = _keepers(rng, plan, rng.uniform(0.6, 0.9), longest_s=rng.uniform(600, 2400))
    quiet = Happening(What.KEEPERS, -FOREVER, _onset(rng, run_s, 0.05, 0.4), rng.uniform(0.2, 0.5))
    return _one(replace(plan, keepers=keepers), quiet, negative=False)


@scenario("another process takes the card's memory, bit by bit or at once")
def _external_process(rng: random.Random, run_s: float) -> Script:
    plan = cast(rng, Cast(usage=rng.uniform(0.1, 0.6), utilization=rng.choice((0.85, 0.90, 0.92)), big_steps=True))
    keepers = _keepers(rng, plan, rng.uniform(0.2, 0.5), longest_s=1800.0)
    at = _onset(rng, run_s, 0.1, 0.5)
    room = (1 - plan.build.utilization) * plan.build.total_bytes
    gone = at + rng.uniform(0.3, 0.6) * run_s
    if rng.random() < 0.5:
        tenant = Happening(What.TENANT, at, gone, amount=room / rng.uniform(600, 5400))
    else:
        tenant = Happening(What.TENANT_JUMP, at, gone, amount=room * rng.uniform(0.7, 2.0))
    return _one(replace(plan, keepers=keepers), tenant, negative=False)


@scenario("one request wants a buffer like no other (prompt log-probabilities of a long prompt)")
def _transient_peak(rng: random.Random, run_s: float) -> Script:
    plan = cast(rng, Cast(usage=rng.uniform(0.1, 0.6), utilization=rng.choice((0.90, 0.92, 0.92, 0.95))))
    room = (1 - plan.build.utilization) * plan.build.total_bytes
    peaks = [
        Happening(What.PEAK, _onset(rng, run_s, 0.1, 0.95), amount=room * rng.uniform(0.15, 0.9))
        for _ in range(rng.randint(2, 4))
    ]
    return _one(plan, *peaks, negative=False)


@scenario("rollouts: traffic is drained, then SIGTERM; some are cut short")
def _rolling_restart(rng: random.Random, run_s: float) -> Script:
    thin = rng.random() < 0.5
    plan = cast(rng, Cast(usage=rng.uniform(0.1, 0.6), utilization=_thin(rng) if thin else _ample(rng)))
    happenings: list[Happening] = []
    for number in range(rng.randint(1, 3)):
        at = run_s * (0.15 + 0.28 * number + rng.uniform(0, 0.15))
        drain_s = rng.choice((0.0, 5.0, 30.0, 60.0, 90.0))
        if drain_s:
            happenings.append(Happening(What.LOAD, at - drain_s, at, 0.0))
        happenings.append(Happening(What.ROLLOUT, at))
    return _one(plan, *sorted(happenings, key=lambda h: h.at), hard=thin)


@scenario("the engine is killed: SIGKILL, a GPU fault, an exception, the host's OOM killer, the whole pod")
def _hard_kill(rng: random.Random, run_s: float) -> Script:
    thin = rng.random() < 0.5
    plan = cast(rng, Cast(usage=rng.uniform(0.1, 0.7), utilization=_thin(rng) if thin else _ample(rng)))
    kills = [
        Happening(What.KILL, run_s * (0.15 + 0.4 * number + rng.uniform(0, 0.25)), how=rng.choice(_KILLS))
        for number in range(rng.randint(1, 2))
    ]
    return _one(plan, *kills, hard=thin)


_KILLS = ("core", "fault", "exception", "host_oom", "pod")


@scenario("the engine core dies and the server stays up, answering 5xx")
def _dead_engine(rng: random.Random, run_s: float) -> Script:
    plan = cast(rng, Cast(usage=rng.uniform(0.05, 0.6), utilization=_either(rng)))
    at = _onset(rng, run_s)
    zombie = Happening(What.ZOMBIE, at, at + rng.uniform(300, 2400))
    return _one(plan, zombie, hard=plan.build.utilization > 0.94)


@scenario("sleep mode: VRAM falls by most of the card and comes back")
def _sleep_mode(rng: random.Random, run_s: float) -> Script:
    plan = cast(rng, Cast(usage=rng.uniform(0.05, 0.4), utilization=_ample(rng)))
    plan = replace(plan, dialect=rng.choice(DIALECTS[2:]))
    happenings: list[Happening] = []
    conditions: list[Condition] = []
    for number in range(rng.randint(1, 3)):
        at = run_s * (0.15 + 0.28 * number + rng.uniform(0, 0.08))
        until = at + rng.uniform(120, 1500)
        happenings.append(Happening(What.LOAD, at - 30, until + 10, 0.0))
        happenings.append(Happening(What.SLEEP, at, until, amount=rng.uniform(0.6, 0.95)))
        conditions.append(Condition(at + 30, until, "sleeping"))
    return _one(plan, *happenings, conditions=tuple(conditions))


@scenario("the scraper is cut off now and then; nothing is wrong with the engine")
def _scrape_gaps(rng: random.Random, run_s: float) -> Script:
    plan = cast(rng, Cast(usage=rng.uniform(0.1, 0.7), utilization=_either(rng)))
    gaps = []
    for _ in range(rng.randint(5, 25)):
        at = run_s * rng.random()
        gaps.append(Happening(What.GAP, at, at + rng.choice((6.0, 20.0, 90.0, 600.0))))
    return _one(plan, *sorted(gaps, key=lambda h: h.at))


@scenario("two engines on one page; the memory of one runs out, or one of them stalls")
def _two_engines(rng: random.Random, run_s: float) -> Script:
    plan = cast(rng, Cast(usage=rng.uniform(0.1, 0.5), utilization=rng.choice((0.92, 0.94)), engines=2))
    plan = replace(plan, dialect=rng.choice((MULTI_API_SERVER, DIALECTS[2], DIALECTS[5])))
    at = _onset(rng, run_s, 0.05, 0.25)
    if rng.random() < 0.3:
        until = at + rng.uniform(900, 3000)
        happenings = (Happening(What.STALL, at, until, engine=1),)
        return _one(plan, *happenings, conditions=(Condition(at + 240, until, "stalled"),))
    room = (1 - plan.build.utilization) * plan.build.total_bytes
    leak = Happening(What.LEAK, at, amount=room / (run_s * rng.uniform(0.3, 0.6)), engine=1)
    return _one(plan, leak, negative=False)


@scenario("tensor parallel: one of the GPUs runs out of memory")
def _one_bad_gpu(rng: random.Random, run_s: float) -> Script:
    plan = cast(rng, Cast(usage=rng.uniform(0.1, 0.6), utilization=rng.choice((0.90, 0.92, 0.94)), tensor_parallel=4))
    at = _onset(rng, run_s, 0.05, 0.25)
    room = (1 - plan.build.utilization) * plan.build.total_bytes
    what = rng.choice((What.LEAK, What.DRIVER_LEAK, What.TENANT))
    grow = Happening(what, at, amount=room / (run_s * rng.uniform(0.3, 0.6)), rank=rng.randint(0, 3))
    return _one(plan, grow, negative=False)


@scenario("a few requests an hour, some of which fail")
def _low_traffic(rng: random.Random, run_s: float) -> Script:
    plan = cast(rng, Cast(usage=0.01, utilization=_either(rng)))
    demand = replace(plan.demand, per_s=rng.uniform(0.002, 0.05))
    plan = replace(plan, demand=demand, background_errors=rng.choice((0.0, 0.02, 0.1)))
    at = _onset(rng, run_s)
    return _one(plan, *([Happening(What.KILL, at, how=rng.choice(_KILLS))] if rng.random() < 0.3 else []))


@scenario("nobody asks for anything")
def _idle(rng: random.Random, run_s: float) -> Script:
    plan = cast(rng, Cast(usage=0.01, utilization=_either(rng)))
    plan = replace(plan, demand=replace(plan.demand, per_s=0.0))
    at = _onset(rng, run_s)
    return _one(plan, *([Happening(What.ROLLOUT, at)] if rng.random() < 0.3 else []))


@scenario("LoRA adapters are loaded at run time: steps in VRAM that are no leak")
def _lora_adapter(rng: random.Random, run_s: float) -> Script:
    plan = cast(rng, Cast(usage=rng.uniform(0.1, 0.5), utilization=_ample(rng)))
    loads = [
        Happening(What.ADAPTER, _onset(rng, run_s, 0.15, 0.95), amount=rng.uniform(0.05, 1.2) * GIB)
        for _ in range(rng.randint(1, 4))
    ]
    return _one(plan, *sorted(loads, key=lambda h: h.at))


@scenario("the card is full to the last percent, held by torch's cache or another process, and nothing fails")
def _full_card(rng: random.Random, run_s: float) -> Script:
    plan = cast(rng, Cast(usage=rng.uniform(0.05, 0.4), utilization=rng.choice((0.94, 0.95, 0.96))))
    at = _onset(rng, run_s, 0.3, 0.5)
    room = (1 - plan.build.utilization) * plan.build.total_bytes
    return _one(plan, Happening(What.TENANT_JUMP, at, amount=room * rng.uniform(0.35, 0.6)), hard=True)


@scenario("eight engines on one node; one dies of something else while a neighbour's card is full", hours=1.5)
def _full_neighbour(rng: random.Random, run_s: float) -> Script:
    names = gpu_names(rng, 8)
    plans = []
    for number in range(8):
        plan = cast(rng, Cast(usage=rng.uniform(0.05, 0.4), utilization=_ample(rng), low_rate=True))
        plans.append(replace(plan, target=f"vllm-{number}", gpus=(names[number],)))
    at = _onset(rng, run_s, 0.1, 0.3)
    room = (1 - plans[3].build.utilization) * plans[3].build.total_bytes
    full = Happening(What.TENANT_JUMP, at, amount=room * 0.9)
    kill = Happening(What.KILL, _onset(rng, run_s, 0.4, 0.8), how=rng.choice(_KILLS))
    plans[3] = replace(plans[3], happenings=(full,))
    plans[5] = replace(plans[5], happenings=(kill,))
    return Script(tuple(plans), negative=True, hard=True)
