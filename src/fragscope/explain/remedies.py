"""What to change after an incident, gated on what is known of the stack, and what would not help.

Where each piece of advice comes from, and on which versions it holds, is in docs/explain.md.
"""

from dataclasses import dataclass

from fragscope.arithmetic import account
from fragscope.detect.parameters import Parameters
from fragscope.detect.words import REMEDIES
from fragscope.explain.findings import Stage
from fragscope.explain.incidents import Incident
from fragscope.explain.judge import Judged
from fragscope.explain.versions import Stack
from fragscope.model import Cause

_EXPANDABLE_TORCH = (2, 11)
_EXPANDABLE_ROCM = (7, 0)
_NEUTRAL_TORCH = (2, 10)
_FRAGMENTATION_WORTH = 0.25


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do, in order, and what to leave alone."""

    do: tuple[str, ...]
    vain: tuple[str, ...] = ()


def advise(incident: Incident, judged: Judged, p: Parameters) -> Advice:
    """The remedy for an incident's cause on its stack."""
    backend = next((each.backend for each in incident.findings if each.backend), None)
    likely = judged.probabilities.get(Cause.FRAGMENTATION, 0.0)
    do = [_OWN_REMEDIES.get(judged.cause, "") or REMEDIES.get(judged.cause, REMEDIES[Cause.UNEXPLAINED])]
    vain: list[str] = []
    if judged.cause == Cause.FRAGMENTATION:
        do, vain = _against_fragmentation(incident, backend)
    elif judged.cause == Cause.TRANSIENT_PEAK:
        do = [_against_peak(incident)]
    elif judged.cause == Cause.STARTUP_NO_MEMORY:
        do = [_against_loading(incident)]
    elif judged.cause == Cause.VRAM_EXHAUSTED and account(incident.facts).capped:
        do = [
            "Raise or remove the per-process memory fraction (set_per_process_memory_fraction): it is the limit here."
        ]
    if judged.cause in _EXPANDABLE_IS_VAIN and likely < _FRAGMENTATION_WORTH and _little_stranded(incident, p):
        vain.append(_VAIN_EXPANDABLE)
    if judged.cause in _UTILIZATION_IS_VAIN:
        vain.append("Changing --gpu-memory-utilization: this was no lack of GPU memory.")
    return Advice(tuple(do), tuple(vain))


_OWN_REMEDIES: dict[str, str] = {
    Cause.MEMORY_UNDETERMINED: (
        "Look in the log of the worker itself, above this line, for the allocator's message with its figures; "
        "until then lower --gpu-memory-utilization by 0.02."
    ),
    Cause.ENGINE_FAULT: "Look above this line for the first error of engine or worker; do not tune memory for it.",
    Cause.UNEXPLAINED: "Look at the minutes before in the metrics, and at the container's exit code.",
}
"""Where the detector would send people to the log that they have just given."""
_EXPANDABLE_IS_VAIN = (Cause.VRAM_EXHAUSTED, Cause.TRANSIENT_PEAK, Cause.STARTUP_NO_MEMORY, Cause.EXTERNAL_PROCESS)
_UTILIZATION_IS_VAIN = (Cause.DRIVER_FAULT, Cause.ENGINE_FAULT, Cause.HOST_OOM, Cause.REQUEST_TOO_LONG)
_VAIN_EXPANDABLE = (
    "expandable_segments: the message always prints that hint, and too little was stranded for it to matter."
)


_ROCM_TRIAL = (
    "If it runs PyTorch 2.11 or later on ROCm 7.0 or later without sleep mode (this log does not say), try "
    "PYTORCH_ALLOC_CONF=expandable_segments:True on one replica: not verified by us; older builds ignore it."
)


def _little_stranded(incident: Incident, p: Parameters) -> bool:
    """Below `mixed_low_ratio` of the card: what could be won is less than a step's noise."""
    a = account(incident.oom.facts if incident.oom is not None else {})
    return a.stranded is not None and bool(a.total) and a.stranded < p.mixed_low_ratio * (a.total or 0.0)


def variable(stack: Stack, backend: str | None) -> str:
    """The name of the allocator's environment variable: neutral from PyTorch 2.10 on, before that per backend."""
    if stack.torch is not None and stack.torch >= _NEUTRAL_TORCH:
        return "PYTORCH_ALLOC_CONF"
    return "PYTORCH_HIP_ALLOC_CONF" if backend == "HIP" else "PYTORCH_CUDA_ALLOC_CONF"


def _against_fragmentation(incident: Incident, backend: str | None) -> tuple[list[str], list[str]]:
    name, stack = variable(incident.stack, backend), incident.stack
    if backend == "NPU" and incident.oom is not None:
        name = incident.oom.variable or "PYTORCH_NPU_ALLOC_CONF"
    room = "Lower --gpu-memory-utilization by 0.02 to give the allocator room."
    refused = _expandable_refused(stack, backend)
    if refused is not None:
        return [room], [f"expandable_segments: {refused}."]
    if backend not in ("CUDA", "NPU") and (stack.torch is None or stack.rocm is None):
        # This log does not say what runs: the condition is told instead of a flag that may do nothing.
        return [room, _ROCM_TRIAL], []
    first = f"Set {name}=expandable_segments:True"
    note = "" if backend in ("CUDA", "NPU") else " (not verified by us on ROCm: try it on one replica)"
    if incident.stage in (Stage.LOADING, Stage.STARTUP, Stage.PROFILING):
        return [f"{first}{note}: the pieces were left by loading the weights.", room], []
    return [f"{first}{note}.", room], ["Raising --gpu-memory-utilization: it takes away the room that was in pieces."]


def _expandable_refused(stack: Stack, backend: str | None) -> str | None:
    """Why expandable segments cannot be advised; None where they can."""
    if stack.expandable_on:
        return "they are already on, by this log"
    if backend == "XPU":
        return "this backend has no such option that we know of"
    if stack.expandable_refused:
        return "this build has just said that it does not support them"
    if stack.sleep_mode:
        return "they cannot be combined with vLLM's sleep mode"
    if backend in ("CUDA", "NPU") or stack.torch is None or stack.rocm is None:
        return None
    if stack.torch < _EXPANDABLE_TORCH or stack.rocm < _EXPANDABLE_ROCM:
        have = f"PyTorch {stack.torch[0]}.{stack.torch[1]} with ROCm {stack.rocm[0]}.{stack.rocm[1]}"
        return f"on ROCm they need PyTorch 2.11 and ROCm 7.0, and this is {have}, which only prints a warning"
    return None


def _against_peak(incident: Incident) -> str:
    what = incident.one_off or ""
    if "log-prob" in what or what == "logits":
        return "Bound prompt_logprobs and logprobs (--max-logprobs), or lower --max-num-batched-tokens."
    if "sampler" in what:
        return "Lower --max-num-seqs: the sampler's buffers are as long as the vocabulary times the sequences."
    if "vision" in what:
        return "Bound images (--limit-mm-per-prompt, --mm-processor-kwargs max_pixels), or serve text only."
    if incident.stage is Stage.CAPTURE:
        return "Lower --gpu-memory-utilization by 0.02, capture fewer graph sizes, or use --enforce-eager."
    if incident.stage is Stage.PROFILING:
        return "Lower --max-num-batched-tokens or --max-num-seqs: the profiling run tries the largest step they allow."
    return "Lower --max-num-batched-tokens, or --gpu-memory-utilization by 0.02 to leave the step more room."


def _against_loading(incident: Incident) -> str:
    facts = incident.facts
    if "kv_needed" in facts or "kv_tokens" in facts:
        return (
            "Shorten --max-model-len, raise --gpu-memory-utilization if nothing else needs the card, or use more GPUs."
        )
    if "requested" in facts:
        return "Lower --gpu-memory-utilization to what is free, or free the card before the start."
    if "kv_available" in facts and "tried" not in facts:
        return (
            "Raise --gpu-memory-utilization, lower --max-num-batched-tokens, or use more GPUs: weights leave no room."
        )
    return "Use more GPUs (--tensor-parallel-size), a smaller or quantized checkpoint, or CPU offload: it does not fit."
