"""What the two ends of a boundary see while the run trains, for priors that its own peers make."""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar

import torch
from torch import Tensor

from swarm.activation.base import BoundaryCodec, ByteCount, CodecKey, Layout, Payload
from swarm.activation.basis import document_positions
from swarm.activation.calibrate import BoundarySamples
from swarm.activation.tokens import SampledTokens


class Recording:
    """States and gradients of one boundary's newest `window` tokens (of whole microbatches, at least one)."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._seen: deque[tuple[CodecKey, Tensor, Tensor]] = deque()
        self._hidden: dict[tuple[int, ...], Tensor] = {}

    def hidden(self, states: Tensor, key: CodecKey) -> None:
        """The sender's states [B, T, H], before they are coded."""
        self._hidden[_name(key)] = states.detach().flatten(0, 1).float().clone()

    def gradient(self, gradient: Tensor, key: CodecKey) -> None:
        """The receiver's gradient [B, T, H] of the same microbatch, before it is coded."""
        hidden = self._hidden.pop(_name(key))
        self._seen.append((key, hidden, gradient.detach().flatten(0, 1).float().clone()))
        while sum(len(each) for _, each, _ in self._seen) - len(self._seen[0][1]) >= self._window:
            self._seen.popleft()

    def samples(self) -> BoundarySamples:
        """All of them. Raises ValueError before the first microbatch."""
        if not self._seen:
            raise ValueError("nothing has crossed the boundary yet")
        taken = []
        for key, hidden, _ in self._seen:
            assert key.token_ids is not None
            taken.append((key.token_ids, key.document_starts, torch.arange(len(hidden))))
        return BoundarySamples(
            hidden=torch.cat([hidden for _, hidden, _ in self._seen]),
            gradient=torch.cat([gradient for _, _, gradient in self._seen]),
            offsets=torch.cat(
                [document_positions(key.document_starts).flatten() for key, _, _ in self._seen]
            ),
            tokens=SampledTokens(tuple(taken)),
        )


def _name(key: CodecKey) -> tuple[int, ...]:
    return key.step, *key.sample_ids.tolist()


class RecordedCodec(BoundaryCodec):
    """A codec that shows a recording what it encodes."""

    name: ClassVar[str] = "recorded"

    def __init__(self, codec: BoundaryCodec, recording: Recording) -> None:
        self._codec, self._recording = codec, recording

    def layout(self, key: CodecKey) -> Layout:
        """The codec's."""
        return self._codec.layout(key)

    def gradient_layout(self, key: CodecKey) -> Layout:
        """The codec's."""
        return self._codec.gradient_layout(key)

    def byte_count(self, key: CodecKey) -> ByteCount:
        """The codec's."""
        return self._codec.byte_count(key)

    def encode(self, hidden: Tensor, key: CodecKey) -> Payload:
        """The codec's, seen."""
        self._recording.hidden(hidden, key)
        return self._codec.encode(hidden, key)

    def decode(self, payload: Payload, key: CodecKey) -> Tensor:
        """The codec's."""
        return self._codec.decode(payload, key)

    def encode_gradient(self, gradient: Tensor, key: CodecKey) -> Payload:
        """The codec's, seen."""
        self._recording.gradient(gradient, key)
        return self._codec.encode_gradient(gradient, key)

    def decode_gradient(self, payload: Payload, key: CodecKey) -> Any:
        """The codec's."""
        return self._codec.decode_gradient(payload, key)
