"""A rolling restart: when it helps, at which hour, under which conditions, and the ways to do it.

It resets growth and torch's cache. It does not help against a spike, a full pool, scheduler limits or other
tenants, and at boot a tenant can make it worse.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fragscope.advise.advice import Advice, Topic, percent
from fragscope.advise.parameters import AdviceParameters
from fragscope.advise.split import HourRow
from fragscope.model import Cause

_HELPED = (Cause.MEMORY_GROWTH, Cause.FRAGMENTATION)
_DAY_HOURS = 24
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """The engines of one model as a group: how many, and the usage that their 95th percentile reaches."""

    replicas: int
    usage_p95_ratio: float | None

    def usage_without_one(self) -> float | None:
        """What the others would reach while one is away; None with one engine or unknown usage."""
        if self.replicas < 2 or self.usage_p95_ratio is None:
            return None
        return self.usage_p95_ratio * self.replicas / (self.replicas - 1)


def advise(
    cause: str, time_left_s: float | None, hours: Sequence[HourRow], fleet: Fleet, parameters: AdviceParameters
) -> Advice:
    """Whether to restart one replica after the other; only for growth or fragmentation with less than a day left."""
    if cause not in _HELPED:
        return Advice(Topic.RESTART, False, f"No restart: {_not_helped(cause)}.")
    if time_left_s is None:
        words = f"The cause is {cause}, but how much time is left is not known; watch it before planning a restart."
        return Advice(Topic.RESTART, None, words, missing=("growth",))
    left = time_left_s / _HOUR_S
    numbers = {"time_left_s": time_left_s}
    if time_left_s >= parameters.restart_time_left_s:
        words = f"No restart yet: {cause}, but about {left:.0f} hours are left; find what grows first."
        return Advice(Topic.RESTART, False, words, numbers=numbers)
    quiet = quietest(hours)
    when = "the quietest hour is not known (a whole day must be seen)"
    if quiet is not None:
        when = f"the quietest hour is {quiet.hour:02d}:00 UTC ({quiet.load:.1f} requests in the engine on average)"
        numbers["quietest_hour"] = float(quiet.hour)
    words = f"Restart one replica after the other: {cause}, about {left:.1f} hours left; {when}."
    return Advice(
        Topic.RESTART,
        True,
        words,
        flags=_ways(quiet),
        caveats=_conditions(quiet, left, fleet, parameters),
        numbers=numbers,
    )


def quietest(hours: Sequence[HourRow]) -> HourRow | None:
    """The hour of the day (UTC) with the least load; None unless all 24 were seen."""
    if len({row.hour for row in hours}) < _DAY_HOURS:
        return None
    return min(hours, key=lambda row: row.load)


def _not_helped(cause: str) -> str:
    reasons = {
        Cause.NONE: "nothing grows that it would reset",
        Cause.TRANSIENT_PEAK: "a spike comes back with the next large step; make room instead",
        Cause.EXTERNAL_PROCESS: "the memory is another process's, which could even keep the engine from starting again",
        Cause.MEMORY_UNDETERMINED: "whether memory grows is not known",
        Cause.VRAM_EXHAUSTED: "the card is too full from the start",
    }
    return next((words for name, words in reasons.items() if name == cause), f"it does not cure {cause}")


def _conditions(quiet: HourRow | None, left_h: float, fleet: Fleet, parameters: AdviceParameters) -> tuple[str, ...]:
    said = ["one at a time, drained first (no running, no waiting request), the next only when it serves again"]
    without = fleet.usage_without_one()
    if fleet.replicas < 2:
        said.append("there is one replica: a restart is an outage, so scale out first")
    elif without is None:
        said.append("whether the others can carry the load is not known")
    elif without < parameters.restart_load_max_ratio:
        said.append(f"the others can carry the load: their usage would reach {percent(without)}")
    else:
        limit = percent(parameters.restart_load_max_ratio)
        said.append(f"the others cannot carry the load ({percent(without)}, limit {limit}): scale out first")
    if quiet is not None:
        said.append(f"if less than the {left_h:.1f} hours are left until {quiet.hour:02d}:00 UTC, do not wait for it")
    said.append("another tenant on the GPU can keep vLLM from starting: look at free VRAM before stopping")
    return tuple(said)


def _ways(quiet: HourRow | None) -> tuple[str, ...]:
    hour = quiet.hour if quiet is not None else "H"
    return (
        "kubectl rollout restart deployment/NAME   # maxUnavailable: 1, maxSurge: 0 where GPUs are scarce",
        f"CronJob with schedule '0 {hour} * * *' (UTC) that runs the same command, until the leak is fixed",
        "scale out by one, wait until it serves, then scale in the oldest",
    )
