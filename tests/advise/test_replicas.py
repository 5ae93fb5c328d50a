"""Engines of one model should be set alike; what differs is named with its values and owners."""

from dataclasses import replace

from fragscope.advise.observed import Observed
from fragscope.advise.replicas import advise
from fragscope.model import CacheConfig
from tests.advise.past import POOL, Life, samples


def fleet(*lives: Life) -> Observed:
    past = Observed()
    for life in lives:
        for sample in samples(life, 120):
            past.observe(sample)
    return past


def test_engines_that_agree_are_said_to() -> None:
    past = fleet(Life(target="a"), Life(target="b", config=replace(POOL, num_gpu_blocks=20_100)))
    given = advise(past.engines.values())
    assert given.change is False


def test_a_replica_with_another_ratio_version_or_flag_is_named() -> None:
    odd = replace(POOL, gpu_memory_utilization=0.92, flags={"enable_prefix_caching": "False"})
    base = replace(POOL, flags={"enable_prefix_caching": "True"})
    past = fleet(Life(target="a", config=base), Life(target="b", config=odd, version="0.33.0"))
    given = advise(past.engines.values())
    assert given.change is True
    for words in (
        "gpu_memory_utilization (0.9: a/0; 0.92: b/0)",
        "version (0.32.0: a/0; 0.33.0: b/0)",
        "enable_prefix_caching (True: a/0; False: b/0)",
    ):
        assert words in given.sentence


def test_pools_that_differ_by_more_than_a_hundredth_are_a_difference() -> None:
    past = fleet(Life(target="a"), Life(target="b", config=replace(POOL, num_gpu_blocks=22_000)))
    assert "pool size" in advise(past.engines.values()).sentence


def test_labels_that_prometheus_adds_are_no_settings() -> None:
    a, b = (replace(POOL, flags={"instance": name, "pod": name}) for name in "ab")
    assert advise(fleet(Life(target="a", config=a), Life(target="b", config=b)).engines.values()).change is False


def test_a_label_that_only_a_newer_version_shows_is_no_difference_of_its_own() -> None:
    new = replace(POOL, flags={"hash_block_size": "16"})
    given = advise(fleet(Life(target="a"), Life(target="b", config=new, version="0.33.0")).engines.values())
    assert "version" in given.sentence
    assert "hash_block_size" not in given.sentence


def test_one_engine_has_nobody_to_agree_with() -> None:
    assert advise(fleet(Life()).engines.values()).change is None
    assert advise(fleet(Life(config=CacheConfig())).engines.values()).change is None
