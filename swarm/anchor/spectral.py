"""Filters: what of the gradient lies in the clean gradients' singular directions passes, the rest is damped.

    d_i    = s_i / (s_i + tau)                                  Tikhonov weights
    G_filt = U diag(d) (U' G V) diag(d) V'                      two-sided, arXiv 2609.14339
    G_filt = U diag(d) U' G   or   G V diag(d) V'               one-sided
    G_proj = alpha G + (1 - alpha) G_filt

For any U, V and any d >= 0 both U diag(d) U' and V diag(d) V' are positive semidefinite, so
<G, G_filt> = ||diag(d)^(1/2) U' G V diag(d)^(1/2)||_F^2 >= 0 and <G, G_proj> >= alpha ||G||^2: a prior, however it
was made, can never turn a gradient around. With orthonormal U and V, G_filt is no longer than G either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from swarm.anchor.config import OneSidedConfig, SpectralConfig
from swarm.anchor.corrector import Energies, PriorCorrector
from swarm.anchor.factor import Factors
from swarm.anchor.prior import SpectralPrior


def filter_weights(values: Tensor, tau: float, *, is_relative: bool) -> Tensor:
    """Tikhonov weights d_i = s_i / (s_i + tau) of singular values s [r] >= 0, in fp32.

    is_relative: tau is a share of the largest one. A singular value of 0 has weight 0, also at tau = 0.
    """
    exact = values.double()
    level = tau * exact.max() if is_relative and exact.numel() else tau
    return torch.where(exact > 0, exact / (exact + level), torch.zeros_like(exact)).float()


class _TwoSided(NamedTuple):
    """U [m, r], d [r] and V [n, r] of a matrix."""

    left: Tensor
    weights: Tensor
    right: Tensor


class _OneSided(NamedTuple):
    """Basis [m, r] and d [r] of the filtered side; whether that is the right one."""

    basis: Tensor
    weights: Tensor
    is_right: bool


class SpectralCorrector(PriorCorrector):
    """The paper's two-sided filter."""

    name: ClassVar[str] = "spectral"
    keeps_descent: ClassVar[bool] = True

    def __init__(
        self,
        config: SpectralConfig,
        *,
        prior: SpectralPrior | None,
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device | str,
    ) -> None:
        self._config = config
        super().__init__(config, prior=prior, shapes=shapes, device=device)
        self._mean_weight = _mean([prepared.weights for prepared in self._prepared.values()])

    def _prepare(self, factors: Factors) -> _TwoSided:
        weights = filter_weights(factors.values, self._config.tau, is_relative=self._config.tau_is_relative)
        return _TwoSided(factors.left, weights, factors.right)

    def _correct(self, gradient: Tensor, prepared: _TwoSided, share: float) -> Energies:
        left, weights, right = prepared
        inner = left.T @ gradient @ right
        filtered = weights[:, None] * inner * weights
        gradient.addmm_(left @ filtered, right.T, beta=1.0 - share, alpha=share)
        return Energies(_square(inner), (inner * filtered).sum(dtype=torch.float64), _square(filtered))

    def _mean_filter_weight(self) -> float | None:
        return self._mean_weight


class OneSidedCorrector(PriorCorrector):
    """Filters the rows' or the columns' space only: less bias at the same rank, less noise removed.

    Directions are damped by d_i, not by d_i^2 as the diagonal of the two-sided filter is.
    """

    name: ClassVar[str] = "one_sided"
    keeps_descent: ClassVar[bool] = True

    def __init__(
        self,
        config: OneSidedConfig,
        *,
        prior: SpectralPrior | None,
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device | str,
    ) -> None:
        self._config = config
        super().__init__(config, prior=prior, shapes=shapes, device=device)
        self._mean_weight = _mean([prepared.weights for prepared in self._prepared.values()])

    def _prepare(self, factors: Factors) -> _OneSided:
        weights = filter_weights(factors.values, self._config.tau, is_relative=self._config.tau_is_relative)
        rows, columns = factors.shape
        is_right = self._config.side == "right" or (self._config.side == "shorter" and columns < rows)
        return _OneSided(factors.right if is_right else factors.left, weights, is_right)

    def _correct(self, gradient: Tensor, prepared: _OneSided, share: float) -> Energies:
        basis, weights, is_right = prepared
        # Filtering the columns of G is filtering the rows of its transpose, a view.
        oriented = gradient.T if is_right else gradient
        inner = basis.T @ oriented
        filtered = weights[:, None] * inner
        oriented.addmm_(basis, filtered, beta=1.0 - share, alpha=share)
        return Energies(_square(inner), (inner * filtered).sum(dtype=torch.float64), _square(filtered))

    def _mean_filter_weight(self) -> float | None:
        return self._mean_weight


def _square(tensor: Tensor) -> Tensor:
    """Squared Frobenius norm: fp64 scalar."""
    norm: Tensor = torch.linalg.vector_norm(tensor)
    return norm.double().square()


def _mean(weights: list[Tensor]) -> float | None:
    """Mean of all weights; None without any."""
    return float(torch.cat(weights).double().mean()) if weights else None
