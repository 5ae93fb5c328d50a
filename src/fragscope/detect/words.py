"""The sentence and the remedy for every cause and condition, for people at 3 a.m."""

from fragscope.model import Cause, Condition

SENTENCES: dict[str, str] = {
    Cause.FRAGMENTATION: "Memory was there but in pieces: the allocator held enough unused bytes, none of them contiguous enough.",
    Cause.MEMORY_GROWTH: "Memory use grew until nothing was left.",
    Cause.EXTERNAL_PROCESS: "Another process took the memory.",
    Cause.TRANSIENT_PEAK: "One step wanted more memory at once than was ever free.",
    Cause.VRAM_EXHAUSTED: "VRAM outside the KV pool ran out; little or nothing was stranded that could have served the request.",
    Cause.MEMORY_UNDETERMINED: "Memory outside the KV pool probably ran out; from outside, fragmentation and growth look the same.",
    Cause.SHUTDOWN: "The engine was stopped on purpose.",
    Cause.ENGINE_FAULT: "The engine itself failed, and memory does not explain it.",
    Cause.DRIVER_FAULT: "The GPU driver reported a fault.",
    Cause.HOST_OOM: "The host's memory ran out and the kernel killed the engine.",
    Cause.STARTUP_NO_MEMORY: "The engine refused to start: no memory is left for its KV pool.",
    Cause.REQUEST_TOO_LONG: "Requests are longer than the model allows.",
    Cause.UNEXPLAINED: "Something failed that nothing seen here explains; memory is not the likely reason.",
    Condition.ENGINE_DOWN: "The engine is down.",
    Condition.STARTING: "The engine is starting.",
    Condition.SLEEPING: "The engine sleeps.",
    Condition.STALLED: "The scheduler is stalled: requests wait, none runs, the KV pool is empty. Memory is innocent.",
    Condition.ADMISSION_LIMIT: "A queue limit refuses requests; memory is not the reason.",
    Condition.KV_EXHAUSTED: "The KV pool is really full: requests wait or are preempted. This is load, not fragmentation.",
    Condition.SCHEDULER_LIMIT: "Requests wait because the scheduler runs no more at once; the KV pool has room.",
    Condition.CLIENT_ERRORS: "Clients send requests that must be refused (4xx).",
    Condition.CLIENT_ABORTS: "Clients hang up before they are served; vLLM counts them as successes.",
    Cause.NONE: "Nothing is wrong that can be seen from here.",
    "unknown": "Not known: the evidence that a verdict needs is missing.",
    "blind": "Something failed, and GPU memory was not seen, so memory is not ruled out.",
    "watch": "Nothing has failed yet, but VRAM climbs and will not meet the engine's need before long.",
}

REMEDIES: dict[str, str] = {
    Cause.FRAGMENTATION: "Lower --gpu-memory-utilization by 0.02 to give the allocator room; restart at a quiet hour.",
    Cause.MEMORY_GROWTH: "Lowering --gpu-memory-utilization only buys time; find what grows, and restart before it fills.",
    Cause.EXTERNAL_PROCESS: "Find the other process on that GPU and move it, or lower --gpu-memory-utilization to make room.",
    Cause.TRANSIENT_PEAK: "Bound the request that did it (prompt_logprobs, image size, batch tokens) or leave more headroom.",
    Cause.VRAM_EXHAUSTED: "Lower --gpu-memory-utilization by 0.02 or --max-num-batched-tokens; the card is simply too full.",
    Cause.MEMORY_UNDETERMINED: (
        "Read the engine's log around that time: its out-of-memory message decides. "
        "Until then lower --gpu-memory-utilization by 0.02."
    ),
    Cause.SHUTDOWN: "Nothing to do if the stop was yours.",
    Cause.ENGINE_FAULT: "Read the engine's log for the first error; do not tune memory for this.",
    Cause.DRIVER_FAULT: "Look at dmesg and the GPU's RAS counters; take the node out of service if it repeats.",
    Cause.HOST_OOM: "Raise the container's memory limit or shrink what is pinned on the host.",
    Cause.STARTUP_NO_MEMORY: "Raise --gpu-memory-utilization, shorten --max-model-len, or use more GPUs.",
    Cause.REQUEST_TOO_LONG: "Raise --max-model-len if the model allows, or refuse such requests earlier.",
    Cause.UNEXPLAINED: "Read the engine's log and the exit code of its container; do not tune memory for this.",
    Condition.ENGINE_DOWN: "See whether it restarts; the container's exit code and last log lines say why it went.",
    Condition.STARTING: "Wait: loading and warm-up take minutes. If nothing ever answers, check the target's address.",
    Condition.SLEEPING: "Wake it when it is needed.",
    Condition.STALLED: "Restart the engine; compare --max-model-len with the KV pool's size and look for a vLLM scheduler bug.",
    Condition.ADMISSION_LIMIT: "Raise --max-num-queued-reqs or --max-num-queued-tokens, or add replicas.",
    Condition.KV_EXHAUSTED: "Add replicas, shorten contexts, use an FP8 KV cache, or raise --gpu-memory-utilization if VRAM has room.",
    Condition.SCHEDULER_LIMIT: "Raise --max-num-seqs or --max-num-batched-tokens, or add replicas.",
    Condition.CLIENT_ERRORS: "Look at who sends them: over-long prompts and bad bodies are answered 400.",
    Condition.CLIENT_ABORTS: "Compare the clients' time-outs with time to first token; add capacity or longer time-outs.",
    Cause.NONE: "Nothing to do.",
    "unknown": "Run `fragscope check` beside the engine: it says what each source sees, or why not.",
    "blind": "Make the GPUs visible (`fragscope check` says why they are not), and read the engine's log around that time.",
    "watch": "Plan a restart at a quiet hour, and lower --gpu-memory-utilization by 0.02 then.",
}
