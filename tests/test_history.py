"""A real Prometheus scrapes the demo, and its memory is read back: whole, twice the same, and with its limits."""

import shutil
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
from tools.shots import stack

from fragscope.model import Part, Reason, Sample
from fragscope.sources.prometheus import History, HistoryError, QueryApi, Span, access
from tests.test_prometheus import number

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (apt)")

WATCHED_S = 30
MAX_SAMPLES = 600
"""A page has some 60 series that are asked for, so a server with this limit refuses half a minute of them at once."""
RESTARTED = 'changes(process_start_time_seconds{job="vllm"}[5m])'


@pytest.fixture(scope="module")
def remembered() -> Iterator[tuple[str, float, float]]:
    """A Prometheus that has watched the demo for half a minute and a restart, and the time in which it did."""
    port = stack.free_port()
    limit = f"--query.max-samples={MAX_SAMPLES}"
    with stack.demo("pseudo-oom", 20, port) as vllm, stack.prometheus(port, vllm, limit) as address:
        until(address, "vllm:num_requests_running + 1", "Prometheus scrapes the simulated engine")
        started = time.time()
        time.sleep(WATCHED_S - 5)
        until(address, RESTARTED, "the engine dies and comes back")
        time.sleep(5)
        yield address, started, time.time()


def until(address: str, expression: str, what: str) -> None:
    deadline = time.monotonic() + 60
    while not number(int(address.rpartition(":")[2]), expression):
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def read(remembered: tuple[str, float, float], **span: object) -> tuple[list[Sample], History]:
    address, start, end = remembered
    history = History(QueryApi(address, access({})), Span(start, end - 2, step_s=1, **span))  # type: ignore[arg-type]
    return list(history.samples()), history


def test_what_prometheus_saw_comes_back_as_samples(remembered: tuple[str, float, float]) -> None:
    samples, history = read(remembered)
    assert len(samples) >= WATCHED_S - 3
    assert [after.at - before.at for before, after in pairwise(samples)] == [1.0] * (len(samples) - 1)
    assert len(history.coverage.targets) == 1
    assert history.coverage.absent() == ()
    last = samples[-1].engines[0]
    assert last.model_name == "demo-llama"
    assert last.cache_config is not None
    assert last.cache_config.block_size
    assert last.output_tokens is not None
    assert last.output_tokens.buckets
    for sample in samples[5:]:
        (gpu,) = sample.gpus
        assert 0 < gpu.used_bytes <= (gpu.peak_used_bytes or 0) <= gpu.total_bytes


def test_a_restart_is_seen_and_counters_rise_within_each_life(remembered: tuple[str, float, float]) -> None:
    samples, _ = read(remembered, chunk_s=5)
    engines = [engine for sample in samples for engine in sample.engines]
    lives = {engine.started_at: [e for e in engines if e.started_at == engine.started_at] for engine in engines}
    assert len(lives) >= 2
    assert None not in lives
    for life in lives.values():
        tokens = [engine.generation_tokens_total or 0 for engine in life]
        assert tokens == sorted(tokens)
    silent = [sample for sample in samples if not sample.engines]
    assert silent, "while it was down there was nothing to scrape"
    assert all(gap.part is Part.ENGINE for sample in silent for gap in sample.gaps)


def test_chunks_make_no_difference_to_a_real_prometheus(remembered: tuple[str, float, float]) -> None:
    whole, _ = read(remembered, chunk_s=10**6)
    assert whole == read(remembered, chunk_s=1)[0]
    assert whole == read(remembered, chunk_s=7)[0]


def test_a_real_limit_is_met_and_gone_round(remembered: tuple[str, float, float]) -> None:
    address, start, end = remembered
    told: list[int] = []
    span = Span(start, end - 2, step_s=1, chunk_s=10**6)
    list(History(QueryApi(address, access({})), span, lambda progress: told.append(progress.done)).samples())
    assert len(told) > 1, "one chunk was asked for, and refused"


def test_samples_agree_with_an_instant_query(remembered: tuple[str, float, float]) -> None:
    samples, _ = read(remembered)
    port = int(remembered[0].rpartition(":")[2])
    for sample in samples[3::7]:
        engine = sample.engines[0] if sample.engines else None
        for name, value in (
            ("vllm:generation_tokens_total", engine and engine.generation_tokens_total),
            ("vllm:kv_cache_usage_perc", engine and engine.kv_usage_ratio),
            ("fragscope_gpu_vram_used_bytes", float(sample.gpus[0].used_bytes) if sample.gpus else None),
        ):
            assert value == number(port, f"{name} @ {sample.at:.3f}"), name


def test_what_the_selector_leaves_out_is_missing_and_said(remembered: tuple[str, float, float]) -> None:
    samples, history = read(remembered, gpu_match='{job="nobody"}')
    assert {gap.reason for sample in samples for gap in sample.gaps} == {Reason.ABSENT}
    assert any("how much VRAM was used cannot be said" in said for said in history.coverage.sentences())
    nothing, other = read(remembered, match='{job="nobody"}')
    assert nothing == []
    assert other.coverage.sentences()[0].startswith("no vLLM metric was found")


def test_a_bad_pattern_is_prometheus_own_word(remembered: tuple[str, float, float]) -> None:
    with pytest.raises(HistoryError, match=r"bad_data.*missing closing"):
        read(remembered, match='{pod=~"["}')
