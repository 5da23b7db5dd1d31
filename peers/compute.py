"""What a stage computes, on the compute thread: decode, forward, backward, encode, accumulate, apply.

Two implementations of one interface: the real one (`torch_compute`), and one that waits an exact time per
token and hands out payloads of the real size (`calibrated_compute`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from swarm.activation.base import BoundaryCodec, CodecKey, Payload
from swarm.batch import Batch
from swarm.gradient.compressor import Compressor
from swarm.gradient.gossip import Gossip
from swarm.gradient.outer import LocalSteps
from swarm.gradient.outer_config import Overlap
from swarm.manifest import RunManifest
from swarm.model.formats import compute_dtype
from swarm.model.stage import build_stage, stage_tensor_names
from swarm.model.trainable import TrainableSet
from swarm.plan import MicrobatchKey

Correct = Callable[[Mapping[str, Tensor], int], object]
"""Corrects a step's averaged gradients (fp32, by name) in place."""


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
    compressor: Compressor
    outer: LocalSteps | Gossip | None
    """The outer loop, if replicas take steps of their own. Then the weights that snapshots, sketches and slices are of
    are the global ones.
    """
    overlap: Overlap
    """Which step's average a commit settles."""

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

    def difference(self, loss_tokens: int, step: int, correct: Correct | None = None) -> Tensor:
        """With an outer loop: take the optimizer step on this replica's own gradient, on trial, and return global minus
        local weights: fp32 [numel]. `apply_outer` makes it good, anything else takes it back; a second call begins
        from what there was before the first. Without tokens, or if the gradient is not finite, no step is taken.
        """

    def apply_outer(self, average: Tensor, step: int, own: Tensor | None = None) -> float:
        """Take the outer step on the averaged difference of a step (fp32 [numel]), and empty the accumulator. own: this
        replica's own difference (fp32 [numel]), where the average comes later than the step.

        Returns the norm of the difference. Raises ValueError if it is not finite; then the step on trial is taken back.
        """

    def begin_from_shared(self) -> None:
        """With an outer loop: this replica's own weights, and what its outer loop keeps of them, become those that all
        replicas share. Without one nothing changes.
        """

    def apply(self, average: Tensor, step: int, correct: Correct | None = None) -> float:
        """Correct a copy of the average, take the optimizer step and empty the accumulator.

        Returns the norm of the gradient that is clipped.
        """

    def state(self) -> dict[str, Tensor]:
        """A copy of all trained state (weights in fp32, moments, the compressor's common state), to be written while
        training goes on.
        """

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave, here or at another replica; accumulator and graphs are emptied.

        Raises ValueError naming the first tensor that is missing, unexpected, of another shape or dtype, or not
        finite; nothing is changed then.
        """

    def initial_state(self, path: Path) -> dict[str, Tensor]:
        """The state of version 0, for `load_state`. path: the stage's artifact (not read when calibrated).

        Raises ValueError if the file does not hold this stage's tensors, OSError if it cannot be read.
        """

    def sketch(self) -> bytes:
        """The sketch of the weights (`swarm.sketch`): 256 bytes."""

    def read_slice(self, offset: int, count: int) -> Tensor:
        """A copy of `count` weights from `offset` on: fp32 [count] on the CPU.

        Raises ValueError for a span outside of the weights.
        """

    def write_slice(self, offset: int, values: Tensor) -> None:
        """Replace weights (not moments) from `offset` on by fp32 [count]; `apply` makes the module follow.

        Raises ValueError for a span outside of the weights, or values that are not finite; nothing is changed then.
        """


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
    dtype = compute_dtype(manifest.compute, device)
    freeze = frozenset(manifest.model.freeze)
    if microseconds_per_token is None:
        model = build_stage(
            config, manifest.model.cuts, stage, dtype=dtype, device=device, tensors=tensors, freeze=freeze
        )
        from peers.torch_compute import TorchCompute

        return TorchCompute(manifest, model, boundaries)
    from peers.calibrated_compute import CalibratedCompute

    return CalibratedCompute(manifest, stage_trainable(manifest, stage), boundaries, microseconds_per_token)


def stage_trainable(manifest: RunManifest, stage: int) -> TrainableSet:
    """The tensors of a stage that are trained, without building it."""
    section = manifest.model
    return trainable_of(model_config(manifest), section.cuts, stage, section.freeze)


def trainable_of(config: Any, cuts: Sequence[int], stage: int, freeze: Collection[str]) -> TrainableSet:
    """The tensors that are trained of a stage of a model of this transformers configuration."""
    parts = (("embedding", "embed_tokens"), ("head", "lm_head"), ("norms", "norm"))
    frozen = tuple(name for part, name in parts if part in freeze)
    return TrainableSet.of(
        {
            name: torch.empty(shape, device="meta")
            for name, shape in stage_tensor_names(config, cuts, stage).items()
            if not any(part in name for part in frozen)
        }
    )


def model_config(manifest: RunManifest) -> Any:
    """The run's transformers configuration."""
    from transformers import AutoConfig

    values = dict(manifest.model.config)
    return AutoConfig.for_model(values.pop("model_type"), **values)


def check_slice(offset: int, count: int, numel: int) -> None:
    """Raise ValueError unless a slice lies within the weights."""
    if offset < 0 or count < 0 or offset + count > numel:
        raise ValueError(f"a slice of {count} from {offset} on lies outside of {numel} weights")


def bytes_per_step(compressor: Compressor, every: int = 1) -> int:
    """Payload bytes of one stage's average, in the mean over `every` steps well after the first ones."""
    steps = range(1000 * every, 1001 * every)
    total = sum(phase.codec.nbytes(phase.elements) for step in steps for phase in compressor.phases(step))
    return total // every


COMPRESSOR, OUTER = "compressor.", "outer."
"""Prefixes of the compressor's and the outer loop's tensors in a stage's state."""


@dataclass(frozen=True, slots=True)
class StateParts:
    """A stage's state by whose it is. compressor, outer: under their own names; rest: weights and moments."""

    compressor: dict[str, Tensor]
    outer: dict[str, Tensor]
    rest: dict[str, Tensor]


def split_state(tensors: Mapping[str, Tensor]) -> StateParts:
    """A stage's state by whose it is."""
    parts = StateParts({}, {}, {})
    for name, tensor in tensors.items():
        for prefix, place in ((COMPRESSOR, parts.compressor), (OUTER, parts.outer), ("", parts.rest)):
            if name.startswith(prefix):
                place[name.removeprefix(prefix)] = tensor
                break
    return parts


def check_state(
    tensors: Mapping[str, Tensor], layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> None:
    """Raise ValueError unless these are finite tensors of exactly this layout: name -> shape, dtype."""
    missing = sorted(set(layout) - set(tensors))
    unexpected = sorted(set(tensors) - set(layout))
    if missing or unexpected:
        raise ValueError(
            f"the state does not fit this stage: {len(missing)} tensors missing {missing[:4]}, "
            f"{len(unexpected)} unexpected {unexpected[:4]}"
        )
    for name, (shape, dtype) in layout.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)}")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name} holds values that are not finite")


def take_step(
    compute: StageCompute,
    average: Tensor,
    step: int,
    taken: tuple[int, Tensor] | None,
    correct: Correct | None = None,
    own: Tensor | None = None,
) -> float:
    """Apply what a step's commit settles, as every member does: the leader's slice (offset, fp32) first, then the
    average, corrected if the group has named a prior. own: see `StageCompute.apply_outer`.

    Returns the gradient's norm. Raises ValueError if either is not finite: the average is not applied then, and
    the accumulator is empty.
    """
    if taken is not None:
        try:
            compute.write_slice(*taken)
        except ValueError:
            compute.clear()
            raise
    if compute.outer is None:
        return compute.apply(average, step, correct)
    start = compute.overlap.settled(step)
    if start is None:
        raise ValueError(f"the commit of step {step} settles no average")
    return compute.apply_outer(average, start, own)
