"""Figures that say whether a prior fits the gradients: for reports, tests and benchmarks, not for the hot path.

All sums are in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from swarm.anchor.factor import Factors
from swarm.anchor.spectral import filter_weights


def subspace_share(gradient: Tensor, factors: Factors) -> float:
    """eta_r = ||U' g V||_F^2 / ||g||_F^2 of a gradient [m, n] (arXiv 2609.14339, figure 2); 0 for a zero gradient.

    A random [m, n] matrix has r^2 / (m n).
    """
    exact = gradient.double()
    whole = float(exact.square().sum())
    inside = factors.left.double().T @ exact @ factors.right.double()
    return float(inside.square().sum()) / whole if whole > 0 else 0.0


def gradient_cosine(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Cosine of two sets of gradients, each taken as one vector; 0 if either is zero.

    With corrected and raw gradients it says how far the corrector turned them. Raises ValueError unless both have the
    same names and shapes.
    """
    _check_alike(first, second)
    inner = sum(float((first[name].double() * second[name].double()).sum()) for name in first)
    lengths = math.sqrt(_energy(first)) * math.sqrt(_energy(second))
    return inner / lengths if lengths > 0 else 0.0


def relative_errors(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """||found - exact||_F / ||exact||_F by name; infinite where only `exact` is zero.

    Raises ValueError unless both have the same names and shapes.
    """
    _check_alike(found, exact)
    errors: dict[str, float] = {}
    for name, wanted in exact.items():
        error = float((found[name].double() - wanted.double()).norm())
        size = float(wanted.double().norm())
        errors[name] = error / size if size > 0 else (math.inf if error > 0 else 0.0)
    return errors


def singular_value_quantiles(
    factors: Mapping[str, Factors], quantiles: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)
) -> tuple[float, ...]:
    """Quantiles of all singular values of a prior, to be read beside tau; empty without any."""
    if not factors:
        return ()
    values = torch.cat([each.values.double() for each in factors.values()])
    return tuple(torch.quantile(values, torch.tensor(quantiles, dtype=torch.float64)).tolist())


def mean_filter_weight(factors: Mapping[str, Factors], tau: float, *, is_relative: bool) -> float:
    """Mean of d_i over all triplets of a prior; 0 without any. Near 1 the filter only cuts at the rank."""
    if not factors:
        return 0.0
    weights = [filter_weights(each.values, tau, is_relative=is_relative) for each in factors.values()]
    return float(torch.cat(weights).double().mean())


def _energy(tensors: Mapping[str, Tensor]) -> float:
    """Squared length of a set of tensors."""
    return sum(float(tensor.double().square().sum()) for tensor in tensors.values())


def _check_alike(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless both have the same names and shapes."""
    if set(first) != set(second):
        raise ValueError(f"the sets differ in {sorted(set(first) ^ set(second))}")
    for name, tensor in first.items():
        if tensor.shape != second[name].shape:
            raise ValueError(
                f"{name}: {tuple(tensor.shape)} in one set, {tuple(second[name].shape)} in the other"
            )
