"""An anchor's pass: a few microbatches, unmasked, through a snapshot of all stages.

What it yields are the boundaries' dense hidden states and the gradients with respect to them (arXiv 2609.14339:
the anchor circuit never takes an optimizer step). Weights get no gradients, unless a corrector wants them
(`gradients`), so a pass costs about two forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from swarm.activation.basis import document_positions
from swarm.activation.calibrate import BoundarySamples, join_samples
from swarm.activation.config import BasisConfig
from swarm.anchor.gradients import WeightGradients
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
        progress: Callable[[int, int], None] | None = None,
        gradients: WeightGradients | None = None,
    ) -> list[BoundarySamples]:
        """Samples of every boundary, at most `max_tokens` each, drawn evenly from the batches.

        The gradients are those of each microbatch's mean token loss. seed: of the draw. progress: called with
        batches done and their number. gradients: collects the weights' in the same backwards. Raises ValueError
        without batches or boundaries.
        """
        if not batches or self.stages < 2:
            raise ValueError(f"{len(batches)} microbatches through {self.stages} stages give no samples")
        generator = torch.Generator().manual_seed(seed)
        per_batch = max(1, max_tokens // len(batches))
        parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self.stages - 1)]
        offsets: list[Tensor] = []
        taken: list[tuple[Tensor, Tensor, Tensor]] = []
        loss_tokens = sum(batch.loss_tokens for batch in batches)
        for done, batch in enumerate(batches):
            if gradients is not None:
                gradients.share = batch.loss_tokens / max(1, loss_tokens)
            chosen = torch.randperm(batch.tokens, generator=generator)[:per_batch]
            offsets.append(document_positions(batch.document_starts).reshape(-1).cpu()[chosen])
            taken.append((batch.token_ids, batch.document_starts, chosen))
            for part, states in zip(parts, self._pass(batch), strict=True):
                gradient = states.grad if states.grad is not None else torch.zeros_like(states)
                here = chosen.to(states.device)
                hidden, gradient = (x.flatten(0, 1)[here].float().cpu() for x in (states.detach(), gradient))
                part.append((hidden, gradient))
            if progress is not None:
                progress(done + 1, len(batches))
        return join_samples(parts, offsets, taken)

    def _pass(self, batch: Batch) -> list[Tensor]:
        """One forward and backward: the boundaries' states [B, T, H], their gradients in `.grad`."""
        states: list[Tensor] = []
        with torch.enable_grad():
            hidden: Tensor | None = None
            for stage in self._stages[:-1]:
                hidden = stage(batch, hidden)
                if hidden.requires_grad:
                    hidden.retain_grad()
                else:  # the first boundary: nothing before it needs a graph
                    hidden = hidden.detach().requires_grad_(True)
                states.append(hidden)
            loss = self._stages[-1].loss_sum(batch, hidden) / max(1, batch.loss_tokens)
            loss.backward()  # type: ignore[no-untyped-call]
        return states
