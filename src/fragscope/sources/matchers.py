"""Label matchers as people write them behind `--match`, checked before a server sees them."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

_MATCHER = re.compile(
    r"""\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|`[^`]*`)\s*(,|$)"""
)
_EXAMPLE = """{namespace="llm",pod=~"vllm-.*"}"""


class MatchError(ValueError):
    """A selector that is none, in a sentence with the place where it goes wrong."""


@dataclass(frozen=True, slots=True)
class Matcher:
    """One condition on a label; `value` keeps the quotes it was written with."""

    label: str
    operator: str
    value: str


def parse(text: str) -> tuple[Matcher, ...]:
    """The matchers of a selector, with or without its braces; () for an empty one. Raises MatchError."""
    inner = text.strip()
    if inner.startswith("{") != inner.endswith("}"):
        raise MatchError(f"{text!r} has a brace on one side only; write {_EXAMPLE}")
    inner = inner.removeprefix("{").removesuffix("}").strip()
    matchers: list[Matcher] = []
    at = 0
    while at < len(inner):
        found = _MATCHER.match(inner, at)
        if found is None:
            raise MatchError(f"{text!r} is no label selector from {inner[at : at + 40]!r} on; write {_EXAMPLE}")
        if found[1] == "__name__":
            raise MatchError(f"{text!r} chooses metrics by name, which fragscope does itself; leave __name__ out")
        matchers.append(Matcher(found[1], found[2], found[3]))
        at = found.end()
    return tuple(matchers)


def without(matchers: Iterable[Matcher], labels: Collection[str]) -> tuple[Matcher, ...]:
    """The matchers that are not about one of these labels."""
    return tuple(each for each in matchers if each.label not in labels)


def selector(names: str, matchers: Iterable[Matcher]) -> str:
    """A PromQL selector of all metrics whose whole name fits the regular expression, and of these labels only."""
    conditions = [f'__name__=~"{names}"', *(f"{each.label}{each.operator}{each.value}" for each in matchers)]
    return "{" + ",".join(conditions) + "}"
