"""The simulated engine behind real HTTP: it can die (connections are refused) and come back on its port."""

import socket
import threading
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from fragscope.simulate.exposition import VERSION

_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class EngineServer:
    """Serves /metrics, /health and /version on loopback."""

    def __init__(self, page: Callable[[], str]) -> None:
        async def metrics(_: Request) -> Response:
            return Response(page(), headers={"Content-Type": _TEXT})

        async def health(_: Request) -> Response:
            return PlainTextResponse("")

        async def version(_: Request) -> Response:
            return JSONResponse({"version": VERSION})

        routes = [Route("/metrics", metrics), Route("/health", health), Route("/version", version)]
        self._app = Starlette(routes=routes)
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def up(self) -> None:
        """Begins to listen; later times on the port of the first."""
        sock = socket.create_server(("127.0.0.1", self.port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port = sock.getsockname()[1]
        config = uvicorn.Config(
            self._app, lifespan="off", access_log=False, log_config=None, timeout_graceful_shutdown=0
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([sock],), name="simulated-engine", daemon=True)
        self._thread.start()

    def down(self) -> None:
        """Dies: open connections are cut, new ones refused."""
        if self._server is None or self._thread is None:
            return
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(5)
        self._server = self._thread = None
