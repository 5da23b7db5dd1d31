"""Token-id features: what both ends of a boundary know of a microbatch before its hidden states exist.

Most of a hidden state's variance is a linear function of its token and of those before it. Every stage gets the
token ids, so what they predict need not be sent. The features are rows of the starting checkpoint's embedding,
frozen when the run is created; a run's table has the rows of those tokens that its training data holds, less their
mean, as int8 with one scale per row. All other tokens share the mean: a row of zeros.

Where the table and the normal equations of the fit would take more than 100 MB, the rows are their leading
principal components (weighted by how often a token occurs): of all projections to so many columns it keeps most of
what occurs. Both ends read the same bytes, so their features agree up to the rounding of sums. Nothing of an earlier
document enters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.activation.config import Prediction

BLOCKS: dict[Prediction, int] = {"none": 0, "token": 1, "context": 3}
"""Feature vectors of F columns that one token has."""

TOKENS_FILE = "tokens.safetensors"
"""Artifact name of a run's token table."""

TABLE_BUDGET_BYTES = 100_000_000
SMALLEST_FEATURES = 256
_LEVELS = 127
_CHUNK = 4096


class TokenTable:
    """The token table of a run, on one device.

    arrays: ids int32 [n], increasing; rows int8 [n, F]; scales fp32 [n]. Raises ValueError for anything else.
    """

    def __init__(self, arrays: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        missing = {"ids", "rows", "scales"} - set(arrays)
        if missing:
            raise ValueError(f"token table: lacks {sorted(missing)}")
        ids, rows, scales = arrays["ids"], arrays["rows"], arrays["scales"]
        count = ids.numel()
        if (ids.dtype, rows.dtype, scales.dtype) != (torch.int32, torch.int8, torch.float32):
            raise ValueError(f"token table: ids {ids.dtype}, rows {rows.dtype}, scales {scales.dtype}")
        if ids.ndim != 1 or rows.ndim != 2 or rows.shape[0] != count or tuple(scales.shape) != (count,):
            raise ValueError(
                f"token table: ids {list(ids.shape)}, rows {list(rows.shape)}, scales {list(scales.shape)}"
            )
        if not count or not rows.shape[1] or int(ids[0]) < 0 or bool((ids[1:] <= ids[:-1]).any()):
            raise ValueError("token table: ids must increase from 0 or more, and rows must have columns")
        if not bool(torch.isfinite(scales).all()):
            raise ValueError("token table: scales hold a value that is not finite")
        # One more row, of zeros, for all other tokens.
        self._rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]).to(device)
        self._scales = torch.cat([scales, scales.new_zeros(1)]).to(device)
        place = torch.full((int(ids[-1]) + 2,), count, dtype=torch.int64)
        place[ids.long()] = torch.arange(count)
        self._place = place.to(device)

    @property
    def features(self) -> int:
        """Columns F."""
        return int(self._rows.shape[1])

    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows of tokens: fp32 [..., F] from int64 [...], on the table's device."""
        places = self._place[token_ids.to(self._place.device).clamp_max(self._place.numel() - 1)]
        return self._rows[places].float() * self._scales[places].unsqueeze(-1)


def make_token_table(embedding: Tensor, counts: Tensor, prediction: Prediction) -> dict[str, Tensor]:
    """Arrays of the table of a run, as `TokenTable` takes them.

    embedding: float [V, H], the input embedding of the starting checkpoint. counts: int64 [at most V], how often each
    token occurs in the training data (`torch.bincount` of all token ids will do). Raises ValueError if none does.
    """
    ids = counts.nonzero().squeeze(1)
    if not ids.numel():
        raise ValueError("no token occurs: there is nothing to predict from")
    embedding = embedding.detach().cpu()
    weights = counts[ids].double() / counts.sum()
    chunks = [slice(start, start + _CHUNK) for start in range(0, ids.numel(), _CHUNK)]
    mean = sum(weights[c] @ embedding[ids[c]].double() for c in chunks)
    width = feature_columns(int(embedding.shape[1]), ids.numel(), prediction)
    basis = None
    if width < embedding.shape[1]:
        covariance = torch.zeros(embedding.shape[1], embedding.shape[1], dtype=torch.float64)
        for c in chunks:
            centred = embedding[ids[c]].double() - mean
            covariance += centred.T @ (centred * weights[c].unsqueeze(1))
        basis = torch.linalg.eigh(covariance).eigenvectors.flip(1)[:, :width]
    rows = torch.empty(ids.numel(), width, dtype=torch.int8)
    scales = torch.empty(ids.numel())
    for c in chunks:
        centred = embedding[ids[c]].double() - mean
        kept = centred if basis is None else centred @ basis
        scale = (kept.abs().amax(dim=1) / _LEVELS).float()
        rows[c] = (
            (kept / scale.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)).round().to(torch.int8)
        )
        scales[c] = scale
    return {"ids": ids.to(torch.int32), "rows": rows, "scales": scales}


def feature_columns(hidden_size: int, tokens: int, prediction: Prediction) -> int:
    """Columns F of a table of so many tokens: H if table (int8) and normal equations (fp32 [c F, c F]) stay within
    the budget, else the most that do, at least `SMALLEST_FEATURES` (or H).
    """
    blocks = max(1, BLOCKS[prediction])

    def nbytes(columns: int) -> int:
        return tokens * columns + 4 * (blocks * columns) ** 2

    low, high = min(SMALLEST_FEATURES, hidden_size), hidden_size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if nbytes(middle) <= TABLE_BUDGET_BYTES else (low, middle - 1)
    return low


def running_mean(values: Tensor, document_starts: Tensor) -> Tensor:
    """Mean over the document so far, the token itself included: fp32 [B, T, C] from [B, T, C] and bool [B, T]."""
    rows, tokens = document_starts.shape
    index = torch.arange(tokens, device=document_starts.device).expand(rows, tokens)
    first = torch.where(document_starts, index, torch.zeros_like(index)).cummax(dim=1).values
    flat = (first + torch.arange(rows, device=first.device).unsqueeze(1) * tokens).reshape(-1)
    values = values.float()
    total = values.cumsum(dim=1)
    before = (total - values).flatten(0, 1).index_select(0, flat).view_as(values)
    return total.sub_(before).div_((index - first + 1).unsqueeze(2))


def previous(values: Tensor, document_starts: Tensor) -> Tensor:
    """The value of the token before, 0 at document starts: [B, T, C] from [B, T, C] and bool [B, T]."""
    shifted = torch.zeros_like(values)
    shifted[:, 1:] = values[:, :-1]
    return shifted.masked_fill_(document_starts.unsqueeze(2), 0.0)


def token_features(
    table: TokenTable, token_ids: Tensor, document_starts: Tensor, prediction: Prediction
) -> Tensor:
    """Features of every token: fp32 [B * T, c F], c = BLOCKS[prediction], from int64 [B, T] and bool [B, T]."""
    rows = table.embed(token_ids)
    starts = document_starts.to(rows.device)
    blocks = [rows]
    if prediction == "context":
        blocks += [previous(rows, starts), running_mean(rows, starts)]
    return torch.cat(blocks, dim=2).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Which tokens of which batches were sampled, with what their features need.

    batches: of each batch token_ids int64 [B, T], document_starts bool [B, T], and the flat indices, int64, of those
    that were taken.
    """

    batches: tuple[tuple[Tensor, Tensor, Tensor], ...]

    def features(self, table: TokenTable, prediction: Prediction) -> Tensor | None:
        """fp32 [n, c F] on the CPU, in the order of the samples; None for prediction "none"."""
        if prediction == "none":
            return None
        return torch.cat(
            [
                token_features(table, ids, starts, prediction).cpu()[chosen]
                for ids, starts, chosen in self.batches
            ]
        )
