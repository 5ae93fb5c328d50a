"""A Prometheus' history as samples: equal to live polls, whole at chunk borders, the same in any chunks."""

import dataclasses
import gzip
import json
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fragscope.model import EngineReading, Gap, Part, Reason, Sample
from fragscope.sources import vllm
from fragscope.sources.coverage import SUBJECTS
from fragscope.sources.exposition import Page, Parser
from fragscope.sources.prometheus import History, HistoryError, Progress, QueryApi, Span, access
from fragscope.sources.scrape import Access, Body
from tests.paths import DATA, VLLM_032
from tests.servers import serving
from tests.sources.fake_prometheus import FakePrometheus, scraped

ACCESS = Access(connect_timeout_s=2, total_timeout_s=10)
T0 = 1_700_000_000.0 - 1_700_000_000.0 % 60
ENGINE = {"job": "vllm", "instance": "10.0.0.1:8000"}


def engine_page(tokens: float = 0.0, started_at: float = 1.0, running: float = 1.0) -> str:
    return (
        f"process_start_time_seconds {started_at}\n"
        f'vllm:num_requests_running{{engine="0",model_name="m"}} {running}\n'
        f'vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.5\n'
        f'vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}\n'
        f'vllm:request_prompt_tokens_bucket{{engine="0",model_name="m",le="10.0"}} {tokens / 20}\n'
        f'vllm:request_prompt_tokens_bucket{{engine="0",model_name="m",le="+Inf"}} {tokens / 10}\n'
        f'vllm:request_prompt_tokens_sum{{engine="0",model_name="m"}} {tokens}\n'
        f'vllm:request_prompt_tokens_count{{engine="0",model_name="m"}} {tokens / 10}\n'
    )


def gpu_page(used: int, gpu: str = "0000:0c:00.0", target: str = "llama") -> str:
    labels = f'{{target="{target}",gpu="{gpu}"}}'
    return (
        f"fragscope_gpu_vram_size_bytes{labels} {192 * 2**30}\n"
        f"fragscope_gpu_vram_used_bytes{labels} {used}\n"
        f"fragscope_gpu_vram_used_peak_bytes{labels} {used + 5}\n"
    )


def steady(minutes: int) -> FakePrometheus:
    """An engine and its GPU, scraped every minute; a restart and an hour's outage where there is room for them."""
    fake = FakePrometheus()
    for i in range(minutes):
        if not 20 <= i < 30:
            fake.add(T0 + 60 * i, scraped(engine_page(7.0 * i, 1.0 if i < 40 else 2.0), **ENGINE))
        fake.add(T0 + 60 * i, scraped(gpu_page(1000 + i), job="fragscope", instance="10.0.0.1:23724"))
    return fake


def history(url: str, minutes: int, **span: object) -> History:
    return History(QueryApi(url, ACCESS), Span(T0, T0 + 60 * (minutes - 1), **span))  # type: ignore[arg-type]


def read(fake: FakePrometheus, minutes: int, **span: object) -> list[Sample]:
    with serving(fake) as url:
        return list(history(url, minutes, **span).samples())


def counters(samples: Sequence[Sample]) -> Iterator[float | None]:
    for sample in samples:
        for engine in sample.engines:
            yield engine.generation_tokens_total


@pytest.mark.parametrize("name", ["admission_rejected", "kv_exhausted"])
def test_a_history_says_what_live_polls_said(name: str) -> None:
    with gzip.open(VLLM_032 / f"{name}.jsonl.gz", "rt") as stream:
        rows = [json.loads(line) for line in stream]
    texts = [row["text"] for row in rows if row["kind"] == "exposition" and "text" in row][::5]
    fake = FakePrometheus()
    for i, text in enumerate(texts):
        fake.add(T0 + 60 * i, scraped(text, **ENGINE))
    samples = [sample for sample in read(fake, len(texts), chunk_s=420) if sample.engines]
    live = []
    for i, text in enumerate(texts):
        parsed = Parser(vllm.wanted).parse(Body(text, ""))
        assert isinstance(parsed, Page)
        # A family that a page only announces leaves no trace in a Prometheus.
        kept = Page({family: rows for family, rows in parsed.families.items() if rows})
        live.append((T0 + 60 * i, vllm.read(kept, T0 + 60 * i, health=None).engines))
    assert [(sample.at, sample.engines) for sample in samples] == [each for each in live if each[1]]
    assert len(samples) >= 10


def test_no_moment_is_lost_or_read_twice_at_a_chunk_border() -> None:
    samples = read(steady(60), 60, chunk_s=600)
    assert [sample.at for sample in samples] == [T0 + 60 * i for i in range(60)]
    expected = [7.0 * i for i in range(60) if not 20 <= i < 30]
    assert list(counters(samples)) == expected, "counters go on across the borders"


WHOLE = read(steady(60), 60, chunk_s=10**6)


@settings(max_examples=25, deadline=None)
@given(chunk_s=st.floats(1, 4000), max_samples=st.integers(20, 400))
def test_neither_chunks_nor_a_servers_limits_change_the_samples(chunk_s: float, max_samples: int) -> None:
    fake = steady(60)
    fake.max_samples = max_samples
    assert read(fake, 60, chunk_s=chunk_s) == WHOLE


def test_no_query_asks_for_more_points_than_a_server_gives() -> None:
    fake = FakePrometheus()
    span = {"chunk_s": 10**9, "step_s": 1.0}
    assert read(fake, 400, **span) == []
    sizes = [float(form["end"]) - float(form["start"]) + 1 for form in fake.asked]
    assert max(sizes) == 11_000


def test_what_was_too_much_once_is_not_asked_again() -> None:
    fake = steady(60)
    fake.max_samples = 100
    assert read(fake, 60, chunk_s=3600) == WHOLE
    sizes = [round((float(form["end"]) - float(form["start"])) / 60) + 1 for form in fake.asked]
    refused = [size for size in sizes if size > 12]
    assert refused == sorted(refused, reverse=True)
    assert len(refused) <= 3, "60, 30, 15 and then 7 minutes for good"


def test_samples_lie_on_multiples_of_the_step() -> None:
    with serving(steady(60)) as url:
        span = Span(T0 + 61.5, T0 + 299.9)
        assert [each.at for each in History(QueryApi(url, ACCESS), span).samples()] == [T0 + 120, T0 + 180, T0 + 240]


def test_a_restart_shows() -> None:
    started = [engine.started_at for sample in WHOLE for engine in sample.engines]
    assert started == sorted(filter(None, started))
    assert set(started) == {1.0, 2.0}


def test_an_outage_is_a_gap_and_its_gpu_goes_on() -> None:
    silent = WHOLE[20:30]
    assert all(sample.engines == () and sample.gpus for sample in silent)
    assert {gap for sample in silent for gap in sample.gaps} == {
        Gap(Part.ENGINE, Reason.ABSENT, "Prometheus has nothing of vLLM at this time")
    }
    assert not [gap for sample in WHOLE[:20] for gap in sample.gaps]


def test_a_server_that_vanishes_leaves_one_gap_and_then_nothing() -> None:
    fake = FakePrometheus()
    for i in range(5):
        fake.add(T0 + 60 * i, scraped(engine_page(), **ENGINE))
    samples = read(fake, 20, chunk_s=180)
    assert [bool(sample.engines) for sample in samples] == [True] * 5 + [False]
    assert {gap.part for gap in samples[-1].gaps} == {Part.ENGINE, Part.GPU}


def test_several_engines_and_servers_stay_apart() -> None:
    two = engine_page(5) + engine_page(9).replace('engine="0"', 'engine="1"').split("\n", 1)[1]
    fake = FakePrometheus()
    fake.add(T0, scraped(two, job="vllm", instance="10.0.0.1:8000", namespace="llm", pod="a-0"))
    fake.add(T0, scraped(engine_page(3), job="vllm", instance="10.0.0.2:8000", namespace="llm", pod="b-0"))
    fake.add(T0, scraped(engine_page(4), job="vllm", instance="10.0.0.2:8001", namespace="llm", pod="b-0"))
    samples = read(fake, 1)
    told = {sample.target: [engine.generation_tokens_total for engine in sample.engines] for sample in samples}
    assert told == {"llm/a-0": [5, 9], "llm/b-0": [3], "llm/b-0:8001": [4]}


def test_other_programs_counters_are_not_a_servers() -> None:
    other = 'http_requests_total{handler="/v1/x",method="POST",status="5xx"} 9\nprocess_start_time_seconds 5\n'
    fake = FakePrometheus()
    fake.add(T0, scraped(engine_page(), **ENGINE) | scraped(other, job="shop", instance="10.0.0.1:9000"))
    (sample,) = read(fake, 1)
    assert (sample.engines[0].http_total, sample.engines[0].started_at) == (None, 1.0)


def test_the_match_is_in_every_query_and_gpus_are_not_asked_for_a_model() -> None:
    fake = steady(1)
    read(fake, 1, match='{pod=~".*",model_name="m",job="vllm"}')
    engines, server, figures, peaks = (form["query"] for form in fake.asked)
    assert 'pod=~".*",model_name="m",job="vllm"' in engines
    assert server.startswith(f'{{__name__=~"{vllm.SERVER_PATTERN}",pod=~".*",job="vllm"}} and on ')
    for query in (figures, peaks):
        assert 'pod=~".*"' in query
        assert "model_name" not in query
        assert "job" not in query


def test_the_gpus_can_have_a_match_of_their_own() -> None:
    fake = steady(1)
    (sample,) = read(fake, 1, match='{job="vllm"}', gpu_match='{job="nobody"}')
    assert [gap.part for gap in sample.gaps] == [Part.GPU]
    assert 'job="nobody"' in fake.asked[3]["query"]


def test_progress_is_told_after_each_chunk() -> None:
    told: list[Progress] = []
    with serving(steady(60)) as url:
        list(History(QueryApi(url, ACCESS), Span(T0, T0 + 59 * 60, chunk_s=1500), told.append).samples())
    assert [(each.done, each.total, each.samples) for each in told] == [(25, 60, 25), (50, 60, 50), (60, 60, 60)]
    assert told[-1].at == T0 + 59 * 60


def test_chunks_are_asked_for_only_when_they_are_needed() -> None:
    fake = steady(60)
    with serving(fake) as url:
        samples = history(url, 60, chunk_s=600).samples()
        next(samples)
        assert len(fake.asked) == 4, "four queries of the first chunk"


def test_what_a_history_lacks_is_named_with_what_is_lost() -> None:
    with serving(steady(3)) as url:
        reading = history(url, 3)
        list(reading.samples())
    lacking = {absent.metric: absent for absent in reading.coverage.absent()}
    assert set(lacking) == {
        "vllm:num_requests_waiting",
        "vllm:num_preemptions",
        "vllm:request_generation_tokens_bucket",
        "vllm:request_success",
        "vllm:cache_config_info",
        "http_requests",
    }
    assert "whether requests waited cannot be said" in lacking["vllm:num_requests_waiting"].sentence()
    assert reading.coverage.targets == ("10.0.0.1:8000",)


def test_what_one_server_lacks_is_said_of_it_alone() -> None:
    fake = steady(2)
    fake.add(T0, scraped("vllm:num_requests_running 1\n", job="vllm", instance="10.0.0.9:8000"))
    with serving(fake) as url:
        reading = history(url, 2)
        list(reading.samples())
    lacking = {absent.metric: absent.targets for absent in reading.coverage.absent()}
    assert lacking["vllm:kv_cache_usage_perc"] == ("10.0.0.9:8000",)
    assert lacking["vllm:num_preemptions"] == ()


def test_an_empty_history_says_so() -> None:
    with serving(FakePrometheus(warnings=["a store is down"])) as url:
        reading = history(url, 3)
        assert list(reading.samples()) == []
    said = reading.coverage.sentences()
    assert said[0].startswith("no vLLM metric was found")
    assert "Prometheus warns: a store is down" in said
    assert len(reading.coverage.absent()) >= len(SUBJECTS)


def test_a_subject_is_a_name_that_is_read() -> None:
    for subject in SUBJECTS:
        assert all(vllm.wanted(name) == name for name in subject.names), subject.metric


def test_the_old_names_and_rays_are_asked_for_too() -> None:
    old = engine_page(5).replace("kv_cache_usage_perc", "gpu_cache_usage_perc").replace("vllm:", "ray_vllm_")
    fake = FakePrometheus()
    fake.add(T0, scraped(old, **ENGINE))
    (sample,) = read(fake, 1)
    assert dataclasses.replace(sample.engines[0], http_total=None) == EngineReading(
        at=T0, engine="0", model_name="m", kv_usage_ratio=0.5, running=1, generation_tokens_total=5, started_at=1.0,
        prompt_tokens=sample.engines[0].prompt_tokens,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("span", "words"),
    [
        ({"end_at": T0 - 1}, "before it begins"),
        ({"step_s": 0.0}, "must be above 0"),
        ({"start_at": T0 + 1, "end_at": T0 + 59}, "take a smaller step"),
        ({"chunk_s": float("nan")}, "must be above 0"),
    ],
)
def test_a_span_that_is_none_is_refused(span: dict[str, float], words: str) -> None:
    with pytest.raises(HistoryError, match=words):
        dataclasses.replace(Span(T0, T0 + 60), **span)  # type: ignore[arg-type]


def test_the_token_comes_from_the_environment_and_is_checked() -> None:
    assert access({"FRAGSCOPE_PROMETHEUS_TOKEN": " abc\n"}) == access({"FRAGSCOPE_PROMETHEUS_TOKEN": "abc"})
    assert access({}).token is None
    assert "abc" not in repr(access({"FRAGSCOPE_PROMETHEUS_TOKEN": "abc"}))
    with pytest.raises(HistoryError, match="FRAGSCOPE_PROMETHEUS_TOKEN") as caught:
        access({"FRAGSCOPE_PROMETHEUS_TOKEN": "sec\nret"})
    assert "sec" not in str(caught.value)


def test_the_exporters_shape_is_read() -> None:
    """Names and labels of the exporter, as copied from its source into tests/data."""
    text = (DATA / "device-metrics-exporter.prom").read_text()
    fake = FakePrometheus()
    fake.add(T0, scraped(engine_page(), **ENGINE, namespace="serving", pod="vllm-0"))
    stored = {
        tuple(label for label in labels if label[1]): value
        for labels, value in scraped(text, job="amd", instance="10.0.7.7:5000").items()
    }
    fake.add(T0, stored)
    (sample,) = read(fake, 1)
    (gpu,) = sample.gpus
    assert (gpu.total_bytes, gpu.used_bytes, gpu.peak_used_bytes) == (196592 * 2**20, 1273 * 2**20, 1273 * 2**20)
    assert (gpu.gpu, gpu.source) == ("692301123450", "prometheus:device-metrics-exporter")


def test_a_card_that_two_witnesses_show_is_one() -> None:
    fake = steady(1)
    fake.add(T0, scraped(gpu_page(1000), job="again", instance="10.0.0.1:23724"))
    exporters = 'gpu_used_vram{serial_number="S1"} 5\ngpu_total_vram{serial_number="S1"} 9\n'
    fake.add(T0, scraped(exporters, job="amd", instance="10.0.0.1:5000"))
    (sample,) = read(fake, 1)
    assert [(gpu.gpu, gpu.source) for gpu in sample.gpus] == [("0000:0c:00.0", "prometheus:fragscope")]
