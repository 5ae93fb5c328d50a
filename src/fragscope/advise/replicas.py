"""Engines of one model that are not set alike: all of a load-balanced or tensor-parallel group should agree."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

from fragscope.advise.advice import Advice, Topic
from fragscope.advise.observed import EnginePast
from fragscope.model import CacheConfig

_POOL_RATIO = 0.01
"""Pools differ by a few blocks from boot to boot; more than this is another budget."""
_SIZES = frozenset({"num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency", "kv_cache_memory_bytes"})
_SCRAPE_LABELS = frozenset(
    {"job", "instance", "pod", "namespace", "container", "node", "endpoint", "service", "cluster", "replica", "region"}
    | {"prometheus", "prometheus_replica", "__name__", "model_name"}
)
"""What Prometheus adds to every series is no setting of the engine."""


def settings_of(past: EnginePast) -> dict[str, str]:
    """Version and every label of `cache_config_info` that is a setting, by name."""
    found = {} if past.version is None else {"version": past.version}
    config = past.config or CacheConfig()
    for item in fields(CacheConfig):
        value = getattr(config, item.name)
        if item.name != "flags" and item.name not in _SIZES and value is not None:
            found[item.name] = str(value)
    found.update({name: word for name, word in (config.flags or {}).items() if name not in _SCRAPE_LABELS})
    return found


def differences(settings: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Setting -> value by owner, for every setting on which the owners disagree; what one lacks is `not shown`.

    A setting that only some versions show is a difference of versions and left out where these differ.
    """
    names = {name for shown in settings.values() for name in shown}
    found = {}
    for name in sorted(names):
        values = {owner: shown.get(name, "not shown") for owner, shown in settings.items()}
        by_version = "not shown" in values.values() and len({s.get("version") for s in settings.values()}) > 1
        if len(set(values.values())) > 1 and not by_version:
            found[name] = values
    return found


def advise(engines: Iterable[EnginePast]) -> Advice:
    """Whether the engines of each model agree; not known with fewer than two of any."""
    groups: dict[str, list[EnginePast]] = {}
    for past in engines:
        groups.setdefault(past.model_name, []).append(past)
    several = {model: group for model, group in groups.items() if len(group) > 1}
    if not several:
        return Advice(Topic.REPLICAS, None, "One engine has nobody to agree with.", missing=("a second engine",))
    words = [line for model, group in several.items() for line in _group_words(model, group)]
    if words:
        return Advice(Topic.REPLICAS, True, " ".join(words), numbers={"differences": float(len(words))})
    count = sum(map(len, several.values()))
    return Advice(Topic.REPLICAS, False, f"All {count} engines show the same version and settings.")


def _group_words(model: str, group: Sequence[EnginePast]) -> list[str]:
    words = []
    for name, values in differences({past.names: settings_of(past) for past in group}).items():
        shown = "; ".join(f"{value}: {', '.join(owners)}" for value, owners in _by_value(values).items())
        words.append(f"Engines of {model} differ in {name} ({shown}).")
    pools = {past.names: float(blocks) for past in group if (blocks := _blocks(past, group)) is not None}
    if pools and max(pools.values()) > min(pools.values()) * (1 + _POOL_RATIO):
        shown = "; ".join(f"{owner} {blocks:,.0f}" for owner, blocks in pools.items())
        words.append(f"Engines of {model} differ in pool size by more than 1 %, in blocks: {shown}.")
    return words


def _blocks(past: EnginePast, group: Sequence[EnginePast]) -> float | None:
    """Blocks of one engine: vLLM shows the sum over the engines of a server."""
    if past.config is None or not past.config.num_gpu_blocks:
        return None
    return past.config.num_gpu_blocks / sum(other.target == past.target for other in group)


def _by_value(values: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for owner, value in values.items():
        found.setdefault(value, []).append(owner)
    return found
