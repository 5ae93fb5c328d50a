"""How what happens to a server begins and ends: kills, rollouts, sleep, stalls, one-off requests."""

from collections.abc import Callable

from fragscope.simulate.allocator import OutOfMemoryError
from fragscope.simulate.happenings import Happening, What
from fragscope.simulate.served import Life, Server

_LATE_S = 0.9
"""Something that happens within a step happens up to this long before the step's end."""


def turn(server: Server, at: float, began: float) -> None:
    """Begins and ends what is due in a run that began then."""
    begins, ends = server.due(at - began)
    for happening in begins:
        begin(server, at, happening)
    for happening in ends:
        end(server, at, happening)


def begin(server: Server, at: float, h: Happening) -> None:
    """The happening's first moment; most of them need a server that is up."""
    if h.what is What.TENANT_JUMP:
        server.tenant_takes(h, int(h.amount))
    elif server.life is Life.UP and h.what in _STARTS:
        _STARTS[h.what](server, at, h)


def end(server: Server, at: float, h: Happening) -> None:
    """The happening is over."""
    if h.what in (What.TENANT, What.TENANT_JUMP):
        server.tenant_leaves(h)
    elif h.what is What.STALL:
        server.pools[h.engine].stalled = False
    elif h.what is What.SLEEP and server.sleeping:
        server.sleeping = False
        for worker in server.all_workers():
            worker.wake()
    elif h.what is What.ZOMBIE and server.life is Life.DYING:
        server.exit_now(at)


def _stall(server: Server, _: float, h: Happening) -> None:
    server.pools[h.engine].stalled = True


def _sleep(server: Server, _: float, h: Happening) -> None:
    for pool in server.pools:
        pool.lose_all()
    for worker in server.all_workers():
        worker.sleep(h.amount)
    server.sleeping = True


def _peak(server: Server, at: float, h: Happening) -> None:
    for rank, worker in enumerate(server.workers[h.engine]):
        try:
            worker.one_off(int(h.amount))
        except OutOfMemoryError as oom:
            server.out_of_memory(at, oom, (h.engine, rank), one_off_bytes=2 * int(h.amount))
            return


def _adapter(server: Server, at: float, h: Happening) -> None:
    for rank, worker in enumerate(server.workers[h.engine]):
        try:
            worker.adapter(int(h.amount))
        except OutOfMemoryError as oom:
            server.out_of_memory(at, oom, (h.engine, rank))
            return


def _kill(server: Server, at: float, h: Happening) -> None:
    scribe, fate = server.scribe, server.fate
    at -= fate.random() * _LATE_S
    busy = server.in_flight()
    pool = server.pools[0]
    if h.how == "core":
        server.say(at, [*scribe.core_vanished(at), *scribe.server_ends(0.4)])
        server.die(at, fate.uniform(0.3, 4.0))
    elif h.how == "fault":
        server.say(at, scribe.worker_fault(at, 1 + h.rank))
        server.die(at, fate.uniform(0.2, 1.0))
    elif h.how == "exception":
        server.say(at, scribe.failed_step(at, _ERROR, pool.running, pool.usage_ratio))
        server.die(at, fate.uniform(0.2, 0.8))
    elif h.how == "host_oom":
        server.say(at, scribe.host_killed(at, with_kernel=fate.random() < 0.5))
        server.die(at, fate.uniform(0.2, 1.0))
    else:
        server.die(at, 0.0)
    server.truth.death(at, server.plan.target, _CAUSE_OF[h.how], f"{h.how}, {busy} in flight")


def _zombie(server: Server, at: float, h: Happening) -> None:
    at -= server.fate.random() * _LATE_S
    server.say(at, server.scribe.core_vanished(at))
    server.die(at, h.until - h.at)
    server.truth.death(at, server.plan.target, "engine_fault", "the server outlives its engine")


def _rollout(server: Server, at: float, _: Happening) -> None:
    left = server.in_flight()
    server.say(at, server.scribe.shutdown(at, in_flight=left > 0))
    server.die(at, server.fate.uniform(0.5, 3.0))
    server.truth.death(at, server.plan.target, "shutdown", f"{left} in flight")


_ERROR = "AssertionError: the tensors of one batch differ in length"

_CAUSE_OF = {
    "core": "engine_fault",
    "fault": "driver_fault",
    "exception": "engine_fault",
    "host_oom": "host_oom",
    "pod": "unexplained",
}

_STARTS: dict[What, Callable[[Server, float, Happening], None]] = {
    What.STALL: _stall,
    What.SLEEP: _sleep,
    What.PEAK: _peak,
    What.ADAPTER: _adapter,
    What.KILL: _kill,
    What.ZOMBIE: _zombie,
    What.ROLLOUT: _rollout,
}
