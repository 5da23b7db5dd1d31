"""Attention of packed rows document by document, with torch's causal kernel and no mask.

A mask over a packed row makes torch compute, and then discard, everything between documents and above the
diagonal; on a CPU that costs 1.7 times the causal kernel on the documents themselves ([4, 9, 1024, 64] in bf16,
two documents a row). The kernel, and so the precision, is the same. Stages of families whose attention takes
its implementation from transformers' registry use this; the uncut model keeps its masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swarm.batch import Batch

NAME = "swarm_documents"
"""Name in transformers' attention registry. It has no mask function there, so trunks build no masks for it."""

Lengths = tuple[tuple[int, ...], ...]
"""Lengths of the documents of every row, in order; each row's sum is T."""

_lengths: ContextVar[Lengths] = ContextVar("document_lengths")


def register() -> None:
    """Make the implementation known to transformers (any number of times)."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, document_attention)


def document_lengths(batch: Batch) -> Lengths:
    """Lengths of the documents of every row of a batch."""
    tokens = batch.token_ids.shape[1]
    rows = []
    for starts in batch.document_starts.cpu():
        edges = torch.cat([starts.nonzero().flatten(), torch.tensor([tokens])])
        rows.append(tuple(int(length) for length in edges.diff().tolist()))
    return tuple(rows)


@contextmanager
def documents_of(batch: Batch) -> Iterator[None]:
    """Within the context, `document_attention` works on this batch's rows."""
    token = _lengths.set(document_lengths(batch))
    try:
        yield
    finally:
        _lengths.reset(token)


def document_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within documents, in the form transformers' attention modules call it.

    query: [B, heads, T, D]; key, value: [B, key heads, T, D].
    sliding_window: number of keys a query sees at most, itself included.
    Returns ([B, T, heads, D], None).
    Raises ValueError when given a mask: nobody who builds one should land here.
    """
    if attention_mask is not None:
        raise ValueError("document attention takes no mask")
    lengths = _lengths.get()
    grouped = query.shape[1] != key.shape[1]
    windowed = sliding_window is not None and any(n > sliding_window for row in lengths for n in row)
    if not windowed and all(len(row) == 1 for row in lengths):
        whole = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
        )
        return whole.transpose(1, 2).contiguous(), None
    outputs = []
    for row, *states in zip(
        lengths, torch.split(query, 1), torch.split(key, 1), torch.split(value, 1), strict=True
    ):
        for q, k, v in zip(*(torch.split(state, list(row), dim=2) for state in states), strict=True):
            mask = _window_mask(q.shape[2], sliding_window, q.device)
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
            )
            outputs.append(attended.transpose(1, 2))
    return torch.cat(outputs, dim=1).view(query.shape[0], query.shape[2], *outputs[0].shape[2:]), None


def _window_mask(tokens: int, window: int | None, device: torch.device) -> Tensor | None:
    """Boolean mask [tokens, tokens] of a causal window, or None where the window reaches everything."""
    if window is None or tokens <= window:
        return None
    index = torch.arange(tokens, device=device)
    distance = index[:, None] - index[None, :]
    return (distance >= 0) & (distance < window)
