"""Partitions with living peers on both sides: one half at most goes on, and afterwards everybody is one again."""

from __future__ import annotations

import pytest

from tests.kit.round_stage import World, check


@pytest.mark.parametrize("is_source", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_no_two_halves_commit_a_step_and_all_are_one_after_healing(size: int, is_source: bool) -> None:
    """At stage 0 two leaders may commit one average with two plans: then all train the later one."""
    check(range(100), size, World(partitions=2, is_source=is_source))


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_partitions_among_all_other_trouble_split_nobody(size: int) -> None:
    trouble = {"late": 0.1, "doubled": 0.05, "lost": 0.1, "slow_exchange": 0.1, "failing_exchange": 0.1}
    for is_source in (False, True):
        world = World(partitions=3, flaps=3, steps=6, deadline_s=3000.0, is_source=is_source, **trouble)
        check(range(25), size, world)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_halves_that_take_each_other_for_dead_go_two_ways_and_become_one(size: int) -> None:
    """The one exception: witnesses beyond the partition confirm that living peers have ended."""
    seen = check(range(80), size, World(partitions=2, false_gone=True, may_split=True, steps=6))
    assert seen["Diverged"] > 20


@pytest.mark.parametrize("size", [3, 4])
def test_everything_at_once_ends_in_one_lineage(size: int) -> None:
    trouble = {"late": 0.1, "doubled": 0.05, "lost": 0.1, "slow_exchange": 0.1, "failing_exchange": 0.1}
    for is_source in (False, True):
        world = World(
            kills=3,
            revives=True,
            partitions=1,
            flaps=2,
            steps=6,
            deadline_s=3000.0,
            may_split=True,
            is_source=is_source,
            **trouble,
        )
        check(range(25), size, world)
