"""Packed rows as a transformers model understands them.

transformers recognises several documents in one row by their positions: where the position does not grow by
one, a document starts. A family then builds its own block-diagonal masks (full, sliding or chunked
attention, boolean or additive), once per forward. Batches without a document start inside a row get no mask
at all, but the causal flag of the fused attention, which is the faster path. A few families do not hand their
positions to the masks; they are given finished masks, one for each kind of layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swarm.batch import Batch
from swarm.model.families import POSITIONS_DO_NOT_REACH_MASKS


def packed_kwargs(
    config: Any, batch: Batch, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Any]:
    """Keyword arguments for the forward of an uncut transformers causal LM on packed rows.

    The logits equal those of running every document alone. The result has `input_ids` and `position_ids`,
    int64 [B, T] on `device`, and has the key cache off, or positions would not be read as document starts.

    config: the model's configuration.
    dtype: compute dtype of the model (of masks, where they are given).
    Raises ValueError if a row is longer than the model's positions reach.
    """
    return {"input_ids": batch.token_ids.to(device), **packed_context(config, batch, dtype, device)}


def packed_context(
    config: Any, batch: Batch, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Any]:
    """`packed_kwargs` without the input: what every stage passes to its trunk besides hidden states."""
    limit = getattr(config, "max_position_embeddings", None)
    tokens = batch.token_ids.shape[1]
    if limit is not None and tokens > limit:
        raise ValueError(
            f"rows of {tokens} tokens exceed the model's {limit} positions; use a shorter sequence_length"
        )
    mask: dict[str, Tensor] | None = None
    if config.model_type in POSITIONS_DO_NOT_REACH_MASKS:
        documents = batch.documents().to(device)
        mask = {
            "full_attention": document_mask(documents, None, dtype),
            "sliding_attention": document_mask(documents, config.sliding_window, dtype),
        }
    return {"position_ids": batch.positions().to(device), "attention_mask": mask, "use_cache": False}


def document_mask(documents: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, 1, T, T]: 0 where a query (third axis) sees a key (fourth), else the lowest `dtype`.

    A query sees the keys of its own document up to itself, of those the last `window` (itself included).

    documents: int64 [B, T], each token's document within its row.
    """
    index = torch.arange(documents.shape[1], device=documents.device)
    distance = index[:, None] - index[None, :]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    same = documents[:, :, None] == documents[:, None, :]
    mask = torch.zeros(same.shape, dtype=dtype, device=documents.device)
    return mask.masked_fill_(~(same & visible), torch.finfo(dtype).min).unsqueeze(1)
