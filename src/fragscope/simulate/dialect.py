"""How vLLM's releases name and count things on `/metrics`: which families a page has is a matter of release."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dialect:
    """What one release shows (docs/vllm.md); `client_errors_are_5xx` is its miscounting of bad requests."""

    version: str
    usage_name: str = "kv_cache_usage_perc"
    rejections: bool = True
    waiting_by_reason: bool = True
    sleep_state: bool = True
    error_reason: bool = True
    pool_tokens: bool = True
    num_blocks: bool = True
    process_start: bool = True
    client_errors_are_5xx: bool = False
    log_files: bool = True

    @property
    def reasons(self) -> tuple[str, ...]:
        """The finished_reason rows, all of them there from the start."""
        return ("stop", "length", "abort", "error") if self.error_reason else ("stop", "length", "abort")


DIALECTS = (
    Dialect("0.8.5", "gpu_cache_usage_perc", rejections=False, waiting_by_reason=False, sleep_state=False,
            error_reason=False, pool_tokens=False, num_blocks=False),
    Dialect("0.10.2", rejections=False, waiting_by_reason=False, sleep_state=False, error_reason=False,
            pool_tokens=False),
    Dialect("0.14.1", rejections=False, waiting_by_reason=False, pool_tokens=False),
    Dialect("0.20.2", rejections=False, pool_tokens=False, client_errors_are_5xx=True),
    Dialect("0.22.0", rejections=False, pool_tokens=False, client_errors_are_5xx=True),
    Dialect("0.26.0", rejections=False),
    Dialect("0.32.0"),
    Dialect("0.33.0"),
)  # fmt: skip
"""From the oldest with HTTP counters to the newest; the sampled releases stand for their neighbours."""

MULTI_API_SERVER = Dialect("0.32.0", process_start=False)
"""Several API servers, or data parallelism: nobody says when the process started."""


def by_version(version: str) -> Dialect:
    """The dialect of a release listed above. Raises KeyError."""
    return {dialect.version: dialect for dialect in DIALECTS}[version]
