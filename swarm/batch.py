"""A microbatch as every stage sees it: packed rows of token ids with their document starts.

The same few tensors travel with every FORWARD, so that each stage can build its attention masks and
positions, and the last stage its loss, without a data set of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED_LABEL = -100
"""Label of a position that carries no loss (the value torch's cross entropy ignores by default)."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows. B rows (samples) of T tokens each.

    token_ids: int64 [B, T].
    document_starts: bool [B, T]; True at the first token of a document; column 0 is always True, since
        attention never crosses a row.
    loss_positions: bool [B, T]; True where the next token is predicted: never in the last column and
        never where the next position starts a document.
    sample_ids: int64 [B]; the row's index in the run's data set (it keys the codecs' random masks).
    """

    token_ids: Tensor
    document_starts: Tensor
    loss_positions: Tensor
    sample_ids: Tensor

    def __post_init__(self) -> None:
        """Check shapes, so that a malformed batch fails where it is made.

        Raises ValueError with the offending shapes.
        """
        if self.token_ids.ndim != 2:
            raise ValueError(f"token_ids must be [rows, tokens], got {tuple(self.token_ids.shape)}")
        shape = self.token_ids.shape
        for name in ("document_starts", "loss_positions"):
            tensor: Tensor = getattr(self, name)
            if tensor.shape != shape or tensor.dtype != torch.bool:
                raise ValueError(
                    f"{name} must be bool {tuple(shape)}, got {tensor.dtype} {tuple(tensor.shape)}"
                )
        if self.sample_ids.shape != shape[:1]:
            raise ValueError(f"sample_ids must be [{shape[0]}], got {tuple(self.sample_ids.shape)}")
        if not bool(self.document_starts[:, 0].all()):
            raise ValueError("every row must begin with a document start")

    @property
    def rows(self) -> int:
        """Rows B."""
        return int(self.token_ids.shape[0])

    @property
    def tokens(self) -> int:
        """Tokens B * T."""
        return int(self.token_ids.numel())

    @property
    def loss_tokens(self) -> int:
        """Positions that carry a loss."""
        return int(self.loss_positions.sum())

    def positions(self) -> Tensor:
        """Position of every token within its document: int64 [B, T]."""
        index = torch.arange(self.token_ids.shape[1], device=self.token_ids.device).expand_as(self.token_ids)
        starts = torch.where(self.document_starts, index, torch.zeros_like(index)).cummax(dim=1).values
        return index - starts

    def documents(self) -> Tensor:
        """Ordinal of every token's document within its row: int64 [B, T], counted from 0."""
        return self.document_starts.long().cumsum(dim=1) - 1

    def labels(self) -> Tensor:
        """Next token id where `loss_positions`, else IGNORED_LABEL: int64 [B, T]."""
        labels = torch.full_like(self.token_ids, IGNORED_LABEL)
        shifted = self.token_ids[:, 1:]
        labels[:, :-1] = torch.where(
            self.loss_positions[:, :-1], shifted, torch.full_like(shifted, IGNORED_LABEL)
        )
        return labels

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        return Batch(
            token_ids=self.token_ids.to(device),
            document_starts=self.document_starts.to(device),
            loss_positions=self.loss_positions.to(device),
            sample_ids=self.sample_ids.to(device),
        )


def default_loss_positions(document_starts: Tensor) -> Tensor:
    """Every position whose successor lies in the same row and document: bool [B, T]."""
    positions = torch.zeros_like(document_starts)
    positions[:, :-1] = ~document_starts[:, 1:]
    return positions
