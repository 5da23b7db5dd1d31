"""What crosses a boundary between two stages, and the interface every codec implements.

A codec maps hidden states to a payload of named tensors and back. Everything that decides a payload's
layout (names, dtypes, shapes) follows from the manifest and the `CodecKey` alone, before anything is
encoded: a receiver knows the size of a frame before it reads it, and refuses every other one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from swarm.batch import Batch

Payload = dict[str, Tensor]
"""Named tensors in layout order, contiguous, on the codec's device."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Dtype and shape of one payload tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count * self.dtype.itemsize


Layout = dict[str, TensorSpec]


@dataclass(frozen=True, slots=True)
class CodecKey:
    """What both ends of a boundary know about a microbatch before its hidden states exist.

    step: training step (keys the random masks).
    sample_ids: int64 [B].
    document_starts: bool [B, T].
    priors: hash of the prior in force at every boundary of the run, "" for the run's initial one; empty where
        the initial ones are in force everywhere.
    token_ids: int64 [B, T]; None will do for codecs that predict nothing from them.
    """

    step: int
    sample_ids: Tensor
    document_starts: Tensor
    priors: tuple[str, ...] = ()
    token_ids: Tensor | None = None

    @classmethod
    def of(cls, batch: Batch, step: int, priors: tuple[str, ...] = ()) -> CodecKey:
        """The key of a batch at a step whose plan names these priors."""
        return cls(
            step=step,
            sample_ids=batch.sample_ids,
            document_starts=batch.document_starts,
            priors=priors,
            token_ids=batch.token_ids,
        )

    def prior(self, boundary: int) -> str:
        """Hash of the prior in force at a boundary, "" for the initial one."""
        return self.priors[boundary] if self.priors else ""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and tokens per row."""
        return int(self.document_starts.shape[0]), int(self.document_starts.shape[1])


@dataclass(frozen=True, slots=True)
class ByteCount:
    """Payload bytes of one microbatch in one direction, split as reports print them.

    coded: bytes of ordinary tokens. dense_positions: bytes of tokens sent uncoded.
    """

    coded: int
    dense_positions: int

    @property
    def total(self) -> int:
        """All payload bytes."""
        return self.coded + self.dense_positions


class PayloadError(ValueError):
    """A payload that does not have the layout its key demands, or holds a non-finite value."""


class BoundaryCodec(ABC):
    """Encode and decode hidden states [B, T, H] and their gradients at one boundary.

    Instances are immutable after construction and hold no per-microbatch state, so several microbatches may
    be in flight and a replay encodes to the same bytes.
    """

    name: ClassVar[str]

    @abstractmethod
    def layout(self, key: CodecKey) -> Layout:
        """Payload layout of the forward direction."""

    @abstractmethod
    def gradient_layout(self, key: CodecKey) -> Layout:
        """Payload layout of the backward direction."""

    @abstractmethod
    def byte_count(self, key: CodecKey) -> ByteCount:
        """Forward bytes (the backward direction has the same split)."""

    @abstractmethod
    def encode(self, hidden: Tensor, key: CodecKey) -> Payload:
        """Sender, forward. hidden: float [B, T, H]."""

    @abstractmethod
    def decode(self, payload: Payload, key: CodecKey) -> Tensor:
        """Receiver, forward. Returns [B, T, H] in the compute dtype. Raises PayloadError."""

    @abstractmethod
    def encode_gradient(self, gradient: Tensor, key: CodecKey) -> Payload:
        """Receiver, backward. gradient: float [B, T, H], with respect to the decoded states."""

    @abstractmethod
    def decode_gradient(self, payload: Payload, key: CodecKey) -> Tensor:
        """Sender, backward. Returns [B, T, H]. Raises PayloadError."""


def check_payload(payload: Payload, layout: Layout) -> None:
    """Raise PayloadError, naming tensor, expected and actual, unless the payload has exactly this layout."""
    if list(payload) != list(layout):
        raise PayloadError(f"payload tensors {list(payload)} where {list(layout)} was expected")
    for name, spec in layout.items():
        tensor = payload[name]
        if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
            raise PayloadError(
                f"payload tensor {name!r}: {tensor.dtype} {tuple(tensor.shape)} "
                f"where {spec.dtype} {spec.shape} was expected"
            )


def check_finite(payload: Payload, names: Iterable[str]) -> None:
    """Raise PayloadError, naming the tensor, if one of the named float tensors holds NaN or infinity.

    A sum is finite exactly when all its terms are (short of overflowing float32, which no sane activation
    does), and costs a tenth of an element-wise test.
    """
    for name in names:
        if not bool(torch.isfinite(payload[name].sum(dtype=torch.float32))):
            raise PayloadError(f"payload tensor {name!r} holds a non-finite value")
