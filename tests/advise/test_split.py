"""Splitting two populations: blocking from the prompt histogram, and only where everything speaks for it."""

import pytest

from fragscope.advise.lengths import Steps, steps_of
from fragscope.advise.split import HourRow, Queue, advise, blocking, by_hour, queue_of
from fragscope.model import Histogram
from tests.advise.past import DAY, HOUR, Life, observed
from tests.advise.traces import PARAMETERS, counter, histogram, histogram_of, requests

POOL = 331_000
QUEUE = Queue(POOL, 0.95, 0.6, 0.5, 0.3, 4)


def prompts_of(lengths: list[int]) -> Steps:
    return steps_of(histogram_of(lengths))


@pytest.mark.parametrize(
    ("trace", "pool", "shares"),
    [
        ("mooncake_conv", 331_000, {0.80: 0.021, 0.90: 0.067, 0.95: 0.224, 0.98: 0.51}),
        ("mooncake_conv", 122_000, {0.80: 0.125, 0.90: 0.32, 0.95: 0.54, 0.98: 0.74}),
        ("azure_code", 331_000, {0.80: 0.0, 0.90: 0.0, 0.95: 0.0, 0.98: 0.058}),
        ("azure_conv", 331_000, {0.80: 0.0, 0.90: 0.0, 0.95: 0.0, 0.98: 0.0005}),
    ],
)
def test_blocking_of_public_traces_lies_inside_the_bounds_of_the_histogram(
    trace: str, pool: int, shares: dict[float, float]
) -> None:
    for usage, known in shares.items():
        found = blocking(steps_of(histogram(trace, "prompt")), pool, usage)
        assert found.low - 0.005 <= known <= found.high + 0.005
        assert found.point == pytest.approx(known, abs=0.05)


def test_listed_lengths_give_blocking_without_bounds() -> None:
    listed = counter(requests("mooncake_conv")).lengths((), PARAMETERS)
    assert listed is not None
    found = blocking(listed.prompts, POOL, 0.95)
    known = sum(p > 0.05 * POOL for p, _ in requests("mooncake_conv")) / 5000
    assert found.low == found.point == found.high == pytest.approx(known, abs=1e-3)


def test_short_chats_with_a_tail_of_documents_are_split_where_there_are_engines_for_it() -> None:
    chats_and_documents = prompts_of([200] * 80 + [1500] * 12 + [40_000] * 8)
    given = advise(chats_and_documents, QUEUE, [], PARAMETERS)
    assert given.change is True
    assert given.flags
    assert given.effect is not None
    assert given.effect.value.point == pytest.approx(-0.08, abs=0.01)
    assert any("sqrt(2)" in caveat for caveat in given.caveats)


def test_with_one_engine_only_priority_scheduling_is_named() -> None:
    given = advise(prompts_of([200] * 80 + [40_000] * 20), Queue(POOL, 0.95, 0.6, 0.5, 0.3, 1), [], PARAMETERS)
    assert given.change is True
    assert given.flags == ("--scheduling-policy priority",)
    assert "nothing to split" in given.sentence
    assert "--kv-cache-dtype" not in given.sentence


def test_engines_that_are_full_on_average_have_none_to_spare() -> None:
    given = advise(prompts_of([200] * 80 + [40_000] * 20), Queue(POOL, 0.97, 0.9, 0.5, 0.3, 4), [], PARAMETERS)
    assert not given.flags
    assert "no replicas to spare" in given.sentence


def test_documents_alone_are_one_population_and_stay_together() -> None:
    given = advise(prompts_of([32_000] * 50), QUEUE, [], PARAMETERS)
    assert given.change is False
    assert "one population" in given.sentence


def test_chats_with_answers_of_128_tokens_and_a_tail_beyond_2048_do_not_block() -> None:
    given = advise(prompts_of([200] * 95 + [3000] * 5), QUEUE, [], PARAMETERS)
    assert given.change is False
    assert given.numbers["blocking_ratio"] == 0


def test_nobody_who_waits_needs_no_split() -> None:
    given = advise(prompts_of([200] * 80 + [40_000] * 20), Queue(POOL, 0.95, 0.6, 0.5, 0.0, 4), [], PARAMETERS)
    assert given.change is False
    assert "no request was seen waiting" in given.sentence


def test_a_queue_in_one_poll_of_ten_thousand_is_no_reason() -> None:
    given = advise(prompts_of([200] * 80 + [40_000] * 20), Queue(POOL, 0.95, 0.6, 0.5, 1e-4, 4), [], PARAMETERS)
    assert given.change is False
    assert "0.01 % of the polls only" in given.sentence


def growing(t: float) -> Histogram:
    """Short chats by day, long documents from 0 to 6 h UTC; counts rise by 60 an hour."""
    day, rest = divmod(t, DAY)
    night = min(rest, 6 * HOUR) + day * 6 * HOUR
    chats = (t - night) / 60
    documents = night / 60
    buckets = ((500.0, chats), (20_000.0, chats), (50_000.0, chats + documents))
    return Histogram(chats + documents, chats * 300 + documents * 40_000, buckets)


def test_long_documents_by_night_show_in_the_hours() -> None:
    usage = {True: 0.95, False: 0.6}
    past = observed(
        Life(prompts=growing, usage=lambda t: usage[t % DAY < 6 * HOUR], waiting=lambda _: 2.0), 2 * DAY, 300
    )
    engine = past.engines["vllm", "0"]
    rows = by_hour(engine.hours, POOL)
    assert len(rows) == 24
    # The first rise of hour 0 and of hour 6 still belongs to the hour before.
    night = [row.prompt_mean_tokens for row in rows if row.hour in range(1, 6)]
    day = [row.prompt_mean_tokens for row in rows if row.hour in range(7, 24)]
    assert min(n for n in night if n is not None) == pytest.approx(40_000)
    assert max(n for n in day if n is not None) == pytest.approx(300)
    queue = queue_of(engine, POOL, 2)
    assert queue is not None
    assert queue.queued_not_full_ratio == 1.0
    assert engine.prompts.since_first is not None
    given = advise(steps_of(engine.prompts.since_first), queue, rows, PARAMETERS)
    assert given.change is True
    assert any("blocking happens at 00, 01, 02, 03, 04, 05" in caveat for caveat in given.caveats)


def test_without_lengths_or_usage_it_is_not_known() -> None:
    assert advise(None, QUEUE, [], PARAMETERS).missing == ("lengths",)
    assert advise(prompts_of([1]), None, [], PARAMETERS).missing == ("kv_usage",)
    assert queue_of(observed(Life(), HOUR).engines["vllm", "0"], None, 1) is None


def test_an_hour_without_finished_prompts_has_no_blocking() -> None:
    rows = by_hour(observed(Life(), HOUR).engines["vllm", "0"].hours, POOL)
    assert [(row.blocking, row.prompt_mean_tokens) for row in rows] == [(None, None)]
    assert isinstance(rows[0], HourRow)
