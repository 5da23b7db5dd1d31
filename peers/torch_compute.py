"""A stage that really computes: torch on the compute thread."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peers.compute import COMPRESSOR, OUTER, Boundaries, Correct, Work, check_slice, check_state, split_state
from swarm.activation.base import Payload
from swarm.gradient.averaging import build_averaging, build_outer
from swarm.gradient.gossip import Gossip
from swarm.gradient.outer import LocalSteps
from swarm.gradient.outer_config import Overlap
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
        self.compressor = build_averaging(
            manifest.averaging, self.trainable, manifest.total_steps, manifest.seed
        )
        self._parameters = model.named_trainable()
        self._accumulator = self.trainable.empty(model.device)
        master = self.trainable.flatten({name: p.detach() for name, p in self._parameters.items()})
        shapes = [torch.Size(shape) for shape in self.trainable.shapes]
        self._optimizer = StageOptimizer(manifest.optimizer, master, shapes, manifest.model.stages)
        self.outer = build_outer(
            manifest.averaging, self.trainable, manifest.total_steps, master, manifest.seed
        )
        self.overlap = Overlap(manifest.averaging.outer.overlap, manifest.total_steps)
        self._before: tuple[Tensor, dict[str, Tensor]] | None = None
        """Local weights and moments before the step on trial."""
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
        self._undo()
        self._accumulator.zero_()
        self._graphs.clear()

    def contribution(self, loss_tokens: int) -> Tensor:
        """See StageCompute."""
        scale = self._manifest.reference_loss_tokens / max(1, loss_tokens)
        return (self._accumulator * scale).cpu()

    def difference(self, loss_tokens: int, step: int, correct: Correct | None = None) -> Tensor:
        """See StageCompute."""
        outer, optimizer = self._outer(), self._optimizer
        self._undo()
        if loss_tokens:
            gradient = self.contribution(loss_tokens).to(self._accumulator.device)
            if correct is not None:
                correct(self.trainable.views(gradient), step)
            moments = {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}
            self._before = optimizer.master.clone(), moments
            try:
                optimizer.apply(gradient, step, self._manifest.total_steps)
            except ValueError:  # not finite: this member's own affair; it has come no further by this step
                self._before = None
        return outer.difference(optimizer.master.cpu())

    def apply_outer(self, average: Tensor, step: int, own: Tensor | None = None) -> float:
        """See StageCompute."""
        outer, optimizer = self._outer(), self._optimizer
        norm = float(torch.linalg.vector_norm(average))
        try:
            with torch.no_grad():
                outer.apply(average, step, optimizer.master, own)
            self._before = None
        finally:
            self.clear()
            self.trainable.write(optimizer.master, self._parameters)
        return norm

    def begin_from_shared(self) -> None:
        """See StageCompute."""
        if self.outer is None:
            return
        self._before = None
        self.outer.load(self.outer.globals, self.outer.state())
        with torch.no_grad():
            self._optimizer.master.copy_(self.outer.globals)
        self.trainable.write(self._optimizer.master, self._parameters)

    def _outer(self) -> LocalSteps | Gossip:
        if self.outer is None:
            raise ValueError("this run averages every step")
        return self.outer

    def _undo(self) -> None:
        """Take the step on trial back, if there is one. The module has not followed it."""
        if self._before is not None:
            master, moments = self._before
            self._before = None
            with torch.no_grad():
                self._optimizer.master.copy_(master)
            self._optimizer.load_state_dict(moments)

    @property
    def _shared(self) -> Tensor:
        """The weights that all replicas have: fp32 [numel]."""
        return self._optimizer.master if self.outer is None else self.outer.globals

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
        weights = self.trainable.views(self._shared)
        moments = self._before[1] if self._before is not None else self._optimizer.state_dict()
        tensors = {WEIGHT + name: tensor.detach().cpu().clone() for name, tensor in weights.items()}
        for name, tensor in moments.items():
            tensors[OPTIMIZER + name] = tensor.detach().cpu().clone()
        tensors |= {COMPRESSOR + name: tensor for name, tensor in self.compressor.common_state().items()}
        if self.outer is not None:
            tensors |= {OUTER + name: tensor for name, tensor in self.outer.state().items()}
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """See StageCompute. A state without moments, or the compressor's, is one before the first step."""
        shapes = zip(self.trainable.names, self.trainable.shapes, strict=True)
        layout = {WEIGHT + name: (shape, torch.float32) for name, shape in shapes}
        if any(name.startswith(OPTIMIZER) for name in tensors):
            layout |= {OPTIMIZER + name: spec for name, spec in self._optimizer.state_layout().items()}
        parts = split_state(tensors)
        check_state(parts.rest, layout)
        if self.outer is not None:
            self.outer.check_state(parts.outer)
        elif parts.outer:
            raise ValueError(f"the state is of a run with an outer loop: {sorted(parts.outer)[:4]}")
        self.compressor.load_common_state(parts.compressor)
        self._before = None
        master = self._optimizer.master
        moments = {
            name.removeprefix(OPTIMIZER): tensor
            for name, tensor in tensors.items()
            if name.startswith(OPTIMIZER)
        }
        self._optimizer.load_state_dict(moments)
        weights = {name: tensors[WEIGHT + name] for name in self.trainable.names}
        self.trainable.flatten(weights, out=master)
        if self.outer is not None:
            self.outer.load(master, parts.outer)
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
        return sketch(self._shared, self._manifest.seed)

    def read_slice(self, offset: int, count: int) -> Tensor:
        """See StageCompute."""
        check_slice(offset, count, self.trainable.numel)
        return self._shared[offset : offset + count].detach().cpu().clone()

    def write_slice(self, offset: int, values: Tensor) -> None:
        """See StageCompute."""
        check_slice(offset, values.numel(), self.trainable.numel)
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"the slice from {offset} on holds values that are not finite")
        with torch.no_grad():
            self._shared[offset : offset + values.numel()].copy_(values)

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
