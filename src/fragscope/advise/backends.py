"""Which KV block sizes the attention backends of ROCm accept, by vLLM version.

From vLLM's own documentation of each release (`get_supported_kernel_block_sizes` and
`get_preferred_block_size` in the API pages, and `docs/design/attention_backends.md`); see docs/advise.md.
"""

import re
from dataclasses import dataclass

_API = "https://docs.vllm.ai/en/v{}/api/vllm/v1/attention/backends/{}/"
_TABLE = "vLLM docs/design/attention_backends.md"
COMMON_SIZES = (1, 8, 16, 32, 64, 128, 256)
"""What people choose from; any other multiple is as good as its neighbours."""


@dataclass(frozen=True, slots=True)
class BackendRule:
    """What one backend accepts from a version on: listed sizes, multiples, or (neither) anything.

    `fast` are the sizes its own kernels take; others fall back to slower ones.
    """

    backend: str
    since: tuple[int, int, int]
    source: str
    sizes: tuple[int, ...] = ()
    multiple_of: int | None = None
    prefers: int | None = None
    fast: tuple[int, ...] = ()
    note: str = ""

    def accepts(self, block_size: int) -> bool:
        """Whether `--block-size` may be that."""
        if block_size in self.sizes:
            return True
        if self.multiple_of is not None:
            return block_size % self.multiple_of == 0
        return not self.sizes

    def words(self) -> str:
        """What it accepts, in words."""
        if self.multiple_of is not None:
            return f"multiples of {self.multiple_of}"
        return " or ".join(map(str, self.sizes)) if self.sizes else "any"


_CUSTOM = (
    "its own paged-attention kernel takes 16 and 32 only (gfx9; gfx11 and gfx12: 16); other sizes run on Triton, "
    "which is slower without saying so"
)

RULES: tuple[BackendRule, ...] = (
    BackendRule("ROCM_ATTN", (0, 11, 2), _API.format("0.17.1", "rocm_attn"), sizes=(16, 32, 544), fast=(16, 32)),
    BackendRule(
        "ROCM_ATTN", (0, 19, 0), _API.format("0.19.0", "rocm_attn"), multiple_of=16, fast=(16, 32), note=_CUSTOM
    ),
    BackendRule("ROCM_AITER_FA", (0, 10, 1), _API.format("0.18.0", "rocm_aiter_fa"), sizes=(16, 32)),
    BackendRule(
        "ROCM_AITER_UNIFIED_ATTN",
        (0, 14, 1),
        _API.format("0.20.2", "rocm_aiter_unified_attn"),
        multiple_of=16,
        prefers=64,
        note="it sets 64 itself unless --block-size is given: its kernels are tuned for 64",
    ),
    BackendRule("TRITON_ATTN", (0, 11, 1), _TABLE, multiple_of=16),
    BackendRule("TRITON_MLA", (0, 8, 5), _TABLE, multiple_of=16),
    BackendRule("ROCM_AITER_TRITON_MLA", (0, 11, 1), _TABLE),
    BackendRule("ROCM_AITER_MLA", (0, 8, 5), _TABLE, sizes=(1,), note="start vLLM with --block-size 1"),
    BackendRule(
        "ROCM_AITER_MLA", (0, 33, 0), "vLLM 0.33.0, vllm/v1/attention/backends/mla/rocm_aiter_mla.py", prefers=None
    ),
    BackendRule("ROCM_AITER_MLA_SPARSE", (0, 11, 1), _TABLE, sizes=(1,), note="start vLLM with --block-size 1"),
)
"""`since` is the first version looked at, which is not always the first that has the backend."""

UNKNOWN = BackendRule(
    "unknown",
    (0, 0, 0),
    _TABLE,
    multiple_of=16,
    note="the backend is not known: every standard-attention backend of ROCm takes 16, and none takes 8; "
    "--backend NAME says which (vLLM logs it at start)",
)
"""What is safe to assume of standard attention; MLA has no such rule."""


def version_of(text: str | None) -> tuple[int, int, int] | None:
    """0.11.1rc2.dev3+rocm as (0, 11, 1); None where there is no version in it."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text or "")
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else None


def rule_for(backend: str | None, version: str | None = None) -> BackendRule:
    """The rule of a backend in a version (unknown: the newest); UNKNOWN where the name is not in the table."""
    name = (backend or "").upper().replace("-", "_")
    rules = [rule for rule in RULES if rule.backend == name]
    if not rules:
        return UNKNOWN
    known = version_of(version)
    if known is None:
        return rules[-1]
    return next((rule for rule in reversed(rules) if rule.since <= known), rules[0])
