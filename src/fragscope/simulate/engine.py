"""A small engine with a paged KV pool and continuous batching, in simulated time.

It follows vLLM V1 where that matters to an observer: first come first served, the newest running request
is preempted and recomputed when no block is free, a queue limit answers 503, counters only rise.
"""

import random
from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Shape:
    """What an engine is and what comes in; rates per second, lengths in tokens."""

    num_blocks: int = 8000
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_queued_reqs: int | None = None
    arrivals_per_s: float = 4.0
    prompt_tokens: int = 400
    output_tokens: int = 200
    decode_tokens_per_s: float = 40.0


@dataclass(slots=True)
class Request:
    """One request on its way."""

    prompt: int
    output: int
    made: float = 0.0
    blocks: int = 0
    started: bool = False


@dataclass(slots=True)
class Counters:
    """What only rises, until the process ends."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    first_tokens: int = 0
    finished: int = 0
    preemptions: int = 0
    rejected: int = 0
    prompts: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)


class Engine:
    """Advances by steps; the same seed and the same steps give the same history."""

    def __init__(self, shape: Shape, rng: random.Random) -> None:
        self.shape = shape
        self._rng = rng
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.counters = Counters()
        self._free = shape.num_blocks

    @property
    def usage_ratio(self) -> float:
        """Blocks in use over all blocks."""
        return 1 - self._free / self.shape.num_blocks

    def step(self, seconds: float) -> None:
        """Lets arrivals in, schedules, decodes."""
        for _ in range(self._arrivals(seconds)):
            self._arrive()
        self._schedule()
        for request in list(self.running):
            if request in self.running:
                self._decode(request, seconds)

    def _arrivals(self, seconds: float) -> int:
        expected, count = self.shape.arrivals_per_s * seconds, 0
        passed = self._rng.expovariate(1.0)
        while passed < expected:
            count += 1
            passed += self._rng.expovariate(1.0)
        return count

    def _arrive(self) -> None:
        limit = self.shape.max_num_queued_reqs
        if limit is not None and len(self.waiting) >= limit:
            self.counters.rejected += 1
            return
        self.waiting.append(Request(self._length(self.shape.prompt_tokens), self._length(self.shape.output_tokens)))

    def _length(self, mean: int) -> int:
        return max(1, min(8 * mean, int(self._rng.lognormvariate(0.0, 0.7) * mean * 0.78)))

    def _schedule(self) -> None:
        while self.waiting and len(self.running) < self.shape.max_num_seqs:
            request = self.waiting[0]
            if not self._reserve(request, request.prompt + int(request.made)):
                return
            self.waiting.popleft()
            self.running.append(request)
            if not request.started:
                request.started = True
                self.counters.first_tokens += 1
                self.counters.prompt_tokens += request.prompt

    def _reserve(self, request: Request, tokens: int) -> bool:
        more = -(-tokens // self.shape.block_size) - request.blocks
        if more > self._free:
            return False
        self._free -= more
        request.blocks += more
        return True

    def _decode(self, request: Request, seconds: float) -> None:
        made = min(float(request.output), request.made + self.shape.decode_tokens_per_s * seconds)
        while not self._reserve(request, request.prompt + int(made)):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return
        self.counters.generation_tokens += int(made) - int(request.made)
        request.made = made
        if made >= request.output:
            self._finish(request)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._free += request.blocks
        request.blocks = 0
        self.waiting.appendleft(request)
        self.counters.preemptions += 1

    def _finish(self, request: Request) -> None:
        self.running.remove(request)
        self._free += request.blocks
        self.counters.finished += 1
        self.counters.prompts.append(request.prompt)
        self.counters.outputs.append(request.output)
