"""From an incident's findings to its cause, with the arithmetic shown. Rules come from how the allocator works."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fragscope.arithmetic import Clue, account, memory_shares, size
from fragscope.detect.parameters import GIB, Parameters
from fragscope.explain.findings import FAILURES, Finding, Kind, Stage
from fragscope.explain.incidents import Incident
from fragscope.explain.lines import SIGKILL
from fragscope.explain.pressure import Pressure, pressure
from fragscope.explain.words import reason
from fragscope.model import Cause, Condition

_CERTAIN = 0.97
"""What the allocator's own message leaves to every other explanation: 3 %."""
_LIKELY = 0.80
_PERHAPS = 0.55
_CONTEXT_BYTES = 3 * GIB
"""Contexts that ranks of one engine open on a card: 0.5 GiB each and more."""
_GROWTH_BYTES = GIB
_RAW_OOM_SHARE = 0.7
_INFERRED_LOADING = 0.6


@dataclass(frozen=True, slots=True)
class Judged:
    """An incident's cause (an episode cause, or a condition's name), how sure, and why in sentences."""

    cause: str
    probabilities: Mapping[str, float]
    reasons: tuple[str, ...] = field(default=())

    @property
    def probability(self) -> float:
        """The cause's own."""
        return self.probabilities[self.cause]


def judge(incident: Incident, p: Parameters) -> Judged:
    """The cause of an incident: what came first in time explains what follows; deaths explain nothing."""
    leading = _leading(incident)
    if leading is None:
        return _pressure(incident, p)
    if leading.kind is Kind.OOM:
        return _allocation(incident, leading, p)
    return _BY_KIND[leading.kind](incident, leading, p)


def _leading(incident: Incident) -> Finding | None:
    """The finding that explains the rest: a stop that was asked for if it came first, else by rank, else by time."""
    failures = incident.of(*FAILURES, Kind.DUMP)
    first = min(failures, key=lambda each: each.first_line, default=None)
    if first is not None and first.kind is Kind.SHUTDOWN:
        return first
    for kinds in _RANKS:
        found = incident.of(*kinds)
        if found:
            leading = min(found, key=lambda each: each.first_line)
            return incident.oom if leading.kind is Kind.OOM else _fullest(incident, leading)
    return first


def _fullest(incident: Incident, leading: Finding) -> Finding:
    """The same sentence with its wrapped rest, where there is one."""
    same = [each for each in incident.of(leading.kind) if each.first_line - leading.first_line <= 1]
    return max(same, key=lambda each: len(each.facts))


_RANKS = (
    (Kind.DRIVER_FAULT, Kind.HOST_OOM, Kind.OOM, Kind.REFUSAL),
    (Kind.RUNTIME_OOM,),
    (Kind.ENGINE_ERROR, Kind.REQUEST_TOO_LONG),
    (Kind.WORKER_DEATH,),
    (Kind.ENGINE_DEATH, Kind.DUMP),
)


def _allocation(incident: Incident, oom: Finding, p: Parameters) -> Judged:
    a = account(oom.facts)
    one_off = incident.one_off or _ONE_OFF_STAGES.get(incident.stage)
    clue = Clue(one_off is not None, _loading(incident, oom, p), _serving(incident, oom))
    shares = memory_shares(oom.facts, p, clue)
    if incident.stage is Stage.CAPTURE and a.compaction:
        # While a graph is captured nothing is returned to the driver: what is unallocated need not be pinned.
        shares = _halved(shares)
    if Cause.MEMORY_UNDETERMINED in shares and incident.of(Kind.DRIVER_FAULT):
        shares = {Cause.DRIVER_FAULT: _LIKELY, Cause.MEMORY_UNDETERMINED: 1 - _LIKELY}
    probabilities: dict[str, float] = {cause: _CERTAIN * share for cause, share in shares.items()}
    probabilities[Cause.UNEXPLAINED] = probabilities.get(Cause.UNEXPLAINED, 0.0) + 1 - _CERTAIN
    cause = max(probabilities, key=lambda name: probabilities[name])
    return Judged(cause, probabilities, tuple(reason(a, cause, p, one_off, sure=clue.loading >= 1)))


def _halved(shares: Mapping[Cause, float]) -> dict[Cause, float]:
    kept = shares.get(Cause.FRAGMENTATION, 0.0) / 2
    return {**shares, Cause.FRAGMENTATION: kept, Cause.TRANSIENT_PEAK: shares.get(Cause.TRANSIENT_PEAK, 0.0) + kept}


_ONE_OFF_STAGES = {Stage.CAPTURE: "graph capture or warm-up", Stage.PROFILING: "the profiling run"}


def _loading(incident: Incident, oom: Finding, p: Parameters) -> float:
    """How sure it is that weights were still being loaded: told so, or live memory beyond any pool, without graphs."""
    if incident.stage in (Stage.LOADING, Stage.STARTUP):
        return 1.0
    a = account(oom.facts)
    if incident.stage is not Stage.UNKNOWN or a.live is None or not a.total or "private_pools" in oom.facts:
        return 0.0
    return _INFERRED_LOADING if a.live >= p.full_ratio * a.total else 0.0


def _serving(incident: Incident, oom: Finding) -> bool:
    """Whether it had served: told so, or graphs were captured and nothing says that it still starts."""
    return incident.stage is Stage.SERVING or (incident.stage is Stage.UNKNOWN and "private_pools" in oom.facts)


def _refusal(incident: Incident, finding: Finding, p: Parameters) -> Judged:
    facts = finding.facts
    free, total, requested = facts.get("free"), facts.get("total"), facts.get("requested")
    if free is not None and total is not None and requested is not None:
        held = total - free
        if held > max(_CONTEXT_BYTES, p.others_ratio * total / 2):
            why = f"{size(held)} of the card's {size(total)} was held before the engine began"
            return _two(Cause.EXTERNAL_PROCESS, _LIKELY, Cause.STARTUP_NO_MEMORY, why)
        short = f"{size(requested)} was wanted and {size(free)} was free"
        why = f"{short}: {size(requested - free)} short, with no other large holder"
        return _two(Cause.STARTUP_NO_MEMORY, _LIKELY, Cause.EXTERNAL_PROCESS, why)
    if "Initial free memory" in finding.words:
        why = "free memory rose while the engine measured it: another process let go of memory on the same card"
        return _two(Cause.EXTERNAL_PROCESS, _LIKELY, Cause.STARTUP_NO_MEMORY, why)
    needed, available = facts.get("kv_needed"), facts.get("kv_available")
    if needed is not None and available is not None:
        why = f"one request of the longest kind needs {size(needed)} of KV cache and {size(available)} is left for it"
    elif "kv_tokens" in facts:
        why = f"the pool holds {facts['kv_tokens']:.0f} tokens and the longest request {facts['max_model_len']:.0f}"
    else:
        why = "weights and profiling left nothing for the KV cache; no allocation failed"
    return _one(Cause.STARTUP_NO_MEMORY, _CERTAIN, why)


def _driver(incident: Incident, finding: Finding, p: Parameters) -> Judged:
    why = f"the driver reports a fault, not a shortage: {finding.words}"
    return _one(Cause.DRIVER_FAULT, _CERTAIN, why)


def _host(incident: Incident, finding: Finding, p: Parameters) -> Judged:
    facts = incident.facts
    sizes = [f"{name.replace('_', '-')} {size(facts[name])}" for name in ("anon_rss", "shmem_rss") if name in facts]
    why = "the kernel killed a process for lack of host memory" + (f" ({', '.join(sizes)})" if sizes else "")
    return _one(Cause.HOST_OOM, _CERTAIN, why)


def _shutdown(incident: Incident, finding: Finding, p: Parameters) -> Judged:
    return _one(Cause.SHUTDOWN, _CERTAIN, "a stop was asked for first; the errors after it are its consequence")


def _runtime(incident: Incident, finding: Finding, p: Parameters) -> Judged:
    free = finding.facts.get("free")
    if free is not None and free < GIB / 4:
        why = f"the runtime, outside the caching allocator, found {size(free)} free"
        return _two(Cause.VRAM_EXHAUSTED, _LIKELY, Cause.MEMORY_UNDETERMINED, why)
    why = "the driver refused memory outside the caching allocator and gave no figures; the code can be stale"
    if "cumem" in finding.words:
        why = "memory that a sleeping engine had given back could not be mapped again, and no figures are printed"
    return _two(Cause.MEMORY_UNDETERMINED, _RAW_OOM_SHARE, Cause.UNEXPLAINED, why)


def _fault(incident: Incident, finding: Finding, p: Parameters) -> Judged:
    return _two(
        Cause.ENGINE_FAULT, _LIKELY, Cause.UNEXPLAINED, f"an error that is no shortage came first: {finding.words}"
    )


def _worker(incident: Incident, finding: Finding, p: Parameters) -> Judged:
    code = finding.facts.get("exit_code")
    if code in SIGKILL:
        killed = f"exit code {code:.0f}: it was killed from outside"
        why = f"{killed}, as the kernel does for lack of host memory; nothing here proves who did"
        return _two(Cause.HOST_OOM, _PERHAPS, Cause.UNEXPLAINED, why)
    return _died(incident, finding)


def _death(incident: Incident, finding: Finding, p: Parameters) -> Judged:
    if finding.facts.get("exit_code") in SIGKILL:
        return _worker(incident, finding, p)
    return _died(incident, finding)


def _died(incident: Incident, finding: Finding) -> Judged:
    usage = incident.facts.get("kv_usage")
    pool = (
        "" if usage is None else f" (KV pool {100 * usage:.0f} % full, {incident.facts.get('running', 0):.0f} running)"
    )
    why = f"the engine died{pool} and the log shows no out-of-memory message: {finding.words}"
    return _two(Cause.ENGINE_FAULT, _LIKELY, Cause.UNEXPLAINED, why)


def _too_long(incident: Incident, finding: Finding, p: Parameters) -> Judged:
    limit, requested = finding.facts.get("max_model_len"), finding.facts.get("requested")
    why = "a request was refused for its length, by the server's own rule"
    if limit is not None and requested is not None:
        why = f"{requested:.0f} tokens were asked for where {limit:.0f} are the limit"
    return _one(Cause.REQUEST_TOO_LONG, _CERTAIN, why)


def _pressure(incident: Incident, p: Parameters) -> Judged:
    if incident.of(Kind.STATS, Kind.PREEMPTION):
        return _of_stats(incident, p)
    if incident.of(Kind.SERIES):
        return _of_series(incident)
    if incident.of(Kind.MEASURED):
        return _of_pairs(incident, p)
    facts = incident.facts
    if incident.of(Kind.SMI) and facts["used"] >= p.others_ratio * facts["total"]:
        why = f"{size(facts['used'])} of {size(facts['total'])} is in use on a card that shows no load"
        return _two(Cause.EXTERNAL_PROCESS, _PERHAPS, Cause.UNEXPLAINED, why)
    return _one(Cause.UNEXPLAINED, _CERTAIN, "nothing here decides")


def _of_stats(incident: Incident, p: Parameters) -> Judged:
    facts = max(incident.of(Kind.STATS), key=lambda each: each.first_line, default=incident.findings[-1]).facts
    if incident.of(Kind.PREEMPTION) and "kv_usage" not in facts:
        why = "vLLM says that it preempts sequences for lack of blocks"
        return _two(Condition.KV_EXHAUSTED, _CERTAIN, Cause.UNEXPLAINED, why)
    usage, running, waiting = facts.get("kv_usage", 0.0), facts.get("running", 0.0), facts.get("waiting", 0.0)
    state = f"{running:.0f} running, {waiting:.0f} waiting, KV pool {100 * usage:.1f} % full"
    kind = pressure(facts, p)
    if kind is Pressure.STALLED:
        why = f"{state}, and no token moves: the scheduler stands still"
        return _two(Cause.ENGINE_FAULT, _LIKELY, Cause.UNEXPLAINED, why)
    if usage >= p.pool_full_ratio or kind is Pressure.FULL:
        return _two(Condition.KV_EXHAUSTED, _CERTAIN if waiting > 0 else _LIKELY, Cause.UNEXPLAINED, state)
    if usage < p.pool_room_ratio:
        why = f"{state}: what waits does not wait for blocks, but for a place in the batch or an adapter"
        return _two(Condition.SCHEDULER_LIMIT, _LIKELY, Cause.UNEXPLAINED, why)
    why = f"{state}: either a long prompt needs more blocks than are free, or a scheduler limit holds it back"
    probabilities: dict[str, float] = {
        Cause.UNEXPLAINED: 0.5,
        Condition.KV_EXHAUSTED: 0.3,
        Condition.SCHEDULER_LIMIT: 0.2,
    }
    return Judged(Cause.UNEXPLAINED, probabilities, (why,))


def _of_series(incident: Incident) -> Judged:
    facts = incident.facts
    held = facts.get("held_last", 0.0) - facts.get("held_first", 0.0)
    live = facts.get("live_last", 0.0) - facts.get("live_first", 0.0)
    if "live_last" in facts and "held_last" in facts and held - live > _GROWTH_BYTES and held > 2 * live:
        why = f"what is reserved grew by {size(held)} and what is live by {size(max(live, 0.0))}"
        return _two(Cause.FRAGMENTATION, _LIKELY, Cause.MEMORY_GROWTH, why)
    grown = max(held, live)
    if grown > _GROWTH_BYTES:
        return _two(Cause.MEMORY_GROWTH, _LIKELY, Cause.UNEXPLAINED, f"memory grew by {size(grown)} in the same state")
    return _one(Cause.UNEXPLAINED, _CERTAIN, f"memory grew by {size(max(grown, 0.0))}, which decides nothing")


def _of_pairs(incident: Incident, p: Parameters) -> Judged:
    pairs = [each.facts for each in incident.of(Kind.MEASURED)]
    spread = max(each["allocated"] for each in pairs) - min(each["allocated"] for each in pairs)
    if spread > _GROWTH_BYTES:
        why = f"live memory differs by {size(spread)} between two measurements of the same state"
        return _two(Cause.MEMORY_GROWTH, _LIKELY, Cause.FRAGMENTATION, why)
    last = pairs[-1]
    unused = last["reserved_total"] - last["allocated"]
    if unused > _GROWTH_BYTES and unused > last["reserved_total"] / 2:
        why = f"{size(unused)} of {size(last['reserved_total'])} reserved is not live"
        return _two(Cause.FRAGMENTATION, _PERHAPS, Cause.MEMORY_UNDETERMINED, why)
    return _one(Cause.UNEXPLAINED, _CERTAIN, f"{size(unused)} reserved and not live decides nothing")


_BY_KIND = {
    Kind.REFUSAL: _refusal,
    Kind.DRIVER_FAULT: _driver,
    Kind.HOST_OOM: _host,
    Kind.SHUTDOWN: _shutdown,
    Kind.RUNTIME_OOM: _runtime,
    Kind.ENGINE_ERROR: _fault,
    Kind.WORKER_DEATH: _worker,
    Kind.ENGINE_DEATH: _death,
    Kind.DUMP: _death,
    Kind.REQUEST_TOO_LONG: _too_long,
}


def _one(cause: str, probability: float, why: str) -> Judged:
    other = Cause.ENGINE_FAULT if cause == Cause.UNEXPLAINED else Cause.UNEXPLAINED
    return _two(cause, probability, other, why)


def _two(cause: str, probability: float, other: str, why: str) -> Judged:
    return Judged(cause, {cause: probability, other: 1 - probability}, (why,))
