"""A tier hides witnesses as if they had never been configured."""

from evaluation.tiers import TIERS, losing, tiers_named

from fragscope.model import AllocatorReading, Fact, Gap, GpuReading, LogFact, Part, Reason, Sample

FACTS = tuple(LogFact(10.0 + i, "vllm", Fact.OOM, {}, f"line {i}") for i in range(1000))
FULL = Sample(
    10.0,
    "vllm",
    gpus=(GpuReading(10.0, "a", 100, 50, 60, 40),),
    allocators=(AllocatorReading(10.0, "a", 1, 1, 2, 1, 0, 0),),
    log_facts=FACTS[:2],
    gaps=(Gap(Part.LOG, Reason.STALE),),
)


def seen(tier: str) -> Sample:
    return tiers_named(tier)[0].mask_of(0)(FULL)


def gaps(sample: Sample) -> set[tuple[Part, Reason]]:
    return {(gap.part, gap.reason) for gap in sample.gaps}


def test_outside_only_sees_the_card_alone() -> None:
    sample = seen("T0")
    assert (sample.gpus[0].own_bytes, sample.allocators, sample.log_facts) == (None, (), ())
    assert sample.gpus[0].peak_used_bytes == 60
    assert gaps(sample) == {(Part.ALLOCATOR, Reason.ABSENT), (Part.LOG, Reason.ABSENT)}


def test_each_tier_adds_one_witness() -> None:
    assert (seen("T1").gpus[0].own_bytes, seen("T1").allocators, seen("T1").log_facts) == (40, (), ())
    assert (seen("T2").allocators, seen("T2").log_facts) == (FULL.allocators, ())
    assert gaps(seen("T2")) == {(Part.LOG, Reason.ABSENT)}
    assert seen("T3") == FULL


def test_a_tenth_of_the_log_is_lost_and_the_same_tenth_each_time() -> None:
    kept = [losing(seed)(Sample(10.0, "vllm", log_facts=FACTS)).log_facts for seed in (1, 1, 2)]
    assert kept[0] == kept[1] != kept[2]
    assert all(860 < len(facts) < 940 for facts in kept)


def test_a_lossy_log_is_still_a_log() -> None:
    assert gaps(tiers_named("T3-lossy")[0].mask_of(0)(FULL)) == {(Part.LOG, Reason.STALE)}


def test_only_allocator_and_log_tell_fragmentation() -> None:
    assert [tier.name for tier in TIERS if tier.tells_fragmentation] == ["T2", "T3", "T3-lossy"]
