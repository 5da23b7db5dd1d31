"""What an anchor remembers of its clean gradients: an exponential moving average per weight matrix.

    M <- beta M + (1 - beta) G_anc        (arXiv 2609.14339; M starts at 0, without bias correction)

The matrices are the linear maps of the decoder layers. Fused experts are three-dimensional and not among them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Refusal = Literal["unknown", "misshapen", "non_finite", "too_old", "early", "repeated"]
"""Why a clean gradient is not taken: a name that is no target, a wrong shape or no floating dtype, NaN or infinity,
older than `max_staleness`, of a step that has not been, not newer than what the memory holds."""

_IN_A_LAYER = re.compile(r"\.\d+\.")
_NO_LINEAR_MAP = re.compile(r"norm|router|embed|^gate$|_gate$", re.IGNORECASE)


def target_matrices(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """The matrices that have a prior, with their shapes [m, n], in the mapping's order.

    shapes: trainable tensors by their name in the uncut model. The rule, for every family: a two-dimensional
    `weight` inside a numbered layer, of a module that is no norm, embedding or router. These are attention's q, k,
    v, o and the MLP's gate, up, down, under whatever name and however fused the family has them; the vocabulary's
    matrices, biases and norms are left out.
    """
    targets: dict[str, tuple[int, int]] = {}
    for name, shape in shapes.items():
        *modules, leaf = name.split(".")
        is_weight = leaf == "weight" and len(shape) == 2 and _IN_A_LAYER.search(name) is not None
        if is_weight and not any(_NO_LINEAR_MAP.search(module) for module in modules):
            targets[name] = (shape[0], shape[1])
    return targets


@dataclass(frozen=True, slots=True)
class Ingestion:
    """What came of one set of clean gradients: matrices taken, and refused ones by reason."""

    taken: int
    refused: Mapping[Refusal, int]


class GradientMemory:
    """Moving averages of clean gradients, fp32 [m, n] each.

    shapes: the matrices (`target_matrices`). beta: decay per gradient. max_staleness: steps after which a gradient
    is refused. `refused` counts refusals by reason over the memory's life.

    Every ingestion makes new tensors, so that what `matrices` returned may be factored meanwhile.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, int]], *, beta: float, max_staleness: int) -> None:
        self.refused: Counter[Refusal] = Counter()
        self._shapes = dict(shapes)
        self._beta = beta
        self._max_staleness = max_staleness
        self._matrices: dict[str, Tensor] = {}
        self._steps: dict[str, int] = {}

    @property
    def matrices(self) -> dict[str, Tensor]:
        """The averages so far, fp32 [m, n] by name, in the order of `shapes`; not to be written to."""
        return {name: self._matrices[name] for name in self._shapes if name in self._matrices}

    @property
    def source_step(self) -> int | None:
        """Step of the newest weights whose gradient was taken; None before the first one."""
        return max(self._steps.values(), default=None)

    def restore(self, matrices: Mapping[str, Tensor], source_step: int) -> None:
        """Take over averages (fp32 [m, n] by name) of an earlier life, whose newest gradient was of this step.

        Raises ValueError naming the first one that is no target, misshapen or not finite; nothing is changed then.
        """
        for name, matrix in matrices.items():
            if self._shapes.get(name) != tuple(matrix.shape) or matrix.dtype != torch.float32:
                raise ValueError(
                    f"{name} is {matrix.dtype} {tuple(matrix.shape)}, not {self._shapes.get(name)}"
                )
            if not bool(torch.isfinite(matrix).all()):
                raise ValueError(f"{name} holds values that are not finite")
        self._matrices = dict(matrices)
        self._steps = dict.fromkeys(matrices, source_step)

    def ingest(self, gradients: Mapping[str, Tensor], *, source_step: int, step: int) -> Ingestion:
        """Take a set of clean gradients (float [m, n] by name) into the averages.

        source_step: step of the weights they were computed at. step: the current one. Each matrix is taken or
        refused on its own; a refused one leaves its average as it was.
        """
        refused: Counter[Refusal] = Counter()
        taken = 0
        for name, gradient in gradients.items():
            reason = self._refusal(name, gradient, source_step, step)
            if reason is not None:
                refused[reason] += 1
                continue
            average = gradient.detach().to(torch.float32, copy=True).mul_(1.0 - self._beta)
            if name in self._matrices:
                average.add_(self._matrices[name].to(average.device), alpha=self._beta)
            self._matrices[name] = average
            self._steps[name] = source_step
            taken += 1
        self.refused.update(refused)
        return Ingestion(taken, dict(refused))

    def _refusal(self, name: str, gradient: Tensor, source_step: int, step: int) -> Refusal | None:
        """Why this gradient is not taken, or None."""
        if name not in self._shapes:
            return "unknown"
        if source_step > step:
            return "early"
        if step - source_step > self._max_staleness:
            return "too_old"
        # A packet that comes twice would count twice, and an older one would undo what newer ones said.
        if source_step <= self._steps.get(name, -1):
            return "repeated"
        if tuple(gradient.shape) != self._shapes[name] or not gradient.is_floating_point():
            return "misshapen"
        # A sum is finite only if all its terms are.
        if not bool(torch.isfinite(gradient.sum(dtype=torch.float32))):
            return "non_finite"
        return None


def coding_bias(dense: Mapping[str, Tensor], coded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Dense less coded gradient of one batch, fp32 by name: what corrector `bias` remembers.

    Raises ValueError unless both have the same names and shapes.
    """
    if set(dense) != set(coded):
        raise ValueError(f"dense and coded gradients differ in {sorted(set(dense) ^ set(coded))}")
    for name, gradient in dense.items():
        if gradient.shape != coded[name].shape:
            raise ValueError(
                f"{name}: dense gradient {tuple(gradient.shape)}, coded one {tuple(coded[name].shape)}"
            )
    return {name: gradient.float() - coded[name].float() for name, gradient in dense.items()}
