"""Prometheus' HTTP API: one range query at a time, and every way it can fail as a sentence."""

import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

import msgspec

from fragscope.model import Reason
from fragscope.sources.scrape import Access, Client, Failure, Reply, TooLarge, short

MAX_POINTS = 11_000
"""A server refuses more points per series in one answer (Prometheus, web/api/v1: "exceeded maximum resolution")."""
MAX_ANSWER_BYTES = 16 * 2**20
"""Above it a query is asked again for less time: this bounds memory, whatever is asked for."""
PATIENCE_S = (1.0, 4.0)
"""Waits before a query is repeated that a busy or starting server turned away."""
_SERVER_SHARE = 0.9
"""The part of our deadline that the server gets: it says why it gave up, a cut connection does not."""
_PATH = "/api/v1/query_range"
_BUSY = (429, 500, 502, 503)
_QUOTED = 60
_NOTHING = float("nan")


class HistoryError(Exception):
    """Why a history cannot be read, in a sentence that names the server and what to do."""


class TooMuchError(HistoryError):
    """The server or we would not handle so much at once; less time per query may do."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Evenly spaced moments: `points` of them from `first_ms` on, in unix milliseconds."""

    first_ms: int
    step_ms: int
    points: int


@dataclass(frozen=True, slots=True)
class Series:
    """One series on a grid; NaN where it has nothing."""

    labels: Mapping[str, str]
    values: "array[float]"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a query brought: series, names stored as native histograms (not read), the server's warnings."""

    series: tuple[Series, ...]
    native_histograms: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class _Row(msgspec.Struct):
    metric: dict[str, str]
    values: msgspec.Raw = msgspec.Raw(b"[]")
    histograms: msgspec.Raw = msgspec.Raw()


class _Matrix(msgspec.Struct):
    result: list[_Row]
    # Required: an answer of another kind would else look like an empty history.
    result_type: str = msgspec.field(name="resultType")


class _Reply(msgspec.Struct):
    status: str
    data: _Matrix | None = None
    error_type: str = msgspec.field(name="errorType", default="")
    error: str = ""
    warnings: list[str] = []
    partial: bool = msgspec.field(name="isPartial", default=False)


def redacted(url: str) -> str:
    """The address without user and password, for messages; not a word of it where it cannot be taken apart."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return "an address that cannot be read"
    if not parts.netloc and "@" in url:
        return "an address that cannot be read"
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


class QueryApi:
    """Range queries to one server. `wait` sleeps between attempts. Not for more than one thread."""

    def __init__(self, url: str, access: Access, wait: Callable[[float], None] = time.sleep) -> None:
        if not _is_address(url):
            raise HistoryError(f"{redacted(url)!r} is no address of a Prometheus; it must be like http://host:9090")
        self._name = f"Prometheus at {redacted(url)}"
        self._client = Client(url, access)
        self._server_timeout_s = _SERVER_SHARE * access.total_timeout_s
        self._wait = wait
        self._answered = False

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()

    def range(self, expression: str, grid: Grid) -> Answer:
        """The expression at every moment of the grid. Raises TooMuchError (ask for less), HistoryError (give up)."""
        last_ms = grid.first_ms + (grid.points - 1) * grid.step_ms
        form = {
            "query": expression,
            "start": _seconds(grid.first_ms),
            "end": _seconds(last_ms),
            "step": _seconds(grid.step_ms),
            "timeout": f"{1000 * self._server_timeout_s:.0f}ms",
        }
        reply = self._patient(form)
        parsed = self._parsed(reply)
        if parsed.status != "success":
            raise self._refusal(parsed)
        if parsed.data is None or parsed.data.result_type != "matrix":
            raise HistoryError(f"{self._name} answers a range query with something else than a matrix")
        self._answered = True
        return self._answer(parsed, parsed.data, grid)

    def _patient(self, form: Mapping[str, str]) -> Reply:
        """The reply, after a few attempts where the server is only busy."""
        reply = self._asked(form)
        for pause_s in PATIENCE_S:
            if reply.status not in _BUSY or _is_json(reply):
                break
            self._wait(pause_s)
            reply = self._asked(form)
        return reply

    def _asked(self, form: Mapping[str, str]) -> Reply:
        reply = self._client.post(_PATH, form, MAX_ANSWER_BYTES)
        if isinstance(reply, Failure):
            raise self._unreached(reply)
        return reply

    def _unreached(self, failure: Failure) -> HistoryError:
        if isinstance(failure, TooLarge):
            return TooMuchError(f"the answer of {self._name} is too large: {failure.detail}")
        sentence = f"{self._name} brought no answer: {failure.detail}"
        if failure.reason is Reason.TIMEOUT and self._answered:
            return TooMuchError(sentence)
        return HistoryError(sentence)

    def _parsed(self, reply: Reply) -> _Reply:
        if 300 <= reply.status < 400:
            where = redacted(reply.location) or "nowhere"
            raise HistoryError(
                f"{self._name} redirects to {short(where)} (HTTP {reply.status}), which is not followed; "
                "is it a login page? Give the address of Prometheus itself"
            )
        if reply.status in (401, 403):
            raise HistoryError(
                f"{self._name} lets nobody in without the right credentials (HTTP {reply.status}); "
                "give a bearer token or user and password"
            )
        if reply.status == 504:
            raise TooMuchError(f"a proxy before {self._name} ran out of patience (HTTP 504)")
        try:
            return msgspec.json.decode(reply.raw, type=_Reply)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise HistoryError(self._strange(reply)) from None

    def _strange(self, reply: Reply) -> str:
        start = " ".join(reply.raw[:_QUOTED].decode("utf-8", "replace").split())
        if reply.status == 404:
            return f"{self._name} has no {_PATH} (HTTP 404); is a path missing in the address, such as /prometheus?"
        if start.startswith("<") or "text/html" in reply.content_type:
            return f"{self._name} answers with a web page (HTTP {reply.status}): {start!r}; is it a login page?"
        return f"{self._name} does not answer as its API should (HTTP {reply.status}): {start!r}"

    def _refusal(self, parsed: _Reply) -> HistoryError:
        """What an error of the API means: too much at once, or nothing that asking for less would help."""
        words = short(parsed.error)
        if parsed.error_type == "timeout" or _speaks_of_a_limit(parsed.error):
            return TooMuchError(f"{self._name} gave up on a query: {words}")
        if parsed.error_type == "bad_data":
            return HistoryError(f"{self._name} does not understand the query (bad_data): {words}; check the matchers")
        return HistoryError(f"{self._name} failed ({parsed.error_type or 'no reason'}): {words}")

    def _answer(self, parsed: _Reply, matrix: _Matrix, grid: Grid) -> Answer:
        try:
            series = tuple(Series(row.metric, _on_grid(row.values, grid)) for row in matrix.result)
        except (msgspec.MsgspecError, ValueError, OverflowError):
            raise HistoryError(f"{self._name} answers with values that are no pairs of time and number") from None
        native = sorted({row.metric.get("__name__", "") for row in matrix.result if bytes(row.histograms)})
        partial = ["the answer is partial"] if parsed.partial else []
        return Answer(series, tuple(native), tuple(short(each) for each in [*parsed.warnings, *partial]))


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _is_json(reply: Reply) -> bool:
    return reply.raw.lstrip()[:1] == b"{"


def _seconds(milliseconds: int) -> str:
    return f"{milliseconds // 1000}.{milliseconds % 1000:03d}"


def _speaks_of_a_limit(error: str) -> bool:
    """Prometheus, Thanos and Mimir word their limits differently; a smaller range is the cure for all of them."""
    lowered = error.lower()
    return any(words in lowered for words in ("too many", "too large", "exceed", "limit", "timed out"))


def _on_grid(raw: msgspec.Raw, grid: Grid) -> "array[float]":
    """One series at a time becomes numbers: pairs of Python objects take ten times the room."""
    values = array("d", [_NOTHING]) * grid.points
    for at, value in msgspec.json.decode(raw, type=list[tuple[float, str]]):
        index, number = round((at * 1000 - grid.first_ms) / grid.step_ms), float(value)
        if 0 <= index < grid.points:
            values[index] = number
    return values
