"""Before and after: a difference is claimed only where the bounds do not overlap."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from fragscope.advise.advice import Range
from fragscope.advise.batches import Slices, together
from fragscope.advise.compare import Comparison, Outcome, Row, batch_mean, compare, mean_of, poisson, quantile
from fragscope.advise.observed import Observed
from fragscope.model import Histogram
from tests.advise.past import CARD, HOUR, POOL, Life, samples

BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


def first_tokens(times: list[float], times_over: int) -> Histogram:
    n = times_over
    buckets = tuple((bound, float(n * sum(t <= bound for t in times))) for bound in BOUNDS)
    return Histogram(float(n * len(times)), n * sum(times), buckets)


def window(life: Life, times: list[float], preemptions_a_poll: float = 0.0, prompt_tokens: float = 500.0) -> Observed:
    """An hour at a poll a minute; every poll sees these times to first token once more."""
    past = Observed()
    for i, sample in enumerate(samples(life, HOUR)):
        done = float(i * len(times))
        reading = replace(
            sample.engines[0],
            first_token_s=first_tokens(times, i),
            preemptions_total=i * preemptions_a_poll,
            prompt_tokens=Histogram(done, done * prompt_tokens, ((1000.0, done),)),
        )
        past.observe(replace(sample, engines=(reading,)))
    return past


def row(comparison: Comparison, name: str) -> Row:
    return next(row for row in comparison.rows if row.name == name)


BEFORE = window(Life(running=lambda _: 200, waiting=lambda _: 20.0), [0.2, 0.4, 2.0, 4.0], 2.0)


def test_the_same_window_twice_shows_no_difference() -> None:
    same = compare(BEFORE, BEFORE)
    assert {row.outcome for row in same.rows} == {Outcome.SAME}
    assert not same.changed


def test_a_change_that_helped_is_named_figure_by_figure() -> None:
    after = window(
        Life(
            running=lambda _: 200, waiting=lambda _: 2.0, used=lambda _: 0.90 * CARD, config=replace(POOL, block_size=1)
        ),
        [0.05, 0.08, 0.2, 0.3],
        0.0,
    )
    result = compare(BEFORE, after)
    for name in (
        "block waste",
        "VRAM free at peaks",
        "requests waiting",
        "preemptions per 1000 requests",
        "time to first token, mean",
        "time to first token, p95",
    ):
        assert row(result, name).verdict == "better", name
    assert "block_size: 16 -> 1" in result.changed
    back = compare(after, BEFORE)
    assert row(back, "requests waiting").verdict == "worse"


def test_noise_is_no_difference() -> None:
    def noisy(seed: int) -> Callable[[float], float]:
        return lambda t: random.Random(seed + int(t)).expovariate(0.2)

    a = window(Life(waiting=noisy(1)), [0.2, 0.4])
    b = window(Life(waiting=noisy(2)), [0.2, 0.4])
    assert row(compare(a, b), "requests waiting").outcome is Outcome.SAME


def test_another_load_is_said_to_spoil_the_comparison() -> None:
    after = window(Life(running=lambda _: 200), [0.2] * 8, prompt_tokens=2000)
    words = " ".join(compare(BEFORE, after).caveats)
    assert "requests per second" in words
    assert "prompt tokens" in words


def test_what_a_side_did_not_show_is_not_known() -> None:
    after = Observed()
    for sample in samples(Life(), HOUR):
        after.observe(replace(sample, gpus=()))
    result = compare(BEFORE, after)
    assert row(result, "VRAM free at peaks").outcome is Outcome.UNKNOWN
    assert row(result, "time to first token, mean").outcome is Outcome.UNKNOWN


def test_quantiles_lie_between_the_edges_of_their_buckets() -> None:
    histogram = first_tokens([0.05] * 10 + [0.3] * 80 + [2.0] * 10, 100)
    middle = quantile([histogram], 0.5)
    assert middle is not None
    assert (middle.low, middle.high) == (0.25, 0.5)
    late = quantile([histogram], 0.95)
    assert late is not None
    assert (late.low, late.high) == (1.0, 2.5)
    assert mean_of([histogram]) is None, "one slice has no spread"
    assert quantile([], 0.5) is None


def test_neighbours_that_are_alike_widen_the_bounds_of_a_mean() -> None:
    values = [float(i // 100) for i in range(1000)]
    shuffled = values.copy()
    random.Random(1).shuffle(shuffled)
    slow, mixed = batch_mean(values), batch_mean(shuffled)
    assert slow is not None
    assert mixed is not None
    assert slow.high - slow.low > 3 * (mixed.high - mixed.low)
    assert batch_mean([1.0]) is None


def test_a_count_of_nothing_still_has_an_upper_bound() -> None:
    low, high = poisson(0)
    assert low == 0
    assert high == pytest.approx(3.69, abs=0.3)
    assert poisson(100)[0] == pytest.approx(81.4, abs=0.5)
    assert poisson(100)[1] == pytest.approx(121.6, abs=0.5)


EDGES = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)


def queued(draw: random.Random, load: float, requests: int = 5000) -> list[Histogram]:
    """Waits in a queue with one server (M/M/1), by the minute at a request a second."""
    minutes: dict[int, list[float]] = {}
    wait = at = 0.0
    for _ in range(requests):
        gap = draw.expovariate(1.0)
        at += gap
        wait = max(0.0, wait + draw.expovariate(1 / load) - gap)
        minutes.setdefault(int(at // 60), []).append(wait)
    return [
        Histogram(float(len(waits)), sum(waits), tuple((e, float(sum(w <= e for w in waits))) for e in EDGES))
        for _, waits in sorted(minutes.items())
    ]


def claimed(a: Range | None, b: Range | None) -> bool:
    return Row("", "s", a, b).outcome in (Outcome.LOWER, Outcome.HIGHER)


def test_two_windows_of_the_same_busy_queue_are_seldom_called_different() -> None:
    """Requests that wait for each other are no independent draws: taken as such, 46 of 60 pairs differed."""
    draw = random.Random(11)
    pairs = [(queued(draw, 0.9), queued(draw, 0.9)) for _ in range(40)]
    assert sum(claimed(mean_of(a), mean_of(b)) for a, b in pairs) <= 3
    assert sum(claimed(quantile(a, 0.95), quantile(b, 0.95)) for a, b in pairs) <= 3


def test_a_queue_that_got_much_shorter_is_still_told_apart() -> None:
    draw = random.Random(12)
    busy, idle = queued(draw, 0.9, 20_000), queued(draw, 0.5, 20_000)
    assert claimed(mean_of(busy), mean_of(idle))
    assert claimed(quantile(busy, 0.95), quantile(idle, 0.95))


def test_slices_grow_wider_instead_of_more_and_lose_nothing() -> None:
    slices = Slices()
    for minute in range(10_000):
        slices.add(60.0 * minute, Histogram(2.0, 3.0, ((1.0, 1.0),)))
    assert len(slices.rows) <= 480
    assert sum(rise.count for rise in together([slices, slices])) == 40_000
