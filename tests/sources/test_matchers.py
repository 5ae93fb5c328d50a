"""A selector is checked before a server sees it."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragscope.sources import vllm
from fragscope.sources.matchers import Matcher, MatchError, parse, selector, without

DIALECTS = ("vllm:", "vllm_", "ray_vllm:", "ray_vllm_")


@pytest.mark.parametrize("text", ["", "{}", "  { } "])
def test_nothing_matches_everything(text: str) -> None:
    assert parse(text) == ()


@pytest.mark.parametrize(
    "text",
    ['{namespace="llm",pod=~"vllm-.*"}', 'namespace="llm", pod=~"vllm-.*"', '{ namespace = "llm" ,pod=~"vllm-.*",}'],
)
def test_braces_spaces_and_a_last_comma_are_free(text: str) -> None:
    assert parse(text) == (Matcher("namespace", "=", '"llm"'), Matcher("pod", "=~", '"vllm-.*"'))


@pytest.mark.parametrize(
    "text",
    [
        "pod",
        "pod=vllm",
        'pod="a',
        'pod=="a"',
        '{pod="a"',
        'pod="a"}',
        'pod="a" or up',
        'pod="a"} or up{x="y"',
        'p-d="a"',
        '{pod="a",,}',
        'pod="a\nb"',
        "up",
    ],
)
def test_what_is_no_selector_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(MatchError, match=re.escape('{namespace="llm",pod=~"vllm-.*"}')):
        parse(text)


def test_metrics_are_not_chosen_by_name() -> None:
    with pytest.raises(MatchError, match="__name__"):
        parse('{__name__="up"}')


@given(st.text())
def test_any_quoted_text_stays_inside_its_matcher(text: str) -> None:
    value = '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    assert parse(f"{{pod={value}}}") == (Matcher("pod", "=", value),)


def test_a_selector_names_metrics_and_conditions() -> None:
    assert selector("a|b", parse("pod!~'x'")) == "{__name__=~\"a|b\",pod!~'x'}"
    assert without(parse('{a="1",b="2"}'), {"a"}) == parse('b="2"')


@pytest.mark.parametrize("suffix", ["", "_total"])
@pytest.mark.parametrize("prefix", DIALECTS)
def test_the_pattern_asks_for_exactly_what_is_read(prefix: str, suffix: str) -> None:
    for name in vllm._ENGINE:
        assert re.fullmatch(vllm.ENGINE_PATTERN, prefix + name + suffix)
        assert vllm.wanted(prefix + name + suffix)
    for other in ("e2e_request_latency_seconds_bucket", "request_prompt_tokens_created", "num_requests"):
        assert not re.fullmatch(vllm.ENGINE_PATTERN, prefix + other + suffix)
