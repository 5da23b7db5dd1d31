"""The bucket and the order of those who wait for it, without a clock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.frames import BULK_PRIORITY, Priority
from peers.shaping import LOWEST_SHARE, PRIORITIES, Flow, Request, Schedule, TokenBucket

RATE, BURST = 1_000_000.0, 20_000.0
sizes = st.integers(1, 64 * 1024)
large_sizes = st.integers(4096, 64 * 1024)
waits = st.floats(0, 2, allow_nan=False)


def schedule(rate: float = RATE, burst: float = BURST) -> Schedule:
    return Schedule(TokenBucket(rate, burst, 0.0))


def drive(plan: Schedule, flows: list[tuple[Flow, int, int]], seconds: float) -> list[Request]:
    """Keep every (flow, priority, size) asking; returns what was served in this time."""
    served: list[Request] = []
    now = 0.0
    for flow, priority, nbytes in flows:
        plan.ask(flow, priority, nbytes, now)
    wants = {id(flow): (priority, nbytes) for flow, priority, nbytes in flows}
    while now < seconds:
        for request in plan.serve(now):
            served.append(request)
            plan.ask(request.flow, *wants[id(request.flow)], now)
        now += max(plan.bucket.seconds_until_ready(now), 1e-6)
    return served


@given(st.lists(st.tuples(waits, sizes), max_size=60))
def test_never_more_than_rate_times_time_plus_burst_and_one_piece(steps: list[tuple[float, int]]) -> None:
    bucket = TokenBucket(RATE, BURST, 0.0)
    now, passed = 0.0, 0
    for wait_s, nbytes in steps:
        now += wait_s
        if bucket.level(now) > 0:
            bucket.take(nbytes, now)
            passed += nbytes
        assert passed <= RATE * now + BURST + 64 * 1024


@given(st.lists(st.tuples(waits, sizes, st.integers(1, PRIORITIES - 1)), min_size=1, max_size=40))
def test_requests_of_any_sizes_keep_to_the_rate_and_all_are_served(
    steps: list[tuple[float, int, int]],
) -> None:
    plan = schedule()
    now, passed, asked = 0.0, 0, 0
    for wait_s, nbytes, priority in steps:
        now += wait_s
        plan.ask(Flow(), priority, nbytes, now)
        asked += nbytes
        passed += sum(request.nbytes for request in plan.serve(now))
        assert passed <= RATE * now + BURST + 64 * 1024
    while plan.waiting:
        now += plan.bucket.seconds_until_ready(now) + 1e-6
        passed += sum(request.nbytes for request in plan.serve(now))
        assert passed <= RATE * now + BURST + 64 * 1024
    assert passed == asked


def test_a_clock_that_steps_back_gives_nothing() -> None:
    bucket = TokenBucket(RATE, BURST, 100.0)
    bucket.take(2 * BURST, 100.0)
    assert bucket.level(50.0) == -BURST
    assert bucket.level(100.0) == -BURST
    assert bucket.level(100.01) == pytest.approx(-BURST + 0.01 * RATE)


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (-1, 1), (1, 0)])
def test_a_bucket_that_would_never_give_anything_is_refused(rate: float, burst: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        TokenBucket(rate, burst, 0.0)


def test_higher_priorities_go_first() -> None:
    plan = schedule()
    plan.bucket.take(BURST, 0.0)
    for priority in (4, 2, 3, 1):
        plan.ask(Flow(), priority, 1000, 0.0)
    assert [request.priority for request in plan.serve(1.0)] == [1, 2, 3, 4]


@settings(max_examples=30, deadline=None)
@given(st.lists(large_sizes, min_size=2, max_size=8))
def test_flows_of_one_priority_get_the_same_bytes_whatever_their_pieces(pieces: list[int]) -> None:
    flows = [(Flow(), Priority.ACTIVATION, nbytes) for nbytes in pieces]
    served = drive(schedule(), flows, 5.0)
    got = [sum(request.nbytes for request in served if request.flow is flow) for flow, _, _ in flows]
    assert max(got) - min(got) <= 2 * max(pieces)


def test_a_flow_that_was_idle_has_saved_up_no_turns() -> None:
    plan, early, late = schedule(), Flow(), Flow()
    drive(plan, [(early, 2, 10_000)], 5.0)
    plan.ask(late, 2, 10_000, 5.0)
    order = []
    now = 5.0
    while len(order) < 20:
        now += 0.01
        for request in plan.serve(now):
            order.append(request.flow)
            plan.ask(request.flow, 2, 10_000, now)
    assert {order[0], order[1]} == {early, late}
    assert order.count(late) == 10


@pytest.mark.parametrize("low", [Priority.ACTIVATION, Priority.AVERAGING, Priority.STATE])
def test_a_starving_priority_gets_its_tenth(low: int) -> None:
    flows = [(Flow(), Priority.GRADIENT, 10_000), (Flow(), low, 10_000)]
    served = drive(schedule(), flows, 10.0)
    share = sum(r.nbytes for r in served if r.priority == low) / sum(r.nbytes for r in served)
    assert share == pytest.approx(LOWEST_SHARE, rel=0.05)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, PRIORITIES - 1), large_sizes), min_size=1, max_size=12))
def test_whoever_asks_is_served_while_everybody_else_goes_on_asking(asks: list[tuple[int, int]]) -> None:
    flows = [(Flow(), priority, nbytes) for priority, nbytes in asks]
    served = drive(schedule(), flows, 12.0)
    assert {id(request.flow) for request in served} == {id(flow) for flow, _, _ in flows}


def test_promoted_requests_overtake_and_nothing_is_ever_demoted() -> None:
    plan, low, high = schedule(), Flow(), Flow()
    plan.bucket.take(BURST, 0.0)
    plan.ask(low, Priority.STATE, 1000, 0.0)
    plan.ask(high, Priority.ACTIVATION, 1000, 0.0)
    plan.promote(low, Priority.GRADIENT)
    plan.promote(high, Priority.STATE)
    plan.promote(Flow(), Priority.GRADIENT)  # waits for nothing
    assert [(r.flow, r.priority) for r in plan.serve(1.0)] == [(low, 1), (high, 2)]


def test_a_cancelled_request_takes_nothing_and_holds_nobody_up() -> None:
    plan, one, other = schedule(), Flow(), Flow()
    plan.bucket.take(BURST, 0.0)
    request = plan.ask(one, 1, 50_000, 0.0)
    plan.ask(other, 1, 1000, 0.0)
    plan.cancel(request)
    plan.cancel(request)
    assert [r.flow for r in plan.serve(0.002)] == [other]
    assert plan.waiting == 0
    plan.ask(one, 1, 1, 0.1)  # the flow may ask again


def test_a_flow_asks_for_one_thing_at_a_time() -> None:
    plan, flow = schedule(), Flow()
    plan.ask(flow, 1, 1, 0.0)
    with pytest.raises(ValueError, match="one thing at a time"):
        plan.ask(flow, 2, 1, 0.0)


def test_every_bulk_kind_waits_at_a_priority_there_is() -> None:
    assert all(Priority.CONTROL < priority < PRIORITIES for priority in BULK_PRIORITY.values())
