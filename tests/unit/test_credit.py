"""Credit between a sender and a capped receiver."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.credit import WINDOW_CEILING_BYTES, GivenCredit, SendCredit
from peers.shaper import WINDOW_LEAST_BYTES, WINDOW_MOST_BYTES, Shaper
from tests.kit.fake_time import run_in_fake_time


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([0.5, 5.0, 50.0, 1000.0]),
    st.lists(st.tuples(st.integers(1, 100_000), st.booleans()), min_size=1, max_size=80),
)
def test_a_sender_never_stalls_and_never_gets_further_ahead_than_the_window(
    mbps: float, pieces: list[tuple[int, bool]]
) -> None:
    shaper = Shaper(mbps, clock=lambda: 0.0)
    sender, receiver = SendCredit(shaper.window_bytes), GivenCredit(shaper)
    ahead, most = 0, 0
    for nbytes, has_waited in pieces:
        left = nbytes
        while left:
            piece = min(left, sender.piece_bytes)
            assert sender._left is not None and sender._left > 0, "stalled with nothing under way"
            sender.spend(piece)
            ahead += piece
            most = max(most, ahead)
            left -= piece
            ahead -= piece
            sender.add(receiver.passed(piece, 0.05, has_waited=has_waited))
    assert most <= WINDOW_CEILING_BYTES


def test_without_a_cap_nobody_waits_or_gives_credit() -> None:
    async def scenario() -> None:
        credit = SendCredit(None)
        credit.spend(1 << 40)
        credit.add(5)
        await credit.wait()

    run_in_fake_time(scenario())
    assert GivenCredit(Shaper(None)).passed(1 << 30, 0.1, has_waited=False) == 0


def test_a_sender_waits_for_credit_and_both_its_streams_wake_up() -> None:
    async def scenario() -> None:
        credit = SendCredit(100)
        credit.spend(300)
        waiting = [asyncio.create_task(credit.wait()) for _ in range(2)]
        await asyncio.sleep(1)
        credit.add(200)
        await asyncio.sleep(1)
        assert not any(task.done() for task in waiting)
        credit.add(1)
        await asyncio.gather(*waiting)

    run_in_fake_time(scenario())


def test_invented_credit_cannot_grow_without_bound() -> None:
    credit = SendCredit(1)
    for _ in range(64):
        credit.add(1 << 62)
    assert credit._left == 1 << 40


@pytest.mark.parametrize("mbps", [0.5, 5, 20, 50, 200, 10_000])
def test_the_first_window_stays_far_below_a_mebibyte(mbps: float) -> None:
    window = Shaper(mbps).window_bytes
    assert window is not None and WINDOW_LEAST_BYTES <= window <= WINDOW_MOST_BYTES < 1 << 20


def test_windows_grow_to_the_round_trip_only_while_the_line_is_free_and_shrink_when_it_was_overrated() -> (
    None
):
    now = 0.0
    shaper = Shaper(50.0, clock=lambda: now)
    given_credit = GivenCredit(shaper)
    first = shaper.window_bytes or 0

    def pass_bytes(rtt_s: float, *, has_waited: bool) -> int:
        nonlocal now
        before = given_credit._window or 0
        for _ in range(1200):
            now += 0.01
            given_credit.passed(20_000, rtt_s, has_waited=has_waited)
        return (given_credit._window or 0) - before

    assert pass_bytes(0.3, has_waited=True) == 0
    assert pass_bytes(0.3, has_waited=False) > first
    assert pass_bytes(0.05, has_waited=True) < 0
    rate = shaper.rate_bytes_per_s
    assert given_credit._window == pytest.approx(rate * 0.1, rel=0.01)


def test_on_a_busy_line_all_windows_together_grow_by_very_little() -> None:
    now = 0.0
    shaper = Shaper(100.0, clock=lambda: now)
    neighbours = [GivenCredit(shaper) for _ in range(20)]
    shaper.charge(shaper.rate_bytes_per_s * 10)
    for _ in range(100):
        now += 0.01
        for neighbour in neighbours:
            neighbour.passed(60_000, 0.5, has_waited=False)
    grown = sum((neighbour._window or 0) - (shaper.window_bytes or 0) for neighbour in neighbours)
    assert 0 < grown <= shaper.rate_bytes_per_s * (0.02 + 0.005 + 0.001)
