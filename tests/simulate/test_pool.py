"""The simulated pool does what vLLM's scheduler does where an observer can see it."""

import random

import pytest

from fragscope.simulate.pool import Capacity, Pool, Tokens

FOREVER = float("inf")


def pool(**fields: int) -> Pool:
    settings = {"num_blocks": 1000, "block_size": 16, **fields}
    return Pool(Capacity(**settings), 32768, random.Random(1))


def run(of: Pool, seconds: int, since: int = 0) -> None:
    for second in range(since + 1, since + seconds + 1):
        of.step(float(second), 1.0)


def test_a_request_holds_blocks_while_it_runs_and_none_afterwards() -> None:
    served = pool()
    served.arrive(1600, 80, FOREVER)
    run(served, 1)
    assert served.running == 1
    assert 0.1 <= served.usage_ratio <= 0.11
    run(served, 5, since=1)
    assert (served.running, served.waiting, served.usage_ratio) == (0, 0, 0.0)
    assert (served.counters.finished, served.counters.first_tokens, served.counters.prompt_tokens) == (1, 1, 1600)
    assert served.counters.generation_tokens == pytest.approx(80)


def test_the_batch_limit_makes_requests_wait_at_low_usage() -> None:
    served = pool(max_num_seqs=2)
    for _ in range(10):
        served.arrive(16, 2000, FOREVER)
    run(served, 5)
    assert (served.running, served.waiting, served.counters.preemptions) == (2, 8, 0)
    assert served.usage_ratio < 0.05


def test_a_prompt_that_does_not_fit_blocks_those_behind_it() -> None:
    served = pool()
    served.arrive(12000, 2000, FOREVER)
    run(served, 1)
    served.arrive(6000, 10, FOREVER)
    served.arrive(16, 10, FOREVER)
    run(served, 2, since=1)
    assert (served.running, served.waiting) == (1, 2)
    assert served.usage_ratio < 0.9


def test_a_full_pool_preempts_the_newest_and_fails_nobody() -> None:
    served = pool(num_blocks=200)
    for _ in range(3):
        served.arrive(960, 800, FOREVER)
    run(served, 120)
    assert served.counters.preemptions > 0
    assert served.counters.finished == 3
    assert served.counters.first_tokens == 3
    assert served.counters.generation_tokens == pytest.approx(2400, rel=0.01)


def test_the_queue_limit_refuses() -> None:
    served = pool(max_num_seqs=1, max_num_queued_reqs=3)
    accepted = [served.arrive(16, 1000, FOREVER) for _ in range(10)]
    assert (sum(accepted), served.counters.rejected) == (3, 7)


def test_a_shared_prefix_is_held_once() -> None:
    alone, shared = pool(), pool(prefix_groups=1, prefix_tokens=1600)
    for served in (alone, shared):
        for _ in range(4):
            served.arrive(1616, 500, FOREVER)
        run(served, 1)
    assert alone.usage_ratio == pytest.approx(0.404, abs=0.02)
    assert shared.usage_ratio == pytest.approx(0.104, abs=0.02)


def test_clients_that_hang_up_leave_no_finish_behind() -> None:
    served = pool()
    served.arrive(16, 4000, deadline=3.0)
    run(served, 5)
    assert (served.running, served.counters.hung_up, served.counters.finished) == (0, 1, 0)
    assert served.counters.first_tokens == 1


def test_a_stalled_scheduler_shows_nothing_but_a_queue() -> None:
    served = pool()
    served.stalled = True
    served.arrive(16, 10, FOREVER)
    run(served, 10)
    assert (served.running, served.waiting, served.usage_ratio) == (0, 1, 0.0)


def test_what_arrives_is_somewhere_at_any_time() -> None:
    rng = random.Random(3)
    served = pool(num_blocks=400, max_num_seqs=16, max_num_queued_reqs=12)
    arrived = 0
    for second in range(1, 2000):
        for _ in range(rng.randrange(3)):
            served.arrive(rng.randrange(1, 1500), rng.randrange(1, 300), second + rng.randrange(5, 200))
            arrived += 1
        served.step(float(second), 1.0)
        c = served.counters
        assert arrived == c.finished + c.hung_up + c.rejected + served.running + served.waiting
        assert 0 <= served.usage_ratio <= 1
    assert served.counters.preemptions > 0
    assert served.prompts.count == served.counters.finished


def test_lengths_are_counted_in_one_two_five_steps() -> None:
    histogram = Tokens(2048)
    for value in (1, 2, 3, 2000, 5000):
        histogram.add(value)
    assert histogram.bounds == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
    assert histogram.buckets()[:3] == ((1.0, 1.0), (2.0, 2.0), (5.0, 3.0))
    assert histogram.buckets()[-1] == (2000.0, 4.0)
    assert (histogram.count, histogram.total) == (5, 7006)
