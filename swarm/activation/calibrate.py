"""Collect hidden states and gradients at the boundaries of the uncut model, for `fit`.

The model runs unmasked. Its weights get no gradients: the graph starts at the first boundary, where the
states are made a leaf, so a pass costs about two forwards and keeps the activations of the layers behind it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarm.activation.basis import document_positions
from swarm.activation.tokens import SampledTokens
from swarm.batch import IGNORED_LABEL, Batch
from swarm.model.packed import packed_kwargs
from swarm.model.plan import require_pipeline_plan


@dataclass(frozen=True, slots=True)
class BoundarySamples:
    """Samples of one boundary: hidden and gradient fp32 [n, H], offsets int64 [n] from the document start, and
    which tokens they are, for their features (`tokens.features`; the same at all boundaries).

    The gradients are those of each microbatch's mean token loss.
    """

    hidden: Tensor
    gradient: Tensor
    offsets: Tensor
    tokens: SampledTokens


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder layers of an uncut transformers causal LM. Raises NoPipelinePlan for families without."""
    layers: nn.ModuleList = getattr(model.base_model, require_pipeline_plan(model.config).layers)
    return layers


def cast_parameters_(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast a model's parameters in place, and not its buffers: rotary frequencies stay in fp32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def replace_hidden(output: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A decoder layer's output (a tensor, or a tuple that starts with it) with its states replaced."""
    if isinstance(output, tuple):
        return (function(output[0]), *output[1:])
    return function(output)


def collect_boundary_samples(
    model: Any,
    cuts: Sequence[int],
    batches: Sequence[Batch],
    dtype: torch.dtype,
    *,
    max_tokens: int = 16384,
    progress: Callable[[int, int], None] | None = None,
) -> list[BoundarySamples]:
    """Samples of every boundary, from one unmasked forward and backward per batch.

    cuts: index of the first layer of stages 1 .. P - 1. dtype: compute dtype; a model of another dtype is
    copied. max_tokens: samples kept per boundary, spread evenly over the batches; which tokens is decided by
    a fixed seed. progress(done, total) is called after every batch. The caller's model is left as it was.
    Raises ValueError without batches, or for a cut outside the model.
    """
    if not cuts:
        return []
    if not batches:
        raise ValueError("calibration needs at least one microbatch")
    layers = decoder_layers(model)
    if any(not 0 < cut < len(layers) for cut in cuts):
        raise ValueError(f"cuts {list(cuts)} must lie in 1..{len(layers) - 1}")
    if next(model.parameters()).dtype != dtype:
        model = copy.deepcopy(model)
        cast_parameters_(model, dtype)
        layers = decoder_layers(model)
    # Bounded memory: every batch leaves its share of tokens, whatever the batches' number and size.
    generator = torch.Generator().manual_seed(0)
    per_batch = max(1, max_tokens // len(batches))
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in cuts]
    offsets: list[Tensor] = []
    taken: list[tuple[Tensor, Tensor, Tensor]] = []
    restore = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    training = model.training
    model.eval()
    try:
        for parameter, _ in restore:
            parameter.requires_grad_(False)
        for done, batch in enumerate(batches):
            captured = _capture(model, layers, cuts, batch, dtype)
            chosen = torch.randperm(batch.tokens, generator=generator)[:per_batch]
            offsets.append(document_positions(batch.document_starts).reshape(-1).cpu()[chosen])
            taken.append((batch.token_ids, batch.document_starts, chosen))
            for part, states in zip(parts, captured, strict=True):
                assert states.grad is not None
                hidden, gradient = (
                    x.flatten(0, 1).cpu()[chosen].float() for x in (states.detach(), states.grad)
                )
                part.append((hidden, gradient))
            if progress is not None:
                progress(done + 1, len(batches))
    finally:
        for parameter, required in restore:
            parameter.requires_grad_(required)
        model.train(training)
    return join_samples(parts, offsets, taken)


def join_samples(
    parts: Sequence[Sequence[tuple[Tensor, Tensor]]],
    offsets: Sequence[Tensor],
    taken: Sequence[tuple[Tensor, Tensor, Tensor]],
) -> list[BoundarySamples]:
    """Samples of every boundary from those of every batch.

    parts: of each boundary and batch hidden and gradient [n, H]; offsets: of each batch int64 [n]; taken: of each
    batch what `SampledTokens` needs.
    """
    joined, tokens = torch.cat(list(offsets)), SampledTokens(tuple(taken))
    return [
        BoundarySamples(
            hidden=torch.cat([hidden for hidden, _ in part]),
            gradient=torch.cat([gradient for _, gradient in part]),
            offsets=joined,
            tokens=tokens,
        )
        for part in parts
    ]


def _capture(
    model: Any, layers: nn.ModuleList, cuts: Sequence[int], batch: Batch, dtype: torch.dtype
) -> list[Tensor]:
    """One forward and backward; returns the boundary states [B, T, H] with their `.grad` filled."""
    captured: list[Tensor] = []

    def keep(states: Tensor) -> Tensor:
        if not states.requires_grad:
            states = states.detach().requires_grad_(True)
        states.retain_grad()
        captured.append(states)
        return states

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        return replace_hidden(output, keep)

    handles = [layers[cut - 1].register_forward_hook(hook) for cut in cuts]
    try:
        device = next(model.parameters()).device
        batch = batch.to(device)
        with torch.enable_grad():
            logits = model(**packed_kwargs(model.config, batch, dtype, device)).logits
            loss = functional.cross_entropy(
                logits.flatten(0, 1).float(), batch.labels().flatten(), ignore_index=IGNORED_LABEL
            )
            loss.backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
    return captured
