"""A stage that really computes: torch on the compute thread."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peers.compute import COMPRESSOR, Boundaries, Correct, Work, check_slice, check_state, split_state
from swarm.activation.base import Payload
from swarm.gradient.registry import build_compressor
from swarm.manifest import RunManifest
from swarm.model.stage import StageModel
from swarm.optim import StageOptimizer
from swarm.plan import MicrobatchKey
from swarm.sketch import sketch

WEIGHT, OPTIMIZER = "weight.", "optimizer."
"""Prefixes of the names in a stage's state."""


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
        self.compressor = build_compressor(manifest.averaging.compressor, self.trainable, manifest.seed)
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

    def apply(self, average: Tensor, step: int, correct: Correct | None = None) -> float:
        """See StageCompute."""
        try:
            gradient = average.to(self._accumulator.device, copy=correct is not None)
            if correct is not None:
                correct(self.trainable.views(gradient), step)
            norm = self._optimizer.apply(gradient, step, self._manifest.total_steps)
        finally:
            # Also when the gradient was refused: a slice may have been written before.
            self.trainable.write(self._optimizer.master, self._parameters)
            self.clear()  # graphs too, of replays that came too late: their weights are gone
        return norm

    def state(self) -> dict[str, Tensor]:
        """See StageCompute."""
        weights = self.trainable.views(self._optimizer.master)
        tensors = {WEIGHT + name: tensor.detach().cpu().clone() for name, tensor in weights.items()}
        for name, tensor in self._optimizer.state_dict().items():
            tensors[OPTIMIZER + name] = tensor.detach().cpu().clone()
        tensors |= {COMPRESSOR + name: tensor for name, tensor in self.compressor.common_state().items()}
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """See StageCompute. A state without moments, or the compressor's, is one before the first step."""
        shapes = zip(self.trainable.names, self.trainable.shapes, strict=True)
        layout = {WEIGHT + name: (shape, torch.float32) for name, shape in shapes}
        if any(name.startswith(OPTIMIZER) for name in tensors):
            layout |= {OPTIMIZER + name: spec for name, spec in self._optimizer.state_layout().items()}
        common, rest = split_state(tensors)
        check_state(rest, layout)
        self.compressor.load_common_state(common)
        master = self._optimizer.master
        moments = {
            name.removeprefix(OPTIMIZER): tensor
            for name, tensor in tensors.items()
            if name.startswith(OPTIMIZER)
        }
        self._optimizer.load_state_dict(moments)
        weights = {name: tensors[WEIGHT + name] for name in self.trainable.names}
        self.trainable.flatten(weights, out=master)
        self.trainable.write(master, self._parameters)
        self.clear()

    def initial_state(self, path: Path) -> dict[str, Tensor]:
        """See StageCompute. Rounded to the compute dtype, as the masters are that a new stage begins with."""
        state: dict[str, Tensor] = {}
        try:
            with safe_open(str(path), framework="pt", device="cpu") as opened:
                for name, parameter in self._parameters.items():
                    state[WEIGHT + name] = opened.get_tensor(name).to(parameter.dtype).float()
        except SafetensorError as error:
            raise ValueError(f"{path.name} does not hold this stage's tensors: {error}") from error
        return state

    def sketch(self) -> bytes:
        """See StageCompute."""
        return sketch(self._optimizer.master, self._manifest.seed)

    def read_slice(self, offset: int, count: int) -> Tensor:
        """See StageCompute."""
        check_slice(offset, count, self.trainable.numel)
        return self._optimizer.master[offset : offset + count].detach().cpu().clone()

    def write_slice(self, offset: int, values: Tensor) -> None:
        """See StageCompute."""
        check_slice(offset, values.numel(), self.trainable.numel)
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"the slice from {offset} on holds values that are not finite")
        with torch.no_grad():
            self._optimizer.master[offset : offset + values.numel()].copy_(values)

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
