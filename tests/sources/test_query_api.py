"""Every way a Prometheus, or what stands before it, can fail to answer: a sentence each, and what to do."""

import base64
import contextlib
import json
import re
import socket
import ssl
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fragscope.sources.prometheus import History, HistoryError, QueryApi, Span
from fragscope.sources.query_api import Grid, TooMuchError, redacted
from fragscope.sources.scrape import Access, Reply
from tests.servers import Behaviour, dripping_body, never_answering, page, request_head, serving

TOKEN = "abc"  # noqa: S105 - nobody's
QUICK = Access(connect_timeout_s=0.5, total_timeout_s=0.5)
GRID = Grid(1_700_000_000_000, 60_000, 3)
EMPTY = {"status": "success", "data": {"resultType": "matrix", "result": []}}
LOGIN = b"<!doctype html><html><head><title>Sign in</title></head></html>"


def replying(*answers: bytes) -> Behaviour:
    """One answer after the other, the last one for ever, over as many connections as it takes."""
    left = list(answers)

    def behave(connection: socket.socket) -> None:
        while request := request_head(connection):
            head, _, body = request.partition("\r\n\r\n")
            length = int(re.search(r"content-length: (\d+)", head.lower())[1])  # type: ignore[index]
            while len(body) < length:
                body += connection.recv(65536).decode()
            connection.sendall(left.pop(0) if len(left) > 1 else left[0])

    return behave


def as_json(answer: object, status: str = "200 OK") -> bytes:
    return page(json.dumps(answer).encode(), "application/json", status)


def refusing(status: str, kind: str, words: str) -> bytes:
    return as_json({"status": "error", "errorType": kind, "error": words}, status)


class Canned:
    """A client that always brings the same."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def post(self, *_: object) -> Reply:
        return self._reply


@pytest.fixture
def answers() -> QueryApi:
    return QueryApi("http://prometheus:9090", QUICK, lambda _: None)


def error_of(behaviour: Behaviour) -> HistoryError:
    waits: list[float] = []
    with serving(behaviour) as url, pytest.raises(HistoryError) as caught:
        QueryApi(url, QUICK, waits.append).range("up", GRID)
    assert "127.0.0.1" in str(caught.value), "the sentence names the server"
    return caught.value


FINAL = [
    (refusing("400 Bad Request", "bad_data", 'parse error: missing argument in "x"'), "bad_data.*missing argument"),
    (refusing("422 Unprocessable Entity", "execution", "found duplicate series"), "found duplicate series"),
    (page(LOGIN, "text/html"), "web page.*login"),
    (page(LOGIN, "application/json"), "web page.*login"),
    (page(b"not json", "text/plain"), "not answer as its API should.*not json"),
    (page(b"", "application/json"), "not answer as its API should"),
    (page(b"404 page not found", "text/plain", "404 Not Found"), "HTTP 404.*path missing"),
    (page(b"", "text/plain", "401 Unauthorized"), "credentials.*HTTP 401"),
    (page(b"", "text/plain", "403 Forbidden"), "credentials.*HTTP 403"),
    (b"HTTP/1.1 302 Found\r\nLocation: https://u:p@sso.example/x\r\nContent-Length: 0\r\n\r\n", "redirects to https://sso"),
    (as_json({"status": "success", "data": {"resultType": "vector", "result": []}}), "else than a matrix"),
    (as_json({"status": "success", "data": {"result": []}}), "not answer as its API should"),
    (as_json({"status": "success"}), "else than a matrix"),
    (as_json([]), "not answer as its API should"),
    (
        as_json({"status": "success", "data": {"resultType": "matrix", "result": [{"metric": {}, "values": [[1]]}]}}),
        "no pairs of time and number",
    ),
    (page(b"Service Unavailable", "text/plain", "503 Service Unavailable"), "HTTP 503"),
]  # fmt: skip
SMALLER = [
    refusing("422 Unprocessable Entity", "execution", "query processing would load too many samples into memory"),
    refusing("400 Bad Request", "bad_data", "exceeded maximum resolution of 11,000 points per timeseries"),
    refusing("422 Unprocessable Entity", "execution", "the query time range exceeds the limit (query length: 168h)"),
    refusing("503 Service Unavailable", "timeout", "query timed out in expression evaluation"),
    page(b"<html>Gateway Time-out</html>", "text/html", "504 Gateway Timeout"),
]


@pytest.mark.parametrize(("answer", "words"), FINAL, ids=range(len(FINAL)))
def test_what_asking_for_less_cannot_mend_is_said(answer: bytes, words: str) -> None:
    error = error_of(replying(answer))
    assert re.search(words, str(error)), str(error)
    assert not isinstance(error, TooMuchError)


@pytest.mark.parametrize("answer", SMALLER, ids=range(len(SMALLER)))
def test_what_asking_for_less_may_mend_is_known(answer: bytes) -> None:
    assert isinstance(error_of(replying(answer)), TooMuchError)


@pytest.mark.parametrize("answer", SMALLER, ids=range(len(SMALLER)))
def test_a_refused_hour_is_asked_for_in_halves(answer: bytes) -> None:
    with serving(replying(answer, answer, as_json(EMPTY))) as url:
        told: list[int] = []
        span = Span(0, 59 * 60)
        list(History(QueryApi(url, QUICK), span, lambda progress: told.append(progress.done)).samples())
    assert told == [15, 30, 45, 60]


def test_even_one_moment_can_be_too_much() -> None:
    with serving(replying(SMALLER[0])) as url, pytest.raises(HistoryError, match=r"even one moment.*--match"):
        list(History(QueryApi(url, QUICK), Span(0, 3600)).samples())


def test_an_answer_without_end_is_cut_at_its_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fragscope.sources.query_api.MAX_ANSWER_BYTES", 1000)
    error = error_of(replying(page(b"{" + b" " * 2000, "application/json")))
    assert isinstance(error, TooMuchError)
    assert "more than 1000 bytes" in str(error)


@pytest.mark.parametrize("status", ["503 Service Unavailable", "502 Bad Gateway", "429 Too Many Requests"])
def test_a_busy_server_is_asked_again_after_a_pause(status: str) -> None:
    busy = page(b"busy", "text/plain", status)
    waits: list[float] = []
    with serving(replying(busy, busy, as_json(EMPTY))) as url:
        assert QueryApi(url, QUICK, waits.append).range("up", GRID).series == ()
    assert waits == [1.0, 4.0]


@pytest.mark.parametrize("behaviour", [never_answering, dripping_body], ids=["silent", "dripping"])
def test_a_server_that_never_answers_ends_at_the_deadline(behaviour: Behaviour) -> None:
    error = error_of(behaviour)
    assert "within 0.5 s" in str(error)
    assert not isinstance(error, TooMuchError), "eight halvings of a dead server are eight deadlines"


def test_nobody_there_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with pytest.raises(HistoryError, match="connection refused"):
        QueryApi(f"http://127.0.0.1:{port}", QUICK).range("up", GRID)


def test_no_password_is_ever_shown() -> None:
    assert redacted("https://me:secret@host:9090/prometheus") == "https://host:9090/prometheus"
    for url in (
        "ftp://me:secret@host",
        "http://me:secret@[",
        "http://me:secret@host:port",
        "me:secret@host",
        "http://",
    ):
        with pytest.raises(HistoryError, match="must be like http://host:9090") as caught:
            QueryApi(url, QUICK)
        assert "secret" not in str(caught.value)
    with serving(replying(page(b"", status="401 Unauthorized"))) as url, pytest.raises(HistoryError) as caught:
        QueryApi(url.replace("//", "//me:secret@"), QUICK).range("up", GRID)
    assert "secret" not in str(caught.value)


def heard(access: Access, user: str = "") -> str:
    """The head of the request that a server gets."""
    heads: list[str] = []

    def behave(connection: socket.socket) -> None:
        while request := request_head(connection):
            heads.append(request.partition("\r\n\r\n")[0])
            connection.sendall(as_json(EMPTY))

    with serving(behave) as url:
        QueryApi(url.replace("//", f"//{user}"), access).range("up", GRID)
    return heads[0]


def test_the_address_or_a_token_says_who_asks() -> None:
    assert f"Basic {base64.b64encode(b'me:secret').decode()}" in heard(QUICK, "me:secret@")
    assert f"Authorization: Bearer {TOKEN}" in heard(Access(total_timeout_s=1, token=TOKEN))
    assert "Authorization" not in heard(QUICK)


def test_a_query_is_a_form_with_a_deadline_for_the_server() -> None:
    head = heard(QUICK)
    assert head.startswith("POST /api/v1/query_range HTTP/1.1")
    assert "application/x-www-form-urlencoded" in head


def over_tls(behaviour: Behaviour, folder: Path) -> tuple[Behaviour, Path]:
    """The same behind a certificate that only its own file vouches for."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    def behave(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secured:
            behaviour(secured)

    return behave, cert


def test_a_server_is_verified_by_the_ca_file_that_is_given(tmp_path: Path) -> None:
    behaviour, cert = over_tls(replying(as_json(EMPTY)), tmp_path)
    with serving(behaviour) as url:
        secured = url.replace("http://", "https://")
        patient = Access(connect_timeout_s=2, total_timeout_s=2, ca_file=cert)
        assert QueryApi(secured, patient).range("up", GRID).series == ()
        stranger = QueryApi(secured, Access(connect_timeout_s=2, total_timeout_s=2))
        with pytest.raises(HistoryError, match="certificate cannot be verified"):
            stranger.range("up", GRID)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    raw=st.binary()
    | st.recursive(
        st.none() | st.floats(allow_nan=False) | st.text() | st.sampled_from(["success", "matrix", "1e999", "NaN"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["status", "data", "result", "metric", "values"]), inner, max_size=5)
        ),
    ).map(lambda value: json.dumps(value).encode()),
    status=st.integers(200, 599),
)
def test_whatever_is_answered_is_series_or_a_sentence(raw: bytes, status: int, answers: QueryApi) -> None:
    answers._client = Canned(Reply(status, raw, "", "http://["))  # type: ignore[assignment]
    with contextlib.suppress(HistoryError):
        answers.range("up", GRID)


@pytest.mark.parametrize("values", ['[[1e308,"1"]]', '[[1,"x"]]', '[["1","1"]]', "[[1]]", "{}", "null", '[[1,"1",2]]'])
def test_values_that_are_none_are_a_sentence(values: str, answers: QueryApi) -> None:
    raw = f'{{"status":"success","data":{{"resultType":"matrix","result":[{{"metric":{{}},"values":{values}}}]}}}}'
    answers._client = Canned(Reply(200, raw.encode(), "", ""))  # type: ignore[assignment]
    with pytest.raises(HistoryError, match="no pairs of time and number"):
        answers.range("up", GRID)


def test_warnings_partial_answers_and_native_histograms_are_kept() -> None:
    row = {"metric": {"__name__": "vllm:request_prompt_tokens"}, "histograms": [[1, {"count": "1"}]]}
    answer = {
        "status": "success",
        "data": {"resultType": "matrix", "result": [row]},
        "warnings": ["a store is down"],
        "isPartial": True,
    }
    with serving(replying(as_json(answer))) as url:
        found = QueryApi(url, QUICK).range("up", GRID)
    assert found.warnings == ("a store is down", "the answer is partial")
    assert found.native_histograms == ("vllm:request_prompt_tokens",)
