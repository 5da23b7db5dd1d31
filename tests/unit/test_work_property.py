"""Thousands of random event orders through the work of a whole pipeline: every key exactly once, every wait ends."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict

import pytest

import peers.work
from peers.limits import LIMITS
from tests.kit.pipeline import Pipeline


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """So little that BUSY is common."""
    monkeypatch.setattr(peers.work, "LIMITS", dataclasses.replace(LIMITS, in_flight=3, early_frames=3))


def check(seeds: range, replicas: tuple[int, ...], **chances: object) -> Counter[str]:
    """Run all seeds; report how many broke a promise, and the first in full. Returns what the peers counted."""
    broken: OrderedDict[int, AssertionError] = OrderedDict()
    counted: Counter[str] = Counter()
    for seed in seeds:
        pipeline = Pipeline(seed, replicas, **chances)  # type: ignore[arg-type]
        try:
            pipeline.run()
        except AssertionError as error:
            broken[seed] = error
        counted["committed without"] += sum(len(lost) for lost in pipeline.lost.values())
        for peer in pipeline.peers.values():
            counted += peer.core.counters
    if broken:
        kinds = Counter(str(error).split("\n", 1)[0][:60] for error in broken.values())
        seed, first = next(iter(broken.items()))
        raise AssertionError(f"{len(broken)} of {len(seeds)} seeds: {dict(kinds)}\nseed {seed}: {first}")
    return counted


@pytest.mark.parametrize("replicas", [(1, 1), (2, 1, 2), (2, 3), (2, 2, 2, 2)])
def test_undisturbed_pipeline_trains_every_key_once(replicas: tuple[int, ...]) -> None:
    check(range(20), replicas)


@pytest.mark.parametrize("replicas", [(1, 1), (2, 2, 2)])
def test_repeated_frames_add_nothing_twice(replicas: tuple[int, ...]) -> None:
    check(range(20), replicas, duplicates=0.3)


@pytest.mark.parametrize("replicas", [(1, 1), (2, 2, 2)])
def test_flapping_links_lose_and_repeat_no_key(replicas: tuple[int, ...]) -> None:
    check(range(40), replicas, flaps=5, longest_break_s=1.0)


def test_holder_behind_a_broken_link_is_not_overlooked_by_a_replay() -> None:
    """A neighbour whose link is down for a moment may hold the key: choosing another would train it twice."""
    check(range(100), (2, 2, 2), victims=(0,), flaps=12, longest_break_s=1.5)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_killed_peer_costs_no_key_and_ends_every_wait(stage: int) -> None:
    check(range(60), (2, 2, 2), victims=(stage,))
    check(range(60), (2, 2, 2), victims=(stage,), kill_at_action=True)


@pytest.mark.parametrize("stage", [0, 1])
def test_killed_peer_among_three_costs_no_key(stage: int) -> None:
    check(range(40), (3, 3), victims=(stage,), duplicates=0.1)


def test_two_killed_peers_of_one_stage_cost_no_key() -> None:
    for stage in range(3):
        check(range(25), (3, 3, 3), victims=(stage, stage))


def test_peers_killed_in_stages_that_are_no_neighbours_cost_no_key() -> None:
    check(range(40), (2, 1, 2, 2), victims=(0, 2), kill_at_action=True)
    check(range(40), (2, 1, 2, 2), victims=(0, 3))


def test_replay_lost_with_a_link_is_repeated() -> None:
    """Also of a key whose gradient is back already: the peer it goes to now needs it for its own ledger."""
    for stage in (1, 2):
        check(range(1100, 1150), (2, 2, 2), victims=(stage,), flaps=4, longest_break_s=1.0)
        check(range(2000, 2030), (3, 3, 3), victims=(stage, stage), flaps=4, longest_break_s=1.0)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_fenced_peer_costs_no_key_and_its_work_is_done_by_others(stage: int) -> None:
    counted = check(range(40), (2, 2, 2), troubles=(("fence", stage),))
    counted += check(range(20), (3, 3, 3), troubles=(("fence", stage), ("fence", stage)))
    assert counted["fenced"] > 100
    check(range(25), (2, 2, 2), troubles=(("fence", stage),), flaps=4, longest_break_s=1.0, duplicates=0.1)


@pytest.mark.parametrize("stage", [0, 1])
def test_falsely_lost_peer_that_comes_back_is_fenced_and_nothing_counts_twice(stage: int) -> None:
    counted = check(range(40), (2, 2, 2), troubles=(("false loss", stage),) * 2)
    counted += check(range(30), (2, 3, 3), troubles=(("false loss", stage),) * 3, flaps=2)
    assert counted["fenced"] > 100, "no double was made"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_restarted_and_resynchronised_peers_cost_no_key(stage: int) -> None:
    check(range(30), (2, 2, 2), troubles=(("restart", stage),))
    check(range(30), (2, 2, 2), troubles=(("resync", stage),))
    check(range(20), (3, 3, 3), troubles=(("restart", stage), ("resync", stage)), flaps=2)


@pytest.mark.parametrize("stage", [0, 1])
def test_two_deaths_in_neighbouring_stages_lose_only_what_nobody_can_give(stage: int) -> None:
    """Every key is once in the committed ledgers or in the lost list; mostly nothing is lost at all."""
    pairs = [
        ("kill", "kill"),
        ("kill", "fence"),
        ("fence", "kill"),
        ("kill", "resync"),
        ("restart", "restart"),
    ]
    counted: Counter[str] = Counter()
    for one, other in pairs:
        counted += check(range(40), (2, 2, 2), troubles=((one, stage), (other, stage + 1)), may_lose=True)
    assert 0 < counted["committed without"] < 0.01 * counted["done"]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_emptied_stage_is_refilled_and_goes_on(stage: int) -> None:
    check(range(40), (2, 2, 2), troubles=(("empty", stage),), may_lose=True)
    check(range(30), (1, 1, 1), troubles=(("empty", stage),), may_lose=True)


def test_everything_at_once_costs_no_key_that_somebody_can_give() -> None:
    troubles = (("kill", 0), ("restart", 1), ("fence", 2), ("false loss", 1), ("resync", 2), ("empty", 0))
    check(range(60), (3, 3, 3), troubles=troubles, may_lose=True, duplicates=0.1, flaps=3)


def test_lost_keys_need_two_losses_in_neighbouring_stages() -> None:
    for stages in ((0, 2), (0, 3), (1, 3)):
        troubles = (("kill", stages[0]), ("restart", stages[1]))
        check(range(20), (2, 2, 2, 2), troubles=troubles, flaps=2)
