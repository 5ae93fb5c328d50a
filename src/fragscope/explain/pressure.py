"""What weighs on an engine without a failure: a full pool, waiting with room, a standstill."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from fragscope.detect.parameters import Parameters
from fragscope.explain.findings import Finding, Kind

SHORT_LINES = 3
"""A text with no more periodic lines than this is judged by its last."""
_MOST_FINDINGS = 64
_DIPS = 3
"""So many lines without the pressure end it: usage oscillates around a full pool."""


class Pressure(StrEnum):
    """What one periodic line shows."""

    FULL = "full"
    STARVED = "starved"
    STALLED = "stalled"


_LASTING = {Pressure.FULL: 3, Pressure.STARVED: 6, Pressure.STALLED: 3}
"""Lines of it (10 s apart by default) before it is worth telling: a queue of a few seconds is ordinary."""


def pressure(facts: Mapping[str, float], p: Parameters) -> Pressure | None:
    """What weighs on the engine in one periodic line; None where nothing does."""
    usage, waiting, running = facts.get("kv_usage"), facts.get("waiting", 0.0), facts.get("running")
    if usage is None:
        return None
    if usage >= p.band_high_ratio or (usage >= p.band_mid_ratio and (waiting > 0 or facts.get("preemptions", 0.0) > 0)):
        return Pressure.FULL
    if waiting <= 0 or "aggregated" in facts:
        # The mean over engines hides one that is full.
        return None
    if (
        running == 0
        and usage < p.stalled_usage_ratio
        and facts.get("gen_tps", 0.0) == 0
        and facts.get("prompt_tps", 0.0) == 0
    ):
        return Pressure.STALLED
    return Pressure.STARVED


def nearly_full(facts: Mapping[str, float], p: Parameters) -> bool:
    """A pool at which a longer prompt already has to wait."""
    return facts.get("kv_usage", 0.0) >= p.pool_full_ratio


@dataclass(slots=True)
class Stretch:
    """Periodic lines of one engine under one pressure, short dips forgiven."""

    parameters: Parameters
    kind: Pressure | None = None
    findings: list[Finding] = field(default_factory=list)
    lines: int = 0
    dips: int = 0

    @property
    def lasted(self) -> bool:
        """Whether it went on for long enough to be told."""
        return self.kind is not None and self.lines >= _LASTING[self.kind]

    def ends_with(self, finding: Finding) -> bool:
        """Whether this line is one dip too many, or the first of another pressure."""
        kind = _of(finding, self.parameters)
        if self.kind is None or kind is self.kind:
            return False
        return self.dips + 1 >= _DIPS

    def take(self, finding: Finding) -> None:
        """Goes on with a line, or begins with it."""
        kind = _of(finding, self.parameters)
        if kind is None or (self.kind is not None and kind is not self.kind):
            self.dips += 1
            return
        self.kind, self.dips, self.lines = kind, 0, self.lines + 1
        self.findings = [*self.findings[:1], *self.findings[1:][-_MOST_FINDINGS:], finding]


def _of(finding: Finding, p: Parameters) -> Pressure | None:
    # V0 warns of each preemption: not enough blocks, in its own words.
    return Pressure.FULL if finding.kind is Kind.PREEMPTION else pressure(finding.facts, p)
