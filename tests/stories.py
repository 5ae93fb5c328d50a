"""Samples of one engine and one GPU told step by step, with counters that rise by themselves and a fake clock."""

from dataclasses import dataclass, field

from fragscope.advise.live import EngineAdvice, LiveAdvisor
from fragscope.advise.parameters import AdviceParameters
from fragscope.detect.detector import Detector
from fragscope.detect.parameters import Parameters
from fragscope.model import (
    AllocatorReading,
    Assessment,
    CacheConfig,
    EngineReading,
    Fact,
    Gap,
    GpuReading,
    Histogram,
    LogFact,
    Part,
    Reason,
    Sample,
    Verdict,
)

GIB = 2**30
CARD = 192 * GIB
GPU = "0000:c1:00.0"
START = 1_000_000.0
NO_LOG = Gap(Part.LOG, Reason.ABSENT)


@dataclass
class Story:
    """Feeds a detector; every method is one tick of `interval_s` and returns what the detector says."""

    interval_s: float = 5.0
    parameters: Parameters = field(default_factory=Parameters)
    used_bytes: int = int(0.905 * CARD)
    born_s_ago: float = 3600.0
    with_gpu: bool = True
    with_log: bool = False
    others_bytes: int | None = None
    """What other processes hold; None: nobody tells per-process VRAM."""
    allocator: dict[str, int] | None = None
    """live, split, free cache, retries and ooms of the one worker; None: nobody asks it."""
    pid: int = 7

    def __post_init__(self) -> None:
        self.detector = Detector("vllm", self.parameters)
        self.advisor = LiveAdvisor(AdviceParameters(history_min_s=600))
        self.advice: tuple[EngineAdvice, ...] = ()
        self.at = START
        self.started_at: float | None = START - self.born_s_ago
        self.counters = dict.fromkeys(("ok", "4xx", "5xx", "rejected", "first", "finished", "errors", "preempted"), 0.0)
        self.counters["first"] = self.counters["finished"] = self.counters["ok"] = 100.0
        self.tokens = 10_000.0
        self.last: Assessment | None = None
        self.facts: list[LogFact] = []

    @property
    def verdict(self) -> Verdict:
        """The first engine's last verdict."""
        assert self.last is not None
        return self.last.verdicts[0]

    def serve(
        self,
        usage: float | None = 0.3,
        *,
        running: float = 4,
        waiting: float = 0,
        ok: float = 5,
        server_errors: float = 0,
        rejected: float = 0,
        client_errors: float = 0,
        hang_ups: float = 0,
        preempted: float = 0,
        tokens: float = 500,
        used: int | None = None,
        healthy: bool | None = True,
        sleeping: bool | None = None,
        ticks: int = 1,
    ) -> Verdict:
        """Polls that are answered, with what happened since the poll before."""
        for _ in range(ticks):
            c = self.counters
            c["ok"] += ok + hang_ups
            c["4xx"] += client_errors
            c["5xx"] += server_errors + rejected
            c["rejected"] += rejected
            c["first"] += ok + hang_ups
            c["finished"] += ok
            c["preempted"] += preempted
            self.tokens += tokens
            if used is not None:
                self.used_bytes = used
            self._observe((self._reading(usage, running, waiting, healthy, sleeping),), ())
        return self.verdict

    def refuse(self, ticks: int = 1, used: int | None = None) -> Verdict:
        """Polls to which nobody answers the phone."""
        if used is not None:
            self.used_bytes = used
        for _ in range(ticks):
            self._observe((), (Gap(Part.ENGINE, Reason.REFUSED, "connection refused"),))
        return self.verdict

    def time_out(self, ticks: int = 1) -> Verdict:
        """Polls that never end."""
        for _ in range(ticks):
            self._observe((), (Gap(Part.ENGINE, Reason.TIMEOUT, "timed out"),))
        return self.verdict

    def restart(self) -> None:
        """The server is a new process from the next poll on: counters at zero."""
        self.started_at = self.at
        self.counters = dict.fromkeys(self.counters, 0.0)
        self.tokens = 0.0

    def say(self, what: Fact, **facts: float) -> None:
        """The log says something just now; it is part of the next tick."""
        self.facts.append(LogFact(self.at, "vllm", what, facts))

    def _reading(
        self, usage: float | None, running: float, waiting: float, healthy: bool | None, sleeping: bool | None
    ) -> EngineReading:
        c = self.counters
        return EngineReading(
            at=self.at,
            engine="0",
            model_name="llama",
            kv_usage_ratio=usage,
            running=running,
            waiting=waiting,
            preemptions_total=c["preempted"],
            prompt_tokens_total=self.tokens,
            generation_tokens_total=self.tokens,
            first_tokens_total=c["first"] + running,
            finished_total={"stop": c["finished"], "error": c["errors"], "abort": 0.0},
            http_total={"2xx": c["ok"], "4xx": c["4xx"], "5xx": c["5xx"]},
            admission_rejections_total=c["rejected"],
            prompt_tokens=Histogram(c["finished"], 300 * c["finished"], ((500.0, c["finished"]),)),
            output_tokens=Histogram(c["finished"], 100 * c["finished"], ((100.0, c["finished"]),)),
            cache_config=CacheConfig(16, 10_000, 0.9, kv_cache_size_tokens=160_000),
            healthy=healthy,
            sleeping=sleeping,
            started_at=self.started_at,
        )

    def _allocator(self, now: dict[str, int]) -> AllocatorReading:
        held = now["live"] + now["split"] + now.get("cache", 0)
        return AllocatorReading(
            at=self.at,
            gpu=GPU,
            pid=self.pid,
            allocated_bytes=now["live"],
            reserved_bytes=held,
            inactive_split_bytes=now["split"],
            retries_total=now.get("retries", 0),
            ooms_total=now.get("ooms", 0),
        )

    def _observe(self, engines: tuple[EngineReading, ...], gaps: tuple[Gap, ...]) -> None:
        own = None if self.others_bytes is None else self.used_bytes - self.others_bytes
        gpus = (GpuReading(self.at, GPU, CARD, self.used_bytes, None, own),) if self.with_gpu else ()
        allocators = (self._allocator(self.allocator),) if self.allocator is not None else ()
        gaps += () if self.with_log else (NO_LOG,)
        gaps += () if self.with_gpu else (Gap(Part.GPU, Reason.ABSENT),)
        facts, self.facts = tuple(self.facts), []
        sample = Sample(self.at, "vllm", engines, gpus, allocators, facts, gaps)
        self.last = self.detector.observe(sample)
        self.advice = self.advisor.observe(sample, self.last)
        self.at += self.interval_s


def crash_without_room(story: Story) -> Verdict:
    """VRAM climbs to within half a GiB of full at low cache use, then the process is gone."""
    story.serve(ticks=6)
    for step in range(12):
        story.serve(used=int(0.93 * CARD) + step * GIB)
    story.serve(used=CARD - GIB // 2, ticks=3, running=12)
    return story.refuse(ticks=2, used=GIB // 4)
