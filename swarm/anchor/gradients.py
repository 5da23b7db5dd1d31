"""Clean weight gradients from an anchor's passes, and what coding the boundaries makes of them.

The gradient of a pass is that of the mean token loss over all its loss tokens, the same that the fast circuit
averages (arXiv 2609.14339: G_anc). It is summed in fp32 as backwards run, matrix by matrix, so that nothing of the
size of the model is kept for each microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle

from swarm.activation.base import BoundaryCodec, CodecKey
from swarm.anchor.corrector import Corrector
from swarm.anchor.diagnostics import gradient_cosine
from swarm.anchor.memory import target_matrices
from swarm.batch import Batch
from swarm.model.stage import StageModel


def stage_targets(stage: StageModel) -> dict[str, tuple[int, int]]:
    """The trained matrices of a stage that have a corrector's prior, with their shapes."""
    trainable = stage.trainable_set
    return target_matrices(dict(zip(trainable.names, trainable.shapes, strict=True)))


class WeightGradients:
    """Collects gradients of the target matrices while backwards run. Use as a context manager.

    stages: whose weights have no gradients otherwise. limit: of the elements collected; beyond it every k-th matrix is
    left. share: weight of the microbatch at hand in the mean; set it
    before each backward. sums: one mapping per stage, fp32 [m, n] by name, on the stage's device; a matrix that no
    backward has reached is 0.
    """

    def __init__(self, stages: Sequence[StageModel], limit: int | None = None) -> None:
        self.share = 1.0
        self.sums: list[dict[str, Tensor]] = []
        self._stages = stages
        whole = sum(rows * columns for stage in stages for rows, columns in stage_targets(stage).values())
        self._every = 1 if limit is None else max(1, -(-whole // limit))
        self._parameters: list[nn.Parameter] = []
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        """Begin to collect."""
        for stage in self._stages:
            parameters = dict(stage.causal.named_parameters())
            sums = {
                name: torch.zeros(shape, dtype=torch.float32, device=parameters[name].device)
                for name, shape in list(stage_targets(stage).items())[:: self._every]
            }
            for name, total in sums.items():
                parameter = parameters[name]
                parameter.requires_grad_(True)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._adder(total)))
                self._parameters.append(parameter)
            self.sums.append(sums)
        return self

    def __exit__(self, *_: object) -> None:
        """Weights have no gradients again."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters:
            parameter.requires_grad_(False)
            parameter.grad = None

    def _adder(self, total: Tensor) -> Any:
        def add(parameter: Tensor) -> None:
            if parameter.grad is not None:
                total.add_(parameter.grad, alpha=self.share)
            parameter.grad = None

        return add


@dataclass(frozen=True, slots=True)
class CodingFigures:
    """What coding the boundaries does to one batch.

    cosine: of the coded with the dense weight gradient. forward_errors, gradient_errors: by boundary,
    ||coded - exact||^2 / ||exact||^2 of the hidden states and of their gradients (the quantisation error).
    """

    cosine: float
    forward_errors: tuple[float, ...]
    gradient_errors: tuple[float, ...]


class _Probe:
    """Squared errors and sizes at one boundary."""

    def __init__(self) -> None:
        self.forward = [0.0, 0.0]
        self.gradient = [0.0, 0.0]

    @staticmethod
    def note(sums: list[float], coded: Tensor, exact: Tensor) -> None:
        """Add one tensor and what became of it."""
        sums[0] += float((coded.float() - exact.float()).double().square().sum())
        sums[1] += float(exact.double().square().sum())


class _Coded(torch.autograd.Function):
    """A boundary inside the graph: the receiver's states forward, the sender's gradient backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, codec: BoundaryCodec, key: CodecKey, probe: _Probe) -> Tensor:
        """decode(encode(hidden)): [B, T, H]."""
        ctx.codec, ctx.key, ctx.probe = codec, key, probe
        decoded = codec.decode(codec.encode(hidden.detach(), key), key).to(hidden.dtype)
        probe.note(probe.forward, decoded, hidden.detach())
        return decoded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """decode_gradient(encode_gradient(gradient)): [B, T, H]."""
        codec: BoundaryCodec = ctx.codec
        decoded = codec.decode_gradient(codec.encode_gradient(gradient, ctx.key), ctx.key).to(gradient.dtype)
        ctx.probe.note(ctx.probe.gradient, decoded, gradient)
        return decoded, None, None, None


def dense_gradients(
    stages: Sequence[StageModel], batches: Sequence[Batch], limit: int | None = None
) -> list[dict[str, Tensor]]:
    """Gradients of the mean token loss over the batches, without codecs; see `WeightGradients`."""
    return _gradients(stages, batches, None, 0, limit)[0]


def coded_gradients(
    stages: Sequence[StageModel],
    batches: Sequence[Batch],
    codecs: Sequence[BoundaryCodec],
    step: int,
    limit: int | None = None,
) -> tuple[list[dict[str, Tensor]], list[tuple[float, float]]]:
    """The same with every boundary coded, as at this step (it keys the random masks).

    Also returns the relative squared errors (forward, gradient) at each boundary. Raises ValueError unless there is
    one codec for each boundary.
    """
    if len(codecs) != len(stages) - 1:
        raise ValueError(f"{len(codecs)} codecs for {len(stages) - 1} boundaries")
    return _gradients(stages, batches, codecs, step, limit)


def _gradients(
    stages: Sequence[StageModel],
    batches: Sequence[Batch],
    codecs: Sequence[BoundaryCodec] | None,
    step: int,
    limit: int | None,
) -> tuple[list[dict[str, Tensor]], list[tuple[float, float]]]:
    total = sum(batch.loss_tokens for batch in batches)
    probes = [_Probe() for _ in stages[:-1]]
    with WeightGradients(stages, limit) as gradients, torch.enable_grad():
        for batch in batches:
            gradients.share = batch.loss_tokens / max(1, total)
            key, hidden = CodecKey.of(batch, step), None
            for boundary, stage in enumerate(stages[:-1]):
                hidden = stage(batch, hidden)
                if codecs is not None:
                    hidden = _Coded.apply(hidden, codecs[boundary], key, probes[boundary])  # type: ignore[no-untyped-call]
            loss = stages[-1].loss_sum(batch, hidden) / max(1, batch.loss_tokens)
            loss.backward()  # type: ignore[no-untyped-call]
    return gradients.sums, [(_ratio(probe.forward), _ratio(probe.gradient)) for probe in probes]


def coding_figures(
    dense: Sequence[Mapping[str, Tensor]],
    coded: Sequence[Mapping[str, Tensor]],
    errors: Sequence[tuple[float, float]],
) -> CodingFigures:
    """Figures of a batch whose dense and coded gradients are known, one mapping per stage.

    errors: as `coded_gradients` returns them.
    """
    return CodingFigures(
        cosine=gradient_cosine(_joined(dense), _joined(coded)),
        forward_errors=tuple(forward for forward, _ in errors),
        gradient_errors=tuple(gradient for _, gradient in errors),
    )


def corrector_gain(
    correctors: Sequence[Corrector],
    coded: Sequence[Mapping[str, Tensor]],
    clean: Sequence[Mapping[str, Tensor]],
    step: int,
) -> tuple[float, float]:
    """Whether correcting a coded gradient brings it nearer to a clean one of other samples: the cosines (raw,
    corrected) with it.

    correctors: of an earlier prior, one per stage. The gradients (one mapping per stage) are left as they are.
    """
    corrected: dict[str, Tensor] = {}
    for corrector, gradients in zip(correctors, coded, strict=True):
        changed = {name: gradient.clone() for name, gradient in gradients.items()}
        corrector(changed, step)
        corrected |= changed
    target = _joined(clean)
    return gradient_cosine(_joined(coded), target), gradient_cosine(corrected, target)


def without(
    whole: Sequence[Mapping[str, Tensor]], part: Sequence[Mapping[str, Tensor]], share: float
) -> list[dict[str, Tensor]]:
    """The mean over the rest of a set, given that over all of it and that over a part with this share of the loss
    tokens, in (0, 1).
    """
    return [
        {name: (mean - share * inner[name]) / (1.0 - share) for name, mean in outer.items()}
        for outer, inner in zip(whole, part, strict=True)
    ]


def _joined(stages: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for stage in stages for name, tensor in stage.items()}


def _ratio(sums: list[float]) -> float:
    return sums[0] / sums[1] if sums[1] > 0 else 0.0
