"""The HTTP server against clients that are idle, slow, many or wrong."""

import contextlib
import http.client as http_client
import json
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from fragscope.model import Gap, Part, Reason
from fragscope.serve import http
from fragscope.serve.board import Board, TargetView, View
from fragscope.serve.http import ListenError, Web, WebServer, application, listen
from tests.serve.test_exposition import busy_story, view_of
from tests.stories import Story, crash_without_room

VIEW = view_of(busy_story())


@contextlib.contextmanager
def running(view: View = VIEW, *, tick_age_s: float = 0.0, web: Web | None = None) -> Iterator[int]:
    web = web or Web()
    app = application(Board(view), web, tick_age_s=lambda: tick_age_s, tick_limit_s=30.0)
    server = WebServer(app, listen("127.0.0.1:0"), web)
    server.start()
    try:
        yield server.address[1]
    finally:
        server.stop()


def get(port: int, path: str, **headers: str) -> tuple[int, str, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def test_the_endpoints_of_the_contract_answer() -> None:
    with running() as port:
        status, kind, page = get(port, "/metrics")
        assert status == 200
        assert kind.startswith("text/plain; version=0.0.4")
        assert "fragscope_pseudo_oom_suspected" in page
        assert get(port, "/-/ready")[0] == 200
        assert get(port, "/-/healthy")[0] == 200
        page = get(port, "/")[2]
        assert "VRAM" in page
        assert "missing: own_bytes, allocator, log" in page
        assert get(port, "/nothing")[0] == 404


def test_openmetrics_is_negotiated() -> None:
    with running() as port:
        _, kind, page = get(port, "/metrics", Accept="application/openmetrics-text;version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert page.endswith("# EOF\n")


def test_the_status_page_shows_the_evidence_with_its_weights() -> None:
    story = Story()
    crash_without_room(story)
    with running(view_of(story)) as port:
        page = get(port, "/")[2]
    assert "+2.6 0000:c1:00.0 had 0.50 GiB of VRAM free" in page
    assert "suspected since 1970" in page
    assert "(+ engine_down)" in page


def test_the_api_gives_the_verdicts_of_the_contract() -> None:
    with running() as port:
        verdict = json.loads(get(port, "/api/v1/verdicts")[2])["verdicts"][0]
        target = json.loads(get(port, "/api/v1/targets")[2])["targets"][0]
    assert {"at", "target", "engine", "model_name", "phase", "cause", "conditions", "since", "probabilities"} <= set(
        verdict
    )
    assert {"sentence", "remedy", "evidence", "missing", "episodes"} <= set(verdict)
    assert target["measures"]["engine_up"] is True


def test_unhealthy_when_no_tick_happens_but_still_ready() -> None:
    with running(tick_age_s=100) as port:
        assert get(port, "/-/healthy")[0] == 503
        assert get(port, "/-/ready")[0] == 200


def test_the_telemetry_path_can_be_set() -> None:
    with running(web=Web(telemetry_path="/federate-me")) as port:
        assert get(port, "/federate-me")[0] == 200
        assert get(port, "/metrics")[0] == 404


def test_head_is_answered_without_a_body() -> None:
    with running() as port, socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"HEAD /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"\r\n\r\n")


def test_a_name_from_outside_is_escaped_on_the_status_page() -> None:
    hostile = Gap(Part.ENGINE, Reason.MALFORMED, "it begins with '<script>alert(1)</script>'")
    target = TargetView("llama-70b", "http://x", {}, gaps=(hostile,))
    with running(View(0.0, (target,))) as port:
        page = get(port, "/")[2]
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>" not in page


def test_three_hundred_idle_and_slow_clients_do_not_slow_a_scrape() -> None:
    with running() as port, contextlib.ExitStack() as clients:
        for i in range(300):
            client = clients.enter_context(socket.create_connection(("127.0.0.1", port)))
            if i % 3 == 1:
                client.sendall(b"GET /metrics HT")
            elif i % 3 == 2:
                client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(0.5)
        took = []
        for _ in range(10):
            began = time.monotonic()
            assert get(port, "/metrics")[0] == 200
            took.append(time.monotonic() - began)
    assert sorted(took)[len(took) // 2] < 0.1, took
    assert max(took) < 1.0, took


def test_a_kept_alive_scrape_waits_for_no_delayed_acknowledgement() -> None:
    with running() as port:
        connection = http_client.HTTPConnection("127.0.0.1", port, timeout=5)
        took = []
        for _ in range(10):
            began = time.monotonic()
            connection.request("GET", "/metrics")
            assert connection.getresponse().read()
            took.append(time.monotonic() - began)
        connection.close()
    assert sorted(took)[5] < 0.03, took


def test_whoever_sends_no_whole_head_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEAD_DEADLINE_S", 0.3)
    with running() as port:
        for start in (b"", b"GET / HT"):
            with socket.create_connection(("127.0.0.1", port), timeout=3) as client:
                client.sendall(start)
                began = time.monotonic()
                assert client.recv(100) == b""
                assert time.monotonic() - began < 2


def test_a_kept_connection_that_drips_its_next_head_is_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEAD_DEADLINE_S", 0.4)
    with running() as port, socket.create_connection(("127.0.0.1", port), timeout=3) as client:
        client.sendall(b"GET /-/ready HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 3:
                client.sendall(b"G")
                client.settimeout(0.05)
                with contextlib.suppress(TimeoutError):
                    if client.recv(100) == b"":
                        break
        assert time.monotonic() - began < 2


def test_more_requests_at_once_than_allowed_are_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_REQUESTS", 0)
    with running() as port:
        assert get(port, "/metrics")[0] == 503


def certificate(folder: Path) -> tuple[Path, Path]:
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


def test_an_idle_tls_client_blocks_nobody(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    trusting = ssl.create_default_context(cafile=str(cert))
    trusting.check_hostname = False
    with running(web=Web(cert_file=cert, key_file=key)) as port, socket.create_connection(("127.0.0.1", port)):
        began = time.monotonic()
        with urllib.request.urlopen(f"https://127.0.0.1:{port}/metrics", timeout=5, context=trusting) as answer:
            assert answer.status == 200
        assert time.monotonic() - began < 2


def test_a_certificate_that_cannot_be_used_is_a_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "cert.pem"
    broken.write_text("no certificate")
    web = Web(cert_file=broken, key_file=broken)
    with listen("127.0.0.1:0") as sock, pytest.raises(ListenError, match=r"cert\.pem"):
        WebServer(application(Board(VIEW), web, tick_age_s=lambda: 0.0, tick_limit_s=1.0), sock, web)


@pytest.mark.parametrize("address", ["nonsense", "host:", "127.0.0.1:99999", ":-1"])
def test_an_address_that_is_none_is_a_sentence(address: str) -> None:
    with pytest.raises(ListenError, match="host:port"):
        listen(address)


def test_a_port_in_use_is_a_sentence() -> None:
    with listen("127.0.0.1:0") as sock, pytest.raises(ListenError, match="already in use"):
        listen(f"127.0.0.1:{sock.getsockname()[1]}")


def test_no_host_means_all_interfaces() -> None:
    with listen(":0") as sock, socket.create_connection(("127.0.0.1", sock.getsockname()[1]), timeout=2):
        pass


def test_requests_run_while_the_view_changes() -> None:
    board = Board(VIEW)
    web = Web()
    app = application(board, web, tick_age_s=lambda: 0.0, tick_limit_s=30.0)
    server = WebServer(app, listen("127.0.0.1:0"), web)
    server.start()
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            board.publish(View(1.0))
            board.publish(VIEW)

    threading.Thread(target=swap, daemon=True).start()
    try:
        pages = [get(server.address[1], "/metrics")[2] for _ in range(20)]
    finally:
        stop.set()
        server.stop()
    engine_up = ["fragscope_engine_up" in page for page in pages]
    outcomes = ["fragscope_request_outcomes_total" in page for page in pages]
    assert engine_up == outcomes, "one view for the whole page"
