"""An anchor's pass: a few microbatches, unmasked, through a snapshot of all stages.

What it yields are the boundaries' dense hidden states and the gradients with respect to them (arXiv 2609.14339:
the anchor circuit never takes an optimizer step). Weights get no gradients, unless a corrector wants them
(`gradients`), so a pass costs about two forwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from swarm.activation.calibrate import BoundarySamples
from swarm.activation.config import BasisConfig
from swarm.anchor.gradients import WeightGradients
from swarm.anchor.span import SpanPass
from swarm.batch import Batch
from swarm.data.order import samples_from_far_end
from swarm.manifest import RunManifest
from swarm.model.stage import StageModel


def pass_samples(manifest: RunManifest, version: int) -> list[int]:
    """Samples of the pass through a version: equal at every anchor, others in every pass, the last that training
    reaches, and not those of the initial priors.
    """
    count = manifest.anchors.microbatches * manifest.rows_per_microbatch
    number = sum(manifest.keeps_snapshot(step) for step in range(version))
    codec = manifest.codec
    calibration = codec.calibration_microbatches if isinstance(codec, BasisConfig) else 0
    skip = calibration * manifest.rows_per_microbatch + number * count
    return samples_from_far_end(manifest.seed, manifest.data.train_samples, count, skip=skip)


class AnchorModel:
    """All stages of a run, one after another.

    stages: stages 0 to P-1 with the weights of any version; they belong to the anchor from here on.
    """

    def __init__(self, stages: Sequence[StageModel]) -> None:
        self._stages = list(stages)
        self._parameters = [dict(stage.causal.named_parameters()) for stage in self._stages]
        for parameters in self._parameters:
            for parameter in parameters.values():
                parameter.requires_grad_(False)

    @property
    def stages(self) -> int:
        """Number of stages P."""
        return len(self._stages)

    @property
    def models(self) -> tuple[StageModel, ...]:
        """The stages, first to last."""
        return tuple(self._stages)

    def load(self, stage: int, weights: Mapping[str, Tensor]) -> None:
        """Take a snapshot's trained weights of one stage, in any float dtype, by the uncut model's names.

        Raises ValueError naming the first tensor that is missing, of another shape, or not finite; nothing is
        changed then.
        """
        trainable = self._stages[stage].trainable_set
        for name, shape in zip(trainable.names, trainable.shapes, strict=True):
            tensor = weights.get(name)
            if tensor is None or tuple(tensor.shape) != tuple(shape):
                found = "missing" if tensor is None else str(tuple(tensor.shape))
                raise ValueError(f"snapshot of stage {stage}: {name} is {found}, expected {tuple(shape)}")
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"snapshot of stage {stage}: {name} holds values that are not finite")
        with torch.no_grad():
            for name in trainable.names:
                self._parameters[stage][name].copy_(weights[name])

    def boundary_samples(
        self,
        batches: Sequence[Batch],
        max_tokens: int,
        *,
        seed: int = 0,
        gradients: WeightGradients | None = None,
    ) -> list[BoundarySamples]:
        """Samples of every boundary, at most `max_tokens` each, drawn evenly from the batches.

        The gradients are those of each microbatch's mean token loss. seed: of the draw. gradients: collects the
        weights' in the same backwards. Raises ValueError without batches or boundaries.
        """
        if not batches or self.stages < 2:
            raise ValueError(f"{len(batches)} microbatches through {self.stages} stages give no samples")
        whole = SpanPass(self._stages, batches, max_tokens, is_last=True, seed=seed, gradients=gradients)
        for index in range(whole.microbatches):
            whole.forward(index, None)
            whole.backward(index, None)
        return whole.samples()
