"""A stage that waits instead of computing, for benchmarks of transport and scheduling."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from peers.compute import COMPRESSOR, Boundaries, Correct, Work, check_slice, check_state, split_state
from swarm.activation.base import BoundaryCodec, Payload
from swarm.gradient.averaging import build_averaging, build_outer
from swarm.gradient.outer_config import Overlap
from swarm.manifest import RunManifest
from swarm.model.trainable import TrainableSet
from swarm.plan import MicrobatchKey
from swarm.sketch import sketch

KEPT_PAYLOADS = 256


class CalibratedCompute:
    """Waits instead of computing; every payload has its real layout and constant content."""

    def __init__(
        self,
        manifest: RunManifest,
        trainable: TrainableSet,
        boundaries: Boundaries,
        microseconds_per_token: float,
    ) -> None:
        self.trainable = trainable
        self.compressor = build_averaging(manifest.averaging, trainable, manifest.total_steps, manifest.seed)
        self._boundaries = boundaries
        self._hidden_size = manifest.model.hidden_size
        self._seconds_per_token = microseconds_per_token * 1e-6
        self._payloads: dict[tuple[str, tuple[int, int], int, tuple[str, ...]], Payload] = {}
        self._zeros = trainable.empty()
        self.outer = build_outer(
            manifest.averaging, trainable, manifest.total_steps, self._zeros, manifest.seed
        )
        self.overlap = Overlap(manifest.averaging.outer.overlap, manifest.total_steps)

    def forward(self, work: Work, incoming: Payload | None) -> Payload:
        """See StageCompute."""
        self._wait(work, 1 / 3)
        return self._payload("forward", self._boundaries.outgoing, work)

    def backward(self, work: Work, returned: Payload) -> Payload | None:
        """See StageCompute."""
        self._wait(work, 2 / 3)
        return self._input_gradient(work)

    def finish(self, work: Work, incoming: Payload | None) -> tuple[Payload | None, float, int]:
        """See StageCompute. The loss is 0."""
        self._wait(work, 1.0)
        return self._input_gradient(work), 0.0, work.batch.loss_tokens

    def drop(self, key: MicrobatchKey) -> None:
        """Nothing is kept."""

    def clear(self) -> None:
        """Nothing is accumulated."""

    def contribution(self, loss_tokens: int) -> Tensor:
        """Zeros of the real size."""
        return self._zeros

    def difference(self, loss_tokens: int, step: int, correct: Correct | None = None) -> Tensor:
        """Zeros of the real size."""
        return self._zeros

    def apply_outer(self, average: Tensor, step: int, own: Tensor | None = None) -> float:
        """Nothing changes."""
        return 0.0

    def begin_from_shared(self) -> None:
        """Nothing changes."""

    def apply(self, average: Tensor, step: int, correct: Correct | None = None) -> float:
        """Nothing changes."""
        return 0.0

    def state(self) -> dict[str, Tensor]:
        """Zeros by the trainable names, and the compressor's common state."""
        weights = {
            f"weight.{name}": tensor.clone() for name, tensor in self.trainable.views(self._zeros).items()
        }
        return weights | {COMPRESSOR + name: x for name, x in self.compressor.common_state().items()}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """See StageCompute. No weights are kept."""
        shapes = zip(self.trainable.names, self.trainable.shapes, strict=True)
        parts = split_state(tensors)
        check_state(parts.rest, {f"weight.{name}": (shape, torch.float32) for name, shape in shapes})
        self.compressor.load_common_state(parts.compressor)

    def initial_state(self, path: Path) -> dict[str, Tensor]:
        """See StageCompute."""
        return self.state()

    def sketch(self) -> bytes:
        """See StageCompute. That of zeros."""
        return sketch(self._zeros[:1], 0)

    def read_slice(self, offset: int, count: int) -> Tensor:
        """See StageCompute."""
        check_slice(offset, count, self.trainable.numel)
        return self._zeros[offset : offset + count].clone()

    def write_slice(self, offset: int, values: Tensor) -> None:
        """See StageCompute. Nothing changes."""
        check_slice(offset, values.numel(), self.trainable.numel)

    def _input_gradient(self, work: Work) -> Payload | None:
        codec = self._boundaries.incoming
        return None if codec is None else self._payload("gradient", codec, work)

    def _payload(self, direction: str, codec: BoundaryCodec | None, work: Work) -> Payload:
        if codec is None:
            raise ValueError("the last stage has no boundary to send a forward through")
        # The layout of `basis` depends on the number of document starts and the prior, every other one on the shape
        # alone.
        key = work.codec_key
        place = (direction, key.shape, int(key.document_starts.sum()), key.priors)
        if place not in self._payloads:
            if len(self._payloads) > KEPT_PAYLOADS:
                self._payloads.clear()
            hidden = torch.zeros(*work.codec_key.shape, self._hidden_size)
            encode = codec.encode if direction == "forward" else codec.encode_gradient
            self._payloads[place] = encode(hidden, work.codec_key)
        return self._payloads[place]

    def _wait(self, work: Work, share: float) -> None:
        """Wait exactly: sleep for the most of it, spin for the rest."""
        deadline = time.perf_counter() + self._seconds_per_token * work.batch.tokens * share
        while (left := deadline - time.perf_counter()) > 0:
            if left > 1e-3:
                time.sleep(left - 5e-4)
