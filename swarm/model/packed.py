"""Packed rows as a transformers model understands them.

transformers recognises several documents in one row by their positions: where the position does not grow by
one, a document starts. Every family then builds its own block-diagonal masks (full, sliding or chunked
attention, boolean or additive) once per forward. Rows without a document start inside get no mask at all, but
the causal flag of the fused attention, which is the faster path. A batch is taken to that path as a whole.
"""

from __future__ import annotations

from typing import Any

import torch

from swarm.batch import Batch


def packed_kwargs(
    config: Any, batch: Batch, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Any]:
    """Keyword arguments for the forward of an uncut transformers causal LM on packed rows.

    The result has `input_ids` and `position_ids`, int64 [B, T] on `device`, and switches the key cache off,
    without which positions are not read as document starts. Equal to running every document alone.

    config: the model's configuration.
    dtype: compute type of the model; masks follow from it inside the model.
    Raises ValueError if a row is longer than the model's positions reach.
    """
    limit = getattr(config, "max_position_embeddings", None)
    tokens = batch.token_ids.shape[1]
    if limit is not None and tokens > limit:
        raise ValueError(f"rows of {tokens} tokens exceed the model's {limit} positions; use a shorter sequence_length")
    return {"input_ids": batch.token_ids.to(device), **packed_context(batch, device)}


def packed_context(batch: Batch, device: torch.device | str) -> dict[str, Any]:
    """What every stage passes to its trunk besides its input: `position_ids` int64 [B, T] and the flags."""
    return {
        "position_ids": batch.positions().to(device),
        "attention_mask": None,
        "use_cache": False,
    }
