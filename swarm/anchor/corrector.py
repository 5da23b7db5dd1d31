"""Correct a step's averaged gradients by what the anchors' clean gradients said, matrix by matrix.

This is what all correctors have in common: which matrices have a usable prior, how much it still counts, and what
is reported. `spectral.py` has the filters, `merge.py` the mixtures, `registry.py` knows all of them.

A corrector stands between averaging and clipping: averaging, corrector, clipping, AdamW (arXiv 2609.14339). It is
a function of averaged gradient, prior and step alone, so replicas that hold the same prior stay equal. Whatever is
wrong with a prior, the gradient passes as it came, and the report says how often and why.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from swarm.anchor.config import PriorCorrectorConfig
from swarm.anchor.factor import COLD_NORM, Factors
from swarm.anchor.memory import target_matrices
from swarm.anchor.prior import BASIS_DTYPES, SpectralPrior

Passed = Literal[
    "off", "missing", "cold", "wrong_shape", "non_finite", "no_basis", "stale", "early", "gradient_non_finite"
]
"""Why a matrix's gradient was left as it was: alpha is 1; the prior has nothing for it; its memory is cold
(norm <= 1e-12); factors of another shape; NaN or infinity in them; columns that are not orthonormal, or a negative
singular value; a prior faded out; a prior of a later step; NaN or infinity in the gradient itself."""

ORTHONORMAL_TOLERANCE = 0.25
"""Largest ||U'U - I||_F of a usable basis: 30 times what bf16 rounding makes of 64 columns, and little enough that
U U' lengthens nothing by more than a quarter."""

_LARGEST_FLOAT = torch.finfo(torch.float32).max


class Energies(NamedTuple):
    """Squared lengths that one matrix's filter leaves behind, scalars: what the basis holds of G, <G, F>, ||F||^2."""

    in_basis: Tensor
    inner: Tensor
    filtered: Tensor


@dataclass(frozen=True, slots=True)
class CorrectionReport:
    """What a corrector did at a step.

    prior_step: step of the weights behind the prior, None without one. weight: what staleness left of the
    correction, 0 to 1. corrected: matrices that were changed. passed: matrices that were not, by reason.
    mean_filter_weight: mean d_i of the usable priors. eta: ||U'GV||_F^2 / ||G||_F^2 over all corrected matrices
    (one-sided: ||U'G||_F^2). cosine: of corrected with raw. relative_change: ||corrected - raw|| / ||raw||. These
    four are None where a corrector does not filter, or nothing was corrected; they take the bases for orthonormal.
    """

    step: int
    prior_step: int | None = None
    weight: float = 0.0
    corrected: int = 0
    passed: Mapping[Passed, int] = field(default_factory=dict)
    mean_filter_weight: float | None = None
    eta: float | None = None
    cosine: float | None = None
    relative_change: float | None = None


class Corrector(ABC):
    """Called with a step's averaged gradients. Immutable: a new prior gets a new corrector.

    keeps_descent: whether <G, corrected> >= alpha ||G||^2 whatever the prior holds, so that a poisoned one can weaken
    a step but never turn it around.
    """

    name: ClassVar[str]
    keeps_descent: ClassVar[bool]

    @abstractmethod
    def __call__(self, gradients: Mapping[str, Tensor], step: int) -> CorrectionReport:
        """Correct gradients (fp32, by their name in the uncut model) in place; others are left alone.

        Raises ValueError, before anything is changed, if a gradient with a prior is missing or misshapen.
        """


class NoCorrector(Corrector):
    """Leaves all gradients as they are."""

    name: ClassVar[str] = "none"
    keeps_descent: ClassVar[bool] = True

    def __call__(self, gradients: Mapping[str, Tensor], step: int) -> CorrectionReport:
        """Nothing."""
        return CorrectionReport(step)


class PriorCorrector(Corrector):
    """A corrector with a prior. Subclasses say what they keep of a matrix's factors, and how they apply it.

    shapes: the stage's trainable tensors. prior: None corrects nothing. device: of the gradients. Factors are checked
    and brought to fp32 here, once; unusable ones are left out and counted at every step.
    """

    def __init__(
        self,
        config: PriorCorrectorConfig,
        *,
        prior: SpectralPrior | None,
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device | str,
    ) -> None:
        self._alpha = config.alpha
        self._max_staleness = config.max_staleness
        self._prior_step = None if prior is None else prior.step
        self._shapes = target_matrices(shapes)
        self._unusable: Counter[Passed] = Counter()
        self._prepared: dict[str, Any] = {}
        if self._alpha == 1.0:
            return
        for name, shape in self._shapes.items():
            factors = None if prior is None else prior.factors.get(name)
            reason = "missing" if factors is None else unusable(factors, shape)
            if factors is None or reason is not None:
                self._unusable[reason or "missing"] += 1
            else:
                self._prepared[name] = self._prepare(_moved(factors, device))

    def __call__(self, gradients: Mapping[str, Tensor], step: int) -> CorrectionReport:
        """Correct in place; see `Corrector`. Costs two thin matmuls from each side of a matrix, and no other [m, n]."""
        self._check(gradients)
        if self._alpha == 1.0:
            # No arithmetic at all: 1.0 * G + 0.0 * F would still turn an infinity in F into NaN.
            return CorrectionReport(step, self._prior_step, passed={"off": len(self._shapes)})
        weight, outdated = self._weight(step)
        passed = Counter(self._unusable)
        if outdated is not None:
            passed[outdated] += len(self._prepared)
        if outdated is not None or not self._prepared:
            return CorrectionReport(step, self._prior_step, weight, passed=dict(passed))
        # All norms before the first correction: one wait for the device instead of one per matrix.
        norms = torch.stack([torch.linalg.vector_norm(gradients[name]) for name in self._prepared]).tolist()
        share = weight * (1.0 - self._alpha)
        raw, energies = 0.0, []
        for (name, prepared), norm in zip(self._prepared.items(), norms, strict=True):
            if not math.isfinite(norm):
                passed["gradient_non_finite"] += 1
                continue
            raw += norm**2
            energies.append(self._correct(gradients[name], prepared, share))
        return CorrectionReport(
            step,
            self._prior_step,
            weight,
            corrected=len(energies),
            passed=dict(passed),
            mean_filter_weight=self._mean_filter_weight(),
            **_measures(raw, [each for each in energies if each is not None], share),
        )

    @abstractmethod
    def _prepare(self, factors: Factors) -> Any:
        """What of a matrix's factors (checked, fp32, on the device) is needed at every step."""

    @abstractmethod
    def _correct(self, gradient: Tensor, prepared: Any, share: float) -> Energies | None:
        """Correct a finite gradient [m, n] in place; share is the weight of the correction, in (0, 1]."""

    def _mean_filter_weight(self) -> float | None:
        """Mean d_i of the usable priors; None where there is no filter."""
        return None

    def _weight(self, step: int) -> tuple[float, Passed | None]:
        """What staleness leaves of the correction, and why that is nothing, if it is."""
        if self._prior_step is None:
            return 0.0, None
        if step < self._prior_step:
            return 0.0, "early"
        weight = fade(step - self._prior_step, self._max_staleness)
        return weight, None if weight > 0.0 else "stale"

    def _check(self, gradients: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless every gradient with a prior is there, fp32, in its shape."""
        for name in self._prepared:
            gradient = gradients.get(name)
            if gradient is None:
                raise ValueError(f"{name} has a prior and no gradient")
            if tuple(gradient.shape) != self._shapes[name] or gradient.dtype != torch.float32:
                raise ValueError(
                    f"gradient of {name} is {gradient.dtype} {tuple(gradient.shape)} where float32 "
                    f"{self._shapes[name]} was expected"
                )


def fade(staleness: int, max_staleness: int) -> float:
    """What staleness (steps) leaves of a correction: 1 up to max_staleness / 2, then falling linearly to 0.

    The paper only drops anchor gradients older than about 30 steps. That a prior fades, and over which half, is our
    choice: a correction that ends from one step to the next changes the size of the gradient at once.
    """
    return min(1.0, max(0.0, 2.0 * (max_staleness - staleness) / max_staleness))


def unusable(factors: Factors, shape: tuple[int, int]) -> Passed | None:
    """Why factors cannot correct a gradient [m, n], or None. Costs r^2 (m + n)."""
    left, values, right = factors.left, factors.values, factors.right
    if left.ndim != 2 or values.ndim != 1 or right.ndim != 2 or factors.shape != shape:
        return "wrong_shape"
    rank = factors.rank
    if not 1 <= rank <= min(shape) or left.shape[1] != rank or right.shape[1] != rank:
        return "wrong_shape"
    if left.dtype not in BASIS_DTYPES or right.dtype not in BASIS_DTYPES or values.dtype != torch.float32:
        return "wrong_shape"
    # The sum of the singular values bounds every element of U diag(s) V'.
    if not bool(torch.isfinite(values).all()) or float(values.double().sum()) > _LARGEST_FLOAT:
        return "non_finite"
    if bool((values < 0).any()):
        return "no_basis"
    if float(values.double().norm()) <= COLD_NORM:
        return "cold"
    for basis in (left.float(), right.float()):
        if not bool(torch.isfinite(basis).all()):
            return "non_finite"
        difference = basis.T @ basis - torch.eye(rank, device=basis.device)
        # "not <=": huge columns make this infinite or NaN.
        if not float(difference.norm()) <= ORTHONORMAL_TOLERANCE:
            return "no_basis"
    return None


def _moved(factors: Factors, device: torch.device | str) -> Factors:
    """The factors in fp32 on a device."""
    left, values, right = (
        tensor.detach().to(device=device, dtype=torch.float32).contiguous()
        for tensor in (factors.left, factors.values, factors.right)
    )
    return Factors(left, values, right)


def _measures(raw: float, energies: list[Energies], share: float) -> dict[str, float]:
    """eta, cosine and relative change from squared lengths; nothing without them, or for zero gradients.

    With P = (1 - share) G + share F both follow from ||G||^2, <G, F> and ||F||^2.
    """
    if not energies or raw == 0.0:
        return {}
    in_basis, inner, filtered = (
        torch.stack([torch.stack(each) for each in energies]).double().sum(dim=0).tolist()
    )
    keep = 1.0 - share
    corrected = keep**2 * raw + 2 * keep * share * inner + share**2 * filtered
    cosine = (keep * raw + share * inner) / math.sqrt(raw * corrected) if corrected > 0 else 0.0
    change = share * math.sqrt(max(0.0, raw - 2 * inner + filtered) / raw)
    return {"eta": in_basis / raw, "cosine": min(1.0, cosine), "relative_change": change}
