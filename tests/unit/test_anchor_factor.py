"""Singular triplets: the exact SVD, and the subspace iteration against it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.anchor.factor import Factorisation, Factors, exact_factors, factorise, subspace_factors

RANK = 16


def decaying(rows: int = 192, columns: int = 256, seed: int = 0, power: float = 1.0) -> Tensor:
    """A matrix with singular values 1 / i^power, as gradients' spectra fall, and random directions."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(rows, rows, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(columns, columns, generator=generator, dtype=torch.float64)).Q
    values = torch.arange(1, min(rows, columns) + 1, dtype=torch.float64) ** -power
    count = values.numel()
    return (left[:, :count] * values @ right[:, :count].T).float()


def numpy_svd(matrix: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    left, values, right = np.linalg.svd(matrix.double().numpy(), full_matrices=False)
    return left, values, right.T


def largest_angle_sine(found: Tensor, exact: np.ndarray) -> float:
    """Sine of the largest angle between the spans of orthonormal columns."""
    basis = found.double().numpy()
    return float(np.linalg.norm(basis - exact @ (exact.T @ basis), 2))


def assert_orthonormal(factors: Factors) -> None:
    for basis in (factors.left, factors.right):
        identity = torch.eye(factors.rank)
        torch.testing.assert_close(basis.T @ basis, identity, rtol=0, atol=1e-5)


def assert_is_svd(found: Factorisation, matrix: Tensor, rank: int) -> None:
    _, values, _ = numpy_svd(matrix)
    size = values[0] if values[0] > 0 else 1.0
    factors = found.factors
    assert factors.values.dtype == factors.left.dtype == factors.right.dtype == torch.float32
    assert factors.rank == min(rank, *matrix.shape)
    assert factors.shape == tuple(matrix.shape)
    np.testing.assert_allclose(factors.values.numpy(), values[: factors.rank], atol=2e-6 * size, rtol=0)
    assert_orthonormal(factors)


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (7, 7), (1, 6)])
@pytest.mark.parametrize("rank", [None, 1, 3, 50])
def test_exact_factors_are_the_svd(shape: tuple[int, int], rank: int | None) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    found = exact_factors(matrix, rank)
    wanted = min(shape) if rank is None else min(rank, *shape)
    assert_is_svd(found, matrix, wanted)
    left, values, right = numpy_svd(matrix)
    rebuilt = found.factors.left * found.factors.values @ found.factors.right.T
    np.testing.assert_allclose(
        rebuilt.numpy(), left[:, :wanted] * values[:wanted] @ right[:, :wanted].T, atol=1e-5
    )
    assert found.energy == pytest.approx((values[:wanted] ** 2).sum() / (values**2).sum(), abs=1e-6)
    assert (found.iterations, found.residual) == (0, 0.0)


@pytest.mark.parametrize("shape", [(192, 256), (256, 192), (200, 200)])
def test_subspace_iteration_finds_the_leading_subspace(shape: tuple[int, int]) -> None:
    matrix = decaying(*shape)
    found = subspace_factors(matrix, RANK, seed=1, tolerance=1e-6, max_iterations=60)
    left, values, right = numpy_svd(matrix)
    assert found.residual < 1e-6 or found.iterations == 60
    assert_orthonormal(found.factors)
    np.testing.assert_allclose(found.factors.values.numpy(), values[:RANK], rtol=1e-4)
    assert largest_angle_sine(found.factors.left, left[:, :RANK]) < 1e-3
    assert largest_angle_sine(found.factors.right, right[:, :RANK]) < 1e-3


def test_residual_says_how_far_the_triplets_are_from_singular_ones() -> None:
    matrix = decaying()
    found = subspace_factors(matrix, RANK, seed=1, max_iterations=1)
    left, values, right = (
        t.double() for t in (found.factors.left, found.factors.values, found.factors.right)
    )
    exact = matrix.double()
    assert float((exact.T @ left - right * values).norm() / values.norm()) < 1e-5
    assert float((exact @ right - left * values).norm() / values.norm()) == pytest.approx(
        found.residual, rel=1e-3
    )
    assert found.residual > 1e-3
    more = subspace_factors(matrix, RANK, seed=1, tolerance=0.0, max_iterations=6)
    assert more.residual < 0.3 * found.residual
    assert more.iterations == 6


def test_warm_start_finds_a_moved_matrix_in_fewer_iterations() -> None:
    before = decaying()
    noise = torch.randn(before.shape, generator=torch.Generator().manual_seed(5))
    after = 0.95 * before + 0.05 * noise * before.norm() / noise.norm()
    start = subspace_factors(before, RANK, seed=1, tolerance=1e-5, max_iterations=60).factors.right
    cold = subspace_factors(after, RANK, seed=1, max_iterations=30)
    warm = subspace_factors(after, RANK, seed=1, start=start, max_iterations=30)
    assert warm.residual <= 1e-2
    assert warm.iterations < cold.iterations
    one = subspace_factors(after, RANK, seed=1, start=start, max_iterations=1)
    cold_one = subspace_factors(after, RANK, seed=1, max_iterations=1)
    left, values, _ = numpy_svd(after)
    assert largest_angle_sine(one.factors.left[:, :8], left[:, :RANK]) < 0.1
    assert one.residual < 0.5 * cold_one.residual
    np.testing.assert_allclose(one.factors.values[:8].numpy(), values[:8], rtol=1e-2)
    exact = subspace_factors(after, RANK, seed=1, start=start, tolerance=1e-6, max_iterations=80)
    np.testing.assert_allclose(exact.factors.values.numpy(), values[:RANK], rtol=1e-4)


def test_factors_are_the_same_for_the_same_seed_and_differ_in_rounding_only_for_another() -> None:
    matrix = decaying()
    first, again = (subspace_factors(matrix, RANK, seed=1) for _ in range(2))
    for name in ("left", "values", "right"):
        assert torch.equal(getattr(first.factors, name), getattr(again.factors, name))
    other = subspace_factors(matrix, RANK, seed=2)
    assert not torch.equal(first.factors.left, other.factors.left)
    torch.testing.assert_close(first.factors.values, other.factors.values, rtol=2e-2, atol=0)


@pytest.mark.parametrize("exponent", [-100, 100])
def test_size_of_a_matrix_changes_nothing_but_its_singular_values(exponent: int) -> None:
    """Gradients of 1e-30 have squares that fp32 does not have: the residual would be 0 at once."""
    matrix = decaying()
    for factor in (exact_factors, lambda m, r: subspace_factors(m, r, seed=1, max_iterations=30)):
        usual, other = factor(matrix, RANK), factor(matrix * 2.0**exponent, RANK)
        assert torch.equal(other.factors.left, usual.factors.left)
        assert torch.equal(other.factors.right, usual.factors.right)
        torch.testing.assert_close(
            other.factors.values, usual.factors.values * 2.0**exponent, rtol=1e-6, atol=0
        )
        assert (other.iterations, other.residual) == (usual.iterations, usual.residual)


@pytest.mark.parametrize(
    "start",
    [
        torch.zeros(256, RANK),
        torch.full((256, RANK), float("nan")),
        torch.ones(256, RANK),
        torch.randn(255, RANK),
        torch.randn(256),
        torch.randn(256, 200),
        torch.randn(256, 3).bfloat16(),
    ],
)
def test_no_start_can_spoil_the_factors(start: Tensor) -> None:
    matrix = decaying()
    found = subspace_factors(matrix, RANK, seed=1, start=start, max_iterations=30)
    assert_orthonormal(found.factors)
    np.testing.assert_allclose(found.factors.values.numpy(), numpy_svd(matrix)[1][:RANK], rtol=2e-2)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(0, 6),
    st.integers(1, 12),
    st.sampled_from([1e-30, 1e-8, 1.0, 1e30]),
    st.integers(0, 10_000),
)
def test_rank_deficient_tiny_and_huge_matrices_have_orthonormal_factors(
    rows: int, columns: int, true_rank: int, rank: int, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, true_rank, generator=generator) @ torch.randn(
        true_rank, columns, generator=generator
    )
    matrix = matrix * scale
    for found in (exact_factors(matrix, rank), subspace_factors(matrix, rank, seed=seed, max_iterations=40)):
        assert_is_svd(found, matrix, rank)
        if true_rank and rank >= true_rank:
            rebuilt = found.factors.left * found.factors.values @ found.factors.right.T
            size = float(matrix.abs().max())
            torch.testing.assert_close(rebuilt, matrix, rtol=0, atol=3e-5 * size)
            assert found.energy == pytest.approx(1.0, abs=1e-4)


def test_matrices_are_factored_one_by_one_and_the_rest_may_be_left() -> None:
    matrices = {
        "a": decaying(seed=1),
        "cold": torch.full((9, 9), 1e-14),
        "b": decaying(seed=2),
        "c": torch.eye(4),
    }
    drive = factorise(matrices, RANK, seed=3)
    name, first = next(drive)
    assert name == "a"
    assert first.iterations > 0
    drive.close()
    whole = dict(factorise(matrices, RANK, seed=3))
    assert list(whole) == ["a", "b", "c"]
    assert whole["c"].iterations == 0
    assert torch.equal(whole["a"].factors.left, first.factors.left)
    swapped = dict(factorise({"b": matrices["b"], "a": matrices["a"]}, RANK, seed=3))
    assert torch.equal(swapped["a"].factors.left, first.factors.left)
    previous = {name: found.factors for name, found in whole.items()}
    warm = dict(factorise(matrices, RANK, seed=4, previous=previous))
    assert warm["a"].iterations < whole["a"].iterations
    thin = dict(factorise({"a": matrices["a"]}, None, seed=3))
    assert thin["a"].factors.rank == 192


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_matrices_that_are_not_finite_are_named(bad: float) -> None:
    matrix = decaying()
    matrix[3, 4] = bad
    for wrong in (matrix, torch.zeros(3), torch.zeros(3, 3, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"is not finite|a float matrix is wanted"):
            exact_factors(wrong)
    with pytest.raises(ValueError, match=r"layers\.0: the matrix \(192, 256\) is not finite"):
        list(factorise({"layers.0": matrix}, RANK, seed=0))
    with pytest.raises(ValueError, match="rank must be at least 1"):
        subspace_factors(decaying(), 0, seed=0)
    with pytest.raises(ValueError, match="exceed float32"):
        exact_factors(torch.full((300, 300), 3e38))
