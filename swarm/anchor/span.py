"""A pass through some of the stages: what an anchor does that holds not all of them.

A pass through all stages (`swarm.anchor.passes`) is one of these that takes nothing and gives nothing. At the ends:
dense hidden states come from the anchor before it and go to the one behind it, gradients the other way. The prior
of a boundary at an anchor's outgoing end is that anchor's: it has the states, and is sent their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarm.activation.basis import document_positions
from swarm.activation.calibrate import BoundarySamples, join_samples
from swarm.anchor.gradients import WeightGradients
from swarm.batch import Batch
from swarm.model.stage import StageModel


class SpanPass:
    """One pass. models: consecutive stages, whose weights need no gradients by themselves; is_last: whether theirs is
    the run's last stage.

    batches: the pass's microbatches, the same at every anchor of it. max_tokens: samples of each boundary, at most.
    seed: of the draw, equal at all anchors. gradients: collects the weights' in the same backwards. Raises ValueError
    without batches or stages.
    """

    def __init__(
        self,
        models: Sequence[StageModel],
        batches: Sequence[Batch],
        max_tokens: int,
        *,
        is_last: bool,
        seed: int = 0,
        gradients: WeightGradients | None = None,
    ) -> None:
        if not batches or not models:
            raise ValueError(f"{len(batches)} microbatches through {len(models)} stages give no samples")
        self._models, self._batches, self._is_last = list(models), list(batches), is_last
        self._gradients = gradients
        self._loss_tokens = max(1, sum(batch.loss_tokens for batch in batches))
        generator = torch.Generator().manual_seed(seed)
        each = max(1, max_tokens // len(batches))
        self._chosen = [torch.randperm(batch.tokens, generator=generator)[:each] for batch in batches]
        self._parts: list[list[tuple[Tensor, Tensor]]] = [
            [] for _ in range(len(models) - 1 if is_last else len(models))
        ]
        self._incoming: Tensor | None = None
        self._states: list[Tensor] = []
        self._loss: Tensor | None = None

    @property
    def microbatches(self) -> int:
        """Their number."""
        return len(self._batches)

    def shape(self, index: int) -> tuple[int, int, int]:
        """Shape [B, T, H] of a microbatch's hidden states and gradients."""
        rows, tokens = self._batches[index].token_ids.shape
        return rows, tokens, self._models[0].hidden_size

    def forward(self, index: int, incoming: Tensor | None) -> Tensor | None:
        """Run a microbatch through the stages. incoming: [B, T, H] of the stage before, None at stage 0.

        Returns [B, T, H] for the stage behind, None at the last. Graphs are kept until `backward`, of one microbatch.
        """
        batch = self._batches[index]
        self._states, self._loss = [], None
        with torch.enable_grad():
            hidden = incoming
            if hidden is not None:
                model = self._models[0]
                hidden = hidden.to(model.device, model.dtype).detach().requires_grad_(True)
            self._incoming = hidden
            for model in self._models[:-1] if self._is_last else self._models:
                hidden = model(batch, hidden)
                if hidden.requires_grad:
                    hidden.retain_grad()
                else:  # the first boundary: nothing before it needs a graph
                    hidden = hidden.detach().requires_grad_(True)
                self._states.append(hidden)
            if self._is_last:
                self._loss = self._models[-1].loss_sum(batch, hidden) / max(1, batch.loss_tokens)
                return None
        return self._states[-1].detach()

    def backward(self, index: int, gradient: Tensor | None) -> Tensor | None:
        """Go back through the stages, and keep the samples. gradient: [B, T, H] of what `forward` gave, None at the
        last stage. Returns the gradient of what it was given, None at stage 0.
        """
        if self._gradients is not None:
            self._gradients.share = self._batches[index].loss_tokens / self._loss_tokens
        if self._loss is not None:
            self._loss.backward()  # type: ignore[no-untyped-call]
        elif gradient is not None:
            output = self._states[-1]
            torch.autograd.backward(output, gradient.to(output.device, output.dtype))
        chosen = self._chosen[index]
        for part, states in zip(self._parts, self._states, strict=True):
            found = states.grad if states.grad is not None else torch.zeros_like(states)
            here = chosen.to(states.device)
            part.append((_rows(states.detach(), here), _rows(found, here)))
        self._states, self._loss, incoming = [], None, self._incoming
        self._incoming = None
        return None if incoming is None else incoming.grad

    def samples(self) -> list[BoundarySamples]:
        """Samples of the boundaries behind each of the stages, but the run's last. Raises ValueError if no microbatch
        has come back.
        """
        if self._parts and not self._parts[0]:
            raise ValueError("no microbatch has come back")
        batches = list(zip(self._batches, self._chosen, strict=True))
        offsets = [document_positions(b.document_starts).reshape(-1).cpu()[chosen] for b, chosen in batches]
        return join_samples(
            self._parts, offsets, [(b.token_ids, b.document_starts, chosen) for b, chosen in batches]
        )


def _rows(states: Tensor, chosen: Tensor) -> Tensor:
    return states.flatten(0, 1)[chosen].float().cpu()
