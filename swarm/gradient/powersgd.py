"""PowerSGD: matrices as averaged low-rank factors, one power iteration per step (arXiv 1905.13727)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.gradient.chunk import ChunkCodec
from swarm.gradient.compressor import Averaged, Phase
from swarm.gradient.portable import exact_product, filled_basis, orthonormal
from swarm.gradient.select import uniform
from swarm.gradient.state import (
    CompressorState,
    StatefulCompressor,
    check_sizes,
    contribution,
    is_finite,
    left_over,
    mean_of,
)
from swarm.model.trainable import TrainableSet


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor that is compressed: the elements it takes of the flat vector, as a matrix [rows, columns]."""

    name: str
    span: slice
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class LowRankLayout:
    """Which tensors of a stage are compressed at a rank, and what the two phases hold.

    matrices: in the flat vector's order. rest: spans of all other tensors. rank: that of every matrix.
    """

    matrices: tuple[Matrix, ...]
    rest: tuple[slice, ...]
    rank: int

    @classmethod
    def of(cls, trainable: TrainableSet, rank: int, min_compression: float) -> LowRankLayout:
        """Compress the tensors of two or more dimensions (the first one against the rest) for which
        (m + n) r min_compression < m n; leave the others as they are.
        """
        matrices, rest = [], []
        for name, shape, offset in zip(trainable.names, trainable.shapes, trainable.offsets, strict=True):
            count = math.prod(shape)
            span = slice(offset, offset + count)
            rows = shape[0] if len(shape) >= 2 else 0
            columns = count // rows if rows else 0
            if rows and (rows + columns) * rank * min_compression < count:
                matrices.append(Matrix(name, span, rows, columns))
            else:
                rest.append(span)
        return cls(tuple(matrices), tuple(rest), rank)

    @property
    def rest_elements(self) -> int:
        """Elements that are averaged uncompressed."""
        return sum(span.stop - span.start for span in self.rest)

    @property
    def left_elements(self) -> int:
        """Elements of all P."""
        return sum(matrix.rows for matrix in self.matrices) * self.rank

    @property
    def right_elements(self) -> int:
        """Elements of all Q."""
        return sum(matrix.columns for matrix in self.matrices) * self.rank

    @property
    def sent_elements(self) -> int:
        """Elements of both phases."""
        return self.rest_elements + self.left_elements + self.right_elements


def rank_for_ratio(trainable: TrainableSet, ratio: float, min_compression: float) -> int:
    """The largest rank at which a stage's elements are at least `ratio` times those that are sent.

    Raises ValueError if rank 1 sends too much.
    """
    rank = 0
    while True:
        layout = LowRankLayout.of(trainable, rank + 1, min_compression)
        if trainable.numel < ratio * layout.sent_elements or not layout.matrices:
            break
        rank += 1
    if rank == 0:
        raise ValueError(f"PowerSGD cannot send {ratio} times less of this stage: rank 1 is too much already")
    return rank


class PowerSGDCompressor(StatefulCompressor):
    """Per matrix, with A = G + E / w for w tokens in G:  P = A Q;  P_hat = orthonormal(average P);
    Q' = A^T P_hat;  Q = average Q';  G_hat = P_hat Q^T;  E = w (A - G_hat);  the next step starts from Q (warm start).

    The first phase holds P of every matrix ([rows, r], row after row), then all tensors that are not compressed, as
    they are; the second holds Q' ([columns, r]). Q is orthonormalised before use, which leaves P_hat and G_hat what
    they are and keeps P at the gradient's scale, so that one fp16 scale fits many matrices. A column of Q that is zero
    (no gradient, or one of lower rank) would stay zero for ever: it is replaced by a random one from run seed and step,
    as all are at the first step. A matrix without gradient gives zero.

    Common state: Q as decoded, fp32 [right_elements] ("q"). Local state: E, fp32 [numel], if there is error feedback;
    for uncompressed tensors it holds what coding lost. A member without weight keeps its E.
    """

    def __init__(
        self, numel: int, layout: LowRankLayout, codec: ChunkCodec, *, error_feedback: bool, seed: int
    ) -> None:
        self._numel = numel
        self._layout = layout
        self._feedback = error_feedback
        self._seed = seed
        first = Phase(layout.left_elements + layout.rest_elements, codec, needs_residual=error_feedback)
        second = Phase(layout.right_elements, codec, needs_residual=False)
        self._phases = (first, second) if layout.matrices else (first,)
        sizes = {"q": layout.right_elements} if layout.matrices else {}
        self._state = CompressorState(sizes, {"error": numel} if error_feedback else {})

    def phases(self, step: int) -> tuple[Phase, ...]:
        """See Compressor."""
        return self._phases

    def begin(self, gradient: Tensor, step: int, weight: int) -> PowerSGDRound:
        """See Compressor."""
        total = whole = contribution(gradient, self._numel, weight)
        if self._feedback:
            total = whole.mul_(weight).add_(self._state.local("error"))
            whole = mean_of(total, weight)
        return PowerSGDRound(self, total, whole, weight, self.starts(step), self._state.version)

    def replay(self, averages: Sequence[Tensor], step: int) -> Tensor:
        """See Compressor."""
        check_sizes(averages, [phase.elements for phase in self._phases])
        result = self.averaged(averages, self.bases(averages[0]))
        if is_finite(result):
            self.settle(self._state.version, averages, None)
        return result

    # -- parts of a round ------------------------------------------------------------------------------

    @property
    def layout(self) -> LowRankLayout:
        """What is compressed."""
        return self._layout

    @property
    def has_error_feedback(self) -> bool:
        """Whether E is kept."""
        return self._feedback

    def starts(self, step: int) -> list[Tensor]:
        """Orthonormal Q that a step's power iteration starts from, per matrix: fp32 [columns, r]."""
        known = self._state.common("q")
        if known is None:
            known = torch.zeros(self._layout.right_elements)
        spare = uniform(self._layout.right_elements, "powersgd", self._seed, step)
        columns = [matrix.columns for matrix in self._layout.matrices]
        drawn = self._split(spare, columns)
        return _by_shape(
            self._split(known, columns), lambda q, which: filled_basis(q, _stack(drawn, which)).float()
        )

    def bases(self, first: Tensor) -> list[Tensor] | None:
        """P_hat per matrix, float64 [rows, r], of the first phase's average; None if it is not finite."""
        if not is_finite(first):
            return None
        rows = [matrix.rows for matrix in self._layout.matrices]
        return _by_shape(self._split(first, rows), lambda p, _: orthonormal(p))

    def averaged(self, averages: Sequence[Tensor], bases: list[Tensor] | None) -> Tensor:
        """The averaged gradient fp32 [numel] of both averages; NaN if one of them is not finite."""
        if bases is None or not all(is_finite(average) for average in averages):
            return torch.full((self._numel,), torch.nan)
        result = torch.empty(self._numel)
        position = self._layout.left_elements
        for span in self._layout.rest:
            end = position + span.stop - span.start
            result[span] = averages[0][position:end]
            position = end
        if self._layout.matrices:
            rights = self._split(averages[1], [matrix.columns for matrix in self._layout.matrices])
            for matrix, basis, right in zip(self._layout.matrices, bases, rights, strict=True):
                result[matrix.span] = exact_product(basis, right).view(-1)
        return result

    def settle(self, version: int, averages: Sequence[Tensor], error: Tensor | None) -> None:
        """Move the state of a round that began at `version`."""
        common = {"q": averages[1].clone()} if self._layout.matrices else {}
        self._state.move(version, common, {} if error is None else {"error": error})

    def _split(self, flat: Tensor, heights: Sequence[int]) -> list[Tensor]:
        """Views [height, r] one after the other."""
        found, position = [], 0
        for height in heights:
            end = position + height * self._layout.rank
            found.append(flat[position:end].view(height, self._layout.rank))
            position = end
        return found


class PowerSGDRound:
    """One round of PowerSGD at one member; see Compression."""

    def __init__(
        self,
        owner: PowerSGDCompressor,
        total: Tensor,
        whole: Tensor,
        weight: int,
        starts: list[Tensor],
        version: int,
    ) -> None:
        self._owner = owner
        self._total, self._whole, self._weight = total, whole, weight
        self._version = version
        self._taken: list[Averaged] = []
        self._bases: list[Tensor] | None = None
        self._result: Tensor | None = None
        lefts = [
            self._matrix(matrix) @ start for matrix, start in zip(owner.layout.matrices, starts, strict=True)
        ]
        self._vector = _joined([*lefts, *(whole[span] for span in owner.layout.rest)])

    def vector(self) -> Tensor:
        """See Compression."""
        return self._vector

    def take(self, averaged: Averaged) -> None:
        """See Compression. Raises ValueError for an average of another size; one that is not finite makes the result
        NaN.
        """
        owner = self._owner
        phases = owner.phases(0)
        if len(self._taken) == len(phases):
            raise RuntimeError("all phases have their outcome already")
        check_sizes((averaged.average,), (phases[len(self._taken)].elements,))
        self._taken.append(averaged)
        if len(self._taken) == 1:
            self._bases = owner.bases(averaged.average)
        if len(self._taken) == len(phases):
            self._result = owner.averaged([each.average for each in self._taken], self._bases)
        elif self._bases is None:
            self._vector = torch.zeros(phases[1].elements)
        else:
            pairs = zip(owner.layout.matrices, self._bases, strict=True)
            self._vector = _joined([self._matrix(matrix).T @ basis.float() for matrix, basis in pairs])

    def result(self) -> Tensor:
        """See Compression. Raises RuntimeError before the last phase's outcome was taken."""
        if self._result is None:
            raise RuntimeError("not all phases have their outcome yet")
        return self._result

    def commit(self) -> None:
        """See Compression. Raises RuntimeError before the last phase's outcome was taken."""
        result = self.result()
        if not is_finite(result):
            return
        averages = [each.average for each in self._taken]
        error = self._error(result) if self._owner.has_error_feedback else None
        self._owner.settle(self._version, averages, error)

    def _error(self, result: Tensor) -> Tensor:
        """E of every tensor, fp32 [numel]."""
        # Of a member without weight nothing entered the averages; it may owe something all the same.
        error = self._total.clone() if self._weight == 0 else (self._whole - result).mul_(self._weight)
        first, position = self._taken[0], self._owner.layout.left_elements
        for span in self._owner.layout.rest:
            part = slice(position, position + span.stop - span.start)
            averaged = Averaged(first.average[part], first.counted[part], first.owed[part])
            error[span] = left_over(self._total[span], self._whole[span], averaged, self._weight)
            position = part.stop
        return error

    def _matrix(self, matrix: Matrix) -> Tensor:
        return self._whole[matrix.span].view(matrix.rows, matrix.columns)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """All parts in one new vector."""
    return torch.cat([part.reshape(-1) for part in parts]) if parts else torch.zeros(0)


def _stack(matrices: Sequence[Tensor], which: Sequence[int]) -> Tensor:
    return torch.stack([matrices[index] for index in which])


def _by_shape(
    matrices: Sequence[Tensor], function: Callable[[Tensor, Sequence[int]], Tensor]
) -> list[Tensor]:
    """A function of stacked matrices [b, m, r] and their numbers, applied to those of equal shape together."""
    numbers: dict[tuple[int, ...], list[int]] = {}
    for index, matrix in enumerate(matrices):
        numbers.setdefault(tuple(matrix.shape), []).append(index)
    found: dict[int, Tensor] = {}
    for which in numbers.values():
        found |= zip(which, function(_stack(matrices, which), which), strict=True)
    return [found[index] for index in range(len(matrices))]
