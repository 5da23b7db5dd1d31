"""Figures about priors and gradients, against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from swarm.anchor.diagnostics import (
    gradient_cosine,
    mean_filter_weight,
    relative_errors,
    singular_value_quantiles,
    subspace_share,
)
from swarm.anchor.factor import exact_factors


def matrix(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def test_subspace_share_is_eta() -> None:
    gradient, memory = matrix(30, 20, 0), matrix(30, 20, 1)
    left, _, right_t = np.linalg.svd(memory.double().numpy(), full_matrices=False)
    inside = left[:, :4].T @ gradient.double().numpy() @ right_t[:4].T
    expected = (inside**2).sum() / (gradient.double().numpy() ** 2).sum()
    assert subspace_share(gradient, exact_factors(memory, 4).factors) == pytest.approx(expected, rel=1e-4)
    assert subspace_share(memory, exact_factors(memory).factors) == pytest.approx(1.0, abs=1e-5)
    assert subspace_share(torch.zeros(30, 20), exact_factors(memory, 4).factors) == 0.0


def test_cosine_takes_a_set_of_gradients_as_one_vector() -> None:
    first = {"a": matrix(3, 4, 0), "b": matrix(2, 2, 1)}
    second = {"b": matrix(2, 2, 2), "a": matrix(3, 4, 3)}
    one = np.concatenate([first[n].double().numpy().ravel() for n in ("a", "b")])
    two = np.concatenate([second[n].double().numpy().ravel() for n in ("a", "b")])
    expected = one @ two / np.linalg.norm(one) / np.linalg.norm(two)
    assert gradient_cosine(first, second) == pytest.approx(expected, abs=1e-12)
    assert gradient_cosine(first, {n: -1e-30 * t for n, t in first.items()}) == pytest.approx(-1.0, abs=1e-6)
    assert gradient_cosine(first, {n: 0 * t for n, t in first.items()}) == 0.0
    with pytest.raises(ValueError, match="'b'"):
        gradient_cosine(first, {"a": first["a"]})
    with pytest.raises(ValueError, match=r"a: \(3, 4\) in one set, \(4, 3\)"):
        gradient_cosine(first, {**second, "a": second["a"].T})


def test_relative_errors_are_per_matrix() -> None:
    exact = {"a": matrix(3, 4, 0), "zero": torch.zeros(2)}
    found = {"a": exact["a"] * 1.5, "zero": torch.zeros(2)}
    errors = relative_errors(found, exact)
    assert errors["a"] == pytest.approx(0.5, rel=1e-6)
    assert errors["zero"] == 0.0
    assert relative_errors({**found, "zero": torch.ones(2)}, exact)["zero"] == math.inf


def test_quantiles_and_mean_weight_are_those_of_all_singular_values() -> None:
    memories = {"a": matrix(6, 4, 0), "b": matrix(5, 9, 1)}
    factors = {name: exact_factors(each).factors for name, each in memories.items()}
    values = [np.linalg.svd(each.double().numpy(), compute_uv=False) for each in memories.values()]
    together = np.concatenate(values)
    np.testing.assert_allclose(
        singular_value_quantiles(factors), np.quantile(together, [0, 0.25, 0.5, 0.75, 1]), rtol=1e-5
    )
    absolute = np.mean(together / (together + 0.7))
    assert mean_filter_weight(factors, 0.7, is_relative=False) == pytest.approx(absolute, rel=1e-5)
    relative = np.mean(np.concatenate([s / (s + 0.7 * s[0]) for s in values]))
    assert mean_filter_weight(factors, 0.7, is_relative=True) == pytest.approx(relative, rel=1e-5)
    assert singular_value_quantiles({}) == ()
    assert mean_filter_weight({}, 0.7, is_relative=False) == 0.0
