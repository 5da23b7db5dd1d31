"""Sum of token losses over a large vocabulary with bounded memory and no recomputation.

Logits of a microbatch can be the largest tensor of a whole stage (8192 tokens x 49152 words in fp32: 1.6 GB).
They are made chunk by chunk; with a scalar loss the gradient of a chunk is known up to the factor that
arrives at backward, so it is taken at once and the chunk's logits are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGIT_ELEMENTS_PER_CHUNK = 1 << 25
"""Logits of one chunk: 128 MiB in fp32. Larger chunks are hardly faster."""

Head = Callable[[Tensor], Tensor]


def token_loss_sum(
    hidden: Tensor, labels: Tensor, head: Head, parameters: Sequence[Tensor], vocabulary: int
) -> Tensor:
    """Sum of the cross entropies of `labels` under `head(hidden)`: fp32 scalar, differentiable once.

    hidden: [N, H] final hidden states, loss positions only.
    labels: int64 [N].
    head: [n, H] -> logits [n, V]; row by row.
    parameters: every tensor `head` may send a gradient to.
    vocabulary: V, sizes the chunks.
    """
    chunk = max(1, LOGIT_ELEMENTS_PER_CHUNK // max(1, vocabulary))
    if labels.numel() == 0:
        return hidden.float().sum() * 0.0
    if labels.numel() <= chunk:
        return _cross_entropy(head(hidden), labels)
    differentiable = hidden.requires_grad or any(parameter.requires_grad for parameter in parameters)
    if not (torch.is_grad_enabled() and differentiable):
        parts = zip(torch.split(hidden, chunk), torch.split(labels, chunk), strict=True)
        return torch.stack([_cross_entropy(head(states), targets) for states, targets in parts]).sum()
    result: Tensor = _ChunkedLoss.apply(hidden, labels, head, chunk, *parameters)  # type: ignore[no-untyped-call]
    return result


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed cross entropy in fp32."""
    return F.cross_entropy(logits.float(), labels, reduction="sum")


def _loss_and_gradient(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross entropy (fp32 scalar) and its gradient, softmax - one-hot, in the logits' dtype [n, V].

    Written out because autograd's own path makes twice as many passes over n x V elements. The log of the
    softmax's denominator is the largest logit minus the log of the largest probability, which is at least 1/V.
    """
    probabilities = torch.softmax(logits.float(), dim=-1)
    denominators = logits.amax(dim=-1).float() - probabilities.amax(dim=-1).log()
    targets = labels.unsqueeze(1)
    loss = (denominators - logits.gather(1, targets).squeeze(1).float()).sum()
    probabilities.scatter_add_(1, targets, torch.full_like(targets, -1, dtype=probabilities.dtype))
    return loss, probabilities.to(logits.dtype)


class _ChunkedLoss(torch.autograd.Function):
    """Loss and its gradient, chunk by chunk, in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, labels: Tensor, head: Head, chunk: int, *parameters: Tensor
    ) -> Tensor:
        """Sum of the chunks' losses; their gradients are saved for backward."""
        wanted = [parameter for parameter in parameters if parameter.requires_grad]
        hidden_wanted = ctx.needs_input_grad[0]
        hidden_gradient = torch.empty_like(hidden) if hidden_wanted else None
        # fp32, or each chunk's contribution would be rounded to the running sum's bf16.
        sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in wanted]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, labels.numel(), chunk):
            part = hidden[start : start + chunk].detach().requires_grad_(hidden_wanted)
            with torch.enable_grad():
                logits = head(part)
            loss, logit_gradient = _loss_and_gradient(logits.detach(), labels[start : start + chunk])
            inputs = [part, *wanted] if hidden_wanted else wanted
            gradients = list(torch.autograd.grad(logits, inputs, logit_gradient))
            if hidden_gradient is not None:
                hidden_gradient[start : start + chunk] = gradients.pop(0)
            for running, gradient in zip(sums, gradients, strict=True):
                running.add_(gradient)
            total += loss
        ctx.hidden_gradient = hidden_gradient
        ctx.parameter_gradients = [
            running.to(parameter.dtype) for running, parameter in zip(sums, wanted, strict=True)
        ]
        ctx.parameter_wanted = [parameter.requires_grad for parameter in parameters]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """The saved gradients times the loss's own gradient."""
        # A Python number stays exact in bf16 arithmetic; 1/N rounded to bf16 would bias every gradient.
        factor = upstream.item()
        hidden_gradient = ctx.hidden_gradient
        if hidden_gradient is not None:
            hidden_gradient = hidden_gradient * factor
        saved = iter(ctx.parameter_gradients)
        parameter_gradients: list[Tensor | None] = []
        for wanted in ctx.parameter_wanted:
            gradient = next(saved) if wanted else None
            parameter_gradients.append(None if gradient is None else gradient * factor)
        return (hidden_gradient, None, None, None, *parameter_gradients)
