"""A real Prometheus scrapes the demo, and its memory is read back: whole, twice the same, and with its limits."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
from tools.shots import stack

from fragscope.model import Histogram, Part, Reason, Sample
from fragscope.sources.prometheus import History, HistoryError, QueryApi, Span, access
from tests.test_prometheus import number

pytestmark = pytest.mark.skipif(
    any(shutil.which(name) is None for name in ("prometheus", "promtool")), reason="prometheus is not installed (apt)"
)

WATCHED_S = 30
MAX_SAMPLES = 600
"""A page has some 60 series that are asked for, so a server with this limit refuses half a minute of them at once."""
DAY_S = 86400
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


WEEK_STEP_S = 300


@pytest.fixture(scope="module")
def week(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, float]]:
    """A Prometheus that holds a past week, with a restart on the fourth day and no VRAM on the last; and its begin."""
    folder = tmp_path_factory.mktemp("week")
    began = float(int(time.time()) // WEEK_STEP_S * WEEK_STEP_S - 8 * DAY_S)
    (folder / "week.om").write_text(open_metrics(began))
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "--quiet", "week.om", "tsdb"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (folder / "prometheus.yml").write_text("global: {}")
    with stack.serving(folder, "--storage.tsdb.retention.time=30d") as address:
        yield address, began


def open_metrics(began: float) -> str:
    target = 'job="vllm",instance="10.0.0.1:8000"'
    engine = f'engine="0",model_name="m",{target}'
    gpu = 'target="t",gpu="0000:0c:00.0",job="fragscope",instance="10.0.0.1:23724"'
    families: dict[str, list[str]] = {}
    for i in range(7 * DAY_S // WEEK_STEP_S + 1):
        at = began + i * WEEK_STEP_S
        life = i if at < began + 3.5 * DAY_S else i - 1008
        rows = {
            f"process_start_time_seconds{{{target}}}": began if life == i else began + 3.5 * DAY_S,
            f"vllm:num_requests_running{{{engine}}}": 3,
            f"vllm:generation_tokens_total{{{engine}}}": 7 * life,
            f'vllm:request_prompt_tokens_bucket{{le="100.0",{engine}}}': life,
            f'vllm:request_prompt_tokens_bucket{{le="+Inf",{engine}}}': 2 * life,
            f"vllm:request_prompt_tokens_count{{{engine}}}": 2 * life,
            f"vllm:request_prompt_tokens_sum{{{engine}}}": 300 * life,
        }
        if at < began + 6 * DAY_S:
            rows[f"fragscope_gpu_vram_size_bytes{{{gpu}}}"] = 192 * 2**30
            rows[f"fragscope_gpu_vram_used_bytes{{{gpu}}}"] = 170 * 2**30 + i
        for row, value in rows.items():
            families.setdefault(row.partition("{")[0], []).append(f"{row} {value} {at:.0f}")
    lines = [line for name, family in families.items() for line in (f"# TYPE {name} unknown", *family)]
    return "\n".join([*lines, "# EOF", ""])


def test_a_week_is_read_whole_in_chunks_with_its_restart_and_what_it_lacks(week: tuple[str, float]) -> None:
    address, began = week
    told: list[int] = []
    span = Span(began, began + 7 * DAY_S, step_s=WEEK_STEP_S)
    history = History(QueryApi(address, access({})), span, lambda progress: told.append(progress.done))
    samples = list(history.samples())
    count = 7 * DAY_S // WEEK_STEP_S + 1
    assert [sample.at for sample in samples] == [began + i * WEEK_STEP_S for i in range(count)]
    assert told[-1] == count
    assert len(told) == 29, "28 chunks of six hours, and the last moment"
    tokens = [sample.engines[0].generation_tokens_total for sample in samples]
    assert tokens == [7.0 * (i % 1008) if i < 2016 else 7.0 * 1008 for i in range(count)]
    assert {sample.engines[0].started_at for sample in samples} == {began, began + 3.5 * DAY_S}
    assert samples[1000].engines[0].prompt_tokens == Histogram(2000, 300000, ((100.0, 1000.0),))
    assert [len(sample.gpus) for sample in samples[:1728:100]] == [1] * 18
    assert {gap.part for sample in samples[1730:] for gap in sample.gaps} == {Part.GPU}
    lacking = {absent.metric for absent in history.coverage.absent()}
    assert {"vllm:kv_cache_usage_perc", "vllm:cache_config_info", "fragscope_gpu_vram_used_peak_bytes"} <= lacking
    assert "process_start_time_seconds" not in lacking


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
