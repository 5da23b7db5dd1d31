"""What compressors keep between rounds, and a round of a single phase."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from swarm.gradient.compressor import Averaged, Phase


class CompressorState:
    """Common and local tensors by name, all fp32 vectors, replaced as a whole when a round commits.

    common, local: elements of each. None exists before the first step; local ones count as zero then. Tensors are
    never changed in place, so that whoever began a round holds what it began with.
    """

    def __init__(self, common: Mapping[str, int], local: Mapping[str, int]) -> None:
        self._common_sizes, self._local_sizes = dict(common), dict(local)
        self._common: dict[str, Tensor] = {}
        self._local: dict[str, Tensor] = {}
        self.version = 0

    def common(self, name: str) -> Tensor | None:
        """A common tensor, or None before the first step. Not to be changed."""
        return self._common.get(name)

    def local(self, name: str) -> Tensor:
        """A local tensor, zero before the first step. Not to be changed."""
        if name in self._local:
            return self._local[name]
        return torch.zeros(self._local_sizes[name])

    def move(
        self,
        version: int,
        common: Mapping[str, Tensor] | None = None,
        local: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Take new tensors over, from a round that began at `version`.

        Local tensors that are not finite are left aside: what went wrong at one member must not stay with it. Raises
        RuntimeError if another round has committed since.
        """
        if version != self.version:
            raise RuntimeError("a compression cannot commit after another one that began with it")
        self._common |= common or {}
        self._local |= {name: value for name, value in (local or {}).items() if is_finite(value)}
        self.version += 1

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of the common tensors."""
        return {name: value.clone() for name, value in self._common.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take common tensors over, all or none of them; local ones are gone. Raises ValueError for anything else."""
        if state and set(state) != set(self._common_sizes):
            raise ValueError(f"compressor state has {sorted(self._common_sizes)}, not {sorted(state)}")
        for name, value in state.items():
            size = self._common_sizes[name]
            if value.dtype != torch.float32 or tuple(value.shape) != (size,):
                raise ValueError(f"{name} must be float32 [{size}], got {value.dtype} {tuple(value.shape)}")
            if not is_finite(value):
                raise ValueError(f"{name} is not finite")
        self._common = {name: value.detach().to("cpu", copy=True) for name, value in state.items()}
        self._local = {}
        self.version += 1

    def digest(self) -> str:
        """sha256 (hex) of names, sizes and bits."""
        found = hashlib.sha256()
        for kind, tensors in (("common", self._common), ("local", self._local)):
            for name in sorted(tensors):
                found.update(f"{kind}/{name}/{tensors[name].numel()}:".encode())
                found.update(tensors[name].numpy().tobytes())
        return found.hexdigest()


class StatefulCompressor:
    """What all compressors with a `CompressorState` share."""

    _state: CompressorState

    def common_state(self) -> Mapping[str, Tensor]:
        """See Compressor."""
        return self._state.snapshot()

    def load_common_state(self, state: Mapping[str, Tensor]) -> None:
        """See Compressor."""
        self._state.load(state)

    def digest(self) -> str:
        """See Compressor."""
        return self._state.digest()


class SinglePhase:
    """A compression of one phase.

    vector: what is contributed, fp32 [elements]. expand: the averaged gradient [numel] of an average [elements].
    settle: moves the state, from what the exchange made of the vector and the averaged gradient; not called for one
    that is not finite.
    """

    def __init__(
        self,
        vector: Tensor,
        expand: Callable[[Tensor], Tensor],
        settle: Callable[[Averaged, Tensor], None],
    ) -> None:
        self._vector = vector
        self._expand = expand
        self._settle = settle
        self._outcome: tuple[Averaged, Tensor] | None = None

    def vector(self) -> Tensor:
        """See Compression."""
        return self._vector

    def take(self, averaged: Averaged) -> None:
        """See Compression. Raises ValueError for an average of another size."""
        check_sizes((averaged.average,), (self._vector.numel(),))
        self._outcome = (averaged, self._expand(averaged.average))

    def result(self) -> Tensor:
        """See Compression. Raises RuntimeError before the phase's outcome was taken."""
        return self._taken()[1]

    def commit(self) -> None:
        """See Compression. Raises RuntimeError before the phase's outcome was taken."""
        averaged, result = self._taken()
        if is_finite(result):
            self._settle(averaged, result)

    def _taken(self) -> tuple[Averaged, Tensor]:
        if self._outcome is None:
            raise RuntimeError("the phase has no outcome yet")
        return self._outcome


def is_finite(values: Tensor) -> bool:
    """Whether all values are."""
    # What is not finite makes the sum so; the sum of large values may be so too.
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def contribution(gradient: Tensor, numel: int, weight: int) -> Tensor:
    """A mean gradient in new memory on the CPU, fp32 [numel]; zero, whatever it is, for weight 0.

    Raises ValueError unless the gradient is fp32 [numel] and the weight is not negative.
    """
    if weight < 0:
        raise ValueError(f"a weight is not negative: {weight}")
    if gradient.dtype != torch.float32 or tuple(gradient.shape) != (numel,):
        raise ValueError(
            f"a gradient must be float32 [{numel}], got {gradient.dtype} {tuple(gradient.shape)}"
        )
    if weight == 0:
        return torch.zeros(numel)
    return gradient.detach().to("cpu", copy=True)


def mean_of(total: Tensor, weight: int) -> Tensor:
    """What a token sum contributes to a mean with this weight: new memory; zero for weight 0."""
    return total / weight if weight else torch.zeros_like(total)


def left_over(total: Tensor, vector: Tensor, averaged: Averaged, weight: int) -> Tensor:
    """What of a token sum (fp32 [elements]) is left after `vector` = mean_of(total, weight) was contributed."""
    residual = averaged.residual(vector)
    return residual.mul_(weight) if weight else residual.add_(total)


def check_sizes(averages: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """Raise ValueError unless averages are fp32 vectors of these sizes."""
    got = [tuple(average.shape) for average in averages]
    if got != [(size,) for size in sizes] or any(average.dtype != torch.float32 for average in averages):
        raise ValueError(f"averages of {list(sizes)} float32 elements are wanted, got shapes {got}")


def only_average(averages: Sequence[Tensor], phases: Sequence[Phase]) -> Tensor:
    """The average of a round of one phase. Raises ValueError for another number or size."""
    check_sizes(averages, [phase.elements for phase in phases])
    return averages[0]
