"""One HTTP GET or POST with deadlines and a size cap.

`requests` times each receive, not the whole answer: a server that drips a byte a second would hold a poll
for hours. A watch shuts the socket down at the total deadline, whatever stage the answer is in.
"""

import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import HTTPError, NameResolutionError

from fragscope.model import Reason

MAX_BODY_BYTES = 32 * 2**20
_CHUNK_BYTES = 64 * 2**10
_GUARD_S = 0.02


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a GET brought nothing usable."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class TooLarge(Failure):
    """The answer is larger than the cap; the rest of it was not read."""


@dataclass(frozen=True, slots=True)
class Body:
    """A complete 200 answer."""

    text: str
    content_type: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer of any status; `location` is where a redirect would lead."""

    status: int
    raw: bytes
    content_type: str
    location: str


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach a server: deadlines in seconds, and optionally who we are and whom we trust."""

    connect_timeout_s: float = 1.0
    total_timeout_s: float = 3.0
    token_file: Path | None = None
    ca_file: Path | None = None
    token: str | None = field(default=None, repr=False)


Taken = TypeVar("Taken", Body, Reply, int)


class _Adapter(HTTPAdapter):
    """Knows its open connections, so that a deadline can shut them down."""

    def __init__(self) -> None:
        self._open: weakref.WeakSet[HTTPConnection] = weakref.WeakSet()
        super().__init__(pool_connections=1, pool_maxsize=1)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """Makes pools whose connections register themselves."""
        super().init_poolmanager(*args, **kwargs)
        connections = self._open

        class Plain(HTTPConnection):
            def connect(self) -> None:
                super().connect()
                connections.add(self)

        class Secure(HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                connections.add(self)

        class PlainPool(HTTPConnectionPool):
            ConnectionCls = Plain

        class SecurePool(HTTPSConnectionPool):
            ConnectionCls = Secure

        self.poolmanager.pool_classes_by_scheme = {"http": PlainPool, "https": SecurePool}

    def cut(self) -> None:
        """Shuts down every open connection; a blocked read returns at once."""
        for connection in list(self._open):
            sock = connection.sock
            if sock is not None:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue


class _Guard:
    """Cuts connections whose deadline has passed; one thread for all clients, since a timer each would cost a poll."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[_Adapter, float] = {}
        self._thread: threading.Thread | None = None
        self._shortest_s = 1.0

    def watch(self, adapter: _Adapter, seconds: float) -> None:
        """Begins a deadline."""
        with self._lock:
            self._watched[adapter] = time.monotonic() + seconds
            self._shortest_s = min(self._shortest_s, seconds)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="deadlines", daemon=True)
                self._thread.start()

    def release(self, adapter: _Adapter) -> bool:
        """Ends a deadline; True if it had passed."""
        with self._lock:
            deadline = self._watched.pop(adapter, None)
        return deadline is None or time.monotonic() >= deadline

    def _run(self) -> None:
        while True:
            time.sleep(self._cut_late())

    def _cut_late(self) -> float:
        """Cuts what is late; returns how long nothing can become late.

        What begins after this look ends no earlier than the shortest deadline there is.
        """
        now = time.monotonic()
        with self._lock:
            for adapter, deadline in self._watched.items():
                if now >= deadline:
                    adapter.cut()
            coming = [deadline - now for deadline in self._watched.values() if deadline > now]
        return max(_GUARD_S, min([self._shortest_s, *coming]))


_GUARD = _Guard()


class Client:
    """One kept-alive connection to one server. Not for more than one thread."""

    def __init__(self, base_url: str, access: Access | None = None) -> None:
        self._base_url = base_url.rstrip("/")
        self._access = access or Access()
        self._adapter = _Adapter()
        self._session = requests.Session()
        self._prepared: dict[str, requests.PreparedRequest] = {}
        # A proxy from the environment must not come between a sidecar and its loopback neighbour.
        self._session.trust_env = False
        self._session.mount("http://", self._adapter)
        self._session.mount("https://", self._adapter)
        self._session.headers["Accept"] = "text/plain;version=0.0.4"
        self._session.headers["Accept-Encoding"] = "identity"

    def get(self, path: str) -> Body | Failure:
        """The body of a complete 200 answer, or why there is none."""
        return self._tried_again(lambda: self._get(path), self._body)

    def post(self, path: str, form: Mapping[str, str], max_bytes: int) -> Reply | Failure:
        """The complete answer to a form, whatever its status; TooLarge above the cap. For forms that only ask."""
        headers = {"Accept": "application/json"}
        request = requests.Request("POST", self._base_url + path, data=dict(form), headers=headers)
        return self._tried_again(
            lambda: self._session.prepare_request(request), lambda response: _reply(response, max_bytes)
        )

    def status(self, path: str) -> int:
        """The HTTP status of `path`, or 0 where nothing answers in time."""
        answer = self._within_deadline(lambda: self._get(path), self._status)
        return 0 if isinstance(answer, Failure) else answer

    def close(self) -> None:
        """Closes the connection."""
        self._session.close()

    def _tried_again(
        self, prepare: Callable[[], requests.PreparedRequest], take: Callable[[requests.Response], Taken | Failure]
    ) -> Taken | Failure:
        answer = self._within_deadline(prepare, take)
        if isinstance(answer, Failure) and answer.reason is Reason.REFUSED and "refused" not in answer.detail.lower():
            # A kept-alive connection may have been closed as we spoke; a dead server refuses the second try.
            answer = self._within_deadline(prepare, take)
        return answer

    def _within_deadline(
        self, prepare: Callable[[], requests.PreparedRequest], take: Callable[[requests.Response], Taken | Failure]
    ) -> Taken | Failure:
        _GUARD.watch(self._adapter, self._access.total_timeout_s)
        answer: Taken | Failure
        try:
            response = self._send(prepare())
            try:
                answer = take(response)
                # Gives the connection back; `close` would end it unless requests itself had read the body.
                response.raw.release_conn()
            except BaseException:
                response.close()
                raise
        except _NoTokenError as error:
            answer = Failure(Reason.DENIED, str(error))
        except TooLargeError as error:
            answer = TooLarge(Reason.MALFORMED, str(error))
        except (requests.RequestException, HTTPError, OSError, ValueError) as error:
            answer = failure_of(error)
        if _GUARD.release(self._adapter):
            # A connection that was cut in the middle of its head looks like a complete, empty answer.
            return Failure(Reason.TIMEOUT, f"no complete answer within {self._access.total_timeout_s:g} s")
        return answer

    def _get(self, path: str) -> requests.PreparedRequest:
        prepared = self._prepared.get(path)
        if prepared is None:
            prepared = self._prepared[path] = self._session.prepare_request(
                requests.Request("GET", self._base_url + path)
            )
        return prepared

    def _send(self, prepared: requests.PreparedRequest) -> requests.Response:
        prepared.headers.update(_authorization(self._access))
        return self._session.send(
            prepared,
            timeout=(self._access.connect_timeout_s, self._access.total_timeout_s),
            stream=True,
            allow_redirects=False,
            verify=str(self._access.ca_file) if self._access.ca_file is not None else True,
        )

    def _body(self, response: requests.Response) -> Body | Failure:
        raw = b"".join(_chunks(response, MAX_BODY_BYTES))
        if response.status_code in (401, 403):
            return Failure(Reason.DENIED, f"HTTP {response.status_code}")
        if response.status_code != 200:
            return Failure(Reason.HTTP_ERROR, f"HTTP {response.status_code}")
        if len(raw) > MAX_BODY_BYTES:
            raise TooLargeError(f"more than {MAX_BODY_BYTES} bytes")
        return Body(raw.decode("utf-8"), response.headers.get("Content-Type", ""))

    def _status(self, response: requests.Response) -> int:
        for _ in _chunks(response, MAX_BODY_BYTES):
            continue
        return response.status_code


class TooLargeError(ValueError):
    """The answer is larger than any exposition; the rest of it is not read."""


class _NoTokenError(Exception):
    """The bearer token cannot be read."""


def _authorization(access: Access) -> dict[str, str]:
    """A token file is read anew each time: Kubernetes rotates projected tokens in place."""
    if access.token is not None:
        return {"Authorization": f"Bearer {access.token}"}
    if access.token_file is None:
        return {}
    try:
        return {"Authorization": f"Bearer {access.token_file.read_text().strip()}"}
    except OSError as error:
        raise _NoTokenError(f"token file {access.token_file} cannot be read: {error.strerror}") from error


def _reply(response: requests.Response, max_bytes: int) -> Reply:
    raw = b"".join(_chunks(response, max_bytes))
    if len(raw) > max_bytes:
        raise TooLargeError(f"more than {max_bytes} bytes")
    headers = response.headers
    return Reply(response.status_code, raw, headers.get("Content-Type", ""), headers.get("Location", ""))


def _chunks(response: requests.Response, max_bytes: int) -> Iterator[bytes]:
    """The body as it arrives, up to one chunk over the cap."""
    size = 0
    while size <= max_bytes:
        chunk = response.raw.read(_CHUNK_BYTES, decode_content=True)
        if not chunk:
            return
        size += len(chunk)
        yield chunk


def failure_of(error: Exception) -> Failure:
    """Maps an exception to a reason; a recording's free-text errors go through the same words."""
    if isinstance(error, requests.Timeout):
        return Failure(Reason.TIMEOUT, "no answer in time: timed out")
    for cause in _causes(error):
        if isinstance(cause, ConnectionRefusedError):
            return Failure(Reason.REFUSED, "connection refused: nothing listens there")
        if isinstance(cause, NameResolutionError):
            return Failure(Reason.ABSENT, "the host's name cannot be resolved")
        if isinstance(cause, ssl.SSLCertVerificationError):
            return Failure(Reason.DENIED, f"the certificate cannot be verified ({cause.verify_message}); see ca_file")
        if isinstance(cause, ssl.SSLError):
            return Failure(Reason.UNSUPPORTED, f"no TLS can be spoken ({cause.reason}); is it an http:// address?")
    return failure_from_text(str(error) or type(error).__name__)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and all it was raised from; the libraries hide the telling one three deep, also in arguments."""
    seen: set[int] = set()
    waiting: list[Any] = [error]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, BaseException) or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [each.__cause__, each.__context__, getattr(each, "reason", None), *each.args]


def failure_from_text(text: str) -> Failure:
    """'refused', 'reset', 'aborted' or 'closed connection' mean refused, 'timed out' timeout, else malformed."""
    lowered = text.lower()
    if "timed out" in lowered:
        return Failure(Reason.TIMEOUT, short(text))
    if any(word in lowered for word in ("refused", "reset", "aborted", "closed connection")):
        return Failure(Reason.REFUSED, short(text))
    return Failure(Reason.MALFORMED, short(text))


def short(text: str) -> str:
    """At most 200 characters of it: details come from outside."""
    return text if len(text) <= 200 else text[:200] + "..."
