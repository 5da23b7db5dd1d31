"""The tensors of a stage that training changes, in a fixed order.

Averaging, compressors, the optimizer, snapshots and digests see a stage as one flat fp32 vector laid out by
its TrainableSet, never as `parameters()`: frozen tensors do not travel, and two replicas whose schema hashes
are equal can add their vectors without looking at a name.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import Tensor

FrozenPart = Literal["embedding", "head", "norms"]
"""What a run may leave untrained: the token embedding, the output head, every norm."""


def frozen_parts(names: frozenset[str]) -> frozenset[FrozenPart]:
    """The names as frozen parts. Raises ValueError naming the ones that are none."""
    unknown = names - set(get_args(FrozenPart))
    if unknown:
        raise ValueError(f"cannot freeze {sorted(unknown)}; choose from {list(get_args(FrozenPart))}")
    return cast("frozenset[FrozenPart]", names)


@dataclass(frozen=True, slots=True)
class TrainableSet:
    """Layout of a stage's trainable tensors in one flat vector.

    names: tensor names of the uncut model, in the module's order.
    shapes: their shapes.
    offsets: index of each tensor's first element in the flat vector; they follow each other without gaps.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> TrainableSet:
        """The layout of named tensors, in the mapping's order."""
        names, shapes, offsets, offset = [], [], [], 0
        for name, tensor in tensors.items():
            names.append(name)
            shapes.append(tuple(tensor.shape))
            offsets.append(offset)
            offset += tensor.numel()
        return cls(tuple(names), tuple(shapes), tuple(offsets))

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self.names)

    @property
    def numels(self) -> tuple[int, ...]:
        """Elements of each tensor."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def numel(self) -> int:
        """Elements of the flat vector."""
        return sum(self.numels)

    @property
    def schema_hash(self) -> str:
        """sha256 (hex) of names and shapes in order."""
        text = json.dumps([[name, list(shape)] for name, shape in zip(self.names, self.shapes, strict=True)])
        return hashlib.sha256(text.encode()).hexdigest()

    def empty(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
        """A zero vector of this layout: [numel]."""
        return torch.zeros(self.numel, dtype=dtype, device=device)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Named views into a flat vector [numel]; writing to a view writes to the vector.

        Raises ValueError if the vector has another length.
        """
        self._check_flat(flat)
        parts = torch.split(flat, list(self.numels))
        return {
            name: part.view(shape) for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }

    def flatten(self, tensors: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """Copy named tensors of any dtype into `out` [numel] (a new fp32 vector if None) and return it.

        Raises ValueError naming missing or unexpected tensors or a wrong shape.
        """
        self.check(tensors)
        if out is None:
            out = torch.empty(self.numel, dtype=torch.float32, device=self._device(tensors))
        with torch.no_grad():
            for name, view in self.views(out).items():
                view.copy_(tensors[name])
        return out

    def write(self, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Copy the flat vector into the named tensors in place, rounding to their dtype.

        This is how fp32 masters become the module's compute weights after a step.
        Raises ValueError as `flatten` does.
        """
        self.check(tensors)
        with torch.no_grad():
            for name, view in self.views(flat).items():
                tensors[name].copy_(view)

    def take_gradients(self, tensors: Mapping[str, Tensor], accumulator: Tensor) -> None:
        """Add every tensor's `.grad` to the flat accumulator [numel] (fp32) and clear it.

        A tensor without a gradient adds nothing.
        Raises ValueError as `flatten` does.
        """
        self.check(tensors)
        with torch.no_grad():
            for name, view in self.views(accumulator).items():
                gradient = tensors[name].grad
                if gradient is not None:
                    view.add_(gradient)
                    tensors[name].grad = None

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless `tensors` has exactly this set's names and shapes."""
        missing = [name for name in self.names if name not in tensors]
        known = set(self.names)
        unexpected = [name for name in tensors if name not in known]
        if missing or unexpected:
            raise ValueError(
                f"tensors do not fit the trainable set: missing {missing}, unexpected {unexpected}"
            )
        for name, shape in zip(self.names, self.shapes, strict=True):
            if tuple(tensors[name].shape) != shape:
                raise ValueError(f"{name} must have shape {shape}, got {tuple(tensors[name].shape)}")

    def _check_flat(self, flat: Tensor) -> None:
        """Raise ValueError unless `flat` is a vector of this layout's length."""
        if flat.ndim != 1 or flat.numel() != self.numel:
            raise ValueError(f"flat vector must be [{self.numel}], got {tuple(flat.shape)}")

    def _device(self, tensors: Mapping[str, Tensor]) -> torch.device:
        """Device of the first tensor (CPU for an empty set)."""
        return tensors[self.names[0]].device if self.names else torch.device("cpu")
