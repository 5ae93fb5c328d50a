"""What single lines of vLLM, the runtimes and the kernel establish; the wordings are listed in docs/logs.md."""

import re
from collections.abc import Callable, Mapping

from fragscope.explain.findings import Kind, Stage
from fragscope.explain.oom import figure
from fragscope.explain.stats import read_dump, read_startup, read_stats

Facts = Mapping[str, float]
_NUMBER = r"(\d{1,9}(?:\.\d{1,9})?)"

SHUTDOWN = ("API server: shutdown triggered", "trigger received signal=SIG")
"""A stop was asked for. Other `[shutdown]` lines follow crashes as well and prove nothing."""
DEATH = (
    "engine core exited unexpectedly",
    "EngineCore encountered a fatal error",
    "EngineCore encountered an issue",
    "EngineDeadError",
    "Engine core initialization failed",
    "Engine loop is not running",
    "Got fatal signal from worker processes",
)
_RUNTIME_OOM = re.compile(
    r"(?:CUDA|HIP) [Ee]rror: out of memory|hipErrorOutOfMemory|failure (?:\d{1,3} )?'?out of memory|"
    r"HSA_STATUS_ERROR_OUT_OF_RESOURCES"
)
_DRIVER = re.compile(
    r"Memory access fault by GPU node-(\d{1,15})|VM_L2_PROTECTION_FAULT_STATUS|no-retry page fault|retry page fault|"
    r"HSA_STATUS_ERROR_(?:MEMORY_APERTURE_VIOLATION|MEMORY_FAULT|EXCEPTION|ILLEGAL_INSTRUCTION)|"
    r"HW Exception by GPU node-(\d{1,15})|illegal memory access was encountered|NVRM: Xid|amdgpu: GPU reset begin"
)
_ENGINE_ERROR = re.compile(
    r"(?:HIP|CUDA) error: (?!out of memory)|\b[NR]CCL error|Returned hipError(?!OutOfMemory|Success)\w+|"
    r"HSA_AMD_AGENT_INFO_MEMORY_AVAIL query failed"
)
_KILLED = re.compile(
    r"(?:Out of memory|Memory cgroup out of memory): Kill(?:ed)? process|oom-kill:constraint|invoked oom-killer|"
    r"oom_reaper: reaped|Killed process \d{1,9} .{0,60}total-vm:|killed due to memory pressure|"
    r"OOMKilled(?![\"']?\s?[:=]\s?[\"']?[Ff]alse)"
)
_EXIT = re.compile(
    r"(?:[Ee]xit(?:ed)?(?: with)?[ _-]?(?:[Cc]ode|[Ss]tatus)|exitcode|\bEXIT)[\"']?[:= ]{1,3}(-?\d{1,9})(?! means)|"
    r"Exited \((\d{1,9})\)|proc\(s\): \{[^}]{0,80}?: (-?\d{1,9})"
)
_WORKER = re.compile(r"(?:Worker proc|Engine core proc(?:ess)?) .{0,60}died unexpectedly")
SIGKILL = (-9, 137)
"""Exit codes of a process that was killed from outside, as Python and as a shell or container tell them."""
_LIMIT = re.compile(r"maximum context length(?: is)? \(?(\d{1,15})")
_REQUESTED = re.compile(
    r"you requested (\d{1,15}) tokens|prompt contains (?:at least )?(\d{1,15}) input tokens|Input length \((\d{1,15})\)"
)
_NEGATIVE = re.compile(r"max_tokens must be at least 1, got (-?\d{1,9})")
_SERVE = re.compile(
    rf"max seq len \((\d{{1,15}})\),? \(?{_NUMBER} GiB KV cache is needed, which is larger than the available KV cache "
    rf"memory \((-?{_NUMBER[1:]} GiB\)"
)
_POOL = re.compile(
    r"max seq len \((\d{1,15})\) is larger than the maximum number of tokens .{0,40}KV cache \((\d{1,15})\)"
)
_BUDGET = re.compile(
    rf"Free memory on device .{{0,20}}?\({_NUMBER}/{_NUMBER} GiB\) on startup is less than .{{0,120}}?"
    rf"\((?:{_NUMBER}, )?{_NUMBER} GiB\)"
)
_HINTS = (
    (re.compile(r"warming up (?:sampler|pooler) with (\d{1,15}) dummy requests"), "sampler warm-up", Stage.CAPTURE),
    (re.compile(r"Failed to load model - not enough GPU memory"), None, Stage.LOADING),
    (re.compile(r"while processing method load_model"), None, Stage.LOADING),
    (re.compile(r"while processing method determine_\w{1,40}"), None, Stage.PROFILING),
    (re.compile(r"while processing method (?:initialize_cache|compile_or_warm_up_model)"), None, Stage.CAPTURE),
    (re.compile(r"while processing method (?:execute_model|start_worker_execution_loop)"), None, Stage.SERVING),
    (re.compile(r"expandable_segments not supported on this platform"), None, None),
)


def kilobytes(text: str, name: str) -> float | None:
    """A size of the kernel's oom lines in bytes, such as anon-rss:1117884kB."""
    match = re.search(name + r":(\d{1,15})kB", text)
    return float(int(match[1]) * 1024) if match else None


def _host_oom(text: str) -> Facts | None:
    if _KILLED.search(text) is None:
        return None
    sizes = {name.replace("-", "_"): kilobytes(text, name) for name in ("total-vm", "anon-rss", "shmem-rss")}
    return {name: size for name, size in sizes.items() if size is not None}


def _refusal(text: str) -> Facts | None:
    if "No available memory for the cache blocks" in text:
        return {"kv_available": 0.0}
    match = _SERVE.search(text)
    if match is not None:
        needed, available = figure(match[2], "GiB"), figure(match[3].removeprefix("-"), "GiB")
        sign = -1 if match[3].startswith("-") else 1
        return {
            "max_model_len": float(match[1]),
            "kv_needed": float(needed.value_bytes),
            "kv_available": float(sign * available.value_bytes),
        }
    match = _POOL.search(text)
    if match is not None:
        return {"max_model_len": float(match[1]), "kv_tokens": float(match[2])}
    match = _BUDGET.search(text)
    if match is None:
        return {} if "Initial free memory" in text and "current free memory" in text else None
    names = ("free", "total", "requested")
    sizes = (figure(size, "GiB").value_bytes for size in (match[1], match[2], match[4]))
    facts = dict(zip(names, map(float, sizes), strict=True))
    return facts | ({"gpu_memory_utilization": float(match[3])} if match[3] else {})


def _too_long(text: str) -> Facts | None:
    negative = _NEGATIVE.search(text)
    if negative is not None:
        return {"max_tokens": float(negative[1])}
    limit = _LIMIT.search(text)
    if limit is None:
        return None
    asked = _REQUESTED.search(text)
    requested = next((group for group in asked.groups() if group), None) if asked else None
    facts = {"max_model_len": float(limit[1])}
    return facts | ({"requested": float(requested)} if requested else {})


def _driver(text: str) -> Facts | None:
    match = _DRIVER.search(text)
    if match is None:
        return None
    node = match[1] or match[2]
    return {"gpu_node": float(node)} if node else {}


def _runtime_oom(text: str) -> Facts | None:
    if _RUNTIME_OOM.search(text) is None:
        return None
    free = re.search(r"Available Free mem\s*:\s*(\d{1,9}(?:\.\d{1,9})?)\s*([KMG]i?B)", text)
    return {"free": float(figure(free[1], free[2]).value_bytes)} if free else {}


def _engine_error(text: str) -> Facts | None:
    return {} if _ENGINE_ERROR.search(text) else None


def _worker_death(text: str) -> Facts | None:
    code = exit_code(text)
    if _WORKER.search(text) is not None:
        return {"exit_code": code} if code is not None else {}
    return {"exit_code": code} if code in SIGKILL else None


def exit_code(text: str) -> float | None:
    """The exit code that a line names, in the words of vLLM, Python, docker or Kubernetes."""
    match = _EXIT.search(text)
    return float(next(group for group in match.groups() if group)) if match else None


def _death(text: str) -> Facts | None:
    if not any(marker in text for marker in DEATH):
        return None
    code = exit_code(text) if "proc(s)" in text else None
    return {"exit_code": code} if code in SIGKILL else {}


def _marked(markers: tuple[str, ...]) -> Callable[[str], Facts | None]:
    return lambda text: {} if any(marker in text for marker in markers) else None


READERS: tuple[tuple[Kind, tuple[str, ...], Callable[[str], Facts | None]], ...] = (
    (Kind.STATS, ("KV cache usage",), read_stats),
    (Kind.DUMP, ("Dumping scheduler stats",), read_dump),
    (
        Kind.HOST_OOM,
        ("Killed process", "Kill process", "oom-kill", "oom_reaper", "OOMKilled", "memory pressure"),
        _host_oom,
    ),
    (
        Kind.DRIVER_FAULT,
        ("ccess fault", "_FAULT", "page fault", "HSA_STATUS", "Exception by GPU", "illegal memory", "Xid", "GPU reset"),
        _driver,
    ),
    (
        Kind.RUNTIME_OOM,
        ("rror: out of memory", "ErrorOutOfMemory", "out of memory'", "OUT_OF_RESOURCES"),
        _runtime_oom,
    ),
    (
        Kind.REFUSAL,
        ("for the cache blocks", "max seq len", "Free memory on device", "Initial free memory"),
        _refusal,
    ),
    (Kind.REQUEST_TOO_LONG, ("maximum context length", "max_tokens must be"), _too_long),
    (Kind.SHUTDOWN, SHUTDOWN, _marked(SHUTDOWN)),
    (Kind.WORKER_DEATH, ("died unexpectedly", "xit", "EXIT"), _worker_death),
    (Kind.ENGINE_ERROR, (" error: ", "CCL error", "Returned hipError", "query failed"), _engine_error),
    (Kind.ENGINE_DEATH, DEATH, _death),
    (
        Kind.PREEMPTION,
        ("is preempted by",),
        lambda text: {} if "not enough KV cache" in text else None,
    ),
    (
        Kind.STARTUP,
        ("odel loading took", "model weights t", "Available KV cache memory", "KV cache size:", "# GPU blocks:",
         "emory profiling", "concurrency for"),
        read_startup,
    ),
)  # fmt: skip
"""Kind, words one of which must be there (a cheap look), and the reader; the first that reads a line has it."""


def classify(text: str) -> tuple[Kind, Facts] | None:
    """What a line without its prefix says, and its numbers; None for an ordinary line."""
    for kind, cues, reader in READERS:
        if any(cue in text for cue in cues):
            facts = reader(text)
            if facts is not None:
                return kind, facts
    return None


_GOES_ON = re.compile(
    r"Avg prompt throughput|at least one request with the model|max seq len|Free memory on device|Killed process|"
    r"OUT_OF_RESOURCES|Input length|maximum context length"
)


def may_go_on(text: str) -> bool:
    """Whether a terminal may have wrapped this line: the words of a known sentence, perhaps without its end."""
    return _GOES_ON.search(text) is not None


def hint(text: str) -> tuple[str, str | None, Stage | None] | None:
    """A symptom around a failure: its words, the one-off buffer it names, the stage it betrays."""
    for pattern, one_off, stage in _HINTS:
        match = pattern.search(text)
        if match is not None:
            return match[0], one_off, stage
    return None
