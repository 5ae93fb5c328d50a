"""Every kind of bad input that broke other tools, and what is right instead. The rows follow docs/bad-input.md."""

import dataclasses
import socket
import time
from pathlib import Path

import pytest

from fragscope.model import EngineReading, Gap, Reason
from fragscope.serve.clock import Clock
from fragscope.serve.feeds import EnginePoll, Visitor
from fragscope.sources.exposition import Page, Parser
from fragscope.sources.scrape import Access, Body, Client, Failure
from fragscope.sources.vllm import Answer, read, wanted
from tests.servers import (
    Behaviour,
    answering,
    dripping_body,
    dripping_head,
    never_answering,
    page,
    request_head,
    serving,
)

GOOD = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 1234.0
"""
HTML = b"<!doctype html><html><head><title>Sign in</title></head><body>Sign in</body></html>\n"
QUICK = Access(connect_timeout_s=0.5, total_timeout_s=0.5)


def answer_of(text: str, content_type: str = "", health: int | None = 200) -> Answer:
    parsed = Parser(wanted).parse(Body(text, content_type))
    assert isinstance(parsed, Page), parsed
    return read(parsed, 1.0, health)


def failure_of(text: str, content_type: str = "") -> Failure:
    parsed = Parser(wanted).parse(Body(text, content_type))
    assert isinstance(parsed, Failure), parsed
    return parsed


def only(answer: Answer) -> EngineReading:
    (engine,) = answer.engines
    return engine


def poll(url: str) -> EnginePoll:
    return Visitor("vllm", Client(url, QUICK), Clock(), None).poll()


def gap_of(answer: bytes) -> Gap:
    with serving(answering({"/metrics": answer})) as url:
        found = poll(url)
    assert found.gap is not None
    return found.gap


@pytest.mark.parametrize(
    "line",
    [
        'vllm:kv_cache_usage_perc{engine="0" 41.4',
        "vllm:num_requests_running{engine=",
        "complete nonsense, with commas",
        "\x00\x01\x02",
        'vllm:num_preemptions_total{engine="0"} many',
        'vllm:num_requests_running{engine="0",  ="1"} 2',
        "vllm:num_requests_running{ } 2 {",
    ],
)
def test_one_malformed_line_spoils_nothing_else(line: str) -> None:
    answer = answer_of(GOOD + line + "\n")
    engine = only(answer)
    assert (engine.running, engine.kv_usage_ratio) == (3, 0.25)
    assert answer.malformed == (line,)


def test_a_page_of_another_program_is_unsupported_and_says_what_it_looks_like() -> None:
    answer = answer_of("# TYPE node_load1 gauge\nnode_load1 0.2\n")
    assert answer.engines == ()
    assert answer.gap is not None
    assert answer.gap.reason is Reason.UNSUPPORTED
    assert "node_load1" in answer.gap.detail


def test_another_python_exporter_is_not_taken_for_an_empty_page() -> None:
    answer = answer_of("python_gc_total 1\n# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 1\n")
    assert answer.gap is not None
    assert "python_gc_total" in answer.gap.detail


def test_vllm_without_its_statistics_is_unsupported_and_says_why() -> None:
    answer = answer_of('# TYPE http_requests_total counter\nhttp_requests_total{handler="/v1/completions"} 1\n')
    assert answer.gap is not None
    assert answer.gap.reason is Reason.UNSUPPORTED
    assert "--disable-log-stats" in answer.gap.detail


def test_metrics_that_are_only_announced_are_absent_not_zero() -> None:
    answer = answer_of("# TYPE vllm:num_requests_running gauge\n")
    assert answer.gap is not None
    assert answer.gap.reason is Reason.ABSENT


@pytest.mark.parametrize("text", ["", "\n", "  \n\n"])
def test_an_empty_body_is_malformed(text: str) -> None:
    assert failure_of(text) == Failure(Reason.MALFORMED, "empty")


def test_a_login_page_is_malformed_and_quoted() -> None:
    gap = gap_of(page(HTML, "text/html"))
    assert gap.reason is Reason.MALFORMED
    assert "<!doctype html>" in gap.detail


def test_a_json_answer_is_malformed() -> None:
    assert "not an exposition" in failure_of('{"detail":"Not Found"}').detail


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ("500 Internal Server Error", Reason.HTTP_ERROR),
        ("404 Not Found", Reason.HTTP_ERROR),
        ("302 Found", Reason.HTTP_ERROR),
        ("401 Unauthorized", Reason.DENIED),
        ("403 Forbidden", Reason.DENIED),
    ],
)
def test_a_status_is_a_reason_with_its_number(status: str, reason: Reason) -> None:
    gap = gap_of(page(b"x\n", status=status))
    assert gap.reason is reason
    assert status[:3] in gap.detail


def test_a_body_shorter_than_announced_is_malformed() -> None:
    whole = page(GOOD.encode())

    def torn(connection: socket.socket) -> None:
        request_head(connection)
        connection.sendall(whole[:-40])

    with serving(torn) as url:
        found = poll(url)
    assert found.gap is not None
    assert found.gap.reason is Reason.MALFORMED
    assert found.engines == ()


def test_chunks_that_do_not_end_are_malformed() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    chunk = f"{len(GOOD):x}\r\n".encode() + GOOD.encode() + b"\r\n"

    def torn(connection: socket.socket) -> None:
        request_head(connection)
        connection.sendall(head + chunk)

    with serving(torn) as url:
        found = poll(url)
    assert found.gap is not None
    assert found.gap.reason is Reason.MALFORMED


def test_a_page_without_its_last_newline_is_torn() -> None:
    assert "cut in the middle" in failure_of(GOOD + "vllm:num_preemptions_tot").detail


def test_bytes_that_are_no_text_are_malformed() -> None:
    assert gap_of(page(b"\xff\xfe\x00binary\n")).reason is Reason.MALFORMED


def test_a_body_without_end_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fragscope.sources.scrape.MAX_BODY_BYTES", 1000)
    gap = gap_of(page(b"# " + b"x" * 5000 + b"\n"))
    assert gap.reason is Reason.MALFORMED
    assert "more than 1000 bytes" in gap.detail


def test_nan_is_absent_and_counted_not_zero() -> None:
    text = GOOD.replace("0.25", "NaN")
    answer = answer_of(text)
    assert only(answer).kv_usage_ratio is None
    assert len(answer.malformed) == 1


@pytest.mark.parametrize("value", ["41.4", "-0.1", "+Inf"])
def test_an_impossible_usage_is_absent_and_counted(value: str) -> None:
    answer = answer_of(GOOD.replace("0.25", value))
    assert only(answer).kv_usage_ratio is None
    assert answer.malformed


def test_braces_commas_and_quotes_in_a_label_are_parsed() -> None:
    strange = r'a{b}c,d="e\"f' + r"\\"
    text = GOOD.replace('model_name="m"', f'model_name="{strange}"'.replace('="e', r"=\"e"))
    answer = answer_of(text)
    assert answer.malformed == ()
    assert only(answer).model_name == 'a{b}c,d="e"f\\'


def test_eight_engines_on_a_page_are_eight_readings() -> None:
    lines = [line for line in GOOD.splitlines() if not line.startswith("#")]
    text = "".join(f"{line.replace('0', str(i), 1)}\n" for i in range(8) for line in lines)
    answer = answer_of(text)
    assert [engine.engine for engine in answer.engines] == [str(i) for i in range(8)]
    assert [engine.running for engine in answer.engines] == [3] * 8


def test_of_several_processes_the_highest_speaks() -> None:
    rows = "".join(f'vllm:kv_cache_usage_perc{{engine="0",pid="{pid}"}} {v}\n' for pid, v in ((7, 0), (8, 0.5), (9, 0)))
    text = "\n".join(line for line in GOOD.splitlines() if "kv_cache" not in line) + "\n" + rows
    assert only(answer_of(text)).kv_usage_ratio == 0.5


def test_the_old_name_of_the_usage_serves_as_well() -> None:
    assert only(answer_of(GOOD.replace("kv_cache_usage_perc", "gpu_cache_usage_perc"))).kv_usage_ratio == 0.25


def test_neither_name_is_missing_not_zero() -> None:
    text = "\n".join(line for line in GOOD.splitlines() if "kv_cache" not in line) + "\n"
    assert only(answer_of(text)).kv_usage_ratio is None


def test_a_target_that_is_down_is_refused() -> None:
    with serving(never_answering) as url:
        pass
    found = poll(url)
    assert found.gap is not None
    assert found.gap.reason is Reason.REFUSED
    assert found.health == 0


def test_a_target_that_never_answers_is_a_time_out() -> None:
    with serving(never_answering) as url:
        began = time.monotonic()
        found = poll(url)
    assert found.gap is not None
    assert found.gap.reason is Reason.TIMEOUT
    assert time.monotonic() - began < 1.5


@pytest.mark.parametrize("behaviour", [dripping_body, dripping_head])
def test_a_target_that_drips_is_cut_off_at_the_total_deadline(behaviour: Behaviour) -> None:
    with serving(behaviour) as url:
        began = time.monotonic()
        found = poll(url)
    assert found.gap is not None
    assert found.gap.reason is Reason.TIMEOUT
    assert time.monotonic() - began < 1.5


def test_one_poll_is_one_get_of_each_path() -> None:
    asked: list[str] = []

    class Pages(dict[str, bytes]):
        def get(self, key: str, _default: object = None) -> bytes:
            asked.append(key)
            return page({"/metrics": GOOD.encode(), "/version": b'{"version":"0.32.0"}'}.get(key, b""))

    with serving(answering(Pages())) as url:
        visitor = Visitor("vllm", Client(url, QUICK), Clock(), None)
        first, second = visitor.poll(), visitor.poll()
    assert asked == ["/metrics", "/health", "/version", "/metrics", "/health"]
    assert first.engines[0].version == second.engines[0].version == "0.32.0"
    assert dataclasses.replace(first.engines[0], at=0) == dataclasses.replace(second.engines[0], at=0)


def test_a_kept_connection_that_was_closed_meanwhile_is_no_refusal() -> None:
    def once_each(connection: socket.socket) -> None:
        request_head(connection)
        connection.sendall(page(GOOD.encode()))

    with serving(once_each) as url:
        client = Client(url, QUICK)
        assert isinstance(client.get("/metrics"), Body)
        assert isinstance(client.get("/metrics"), Body)


def test_polls_share_one_connection() -> None:
    connections: list[socket.socket] = []

    def counted(connection: socket.socket) -> None:
        connections.append(connection)
        answering({"/metrics": page(GOOD.encode()), "/health": page(b"ok")})(connection)

    with serving(counted) as url:
        visitor = Visitor("vllm", Client(url, QUICK), Clock(), None)
        for _ in range(5):
            assert visitor.poll().gap is None
    assert len(connections) == 1


def test_a_bearer_token_is_read_anew_for_every_poll(tmp_path: Path) -> None:
    token = tmp_path / "token"
    heads: list[str] = []

    def remember(connection: socket.socket) -> None:
        while head := request_head(connection):
            heads.append(head)
            connection.sendall(page(b"x 1\n"))

    with serving(remember) as url:
        client = Client(url, dataclasses.replace(QUICK, token_file=token))
        missing = client.get("/metrics")
        token.write_text("first\n")
        client.get("/metrics")
        token.write_text("second\n")
        client.get("/metrics")
    assert isinstance(missing, Failure)
    assert missing.reason is Reason.DENIED
    assert "Authorization: Bearer first" in heads[0]
    assert "Authorization: Bearer second" in heads[1]


def test_a_number_of_four_hundred_digits_is_no_number() -> None:
    huge = f'vllm:num_preemptions_total{{engine="0",model_name="m"}} {"1" * 400}'
    answer = answer_of(GOOD + huge + "\n")
    assert only(answer).running == 3


def test_a_value_with_underscores_is_malformed_also_where_its_line_is_known() -> None:
    parser = Parser(wanted)
    for value, bad in (("10", 0), ("1_0", 1)):
        page = parser.parse(Body(f'vllm:num_requests_running{{engine="0"}} {value}\n', ""))
        assert isinstance(page, Page)
        assert len(page.malformed) == bad


def test_a_bare_number_behind_a_tabbed_line_is_never_that_lines_value() -> None:
    parser = Parser(wanted)
    first, second = (parser.parse(Body(text, "")) for text in ("process_start_time_seconds\t5\n", "41.4\n"))
    assert isinstance(first, Page)
    assert isinstance(second, Page)
    assert first.families["process_start_time_seconds"][0].value == 5
    assert second.families == {}


def test_a_version_nested_without_end_is_not_known() -> None:
    pages = {"/metrics": page(GOOD.encode()), "/version": page(b"[" * 100_000)}
    with serving(answering(pages)) as url:
        found = poll(url)
    assert found.engines[0].version is None
