"""What a stage computes, on the compute thread: decode, forward, backward, encode, accumulate, apply.

Two implementations of one interface: the real one, and one that waits an exact time per token and hands
out payloads of the real size, for benchmarks of transport and scheduling.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from swarm.activation.base import BoundaryCodec, CodecKey, Payload
from swarm.batch import Batch
from swarm.manifest import RunManifest
from swarm.model.stage import StageModel, build_stage
from swarm.model.trainable import TrainableSet
from swarm.optim import StageOptimizer
from swarm.plan import MicrobatchKey


@dataclass(frozen=True, slots=True)
class Work:
    """One microbatch as the compute thread sees it."""

    key: MicrobatchKey
    batch: Batch
    codec_key: CodecKey


@dataclass(frozen=True, slots=True)
class Boundaries:
    """The codecs at a stage's two boundaries; None where the pipeline ends."""

    incoming: BoundaryCodec | None
    outgoing: BoundaryCodec | None


class StageCompute(Protocol):
    """What the stage worker asks of the compute thread."""

    trainable: TrainableSet

    def forward(self, work: Work, incoming: Payload | None) -> Payload:
        """Forward of a stage that is not the last; its graph is kept until `backward` or `drop`."""

    def backward(self, work: Work, returned: Payload) -> Payload | None:
        """Backward of a kept forward into the accumulator. Returns the input gradient's payload."""

    def finish(self, work: Work, incoming: Payload | None) -> tuple[Payload | None, float, int]:
        """The last stage: forward, loss, backward into the accumulator.

        Returns the input gradient's payload, the sum of token losses and the loss tokens.
        """

    def drop(self, key: MicrobatchKey) -> None:
        """Forget a kept forward."""

    def clear(self) -> None:
        """Empty the accumulator."""

    def contribution(self, loss_tokens: int) -> Tensor:
        """The accumulated gradient of the mean token loss: fp32 [numel]."""

    def apply(self, average: Tensor, step: int) -> float:
        """Take the optimizer step and empty the accumulator; returns the gradient's norm."""

    def state(self) -> dict[str, Tensor]:
        """A copy of all trained state (weights in fp32, moments), to be written while training goes on."""


class TorchCompute:
    """The real computation.

    Weights are kept in fp32; the module computes in the run's dtype. Gradients of (sum of token losses) /
    N_ref are accumulated in fp32 (design section 7, normalisation).
    """

    def __init__(self, manifest: RunManifest, model: StageModel, boundaries: Boundaries) -> None:
        self.trainable = model.trainable_set
        self._manifest = manifest
        self._model = model
        self._boundaries = boundaries
        self._parameters = model.named_trainable()
        self._accumulator = self.trainable.empty(model.device)
        master = self.trainable.flatten({name: p.detach() for name, p in self._parameters.items()})
        shapes = [torch.Size(shape) for shape in self.trainable.shapes]
        self._optimizer = StageOptimizer(manifest.optimizer, master, shapes, manifest.model.stages)
        self._graphs: dict[MicrobatchKey, tuple[Tensor | None, Tensor]] = {}

    def forward(self, work: Work, incoming: Payload | None) -> Payload:
        """See StageCompute."""
        hidden = self._decode(work, incoming)
        output = self._model(work.batch, hidden)
        self._graphs[work.key] = (hidden, output)
        codec = self._boundaries.outgoing
        if codec is None:
            raise ValueError("the last stage has no boundary to send a forward through")
        return codec.encode(output.detach(), work.codec_key)

    def backward(self, work: Work, returned: Payload) -> Payload | None:
        """See StageCompute. Raises PayloadError, keeping the graph, for a malformed payload."""
        codec = self._boundaries.outgoing
        if codec is None:
            raise ValueError("the last stage receives no gradient")
        gradient = codec.decode_gradient(returned, work.codec_key)
        hidden, output = self._graphs.pop(work.key)
        torch.autograd.backward(output, gradient.to(output.dtype))
        return self._collect(work, hidden)

    def finish(self, work: Work, incoming: Payload | None) -> tuple[Payload | None, float, int]:
        """See StageCompute."""
        hidden = self._decode(work, incoming)
        loss = self._model.loss_sum(work.batch, hidden)
        (loss / self._manifest.reference_loss_tokens).backward()  # type: ignore[no-untyped-call]
        return self._collect(work, hidden), float(loss.detach()), work.batch.loss_tokens

    def drop(self, key: MicrobatchKey) -> None:
        """See StageCompute."""
        self._graphs.pop(key, None)

    def clear(self) -> None:
        """See StageCompute."""
        self._accumulator.zero_()
        self._graphs.clear()

    def contribution(self, loss_tokens: int) -> Tensor:
        """See StageCompute."""
        scale = self._manifest.reference_loss_tokens / max(1, loss_tokens)
        return (self._accumulator * scale).cpu()

    def apply(self, average: Tensor, step: int) -> float:
        """See StageCompute."""
        try:
            norm = self._optimizer.apply(
                average.to(self._accumulator.device), step, self._manifest.total_steps
            )
            self.trainable.write(self._optimizer.master, self._parameters)
        finally:
            self._accumulator.zero_()
            self._graphs.clear()  # of replays that came too late: their weights are gone
        return norm

    def state(self) -> dict[str, Tensor]:
        """See StageCompute."""
        weights = self.trainable.views(self._optimizer.master)
        tensors = {f"weight.{name}": tensor.detach().cpu().clone() for name, tensor in weights.items()}
        for name, tensor in self._optimizer.state_dict().items():
            tensors[f"optimizer.{name}"] = tensor.detach().cpu().clone()
        return tensors

    def _decode(self, work: Work, incoming: Payload | None) -> Tensor | None:
        codec = self._boundaries.incoming
        if codec is None:
            return None
        if incoming is None:
            raise ValueError(f"microbatch {work.key} came without hidden states")
        return codec.decode(incoming, work.codec_key).detach().requires_grad_(True)

    def _collect(self, work: Work, hidden: Tensor | None) -> Payload | None:
        self.trainable.take_gradients(self._parameters, self._accumulator)
        codec = self._boundaries.incoming
        if codec is None or hidden is None or hidden.grad is None:
            return None
        return codec.encode_gradient(hidden.grad, work.codec_key)


class CalibratedCompute:
    """Waits instead of computing; every payload has its real layout and constant content."""

    def __init__(
        self, trainable: TrainableSet, boundaries: Boundaries, hidden_size: int, microseconds_per_token: float
    ) -> None:
        self.trainable = trainable
        self._boundaries = boundaries
        self._hidden_size = hidden_size
        self._seconds_per_token = microseconds_per_token * 1e-6
        self._payloads: dict[tuple[str, tuple[int, int], int], Payload] = {}
        self._zeros = trainable.empty()

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

    def apply(self, average: Tensor, step: int) -> float:
        """Nothing changes."""
        return 0.0

    def state(self) -> dict[str, Tensor]:
        """Zeros by the trainable names."""
        return {
            f"weight.{name}": tensor.clone() for name, tensor in self.trainable.views(self._zeros).items()
        }

    def _input_gradient(self, work: Work) -> Payload | None:
        codec = self._boundaries.incoming
        return None if codec is None else self._payload("gradient", codec, work)

    def _payload(self, direction: str, codec: BoundaryCodec | None, work: Work) -> Payload:
        if codec is None:
            raise ValueError("the last stage has no boundary to send a forward through")
        # The layout of `basis` depends on the number of document starts, every other one on the shape alone.
        place = (direction, work.codec_key.shape, int(work.codec_key.document_starts.sum()))
        if place not in self._payloads:
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


def build_compute(
    manifest: RunManifest,
    stage: int,
    tensors: Any,
    boundaries: Boundaries,
    *,
    device: str,
    microseconds_per_token: float | None,
) -> StageCompute:
    """The stage's computation. tensors: the stage file's path (ignored when calibrated).

    Raises ValueError if the file does not hold exactly this stage's tensors.
    """
    config = model_config(manifest)
    dtype = compute_dtype(manifest)
    freeze = frozenset(manifest.model.freeze)
    if microseconds_per_token is None:
        model = build_stage(
            config, manifest.model.cuts, stage, dtype=dtype, device=device, tensors=tensors, freeze=freeze
        )
        return TorchCompute(manifest, model, boundaries)
    from swarm.model.stage import stage_tensor_names

    shapes: Mapping[str, tuple[int, ...]] = stage_tensor_names(config, manifest.model.cuts, stage)
    frozen = tuple(
        name for part, name in (("embedding", "embed_tokens"), ("head", "lm_head")) if part in freeze
    )
    trained = {
        name: torch.empty(shape, device="meta")
        for name, shape in shapes.items()
        if not any(part in name for part in frozen)
    }
    trainable = TrainableSet.of(trained)
    return CalibratedCompute(trainable, boundaries, manifest.model.hidden_size, microseconds_per_token)


def compute_dtype(manifest: RunManifest) -> torch.dtype:
    """The run's compute dtype."""
    return torch.bfloat16 if manifest.compute == "bf16" else torch.float32


def model_config(manifest: RunManifest) -> Any:
    """The run's transformers configuration."""
    from transformers import AutoConfig

    values = dict(manifest.model.config)
    return AutoConfig.for_model(values.pop("model_type"), **values)
