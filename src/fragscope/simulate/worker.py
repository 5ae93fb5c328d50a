"""One worker's memory: weights and pool as plain reservations, and what an engine needs beside them.

Boot follows vLLM: measure the peak of a profiling step, size the pool so that weights, that peak and the
pool fill `gpu_memory_utilization` of the card, then capture graphs (which on ROCm are not part of the
sum). What fails later fails because the allocator found no room.
"""

import random
from dataclasses import dataclass
from heapq import heappop, heappush

from fragscope.simulate.allocator import (
    GIB,
    MIB,
    Block,
    CachingAllocator,
    Device,
    ExpandableAllocator,
    OutOfMemoryError,
)


@dataclass(frozen=True, slots=True)
class Model:
    """A model by its sizes; bytes unless named otherwise, all of it before tensor parallelism."""

    name: str
    weights_bytes: int
    kv_bytes_per_token: int
    hidden: int
    intermediate: int
    vocabulary: int
    max_model_len: int = 32768


MODELS = (
    Model("meta-llama/Llama-3.1-8B-Instruct", 15 * GIB, 131072, 4096, 14336, 128256),
    Model("Qwen/Qwen3-32B", 61 * GIB, 262144, 5120, 25600, 151936),
    Model("mistralai/Mixtral-8x7B-Instruct-v0.1", 87 * GIB, 131072, 4096, 28672, 32000),
    Model("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", 68 * GIB, 163840, 8192, 28672, 128256),
    Model("meta-llama/Llama-3.3-70B-Instruct", 132 * GIB, 327680, 8192, 28672, 128256, 16384),
)


@dataclass(frozen=True, slots=True)
class Build:
    """How an engine was started on its cards."""

    model: Model
    utilization: float = 0.92
    tensor_parallel: int = 1
    total_bytes: int = 192 * GIB - 16 * MIB
    idle_bytes: int = 283 * MIB
    non_torch_bytes: int = 900 * MIB
    graph_bytes: int = 2 * GIB
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    block_size: int = 16
    expandable: bool = False


@dataclass(frozen=True, slots=True)
class Keepers:
    """Irregular buffers that outlive their step: encoder outputs, adapters, kept log-probabilities."""

    per_s: float
    low_bytes: int
    high_bytes: int
    shortest_s: float
    longest_s: float
    encoder_factor: float = 0.0
    """What makes a buffer needs up to this many times its size for the moment, as an image encoder does."""

    def live_bytes(self) -> float:
        """What is live of them in the long run."""
        return self.per_s * (self.low_bytes + self.high_bytes) / 2 * (self.shortest_s + self.longest_s) / 2


class NoRoomToStartError(Exception):
    """The card has less free memory than `gpu_memory_utilization` asks for."""

    def __init__(self, free_bytes: int, wanted_bytes: int) -> None:
        super().__init__(f"{free_bytes} of {wanted_bytes} bytes are free")
        self.free_bytes = free_bytes
        self.wanted_bytes = wanted_bytes


class Worker:
    """One rank of an engine on one card."""

    def __init__(self, build: Build, device: Device, rng: random.Random) -> None:
        self.build = build
        self.device = device
        self.pid = 0
        self.non_torch_bytes = 0
        self.leaked_bytes = 0
        self.torch = CachingAllocator(device)
        self._rng = rng
        self._kept: list[tuple[float, int, Block]] = []
        self._slept_bytes = 0
        model, parts = build.model, build.tensor_parallel
        self._per_token = (
            2 * model.hidden,
            2 * model.hidden,
            4 * model.intermediate // parts,
            2 * model.intermediate // parts,
        )
        self._logits_per_seq = 4 * model.vocabulary

    @property
    def own_bytes(self) -> int:
        """What the driver counts for this process."""
        return self.torch.reserved_bytes + self.non_torch_bytes

    def boot(self) -> int:
        """Loads, profiles, takes the pool, captures; returns the pool's bytes. Raises NoRoomToStartError."""
        build = self.build
        wanted = int(build.utilization * build.total_bytes)
        if self.device.free_bytes < wanted:
            raise NoRoomToStartError(self.device.free_bytes, wanted)
        self.torch = ExpandableAllocator(self.device) if build.expandable else CachingAllocator(self.device)
        self._kept = []
        self.leaked_bytes = 0
        self._outside(build.non_torch_bytes)
        try:
            return self._take(wanted)
        except OutOfMemoryError as error:
            # A card that others have filled in the meantime: the start fails, as if it had been refused.
            self.end()
            raise NoRoomToStartError(self.device.free_bytes, wanted) from error

    def _take(self, wanted: int) -> int:
        build, weights = self.build, self.build.model.weights_bytes // self.build.tensor_parallel
        for _ in range(8):
            self.torch.alloc(weights // 8)
        peak = self._activations(build.max_num_batched_tokens, build.max_num_seqs)
        self.torch.empty_cache()
        pool = wanted - weights - peak - build.non_torch_bytes
        self.torch.alloc(pool)
        self._outside(build.graph_bytes)
        # The sampler is warmed up with a full batch.
        self._activations(build.max_num_seqs, build.max_num_seqs)
        return pool

    def end(self) -> None:
        """The process is gone, and its memory is the driver's again."""
        self.device.give(self.own_bytes)
        self.torch = CachingAllocator(self.device)
        self.non_torch_bytes = self._slept_bytes = 0
        self._kept = []

    def step(self, at: float, chunk: int, seqs: int, keep: int, keepers: Keepers | None) -> None:
        """The heaviest iteration of a stretch of time, and two of the others. Raises OutOfMemoryError."""
        while self._kept and self._kept[0][0] <= at:
            self.torch.free(heappop(self._kept)[2])
        if seqs or keep:
            tokens = min(self.build.max_num_batched_tokens, chunk + seqs)
            self._activations(tokens, seqs, at, keep, keepers)
            if chunk and seqs:
                # Between two prefills a batch only decodes, and the last piece of a prompt may have any size.
                self._activations(seqs, seqs)
                self._activations(seqs + int(self._rng.random() * chunk), seqs)

    def leak_torch(self, size: int) -> None:
        """Live tensors that nobody frees any more. Raises OutOfMemoryError."""
        self.torch.alloc(size)
        self.leaked_bytes += size

    def leak_outside(self, size: int) -> bool:
        """Memory of this process that torch knows nothing of; False if the card has none left."""
        if not self._outside(size):
            return False
        self.leaked_bytes += size
        return True

    def one_off(self, size: int) -> None:
        """A request that wants a buffer like no other and gives it back. Raises OutOfMemoryError."""
        first = self.torch.alloc(size)
        try:
            # log_softmax makes a second copy of the logits it reads.
            self.torch.free(self.torch.alloc(size))
        finally:
            self.torch.free(first)

    def adapter(self, size: int) -> None:
        """An adapter's tensors: taken once, kept. Raises OutOfMemoryError."""
        for part in range(32):
            self.torch.alloc(size // 64 + (part % 4) * size // 128)

    def sleep(self, share: float) -> None:
        """Offloads weights or pool: the driver gets `share` of the reserved memory back."""
        self._slept_bytes = int(self.torch.reserved_bytes * share)
        self.torch.reserved_bytes -= self._slept_bytes
        self.torch.allocated_bytes -= self._slept_bytes
        self.device.give(self._slept_bytes)

    def wake(self) -> bool:
        """Takes it again; False if somebody else has it now."""
        size, self._slept_bytes = self._slept_bytes, 0
        if not self.device.take(size):
            return False
        self.torch.reserved_bytes += size
        self.torch.allocated_bytes += size
        return True

    def _outside(self, size: int) -> bool:
        if not self.device.take(size):
            return False
        self.non_torch_bytes += size
        return True

    def _activations(
        self, tokens: int, seqs: int, at: float = 0.0, keep: int = 0, keepers: Keepers | None = None
    ) -> int:
        """One iteration's tensors, freed at its end; returns their bytes."""
        torch, held = self.torch, []
        before = torch.allocated_bytes
        try:
            for number, per_token in enumerate(self._per_token):
                held.append(torch.alloc(per_token * max(1, tokens)))
                if number == 2 and keepers is not None:
                    self._keep(at, keep, keepers)
            rows = min(seqs, self.build.max_num_seqs)
            if rows:
                held.append(torch.alloc(self._logits_per_seq * rows))
                held.append(torch.alloc(self._logits_per_seq * rows))
            return torch.allocated_bytes - before
        finally:
            for block in held:
                torch.free(block)

    def _keep(self, at: float, count: int, keepers: Keepers) -> None:
        for _ in range(count):
            size = keepers.low_bytes + int(self._rng.random() * (keepers.high_bytes - keepers.low_bytes))
            life_s = keepers.shortest_s + self._rng.random() * (keepers.longest_s - keepers.shortest_s)
            work = int(size * keepers.encoder_factor * (0.5 + 0.5 * self._rng.random()))
            working = self.torch.alloc(work) if work else None
            try:
                block = self.torch.alloc(size)
            finally:
                if working is not None:
                    self.torch.free(working)
            heappush(self._kept, (at + life_s, block.number, block))
