"""A paged KV pool with continuous batching, in steps of simulated time.

It follows vLLM V1 where that matters to an observer: first come first served, a prompt is admitted only
if the pool holds it whole, the newest running request is preempted and recomputed when no block is free,
a queue limit refuses, shared prefixes are held once. All decoding requests advance at one mean pace, so a
step costs what *changes* and not what runs.
"""

import random
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one engine can do; lengths in tokens, paces in tokens per second."""

    num_blocks: int
    block_size: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_num_queued_reqs: int | None = None
    prefill_pace: float = 16000.0
    decode_pace: float = 40.0
    half_pace_seqs: float = 240.0
    state_blocks: int = 0
    """Blocks every request holds whatever its length (hybrid models)."""
    prefix_groups: int = 0
    prefix_tokens: int = 0


class Request:
    """One request on its way; `entered` is the pace clock's reading when it began to decode."""

    __slots__ = ("blocks", "deadline", "entered", "group", "made", "number", "output", "prompt", "state", "tokens")

    def __init__(self, number: int, prompt: int, output: int, deadline: float) -> None:
        self.number = number
        self.prompt = prompt
        self.output = output
        self.deadline = deadline
        self.group = -1
        self.made = 0
        self.tokens = 0
        self.blocks = 0
        self.entered = 0.0
        self.state = WAITING


WAITING, PREFILLING, DECODING, GONE = range(4)


@dataclass(slots=True)
class Counters:
    """What only rises until the process ends."""

    prompt_tokens: int = 0
    generation_tokens: float = 0.0
    first_tokens: int = 0
    stopped: int = 0
    cut_at_length: int = 0
    preemptions: int = 0
    rejected: int = 0
    hung_up: int = 0

    @property
    def finished(self) -> int:
        """Requests answered in full."""
        return self.stopped + self.cut_at_length


class Tokens:
    """A histogram of lengths with vLLM's 1-2-5 bounds."""

    __slots__ = ("bounds", "count", "counts", "total")

    def __init__(self, longest: int) -> None:
        bounds = (m * 10**e for e in range(8) for m in (1, 2, 5))
        self.bounds = tuple(bound for bound in bounds if bound <= longest)
        self.counts = [0] * (len(self.bounds) + 1)
        self.count = 0
        self.total = 0

    def add(self, value: int) -> None:
        """Counts one request."""
        low, high = 0, len(self.bounds)
        while low < high:
            middle = (low + high) // 2
            if self.bounds[middle] < value:
                low = middle + 1
            else:
                high = middle
        self.counts[low] += 1
        self.count += 1
        self.total += value

    def buckets(self) -> tuple[tuple[float, float], ...]:
        """(upper bound, requests at or below it), ascending."""
        rows, below = [], 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            below += count
            rows.append((float(bound), float(below)))
        return tuple(rows)


class Pool:
    """One engine: a queue, a batch and the blocks they hold."""

    def __init__(self, capacity: Capacity, longest: int, rng: random.Random) -> None:
        self.capacity = capacity
        self.counters = Counters()
        self.prompts = Tokens(longest)
        self.outputs = Tokens(longest)
        self.largest_chunk = 0
        self.stalled = False
        self._rng = rng
        self._waiting: deque[Request] = deque()
        self._waiting_count = 0
        self._prefilling: deque[Request] = deque()
        self._prefilled = 0
        self._order: list[Request] = []
        self._ends: list[tuple[float, int, Request]] = []
        self._deadlines: list[tuple[float, int, Request]] = []
        self._running = 0
        self._decoding = 0
        self._clock = 0.0
        self._entered = 0.0
        self._tokens = 0
        self._shared: dict[int, int] = {}
        self._number = 0

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return self._running

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._waiting_count

    @property
    def usage_ratio(self) -> float:
        """Referenced blocks over all blocks."""
        return min(1.0, self._used() / self.capacity.num_blocks)

    def arrive(self, prompt: int, output: int, deadline: float) -> bool:
        """A request joins the queue; False if the queue limit refused it."""
        limit = self.capacity.max_num_queued_reqs
        if limit is not None and self._waiting_count >= limit:
            self.counters.rejected += 1
            return False
        self._number += 1
        request = Request(self._number, prompt, output, deadline)
        c = self.capacity
        if c.prefix_groups and prompt > c.prefix_tokens:
            # A few prefixes serve most requests: squaring skews the draw.
            request.group = int(self._rng.random() ** 2 * c.prefix_groups)
        self._waiting.append(request)
        self._waiting_count += 1
        if deadline < float("inf"):
            heappush(self._deadlines, (deadline, request.number, request))
        return True

    def step(self, at: float, seconds: float) -> None:
        """Hang-ups, admissions, prefill and decode of one stretch of time."""
        self._hang_up(at)
        self.largest_chunk = 0
        if not self.stalled:
            self._admit()
        busy = self._prefill(seconds) / (self.capacity.prefill_pace * seconds)
        self._decode(seconds, 1 - 0.7 * min(1.0, busy))

    def lose_all(self) -> int:
        """Everything in flight is gone; returns how many requests that was."""
        lost = self._running + self._waiting_count
        for request in (*self._order, *self._waiting):
            request.state = GONE
        self._waiting.clear()
        self._prefilling.clear()
        self._order.clear()
        self._ends.clear()
        self._deadlines.clear()
        self._shared.clear()
        self._waiting_count = self._running = self._decoding = self._tokens = self._prefilled = 0
        self._entered = 0.0
        return lost

    def _hang_up(self, at: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= at:
            request = heappop(self._deadlines)[2]
            if request.state == GONE:
                continue
            self.counters.hung_up += 1
            if request.state == WAITING:
                self._waiting_count -= 1
                request.state = GONE
            else:
                self._leave(request)

    def _admit(self) -> None:
        c = self.capacity
        while self._waiting and self._running < c.max_num_seqs:
            request = self._waiting[0]
            if request.state == GONE:
                self._waiting.popleft()
                continue
            shared = self._shared_tokens(request)
            tokens = request.prompt + request.made - shared
            extra = 0 if request.group < 0 or self._shared.get(request.group) else c.prefix_tokens // c.block_size
            need = max(1, -(-tokens // c.block_size)) + c.state_blocks + extra
            if need > c.num_blocks - self._used() and self._running:
                return
            self._waiting.popleft()
            self._waiting_count -= 1
            self._enter(request, tokens)

    def _enter(self, request: Request, tokens: int) -> None:
        request.state = PREFILLING
        request.tokens = tokens
        self._tokens += tokens
        self._running += 1
        if request.group >= 0:
            self._shared[request.group] = self._shared.get(request.group, 0) + 1
        self._order.append(request)
        self._prefilling.append(request)

    def _shared_tokens(self, request: Request) -> int:
        return self.capacity.prefix_tokens if request.group >= 0 else 0

    def _used(self) -> float:
        c = self.capacity
        held = self._tokens + self._decoding * self._clock - self._entered
        shared = len(self._shared) * (c.prefix_tokens // c.block_size)
        tails = self._running * (c.block_size - 1) / (2 * c.block_size)
        return max(held / c.block_size + tails, float(self._running)) + self._running * c.state_blocks + shared

    def _prefill(self, seconds: float) -> float:
        """Computes waiting prompts first come first served; returns the tokens computed."""
        budget = self.capacity.prefill_pace * seconds
        computed = 0.0
        while self._prefilling and computed < budget:
            request = self._prefilling[0]
            if request.state != PREFILLING:
                self._prefilling.popleft()
                self._prefilled = 0
                continue
            rest = request.tokens - self._prefilled
            if computed + rest > budget:
                self._prefilled += int(budget - computed)
                computed = budget
                break
            computed += rest
            self._prefilling.popleft()
            self._prefilled = 0
            self._begin_decode(request)
        self.largest_chunk = min(self.capacity.max_num_batched_tokens, int(computed))
        return computed

    def _begin_decode(self, request: Request) -> None:
        if request.made == 0:
            self.counters.first_tokens += 1
            self.counters.prompt_tokens += request.prompt
        request.state = DECODING
        request.entered = self._clock
        self._decoding += 1
        self._entered += self._clock
        heappush(self._ends, (self._clock + request.output - request.made, request.number, request))

    def _decode(self, seconds: float, share: float) -> None:
        c = self.capacity
        if self._decoding:
            pace = c.decode_pace * share / (1 + self._decoding / c.half_pace_seqs)
            self._clock += pace * seconds
            self.counters.generation_tokens += pace * seconds * self._decoding
        while self._ends and self._ends[0][0] <= self._clock:
            end, _, request = heappop(self._ends)
            # A preempted request may have an older entry here: its end no longer matches.
            if request.state == DECODING and end == request.entered + request.output - request.made:
                self._finish(request, end)
        while self._used() > c.num_blocks and self._running > 1:
            self._preempt()
        self._tidy()

    def _finish(self, request: Request, end: float) -> None:
        self.counters.generation_tokens -= self._clock - end
        self._leave(request)
        self.prompts.add(request.prompt)
        self.outputs.add(request.output)
        if request.number % 3 == 0:
            self.counters.cut_at_length += 1
        else:
            self.counters.stopped += 1

    def _leave(self, request: Request) -> None:
        if request.state == DECODING:
            self._decoding -= 1
            self._entered -= request.entered
        request.state = GONE
        self._running -= 1
        self._tokens -= request.tokens
        self._unshare(request)

    def _unshare(self, request: Request) -> None:
        if request.group < 0:
            return
        users = self._shared[request.group] - 1
        if users:
            self._shared[request.group] = users
        else:
            del self._shared[request.group]

    def _preempt(self) -> None:
        """The newest gives its blocks back and starts again at the head of the queue."""
        while self._order[-1].state not in (PREFILLING, DECODING):
            self._order.pop()
        request = self._order.pop()
        if request.state == DECODING:
            request.made = min(request.output - 1, request.made + int(self._clock - request.entered))
        self._leave(request)
        request.state = WAITING
        self._waiting.appendleft(request)
        self._waiting_count += 1
        self.counters.preemptions += 1

    def _tidy(self) -> None:
        """Drops requests that are gone from the order of admission, now and then."""
        if len(self._order) > 64 + 4 * self._running:
            self._order = [request for request in self._order if request.state in (PREFILLING, DECODING)]
