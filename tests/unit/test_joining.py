"""Decisions of joiners from figures alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.frames import FrameError
from peers.joining import (
    Status,
    common_version,
    current_status,
    may_follow,
    parse_status,
    refiller,
    stages_without_state,
    thinnest_stage,
)

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
