"""Runs told by hand: each minute of them is known, so every figure of an evaluation is, too."""

from collections.abc import Iterator

from evaluation.running import Play

from fragscope.model import AllocatorReading, EngineReading, Fact, Gap, GpuReading, LogFact, Part, Reason, Sample
from fragscope.recording import LabelLine

GIB = 2**30
CARD = 192 * GIB
START = 1_000_000.0
GPU = "0000:c1:00.0"
SCENARIOS = ("healthy", "oom", "kill-thin", "server-errors")
MINUTES = 40
FAILS_AT_S = 1200.0


def play(scenario: str, seed: int, interval_s: float, hours: float | None = None) -> Play:
    """Forty minutes; the trouble, if any, comes at minute 20 and the engine is back a minute later."""
    cause = {"oom": "fragmentation", "kill-thin": "engine_fault"}.get(scenario)
    at = START + FAILS_AT_S
    labels = [LabelLine(at, at + 60, cause, "vllm")] if cause is not None else []
    return Play(_samples(scenario, seed, interval_s), labels)


def _samples(scenario: str, seed: int, interval_s: float) -> Iterator[Sample]:
    for tick in range(int(MINUTES * 60 / interval_s)):
        seconds = tick * interval_s
        dying = scenario in ("oom", "kill-thin")
        down = dying and FAILS_AT_S <= seconds < FAILS_AT_S + 60
        reborn = dying and seconds >= FAILS_AT_S + 60
        at = START + seconds
        free = GIB // 2 if dying and not reborn else 20 * GIB
        used = GIB // 4 if down else CARD - free
        engines = () if down else (_engine(at, seconds, seed, scenario=scenario, reborn=reborn),)
        gaps = (Gap(Part.ENGINE, Reason.REFUSED),) if down else ()
        facts: tuple[LogFact, ...] = ()
        if scenario == "oom" and down and seconds < FAILS_AT_S + interval_s:
            numbers = {"tried": 2.0 * GIB, "free": 0.5 * GIB, "total": 1.0 * CARD, "reserved_unallocated": 9.0 * GIB}
            facts = (LogFact(at, "vllm", Fact.OOM, numbers, "out of memory"),)
        allocators = () if down else (AllocatorReading(at, GPU, 7, 150 * GIB, 160 * GIB, 9 * GIB, 0, 0),)
        gpu = GpuReading(at, GPU, CARD, used, None, used)
        yield Sample(at, "vllm", engines, (gpu,), allocators, facts, gaps)


def _engine(at: float, seconds: float, seed: int, *, scenario: str, reborn: bool) -> EngineReading:
    age = seconds - FAILS_AT_S - 60 if reborn else seconds + 3600
    failed = max(0.0, seconds - FAILS_AT_S) if scenario == "server-errors" else 0.0
    return EngineReading(
        at=at,
        engine="0",
        model_name="llama",
        kv_usage_ratio=0.4 + 0.01 * (seed % 5),
        running=8,
        waiting=0,
        preemptions_total=0,
        prompt_tokens_total=500 * age,
        generation_tokens_total=100 * age + 1,
        first_tokens_total=2 * age + 8,
        finished_total={"stop": 2 * age, "error": 0.0, "abort": 0.0},
        http_total={"2xx": 2 * age, "4xx": 0.0, "5xx": failed},
        admission_rejections_total=0.0,
        healthy=True,
        started_at=at - age,
    )
