"""HTTP: the exposition, two probes, a status page and a small JSON API, by uvicorn and Starlette.

Whoever connects and sends nothing is closed after 10 s; at most 32 requests run at once, idle connections
not counted; every answer comes from the board.
"""

import asyncio
import html
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from fragscope.model import Verdict
from fragscope.serve.board import Board, TargetView, View
from fragscope.serve.collector import registry
from fragscope.wire import encode, measures_object, verdict_object

HEAD_DEADLINE_S = 10.0
REQUEST_DEADLINE_S = 10.0
MAX_REQUESTS = 32
_STILL_ALIVE_TICKS = 5
_TICKS_A_SECOND = 10


class ListenError(Exception):
    """The listen address cannot be used."""


@dataclass(frozen=True, slots=True)
class Web:
    """Where and how to serve."""

    listen_address: str = ":23724"
    telemetry_path: str = "/metrics"
    cert_file: Path | None = None
    key_file: Path | None = None


class HeadDeadline(H11Protocol):
    """uvicorn's HTTP/1.1 with a deadline for a full request head; uvicorn itself waits for ever for the first."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the first deadline."""
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Ends the deadline once a request runs, and starts one for the next head."""
        if self._head_timer is None and not self._answering():
            self._arm()
        super().data_received(data)
        if self._answering():
            self._disarm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the deadline."""
        self._disarm()
        super().connection_lost(exc)

    def _arm(self) -> None:
        self._head_timer = asyncio.get_running_loop().call_later(HEAD_DEADLINE_S, self._too_late)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_late(self) -> None:
        self._head_timer = None
        if not self._answering():
            self.transport.close()

    def _answering(self) -> bool:
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete


class Bounded:
    """Runs at most so many requests at once, each for so long; more are told to come back."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if self._running >= MAX_REQUESTS:
            await PlainTextResponse("busy\n", 503, {"Retry-After": "1"})(scope, receive, send)
            return
        self._running += 1
        try:
            async with asyncio.timeout(REQUEST_DEADLINE_S):
                await self._app(scope, receive, _without_body_on_head(scope, send))
        except TimeoutError:
            # Whoever does not read its answer loses the connection; there is nobody to tell.
            return
        finally:
            self._running -= 1


def _without_body_on_head(scope: Scope, send: Send) -> Send:
    if scope.get("method") != "HEAD":
        return send

    async def bare(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return bare


def application(board: Board, web: Web, *, tick_age_s: Callable[[], float], tick_limit_s: float) -> ASGIApp:
    """The ASGI application over a board; `tick_age_s` says how long ago the last tick was."""
    metrics = registry(board)

    async def exposition(request: Request) -> Response:
        encoder, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encoder(metrics), headers={"Content-Type": content_type})

    async def healthy(_: Request) -> Response:
        age_s = tick_age_s()
        if age_s > tick_limit_s:
            return PlainTextResponse(f"no tick for {age_s:.0f} s\n", 503)
        return PlainTextResponse("ok\n")

    async def ready(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def status(_: Request) -> Response:
        return HTMLResponse(_status_page(board.view, web.telemetry_path))

    async def verdicts(_: Request) -> Response:
        view = board.view
        now = [verdict_object(v) for t in view.targets if t.assessment is not None for v in t.assessment.verdicts]
        return _json({"at": view.at, "verdicts": now, "history": [verdict_object(v) for v in view.history]})

    async def targets(_: Request) -> Response:
        view = board.view
        return _json({"at": view.at, "targets": [_target_object(target) for target in view.targets]})

    handlers: list[tuple[str, Callable[[Request], Awaitable[Response]]]] = [
        (web.telemetry_path, exposition),
        ("/-/healthy", healthy),
        ("/-/ready", ready),
        ("/api/v1/verdicts", verdicts),
        ("/api/v1/targets", targets),
        ("/", status),
    ]
    return Bounded(Starlette(routes=[Route(path, handler, methods=["GET"]) for path, handler in handlers]))


def _json(plain: Any) -> Response:
    return Response(encode(plain) + "\n", media_type="application/json")


def _target_object(target: TargetView) -> dict[str, Any]:
    return {
        "target": target.name,
        "url": target.url,
        "labels": dict(target.labels),
        "measures": measures_object(target.assessment.measures) if target.assessment is not None else None,
        "sources": [
            {
                "source": source.source,
                "up": source.up,
                "last_success_at": source.last_success_at,
                "failures": {str(reason): n for reason, n in source.failures.items()},
            }
            for source in target.sources
        ],
        "gaps": [{"part": str(gap.part), "reason": str(gap.reason), "detail": gap.detail} for gap in target.gaps],
    }


_COLOURS = {"unknown": "#777", "clear": "#2a7", "watch": "#b80", "suspected": "#c40", "confirmed": "#b00"}


def _status_page(view: View, telemetry_path: str) -> str:
    now = [verdict for target in view.targets if target.assessment for verdict in target.assessment.verdicts]
    rows = "".join(_row(verdict) + _evidence(verdict) for verdict in now) or "<tr><td>not polled yet</tr>"
    past = "".join(_row(verdict) for verdict in reversed(view.history[-50:]))
    gaps = "".join(
        f"<li>{html.escape(target.name)}: {gap.part} {gap.reason} {html.escape(gap.detail)}</li>"
        for target in view.targets
        for gap in target.gaps
    )
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="10">
<title>fragscope</title><style>body{{font:15px/1.5 sans-serif;margin:2em;max-width:75em}}
td,th{{text-align:left;vertical-align:top;padding:.2em .8em .2em 0}}b{{color:#fff;padding:0 .4em}}</style>
<h1>fragscope</h1><p><a href="{html.escape(telemetry_path)}">metrics</a> <a href="/api/v1/verdicts">verdicts</a>
<a href="/api/v1/targets">targets</a></p>
<h2>Now</h2><table>{rows}</table><h2>Missing evidence</h2><ul>{gaps}</ul><h2>Changes</h2><table>{past}</table></html>"""


def _row(verdict: Verdict) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(verdict.at))
    engine = f" engine {verdict.engine}" if verdict.engine is not None else ""
    others = [str(condition) for condition in verdict.conditions if str(condition) != verdict.cause]
    cause = verdict.cause + (f" (+ {', '.join(others)})" if others else "")
    cells = (at, verdict.target + engine, cause, f"{verdict.sentence} {verdict.remedy}")
    texts = [html.escape(cell) for cell in cells]
    phase = f'<b style="background:{_COLOURS[verdict.phase]}">{verdict.phase}</b>'
    return f"<tr><td>{texts[0]}<td>{texts[1]}<td>{phase}<td>{texts[2]}<td>{texts[3]}</tr>"


def _evidence(verdict: Verdict) -> str:
    """What spoke for (+) and against (-) memory, strongest first, and what was not heard."""
    since = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(verdict.since))
    lines = [f"{verdict.phase} since {since}"]
    lines += [f"{row.weight:+.1f} {row.sentence}" if row.weight else row.sentence for row in verdict.evidence]
    lines += [f"missing: {', '.join(verdict.missing)}"] if verdict.missing else []
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<tr><td><td><td><td><td><ul>{items}</ul></tr>"


def listen(address: str) -> socket.socket:
    """A listening socket for host:port; no host means all interfaces, IPv6 included where there is any.

    Raises ListenError with a sentence.
    """
    host, _, port_text = address.rpartition(":")
    host = host.strip("[]")
    if not port_text.isdigit() or int(port_text) > 65535:
        raise ListenError(f"web_listen_address is {address!r}, but must be host:port or :port, as in :23724")
    try:
        sock = _bind(host, int(port_text))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ListenError(
            f"web_listen_address {address} cannot be used: {reason.lower()}; choose another with --web.listen-address"
        ) from None
    # Accepted connections inherit it. Head and body leave in two writes, and without it a kept-alive client waits 40 ms
    # for the second.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _bind(host: str, port: int) -> socket.socket:
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=512)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512)
        except OSError as error:
            if error.errno in (98, 48, 13):
                raise
    return socket.create_server(("", port), backlog=512)


class _Calm(uvicorn.Server):
    """uvicorn that wakes once a second to look whether it should end, instead of ten times."""

    async def main_loop(self) -> None:
        """Runs until it should end; uvicorn renews its date header at every tenth tick."""
        ticks = 0
        while not await self.on_tick(ticks):
            ticks += _TICKS_A_SECOND
            await asyncio.sleep(1.0)


class WebServer:
    """uvicorn in a daemon thread, on a socket that is already bound."""

    def __init__(self, app: ASGIApp, sock: socket.socket, web: Web) -> None:
        self._sock = sock
        config = uvicorn.Config(
            app,
            http=HeadDeadline,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=int(HEAD_DEADLINE_S),
            timeout_graceful_shutdown=1,
            ssl_certfile=web.cert_file,
            ssl_keyfile=web.key_file,
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            raise ListenError(
                f"web_cert_file {web.cert_file} and web_key_file {web.key_file} cannot be used: {error}"
            ) from None
        self._server = _Calm(config)
        self._thread = threading.Thread(target=self._server.run, args=([sock],), name="http", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, port = self._sock.getsockname()[:2]
        return host, port

    def start(self) -> None:
        """Begins to answer."""
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Stops; whoever is still connected after a second is cut off."""
        self._server.should_exit = True
        self._thread.join(timeout_s)
        self._sock.close()


def tick_limit_s(interval_s: float) -> float:
    """How old the last tick may be before the daemon calls itself unhealthy."""
    return max(30.0, _STILL_ALIVE_TICKS * interval_s)
