"""Parts that do not count, and averages that a few hostile members cannot move far."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.gradient.robust import CLIP_ITERATIONS, RobustConfig, aggregate, centered_clip, screen
from swarm.gradient.split import weighted_mean

N = 50


def draw(members: int, seed: int = 0) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {member: torch.randn(N, generator=generator) for member in range(members)}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_part_that_is_not_finite_does_not_count(bad: float) -> None:
    parts = draw(2)
    parts[1][7] = bad
    assert screen(parts, [1, 1], RobustConfig()) == {1: "not_finite"}


def test_if_no_part_is_finite_nobody_is_refused_and_nor_is_the_mean() -> None:
    parts = {0: torch.full((N,), float("nan")), 1: torch.full((N,), float("inf"))}
    assert screen(parts, [1, 1], RobustConfig()) == {}
    assert not bool(torch.isfinite(aggregate(parts, [1, 1], RobustConfig())).any())


def test_the_largest_values_that_there_are_are_finite() -> None:
    largest = torch.finfo(torch.float32).max
    parts = {member: torch.full((N,), largest) for member in range(3)}
    assert screen(parts, [1, 1, 1], RobustConfig()) == {}
    assert screen({**draw(3), 3: torch.full((N,), largest)}, [1] * 4, RobustConfig()) == {3: "norm"}


@given(members=st.integers(3, 8), seed=st.integers(0, 99), scale=st.sampled_from([1e-20, 1e-6, 1.0, 1e15]))
@settings(max_examples=40, deadline=None)
def test_one_part_a_thousand_times_too_large_is_refused_and_honest_ones_never(
    members: int, seed: int, scale: float
) -> None:
    parts = {member: scale * part for member, part in draw(members, seed).items()}
    weights = [1 + (seed + member) % 5 for member in range(members)]
    honest = {member: part / weights[member] ** 0.5 for member, part in parts.items()}
    assert screen(honest, weights, RobustConfig()) == {}
    hostile = {**honest, seed % members: 1000 * honest[seed % members]}
    assert screen(hostile, weights, RobustConfig()) == {seed % members: "norm"}


def test_two_parts_cannot_tell_who_is_wrong_and_zeros_bound_nothing() -> None:
    assert screen({0: torch.ones(N), 1: torch.full((N,), 1e9)}, [1, 1], RobustConfig()) == {}
    parts = {0: torch.zeros(N), 1: torch.zeros(N), 2: torch.ones(N)}
    assert screen(parts, [1, 1, 1], RobustConfig()) == {}
    assert screen({**draw(3), 3: torch.full((N,), 1e9)}, [1] * 4, RobustConfig(norm_bound=None)) == {}


@given(members=st.integers(3, 7), seed=st.integers(0, 50), radius=st.sampled_from([0.5, 1.0, 2.0]))
@settings(max_examples=30, deadline=None)
def test_centered_clip_is_its_equation(members: int, seed: int, radius: float) -> None:
    parts, weights = draw(members, seed), [1 + (member * 7 + seed) % 4 for member in range(members)]
    rows = np.stack([parts[member].double().numpy() for member in range(members)])
    # torch's median of an even number is the lower one.
    centre = np.sort(rows, axis=0)[(members - 1) // 2]
    first = np.sort(np.linalg.norm(rows - centre, axis=1))
    tau = radius * first[(members - 1) // 2]
    for _ in range(CLIP_ITERATIONS):
        moved = np.zeros(N)
        for row, weight in zip(rows, weights, strict=True):
            distance = np.linalg.norm(row - centre)
            moved += weight * (row - centre) * min(1.0, tau / distance)
        centre = centre + moved / sum(weights)
    np.testing.assert_allclose(centered_clip(parts, weights, radius).numpy(), centre, rtol=1e-5, atol=1e-6)


def test_a_hostile_member_moves_the_clipped_centre_by_no_more_than_tau() -> None:
    generator = torch.Generator().manual_seed(1)
    common = torch.randn(N, generator=generator)
    parts = {member: common + 0.1 * torch.randn(N, generator=generator) for member in range(7)}
    honest = weighted_mean(parts, [1] * 7)
    hostile = {**parts, 7: -1e6 * common}
    config = RobustConfig(norm_bound=None, centered_clip=1.0)
    error = float((aggregate(hostile, [1] * 8, config) - honest).norm() / honest.norm())
    assert error < 0.15
    plain = float((weighted_mean(hostile, [1] * 8) - honest).norm() / honest.norm())
    assert plain > 1e4


def test_equal_parts_are_their_own_centre() -> None:
    part = torch.randn(N, generator=torch.Generator().manual_seed(3))
    assert torch.equal(centered_clip(dict.fromkeys(range(4), part), [1, 2, 3, 4], 1.0), part)
