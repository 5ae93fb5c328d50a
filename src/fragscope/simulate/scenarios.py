"""Named situations: what the engine is, what comes in, how memory behaves."""

from dataclasses import dataclass

from fragscope.simulate.card import GIB, Habits
from fragscope.simulate.engine import Shape


@dataclass(frozen=True, slots=True)
class Scenario:
    """One situation, with a sentence for people."""

    name: str
    story: str
    shape: Shape
    habits: Habits


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("healthy", "moderate load, room everywhere", Shape(), Habits()),
        Scenario(
            "kv-exhausted",
            "more and longer contexts than the KV pool holds: waiting and preemptions, no failure",
            Shape(num_blocks=900, arrivals_per_s=8.0),
            Habits(),
        ),
        Scenario(
            "admission-limit",
            "a queue limit turns requests away while the cache is nearly empty",
            Shape(num_blocks=40000, max_num_seqs=4, max_num_queued_reqs=4, arrivals_per_s=8.0),
            Habits(),
        ),
        Scenario(
            "pseudo-oom",
            "memory outside the pool climbs in steps until one ordinary step does not fit",
            Shape(),
            Habits(climbs_per_s=0.2, climb_bytes=GIB // 4),
        ),
    )
}
