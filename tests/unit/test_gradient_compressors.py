"""Compressors over whole rounds: what all of them promise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.gradient.compressor import Compressor
from swarm.gradient.simulate import average_group, average_phase
from tests.kit.compressors import (
    ALL,
    MOST,
    NUMEL,
    SEED,
    WEIGHTS,
    bits,
    drawn,
    group,
    make,
    play,
)

compressors = pytest.mark.parametrize("fields", ALL, ids=lambda f: "-".join(map(str, f.values())))


@compressors
def test_members_get_the_same_bits_and_hold_the_same_common_state(fields: dict[str, Any]) -> None:
    members = group(fields)
    for step, weights in enumerate(WEIGHTS):
        results = play(members, 1, step, weights)
        assert all(result.shape == (NUMEL,) and result.dtype == torch.float32 for result in results)
        assert all(torch.equal(bits(result), bits(results[0])) for result in results)
        states = [member.common_state() for member in members]
        for state in states[1:]:
            assert state.keys() == states[0].keys()
            assert all(torch.equal(bits(state[name]), bits(states[0][name])) for name in state)


@compressors
def test_aborted_round_changes_nothing_and_can_be_repeated(fields: dict[str, Any]) -> None:
    members = group(fields)
    for step, weights in enumerate(WEIGHTS):
        before = [member.digest() for member in members]
        first = play(members, 2, step, weights, commit=False)
        assert [member.digest() for member in members] == before
        again = play(members, 2, step, weights)
        assert torch.equal(bits(first[0]), bits(again[0]))


@compressors
def test_gradient_is_not_changed_and_neither_is_a_vector_afterwards(fields: dict[str, Any]) -> None:
    member = make(fields)
    gradient = drawn(3, 0, [1])[0]
    before = gradient.clone()
    compression = member.begin(gradient, 0, 2)
    vector = compression.vector()
    sent = vector.clone()
    gradient.fill_(7.0)
    assert torch.equal(compression.vector(), sent)
    gradient.copy_(before)
    average_group([member, make(fields)], [gradient, gradient], [1, 1], run_seed=SEED, step=0, most=MOST)
    assert torch.equal(gradient, before) and torch.equal(vector, sent)


@compressors
def test_joiner_replays_rounds_to_the_members_averages_and_common_state(fields: dict[str, Any]) -> None:
    members, joiner, late = group(fields), make(fields), make(fields)
    for step, weights in enumerate(WEIGHTS):
        if step == 2:
            late.load_common_state(members[0].common_state())
        averages, result = spied_round(members, 4, step, weights)
        for each in (joiner, late) if step >= 2 else (joiner,):
            replayed = each.replay(averages, step)
            assert torch.equal(bits(replayed), bits(result))
            for name, value in members[0].common_state().items():
                assert torch.equal(bits(each.common_state()[name]), bits(value))
    # With the next round's snapshot the late one is a member like any other.
    fresh = make(fields)
    fresh.load_common_state(late.common_state())
    assert [p.elements for p in fresh.phases(9)] == [p.elements for p in members[0].phases(9)]


def spied_round(
    members: list[Compressor], seed: int, step: int, weights: Sequence[int]
) -> tuple[list[Tensor], Tensor]:
    """A round by hand: the phases' averages, and the averaged gradient."""
    gradients = drawn(seed, step, weights)
    rounds = [m.begin(g, step, w) for m, g, w in zip(members, gradients, weights, strict=True)]
    averages = []
    for number, phase in enumerate(members[0].phases(step)):
        vectors = [each.vector() for each in rounds]
        assert all(vector.shape == (phase.elements,) for vector in vectors)
        outcomes = average_phase(vectors, weights, phase, seeds=(SEED, step, number), most=MOST)
        for each, outcome in zip(rounds, outcomes, strict=True):
            each.take(outcome)
        averages.append(outcomes[0].average.clone())
    result = rounds[0].result()
    for each in rounds:
        each.commit()
    return averages, result


@compressors
def test_averages_that_are_not_finite_move_no_state(fields: dict[str, Any]) -> None:
    members = group(fields)
    play(members, 5, 0, [1, 2, 3])
    before = [member.digest() for member in members]
    gradients = [gradient * float("nan") for gradient in drawn(5, 1, [1, 2, 3])]
    try:
        results = average_group(members, gradients, [1, 2, 3], run_seed=SEED, step=1, most=MOST)
    except ValueError:
        pass
    else:
        assert not any(bool(torch.isfinite(result).all()) for result in results)
    assert [member.digest() for member in members] == before
    averages = [torch.full((phase.elements,), float("inf")) for phase in members[0].phases(1)]
    assert not bool(torch.isfinite(members[0].replay(averages, 1)).all())
    assert members[0].digest() == before[0]


@compressors
def test_gradient_that_is_not_finite_does_not_stay_with_its_member(fields: dict[str, Any]) -> None:
    members = group(fields)
    play(members, 5, 0, [1, 2, 3])
    gradients = drawn(5, 1, [1, 2, 3])
    gradients[1][NUMEL // 3 : NUMEL // 2] = float("nan")
    # Reducers leave out the parts that are not finite.
    results = average_group(members, gradients, [1, 2, 3], run_seed=SEED, step=1, most=MOST)
    assert bool(torch.isfinite(results[0]).all())
    for step in (2, 3):
        assert all(bool(torch.isfinite(result).all()) for result in play(members, 5, step, [1, 2, 3]))


@compressors
def test_other_sizes_are_refused_with_nothing_changed(fields: dict[str, Any]) -> None:
    members = group(fields)
    play(members, 6, 0, [1, 1, 1])
    member, before = members[0], members[0].digest()
    sizes = [phase.elements for phase in member.phases(1)]
    wrong = [
        [],
        [torch.zeros(size + 1) for size in sizes],
        [torch.zeros(size, dtype=torch.float64) for size in sizes],
        [torch.zeros(size) for size in (*sizes, 1)],
    ]
    for averages in wrong:
        with pytest.raises(ValueError, match="averages"):
            member.replay(averages, 1)
    for gradient in (torch.zeros(NUMEL + 1), torch.zeros(NUMEL, dtype=torch.float64)):
        with pytest.raises(ValueError, match="gradient"):
            member.begin(gradient, 1, 1)
    with pytest.raises(ValueError, match="weight"):
        member.begin(torch.zeros(NUMEL), 1, -1)
    state = member.common_state()
    spoiled = [{**state, "other": torch.zeros(3)}]
    for name, value in state.items():
        spoiled += [{name: value[:-1]}, {name: value.double()}, {name: value * float("nan")}]
    for each in spoiled:
        with pytest.raises(ValueError):
            member.load_common_state(each)
    assert member.digest() == before
    member.load_common_state({})
    assert member.digest() == make(fields).digest()


@compressors
def test_common_state_is_a_copy(fields: dict[str, Any]) -> None:
    members = group(fields)
    play(members, 7, 0, [1, 1, 1])
    before = members[0].digest()
    for value in members[0].common_state().values():
        value.fill_(9.0)
    assert members[0].digest() == before


def test_compression_cannot_commit_after_another_one() -> None:
    member = make({"name": "topk", "ratio": 0.1})
    rounds = [member.begin(drawn(8, 0, [1])[0], 0, 1) for _ in range(2)]
    phase = member.phases(0)[0]
    for each in rounds:
        with pytest.raises(RuntimeError, match="outcome"):
            each.commit()
        each.take(average_phase([each.vector()] * 2, [1, 1], phase, seeds=(SEED, 0, 0), most=MOST)[0])
    rounds[0].commit()
    with pytest.raises(RuntimeError, match="another"):
        rounds[1].commit()
