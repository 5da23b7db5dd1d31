"""Mixtures: the memory's low-rank matrix M ~ U diag(s) V' itself enters the gradient.

    signed     alpha G + (1 - alpha) |G| sign(M)
    bias       G + (1 - alpha) B       B: memory of dense less coded gradients (`memory.coding_bias`)
    additive   alpha G + (1 - alpha) M

Unlike a filter these can add a direction that the gradient does not have, and turn it around: what the prior says
is trusted. A prior some twenty steps old has little in common with the gradient, and at a high learning rate such
a mixture diverges. They are there to be compared with, and for short distances between priors.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from torch import Tensor

from swarm.anchor.corrector import PriorCorrector
from swarm.anchor.factor import Factors


class _LowRank(NamedTuple):
    """U diag(s) [m, r] and V [n, r]: the matrix is their product."""

    scaled: Tensor
    right: Tensor


class _MergeCorrector(PriorCorrector):
    """What the mixtures have in common."""

    keeps_descent: ClassVar[bool] = False

    def _prepare(self, factors: Factors) -> _LowRank:
        return _LowRank(factors.left * factors.values, factors.right)


class SignedCorrector(_MergeCorrector):
    """Sizes of the raw gradient with the prior's signs; an element where M is 0 keeps its alpha share only."""

    name: ClassVar[str] = "signed"

    def _correct(self, gradient: Tensor, prepared: _LowRank, share: float) -> None:
        # |G| sign(M) = G sign(G sign(M)): one factor per element, built in the one [m, n] that M needs anyway.
        factor = (prepared.scaled @ prepared.right.T).sign_()
        factor.mul_(gradient).sign_().mul_(share).add_(1.0 - share)
        gradient.mul_(factor)


class BiasCorrector(_MergeCorrector):
    """Adds the remembered difference between dense and coded gradients."""

    name: ClassVar[str] = "bias"

    def _correct(self, gradient: Tensor, prepared: _LowRank, share: float) -> None:
        gradient.addmm_(prepared.scaled, prepared.right.T, alpha=share)


class AdditiveCorrector(_MergeCorrector):
    """Mixes the remembered clean gradient in."""

    name: ClassVar[str] = "additive"

    def _correct(self, gradient: Tensor, prepared: _LowRank, share: float) -> None:
        gradient.addmm_(prepared.scaled, prepared.right.T, beta=1.0 - share, alpha=share)
