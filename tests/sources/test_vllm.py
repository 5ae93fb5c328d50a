"""vLLM's dialects, and equality with the reference parser on real pages."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from fragscope.model import EngineReading
from fragscope.sources.exposition import Page, Parser
from fragscope.sources.scrape import Body, Failure
from fragscope.sources.vllm import read, wanted
from tests.paths import VLLM_032


def pages(name: str) -> list[str]:
    with gzip.open(VLLM_032 / f"{name}.jsonl.gz", "rt") as stream:
        rows = [json.loads(line) for line in stream]
    return [row["text"] for row in rows if row["kind"] == "exposition" and "text" in row]


def engines(text: str, content_type: str = "") -> tuple[EngineReading, ...]:
    page = Parser(wanted).parse(Body(text, content_type))
    assert isinstance(page, Page)
    return read(page, 1.0, 200).engines


def engine(text: str, content_type: str = "") -> EngineReading:
    (found,) = engines(text, content_type)
    return found


REAL = pages("admission_rejected")[:-8]


@pytest.mark.parametrize("name", ["healthy", "admission_rejected", "kv_exhausted"])
def test_every_value_equals_the_reference_parsers(name: str) -> None:
    parser = Parser(wanted)
    for text in pages(name)[::10]:
        page = parser.parse(Body(text, ""))
        assert isinstance(page, Page)
        assert page.malformed == ()
        expected: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                kept = wanted(sample.name)
                if kept is not None:
                    expected.setdefault(kept, []).append((sample.labels, sample.value))
        got = {name: [(dict(row.labels), row.value) for row in rows] for name, rows in page.families.items() if rows}
        assert got == expected


def test_a_real_page_is_read_in_full() -> None:
    found = engine(REAL[-1])
    assert found.model_name == "tiny"
    assert found.engine == "0"
    assert found.running == 4
    assert found.waiting == 2
    assert found.cache_config is not None
    assert found.cache_config.block_size == 32
    assert found.cache_config.num_gpu_blocks == 4000
    assert found.http_total is not None
    assert found.http_total["5xx"] > 1000
    assert found.admission_rejections_total is not None
    assert found.admission_rejections_total > 1000
    assert found.prompt_tokens is not None
    assert found.prompt_tokens.buckets[0][0] == 1
    assert found.started_at is not None
    assert found.sleeping is False
    assert set(found.finished_total or {}) == {"stop", "length", "abort", "error", "repetition"}


@pytest.mark.parametrize("prefix", ["vllm_", "ray_vllm_", "ray_vllm:"])
def test_all_prefixes_say_the_same(prefix: str) -> None:
    assert engine(REAL[-1].replace("vllm:", prefix)) == engine(REAL[-1])


def test_counters_without_total_are_read() -> None:
    bare = REAL[-1].replace("_total{", "{").replace("_total counter", " counter")
    assert engine(bare) == engine(REAL[-1])


def test_created_series_are_dropped() -> None:
    assert wanted("vllm:num_preemptions_created") is None


def test_a_histogram_called_total_is_no_counter() -> None:
    assert wanted("vllm:iteration_tokens_total") is None


def test_none_in_an_info_label_is_not_known() -> None:
    text = REAL[-1].replace('num_gpu_blocks="4000"', 'num_gpu_blocks="None"')
    config = engine(text).cache_config
    assert config is not None
    assert config.num_gpu_blocks is None
    assert config.cache_dtype == "auto"


def test_a_page_without_engine_labels_is_engine_0() -> None:
    text = REAL[-1].replace('engine="0",', "").replace('engine="0"', "")
    assert engine(text).engine == "0"


def test_an_http_family_without_rows_is_zero_and_one_that_is_absent_is_unknown() -> None:
    fresh = pages("healthy")[0]
    assert engine(fresh).http_total == {"2xx": 0, "4xx": 0, "5xx": 0}
    without = "\n".join(line for line in fresh.splitlines() if "http_requests" not in line) + "\n"
    assert engine(without).http_total is None


@pytest.mark.parametrize(
    ("handler", "method", "counts"),
    [
        ("/v1/completions", "POST", True),
        ("/v1/chat/completions", "POST", True),
        ("/v1/embeddings", "POST", True),
        ("/generate", "POST", True),
        ("/pooling", "POST", True),
        ("/inference/v1/generate", "POST", True),
        ("/v1/models", "GET", False),
        ("/v1/load_lora_adapter", "POST", False),
        ("/v1/tokenize", "POST", False),
        ("/tokenize", "POST", False),
        ("/v1/chat/completions/render", "POST", False),
        ("/v1/responses/{response_id}/cancel", "POST", False),
        ("/v1/messages/count_tokens", "POST", False),
        ("none", "POST", False),
        ("/health", "GET", False),
    ],
)
def test_only_handlers_that_complete_are_counted(handler: str, method: str, counts: bool) -> None:
    line = f'http_requests_total{{handler="{handler}",method="{method}",status="5xx"}} 7.0\n'
    fresh = pages("healthy")[0]
    assert engine(fresh + line).http_total == {"2xx": 0, "4xx": 0, "5xx": 7 if counts else 0}


def test_ungrouped_statuses_fall_into_their_class() -> None:
    line = 'http_requests_total{handler="/v1/completions",method="POST",status="503"} 7.0\n'
    http = engine(pages("healthy")[0] + line).http_total
    assert http is not None
    assert http["5xx"] == 7


def test_openmetrics_is_read_by_its_own_rules() -> None:
    text = (
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 2\n'
        "# TYPE vllm:num_preemptions counter\n"
        'vllm:num_preemptions_total{engine="0",model_name="m"} 5 # {trace="x"} 1.0\n'
        "# EOF\n"
    )
    found = engine(text, "application/openmetrics-text; version=1.0.0")
    assert (found.running, found.preemptions_total) == (2, 5)


def test_openmetrics_without_its_end_is_torn() -> None:
    page = Parser(wanted).parse(Body("# TYPE a gauge\na 1\n", "application/openmetrics-text"))
    assert isinstance(page, Failure)


def test_a_timestamp_behind_the_value_is_not_the_value() -> None:
    parser = Parser(wanted)
    for value, stamp in ((1, 1000), (2, 2000)):
        page = parser.parse(Body(f"process_start_time_seconds {value} {stamp}\n", ""))
        assert isinstance(page, Page)
        assert page.families["process_start_time_seconds"][0].value == value


def test_a_series_that_vanishes_from_the_page_vanishes() -> None:
    parser = Parser(wanted)
    two = 'vllm:num_requests_running{engine="0"} 1\nvllm:num_requests_running{engine="1"} 1\n'
    one = 'vllm:num_requests_running{engine="0"} 1\n'
    counts = []
    for text in (two, one, two):
        page = parser.parse(Body(text, ""))
        assert isinstance(page, Page)
        counts.append(len(page.families["vllm:num_requests_running"]))
    assert counts == [2, 1, 2]


@pytest.mark.parametrize(
    ("status", "healthy"), [(200, True), (503, False), (500, False), (0, None), (None, None), (404, None)]
)
def test_only_a_failing_health_check_is_unhealthy(status: int | None, healthy: bool | None) -> None:
    page = Parser(wanted).parse(Body(REAL[-1], ""))
    assert isinstance(page, Page)
    assert read(page, 1.0, status).engines[0].healthy is healthy


@given(st.text(max_size=400))
def test_no_text_raises(text: str) -> None:
    page = Parser(wanted).parse(Body(text, ""))
    if isinstance(page, Page):
        read(page, 1.0, 200)


@given(st.lists(st.sampled_from([*REAL[-1].splitlines()[:80], "", "{", '"', "# TYPE", "a{b=", "x 1 2 3"]), max_size=30))
def test_no_shuffled_page_raises(lines: list[str]) -> None:
    page = Parser(wanted).parse(Body("\n".join(lines) + "\n", ""))
    if isinstance(page, Page):
        read(page, 1.0, 200)
