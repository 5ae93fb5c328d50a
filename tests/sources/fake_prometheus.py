"""A Prometheus that knows four kinds of query, with the limits of a real one; what it holds is given."""

import json
import re
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

from prometheus_client.parser import text_string_to_metric_families

from tests.servers import page, request_head

Labels = tuple[tuple[str, str], ...]
_SELECTOR = re.compile(r"\{([^}]*)\}")
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


def scraped(text: str, **target: str) -> dict[Labels, float]:
    """An exposition as one scrape would store it."""
    return {
        tuple(sorted({**sample.labels, "__name__": sample.name, **target}.items())): float(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@dataclass
class FakePrometheus:
    """`scrapes` by time in seconds; counts its queries, refuses too many samples or points."""

    scrapes: dict[float, dict[Labels, float]] = field(default_factory=dict)
    max_samples: int = 10**9
    warnings: list[str] = field(default_factory=list)
    asked: list[dict[str, str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, at: float, scrape: dict[Labels, float]) -> None:
        self.scrapes.setdefault(at, {}).update(scrape)

    def __call__(self, connection: socket.socket) -> None:
        while request := request_head(connection):
            head, _, body = request.partition("\r\n\r\n")
            length = int(re.search(r"content-length: (\d+)", head.lower())[1])  # type: ignore[index]
            while len(body) < length:
                body += connection.recv(65536).decode()
            form = {name: values[0] for name, values in parse_qs(body).items()}
            with self._lock:
                self.asked.append(form)
            status, answer = self._answer(form)
            connection.sendall(page(json.dumps(answer).encode(), "application/json", status))

    def _answer(self, form: dict[str, str]) -> tuple[str, dict[str, Any]]:
        start, end, step = (float(form[name]) for name in ("start", "end", "step"))
        times = [start + i * step for i in range(round((end - start) / step) + 1)]
        if len(times) > 11_000:
            return _error("400 Bad Request", "bad_data", "exceeded maximum resolution of 11,000 points per timeseries.")
        found: dict[Labels, list[tuple[float, str]]] = {}
        for at in times:
            for labels, value in self._at(form["query"], at, step).items():
                found.setdefault(labels, []).append((at, repr(value)))
        if sum(len(values) for values in found.values()) > self.max_samples:
            words = "query processing would load too many samples into memory in query execution"
            return _error("422 Unprocessable Entity", "execution", words)
        result = [{"metric": dict(labels), "values": values} for labels, values in sorted(found.items())]
        data = {"resultType": "matrix", "result": result}
        return "200 OK", {"status": "success", "data": data, "warnings": self.warnings}

    def _at(self, query: str, at: float, step: float) -> dict[Labels, float]:
        selectors = [_MATCHER.findall(inner) for inner in _SELECTOR.findall(query)]
        if query.startswith("max_over_time"):
            highest: dict[Labels, float] = {}
            for when, scrape in self.scrapes.items():
                if at - step < when <= at:
                    for labels, value in _chosen(scrape, *selectors):
                        nameless = tuple(each for each in labels if each[0] != "__name__")
                        highest[nameless] = max(value, highest.get(nameless, value))
            return highest
        scrape = next((scrape for when, scrape in self.scrapes.items() if abs(when - at) < 1e-3), {})
        left = dict(_chosen(scrape, selectors[0]))
        if " and on " not in query:
            return left
        beside = {_on(labels) for labels, _ in _chosen(scrape, selectors[1])}
        return {labels: value for labels, value in left.items() if _on(labels) in beside}


def _on(labels: Labels) -> tuple[str | None, ...]:
    return tuple(dict(labels).get(name) for name in ("job", "instance", "namespace", "pod"))


def _chosen(scrape: dict[Labels, float], *selectors: Iterable[tuple[str, str, str]]) -> Iterable[tuple[Labels, float]]:
    for labels, value in scrape.items():
        words = dict(labels)
        if any(all(_fits(words.get(name, ""), op, text) for name, op, text in each) for each in selectors):
            yield labels, value


def _fits(word: str, operator: str, text: str) -> bool:
    same = re.fullmatch(text, word) is not None if "~" in operator else word == text
    return not same if operator.startswith("!") else same


def _error(status: str, kind: str, words: str) -> tuple[str, dict[str, Any]]:
    return status, {"status": "error", "errorType": kind, "error": words}
