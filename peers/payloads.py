"""Microbatches in frames: token ids, document starts and loss positions in front of the codec's payload.

Every byte that arrives is checked here, before any tensor of it reaches the compute thread: sizes follow
from the plan and the manifest, ids from the vocabulary, loss positions from the document starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from peers.compute import Work
from peers.frames import ALIGNMENT, FrameError, aligned, pack_tensors, unpack_tensors
from peers.limits import LIMITS
from swarm.activation.base import BoundaryCodec, CodecKey, Layout, Payload
from swarm.batch import Batch, default_loss_positions
from swarm.manifest import RunManifest
from swarm.plan import MicrobatchKey, Plan

Spec = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class BatchFormat:
    """How a batch travels in a run: its row length and vocabulary."""

    sequence_length: int
    vocabulary_size: int

    @property
    def id_dtype(self) -> torch.dtype:
        """Token ids take two bytes where the vocabulary allows it."""
        return torch.uint16 if self.vocabulary_size <= 65_536 else torch.int32

    def specs(self, rows: int) -> list[Spec]:
        """Token ids, document starts and loss positions as tensors on the wire."""
        bits = -(-rows * self.sequence_length // 8)
        return [
            (self.id_dtype, (rows, self.sequence_length)),
            (torch.uint8, (bits,)),
            (torch.uint8, (bits,)),
        ]

    def nbytes(self, rows: int) -> int:
        """Bytes on the wire, alignment included."""
        return sum(aligned(int(np.prod(shape)) * dtype.itemsize) for dtype, shape in self.specs(rows))

    def pack(self, batch: Batch) -> list[memoryview]:
        """Buffers of a batch."""
        ids = batch.token_ids.cpu().to(self.id_dtype).contiguous()
        return pack_tensors([ids, _to_bits(batch.document_starts), _to_bits(batch.loss_positions)])

    def unpack(self, payload: memoryview, sample_ids: Sequence[int]) -> Batch:
        """A batch from exactly its bytes. Raises FrameError."""
        rows = len(sample_ids)
        ids, starts, losses = unpack_tensors(payload, self.specs(rows))
        shape = (rows, self.sequence_length)
        token_ids = ids.to(torch.int64)
        if int(token_ids.max()) >= self.vocabulary_size or int(token_ids.min()) < 0:
            raise FrameError("range", f"a token id is outside the vocabulary of {self.vocabulary_size}")
        document_starts, loss_positions = _from_bits(starts, shape), _from_bits(losses, shape)
        if not bool(document_starts[:, 0].all()):
            raise FrameError("batch", "a row does not begin with a document start")
        if bool((loss_positions & ~default_loss_positions(document_starts)).any()):
            raise FrameError("batch", "a loss position has no successor in its document")
        return Batch(token_ids, document_starts, loss_positions, torch.tensor(sample_ids, dtype=torch.int64))


def unpack_forward(
    payload: memoryview, key: MicrobatchKey, plan: Plan, form: BatchFormat, codec: BoundaryCodec
) -> tuple[Work, Payload]:
    """Batch and codec payload of a FORWARD. Raises FrameError."""
    sample_ids = samples_of(key, plan)
    head = form.nbytes(len(sample_ids))
    if payload.nbytes < head:
        raise FrameError("size", f"{payload.nbytes} payload bytes where the batch alone takes {head}")
    batch = form.unpack(payload[:head], sample_ids)
    codec_key = CodecKey.of(batch, key.step, plan.prior_hashes)
    return Work(key, batch, codec_key), unpack_layout(payload[head:], codec.layout(codec_key))


def unpack_layout(payload: memoryview, layout: Layout) -> Payload:
    """The tensors of a codec payload. Raises FrameError unless it has exactly this layout."""
    tensors = unpack_tensors(payload, [(spec.dtype, spec.shape) for spec in layout.values()])
    return dict(zip(layout, tensors, strict=True))


def samples_of(key: MicrobatchKey, plan: Plan) -> tuple[int, ...]:
    """Sample ids of a key. Raises FrameError if the plan has no such microbatch."""
    if key.slot < len(plan.slots):
        microbatches = plan.microbatches(key.slot)
        if key.microbatch < len(microbatches):
            return microbatches[key.microbatch]
    raise FrameError("key", f"the plan of step {plan.step} has no microbatch {key}")


def _to_bits(flags: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(flags.cpu().numpy().reshape(-1), bitorder="little"))


def _from_bits(bits: Tensor, shape: tuple[int, int]) -> Tensor:
    flat = np.unpackbits(bits.numpy(), count=shape[0] * shape[1], bitorder="little")
    return torch.from_numpy(flat.astype(np.bool_)).view(shape)


def largest_payload(manifest: RunManifest) -> int:
    """Bytes of the run's largest bulk payload: an uncoded fp32 microbatch, or a chunk of an average."""
    form = BatchFormat(manifest.data.sequence_length, manifest.data.vocabulary_size)
    # No codec sends more than fp32 would; each of its tensors is padded, and there are fewer than 64.
    hidden = 4 * manifest.tokens_per_microbatch * manifest.model.hidden_size + 64 * ALIGNMENT
    average = 4 * LIMITS.averaging_chunk_elements + ALIGNMENT
    return max(form.nbytes(manifest.rows_per_microbatch) + hidden, average)
