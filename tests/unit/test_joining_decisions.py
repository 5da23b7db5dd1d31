"""Decisions of joiners from figures alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.frames import FrameError
from peers.joining import (
    Outlook,
    Status,
    StepClock,
    common_version,
    current_status,
    falls_behind,
    may_follow,
    parse_status,
    refiller,
    stages_without_state,
    thinnest_stage,
    updates_before_a_look,
)
from peers.pace import Pace

statuses = st.builds(
    Status, st.integers(0, 50), st.booleans(), st.text("0123456789abcdef", min_size=0, max_size=8)
)


@given(statuses)
def test_status_survives_the_wire(status: Status) -> None:
    assert parse_status(status.pack()) == status


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        [1, True],
        [1, True, "", 0],
        [True, True, ""],
        [-1, True, ""],
        [1, 1, ""],
        [1, True, "a" * 65],
    ],
)
def test_what_is_no_status_is_refused(value: object) -> None:
    with pytest.raises(FrameError):
        parse_status(value)


@given(st.lists(statuses, max_size=8))
def test_a_stage_is_where_its_furthest_voter_is(known: list[Status]) -> None:
    current = current_status(known)
    voters = [status for status in known if status.is_voting]
    assert (current is None) == (not voters)
    assert all(current is not None and status.version <= current.version for status in voters)


def test_a_joiner_follows_when_the_rest_fits_into_the_gate() -> None:
    assert may_follow(0, 0.0, 5.0)  # never measured: it has nothing to fetch
    assert may_follow(1, 2.0, 5.0)
    assert not may_follow(2, 2.0, 5.0)
    assert may_follow(1, 0.0, 5.0) and not may_follow(2, 0.0, 5.0)  # the second one is a measurement first


def test_a_joiner_falls_behind_if_the_stage_is_faster_than_its_updates_come() -> None:
    assert falls_behind(3, 2.0, 1.0, 5.0)
    assert not falls_behind(1, 2.0, 1.0, 5.0)  # near enough to follow all the same
    assert not falls_behind(30, 0.9, 1.0, 5.0)  # it comes closer


@given(st.floats(0.0, 100.0))
def test_a_look_comes_after_the_updates_of_a_gate_and_after_one_at_least(seconds_per_update: float) -> None:
    count = updates_before_a_look(seconds_per_update, 5.0)
    assert count == 1 or count * seconds_per_update <= 5.0


def test_a_peer_is_told_after_several_looks_and_some_time() -> None:
    outlook = Outlook()
    told = [outlook.saw(20, 6.0, 1.0, 5.5, 7.0 * look) for look in range(4)]
    assert [bool(why) for why in told] == [False, False, True, True]
    assert "20 steps behind" in told[-1]
    gone = [outlook.saw(None, 6.0, 1.0, 5.5, 30.0), Outlook().saw(None, 0.01, 1.0, 5.5, 30.0)]
    assert [bool(why) for why in gone] == [True, False]


def test_one_slow_update_says_nothing() -> None:
    outlook = Outlook()
    assert not any(outlook.saw(3, 8.0, 0.5, 5.2, 0.1 * look) for look in range(50)), "all in a moment"
    outlook = Outlook()
    for second in range(0, 300, 20):
        assert not outlook.saw(9, 8.0, 0.5, 5.2, second)
        assert not outlook.saw(9, 8.0, 0.5, 5.2, second + 9.0)
        assert not outlook.saw(1, 2.0, 0.5, 5.2, second + 12.0)


def test_the_speed_of_a_stage_is_that_of_the_last_minute() -> None:
    clock = StepClock()
    assert clock.seconds_per_step is None
    clock.saw(10, 100.0)
    clock.saw(11, 101.0)
    assert clock.seconds_per_step is None, "one step may just have ended"
    clock.saw(14, 108.0)
    assert clock.seconds_per_step == 2.0
    for second in range(109, 200):
        clock.saw(14 + second - 108, float(second))
    assert clock.seconds_per_step == 1.0
    clock.saw(3, 201.0)  # refilled from an older state
    assert clock.seconds_per_step is None
    for step in range(5):
        clock.saw(3 + step, 201.0 + 100 * step)
    assert clock.seconds_per_step == 100.0, "steps that take minutes"


def test_what_a_transfer_lets_expect_counts_until_an_update_was_measured() -> None:
    pace = Pace()
    pace.expect(1_000_000, 0.0)
    assert pace.seconds_per_update == 0.0
    pace.expect(1_000_000, 8.0)
    assert pace.seconds_per_update == pytest.approx(1.0)
    pace.measured(500_000, 2.0, 0.5)
    pace.expect(1_000_000, 8.0)
    assert (pace.seconds_per_update, pace.bytes_per_update, pace.mbps) == (2.5, 500_000, pytest.approx(2.0))


@given(st.sets(st.text("abcdef", min_size=1, max_size=4), min_size=1), st.integers(), st.integers(0, 9))
def test_all_who_wait_agree_on_the_one_who_refills(peers: set[str], seed: int, stage: int) -> None:
    ordered = sorted(peers)
    assert refiller(ordered, seed, stage) == refiller(ordered[::-1], seed, stage)


def test_a_cold_start_takes_the_newest_version_that_every_stage_can_serve() -> None:
    assert common_version([{"a": (5, 10)}, {"b": (5,), "c": (10, 20)}]) == 10
    assert common_version([{"a": (10,)}, {"b": (5,)}]) == 0
    assert common_version([{"a": ()}, {"b": ()}]) == 0


def test_stages_without_state_are_named_only_while_others_have_some() -> None:
    assert stages_without_state([{"a": (5,)}, {"b": ()}, {}]) == [1, 2]
    assert stages_without_state([{"a": ()}, {"b": ()}]) == []
    assert stages_without_state([{"a": (5,)}, {"b": (10,)}]) == []


@given(st.lists(st.integers(0, 3), max_size=12), st.floats(0, 1, exclude_max=True))
def test_auto_takes_a_stage_with_the_fewest_peers(held: list[int], chance: float) -> None:
    stage = thinnest_stage(4, held, chance)
    assert held.count(stage) == min(held.count(other) for other in range(4))
