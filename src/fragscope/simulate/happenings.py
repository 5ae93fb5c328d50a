"""What can happen to a simulated server, and when: a plan is a build, a demand and a list of happenings."""

from dataclasses import dataclass
from enum import StrEnum

from fragscope.simulate.dialect import Dialect
from fragscope.simulate.pool import Capacity
from fragscope.simulate.worker import Build, Keepers

FOREVER = float("inf")


class What(StrEnum):
    """Kinds of happenings; `amount` means what is written here."""

    LOAD = "load"
    """Arrivals are multiplied by amount."""
    KEEPERS = "keepers"
    """Buffers that outlive their step are multiplied by amount."""
    HANG_UP = "hang_up"
    """Clients hang up after amount seconds."""
    CLIENT_ERRORS = "client_errors"
    """Amount bad requests per second."""
    SERVER_ERRORS = "server_errors"
    """Amount requests per second answered 500 for reasons of code."""
    STALL = "stall"
    """The scheduler admits nobody."""
    LEAK = "leak"
    """Tensors that are never freed, amount bytes per second, in steps."""
    DRIVER_LEAK = "driver_leak"
    """The same outside torch: graphs, communicators, workspaces."""
    TENANT = "tenant"
    """Another process takes amount bytes per second, in steps."""
    TENANT_JUMP = "tenant_jump"
    """Another process takes amount bytes at once, and gives them back at the end."""
    PEAK = "peak"
    """A request wants amount bytes twice for one step."""
    ADAPTER = "adapter"
    """An adapter of amount bytes is loaded."""
    KILL = "kill"
    """The engine core dies at once; `how` says of what."""
    ZOMBIE = "zombie"
    """The engine core dies and the server stays, until the end."""
    ROLLOUT = "rollout"
    """Traffic is drained for amount seconds, then SIGTERM."""
    SLEEP = "sleep"
    """Sleep mode."""
    GAP = "gap"
    """The scraper's polls time out."""


@dataclass(frozen=True, slots=True)
class Happening:
    """One thing that happens from `at` until `until` (seconds since the run began)."""

    what: What
    at: float
    until: float = FOREVER
    amount: float = 0.0
    how: str = ""
    engine: int = 0
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Demand:
    """What comes in: arrivals per second, their trace, how they cluster, and how patient clients are."""

    per_s: float
    trace: str
    burst_factor: float = 1.0
    burst_period_s: float = 600.0
    daily_swing: float = 0.2
    patience_s: float = FOREVER
    stream_share: float = 0.5


@dataclass(frozen=True, slots=True)
class Plan:
    """One server of a run; several plans make a node."""

    target: str
    build: Build
    capacity: Capacity
    demand: Demand
    dialect: Dialect
    engines: int = 1
    gpus: tuple[str, ...] = ("0000:c1:00.0",)
    happenings: tuple[Happening, ...] = ()
    keepers: Keepers | None = None
    background_errors: float = 0.0
    missed_polls: float = 0.0
    """Share of polls that time out for no reason that matters."""
    restart_s: tuple[float, float] = (60.0, 300.0)


@dataclass(frozen=True, slots=True)
class Condition:
    """A stretch in which a condition holds by design, for scoring."""

    at: float
    until: float
    cause: str
    target: str = "vllm"


@dataclass(frozen=True, slots=True)
class Script:
    """A whole run: its servers, the conditions to be seen, and whether a memory failure would be a surprise."""

    plans: tuple[Plan, ...]
    conditions: tuple[Condition, ...] = ()
    negative: bool = True
    hard: bool = False
