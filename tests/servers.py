"""Small hostile servers on loopback, each in a daemon thread, for what a well-behaved library would not do."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

Behaviour = Callable[[socket.socket], None]

OK_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n"


@contextlib.contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    """A server that treats every connection as `behaviour` does; gives its base address."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def accept() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                threading.Thread(target=handle, args=(connection,), daemon=True).start()

    def handle(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            behaviour(connection)

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stop.set()
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def request_head(connection: socket.socket) -> str:
    """Reads a request up to its empty line; "" when the client is gone."""
    head = b""
    while b"\r\n\r\n" not in head:
        more = connection.recv(4096)
        if not more:
            return ""
        head += more
    return head.decode("latin-1")


def answering(pages: dict[str, bytes]) -> Behaviour:
    """Answers raw bytes by path and keeps the connection."""

    def behave(connection: socket.socket) -> None:
        while head := request_head(connection):
            path = head.split(" ", 2)[1]
            connection.sendall(pages.get(path, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"))

    return behave


def page(body: bytes, content_type: str = "text/plain; version=0.0.4", status: str = "200 OK") -> bytes:
    """A whole HTTP answer."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def never_answering(connection: socket.socket) -> None:
    """Accepts and says nothing."""
    while connection.recv(4096):
        pass


def dripping_body(connection: socket.socket) -> None:
    """A byte every 50 ms, for ever: no single receive ever times out."""
    request_head(connection)
    connection.sendall(OK_HEAD + b"Content-Length: 1000000\r\n\r\n")
    while True:
        connection.sendall(b"#")
        time.sleep(0.05)


def dripping_head(connection: socket.socket) -> None:
    """The same, before the head is even complete."""
    request_head(connection)
    connection.sendall(OK_HEAD + b"X-Slow: ")
    while True:
        connection.sendall(b"a")
        time.sleep(0.05)
