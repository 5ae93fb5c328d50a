"""The naive rules do what their names say: they are to be beaten fairly."""

from collections.abc import Iterable

from evaluation.naive import NAIVE, Rule

from fragscope.model import EngineReading, GpuReading, Sample

MIB = 2**20


def engine(
    at: float, *, usage: float = 0.4, ok: float = 0, started: float = 0, aborts: float = 0, **http: float
) -> Sample:
    reading = EngineReading(
        at=at,
        engine="0",
        model_name="m",
        kv_usage_ratio=usage,
        http_total={"2xx": ok, "4xx": http.get("bad", 0.0), "5xx": http.get("failed", 0.0)},
        finished_total={"stop": ok, "abort": aborts},
        started_at=started,
    )
    return Sample(at, "vllm", (reading,))


def last(rule: Rule, samples: Iterable[Sample]) -> bool:
    return [rule.observe(sample) for sample in samples][-1]


def test_n1_takes_any_failure_and_n2_only_server_errors() -> None:
    for changed in ({"bad": 1.0}, {"aborts": 1.0}):
        assert last(NAIVE["N1"](), [engine(0), engine(5, **changed)])
        assert not last(NAIVE["N2"](), [engine(0), engine(5, **changed)])
    assert last(NAIVE["N2"](), [engine(0), engine(5, failed=1)])


def test_a_full_cache_silences_n2_and_five_minutes_end_it() -> None:
    assert not last(NAIVE["N2"](), [engine(0), engine(5, failed=1, usage=0.9)])
    assert last(NAIVE["N2"](), [engine(0), engine(5, failed=1), engine(305, failed=1)])
    assert not last(NAIVE["N2"](), [engine(0), engine(5, failed=1), engine(306, failed=1)])


def test_n3_wants_five_failures_and_one_in_a_hundred() -> None:
    assert not last(NAIVE["N3"](), [engine(0), engine(5, failed=4, ok=10)])
    assert last(NAIVE["N3"](), [engine(0), engine(5, failed=5, ok=494)])
    assert not last(NAIVE["N3"](), [engine(0), engine(5, failed=5, ok=495)])


def test_counters_that_start_again_count_from_zero() -> None:
    assert last(NAIVE["N3"](), [engine(0, failed=100, ok=100), engine(5, failed=6, ok=6)])


def staircase(*steps_mib: int) -> list[Sample]:
    used, samples = 1000, []
    for minute, step in enumerate((0, *steps_mib)):
        used += step
        samples.append(Sample(60.0 * minute, "vllm", gpus=(GpuReading(60.0 * minute, "a", 10**12, used * MIB),)))
    return samples


def test_n4_counts_three_rises_without_a_fall() -> None:
    assert last(NAIVE["N4"](), staircase(40, 0, 40, 40))
    assert not last(NAIVE["N4"](), staircase(40, 0, 40, 20))
    assert not last(NAIVE["N4"](), staircase(40, 40, -40, 40))


def test_n4_looks_at_half_an_hour() -> None:
    assert not last(NAIVE["N4"](), staircase(40, 40, 40, *[0] * 30))


def test_n5_is_a_new_process_after_a_cache_that_was_not_full() -> None:
    assert last(NAIVE["N5"](), [engine(0), engine(5, started=3)])
    assert not last(NAIVE["N5"](), [engine(0, usage=0.95), engine(5, started=3)])
    assert not last(NAIVE["N5"](), [engine(0), engine(5, started=3), engine(906, started=3)])
    assert not last(NAIVE["N5"](), [engine(0), engine(5)])
