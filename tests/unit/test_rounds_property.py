"""Thousands of random event orders through the rounds of one stage: what is promised holds in all of them.

Members are real `RoundCore`s in a shell that does what `peers.averaging` does; time, network, exchange, plan and
work are simulated (`tests.kit.round_stage`, where the promises are checked). Here every peer that is lost is really
gone, or its link just flaps.
"""

from __future__ import annotations

import pytest

from tests.kit.round_stage import World, check


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_undisturbed_members_apply_the_same_averages_of_every_key(size: int) -> None:
    check(range(100), size, World(may_fall_out=False))


@pytest.mark.parametrize("size", [2, 3])
def test_member_or_leader_killed_at_any_moment_stalls_and_splits_nobody(size: int) -> None:
    check(range(250), size, World(kills=1, may_fall_out=False))


@pytest.mark.parametrize("size", [2, 3])
def test_member_killed_between_one_send_and_the_next_stalls_and_splits_nobody(size: int) -> None:
    check(range(300), size, World(kills=1, kill_at_send=True, may_fall_out=False))


@pytest.mark.parametrize("size", [3, 4])
def test_two_killed_members_stall_and_split_nobody(size: int) -> None:
    check(range(150), size, World(kills=2, may_fall_out=False))
    check(range(250), size, World(kills=2, kill_at_send=True, may_fall_out=False))


@pytest.mark.parametrize("size", [2, 3])
def test_link_that_flaps_delays_a_round_and_never_stalls_it(size: int) -> None:
    check(range(200), size, World(flaps=3, may_fall_out=False))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_key_that_two_members_hold_is_averaged_once(size: int) -> None:
    seen = check(range(70), size, World(doubled=0.2))
    assert seen["fences"] > 50


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_key_that_nobody_can_give_is_given_up_and_no_other(size: int) -> None:
    seen = check(range(100), size, World(lost=0.5))
    assert seen["missing"] > 10


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_late_member_is_left_out_and_comes_back_as_a_follower(size: int) -> None:
    seen = check(range(50), size, World(late=0.3, deadline_s=1200.0))
    assert seen["Dropped"] > 5 and seen["followers"] > 5


@pytest.mark.parametrize("size", [2, 3, 4])
def test_exchanges_that_fail_or_are_slow_cost_time_and_nothing_else(size: int) -> None:
    check(range(50), size, World(slow_exchange=0.3, failing_exchange=0.1, deadline_s=3000.0))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_killed_members_that_come_back_as_new_processes_follow_and_vote_again(size: int) -> None:
    seen = check(range(150), size, World(kills=3, revives=True, steps=6))
    assert seen["followers"] > 100
