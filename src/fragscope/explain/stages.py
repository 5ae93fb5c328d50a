"""How far the engine had come, and which one-off buffer a stack names."""

import re
from collections.abc import Iterable

from fragscope.explain.findings import Stage

# What vLLM prints (or did) when it enters a stage; a stage lasts until the next one is announced.
_ENTERED = (
    ("Initializing a V", Stage.STARTUP),
    ("Initializing an LLM engine", Stage.STARTUP),
    ("vLLM API server version", Stage.STARTUP),
    ("Starting to load model", Stage.LOADING),
    ("Loading safetensors", Stage.LOADING),
    ("Loading model weights", Stage.LOADING),
    ("odel loading took", Stage.PROFILING),
    ("model weights took", Stage.PROFILING),
    ("Available KV cache memory", Stage.CAPTURE),
    ("KV cache size:", Stage.CAPTURE),
    ("# GPU blocks:", Stage.CAPTURE),
    ("Capturing ", Stage.CAPTURE),
    ("init engine (", Stage.SERVING),
    ("Application startup complete", Stage.SERVING),
    ("Avg prompt throughput", Stage.SERVING),
    ("Dumping scheduler stats", Stage.SERVING),
)
CUES = tuple(marker for marker, _ in _ENTERED)
_NEW_PROCESS = ("Initializing a V", "Initializing an LLM engine", "vLLM API server version")

# Functions on the stack that betray a stage, the innermost meaning first.
_FRAMES = (
    (re.compile(r"\bin (?:capture_model|_capture_cudagraphs|capture_graph\w*)\b"), Stage.CAPTURE),
    (re.compile(r"\bin (?:profile_run|determine_available_memory|determine_num_available_blocks)\b"), Stage.PROFILING),
    (
        re.compile(r"\bin (?:load_model|load_weights|create_weights|process_weights_after_loading|initialize_model)\b"),
        Stage.LOADING,
    ),
    (re.compile(r"\bin (?:compile_or_warm_up_model|_dummy_sampler_run|kernel_warmup)\b"), Stage.CAPTURE),
    (re.compile(r"\bin (?:execute_model|run_busy_loop|_process_engine_step|run_engine_loop)\b"), Stage.SERVING),
)
# Buffers that one unusual request or step asks for, by the names their code goes by.
_ONE_OFF = (
    (re.compile(r"prompt_logprobs|compute_logprobs|gather_logprobs"), "prompt log-probabilities"),
    (re.compile(r"logits = logits\.to|compute_logits|logits_processor|log_softmax|in _get_logits"), "logits"),
    (re.compile(r"sample/sampler|in sampler_output|top_k_top_p|_dummy_sampler_run|topk_topp"), "the sampler"),
    (
        re.compile(r"vit_attn|torch_sdpa_wrapper|embed_multimodal|_execute_mm_encoder|get_multimodal_emb|_process_image"),
        "the vision encoder",
    ),
)  # fmt: skip


def after(stage: Stage, line: str) -> Stage:
    """The stage once a line is read: nothing but a new process or a reload leads back from serving."""
    told = next((each for marker, each in _ENTERED if marker in line), None)
    if told is None or (stage is Stage.SERVING and told in (Stage.PROFILING, Stage.CAPTURE)):
        return stage
    return told


def begins_process(line: str) -> bool:
    """Whether the line is the first of a new engine: nothing before it belongs to what comes after."""
    return any(marker in line for marker in _NEW_PROCESS)


def stage_of_stack(lines: Iterable[str]) -> Stage | None:
    """The earliest stage that the functions of a stack name: a profiling run executes the model, too."""
    text = "\n".join(lines)
    return next((stage for pattern, stage in _FRAMES if pattern.search(text)), None)


def one_off(lines: Iterable[str]) -> str | None:
    """The one-off buffer that a stack names; None where it names none."""
    text = "\n".join(lines)
    return next((name for pattern, name in _ONE_OFF if pattern.search(text)), None)
