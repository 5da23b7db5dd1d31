"""Leading singular triplets of a matrix: M ~ U diag(s) V'.

The exact thin SVD is the oracle, and what small matrices get. Larger ones are factored by block subspace
iteration (Halko, Martinsson and Tropp, "Finding structure with randomness", 2011, algorithm 4.4) that starts from
the previous V: a memory that moved a little is found again in an iteration or two, at a twentieth of an SVD's
cost.

Factoring takes seconds for a whole stage and runs beside the training, so it is offered matrix by matrix:
`factorise` is a generator, and whoever drives it may stop between any two.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

COLD_NORM = 1e-12
"""Frobenius norm up to which a matrix says nothing about directions (arXiv 2609.14339)."""

OVERSAMPLING = 8
"""Columns iterated beyond the rank: the last wanted directions converge at the pace of the gap behind these."""

_EXACT_SIDES = 2
"""Matrices whose shorter side is at most so many blocks get the exact SVD: it is as fast there."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Singular triplets of an [m, n] matrix, largest first.

    left: U [m, r]; values: s fp32 [r]; right: V [n, r]. U and V are fp32, or bf16 where they were stored so, with
    orthonormal columns (up to that rounding).
    """

    left: Tensor
    values: Tensor
    right: Tensor

    @property
    def rank(self) -> int:
        """Triplets r."""
        return int(self.values.shape[0])

    @property
    def shape(self) -> tuple[int, int]:
        """Shape [m, n] of the matrix."""
        return int(self.left.shape[0]), int(self.right.shape[0])


@dataclass(frozen=True, slots=True)
class Factorisation:
    """Factors and how well they converged.

    iterations: of the subspace; 0 for an exact SVD. residual: ||M V - U diag(s)||_F / ||s||, 0 for exact triplets
    (M' U = V diag(s) holds by construction). energy: share of ||M||_F^2 in the triplets.
    """

    factors: Factors
    iterations: int
    residual: float
    energy: float


def factor_rank(shape: tuple[int, int], rank: int | None) -> int:
    """Triplets of an [m, n] matrix at a wanted rank: min(rank, m, n); None wants all of them."""
    return min(shape) if rank is None else min(rank, *shape)


def exact_factors(matrix: Tensor, rank: int | None = None) -> Factorisation:
    """Thin SVD of a matrix [m, n] (float), cut to its leading `rank` triplets; fp32.

    Raises ValueError for a matrix that is not finite or not 2-D.
    """
    scaled, scale = _scaled(matrix)
    left, values, right = torch.linalg.svd(scaled, full_matrices=False)
    kept = factor_rank((matrix.shape[0], matrix.shape[1]), rank)
    factors = Factors(left[:, :kept].contiguous(), values[:kept], right[:kept].T.contiguous())
    return _finished(factors, scaled, scale, iterations=0, residual=0.0)


def subspace_factors(
    matrix: Tensor,
    rank: int,
    *,
    seed: int,
    start: Tensor | None = None,
    tolerance: float = 1e-2,
    max_iterations: int = 12,
) -> Factorisation:
    """Leading triplets of a matrix [m, n] (float) by subspace iteration; fp32.

    seed: of the random columns; the same matrix, start and seed give the same factors on one machine. start: V of
    an earlier factorisation, [n, r]; one that does not fit is left aside. It goes on until the residual is at most
    `tolerance`, or for `max_iterations`. Directions whose singular values lie close together may still be mixed
    then; the subspace they span is what counts. Raises ValueError as `exact_factors` does, and for a rank below 1.
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    scaled, scale = _scaled(matrix)
    rows, columns = scaled.shape
    kept = factor_rank((rows, columns), rank)
    block = min(rank + OVERSAMPLING, rows, columns)
    # Two powers per iteration, one from each side: the basis of M V, then the SVD of what M is in it.
    image = scaled @ _start_block(start, columns, block, seed, scaled.device)
    iterations, residual = 0, math.inf
    while True:
        basis = torch.linalg.qr(image).Q
        inner, values, right = torch.linalg.svd(basis.T @ scaled, full_matrices=False)
        left = basis @ inner
        iterations += 1
        image = scaled @ right.T
        residual = _relative(image[:, :kept] - left[:, :kept] * values[:kept], values[:kept])
        if residual <= tolerance or iterations >= max_iterations:
            break
    factors = Factors(left[:, :kept].contiguous(), values[:kept], right[:kept].T.contiguous())
    return _finished(factors, scaled, scale, iterations=iterations, residual=residual)


def factorise(
    matrices: Mapping[str, Tensor],
    rank: int | None,
    *,
    seed: int,
    previous: Mapping[str, Factors] | None = None,
) -> Iterator[tuple[str, Factorisation]]:
    """Factor one matrix [m, n] after the other, in the mapping's order, and hand out each as it is done.

    rank: triplets; None for all of them, by an exact SVD. seed: mixed with each name, so that the order of the
    matrices does not matter. previous: earlier factors by name, to start from. Cold matrices (norm at most
    `COLD_NORM`) are left out: a corrector passes over what has no prior. Raises ValueError, naming the matrix, for
    one that is not finite.
    """
    for name, matrix in matrices.items():
        try:
            if float(torch.linalg.matrix_norm(matrix.double())) <= COLD_NORM:
                continue
            if rank is None or min(matrix.shape) <= _EXACT_SIDES * (rank + OVERSAMPLING):
                yield name, exact_factors(matrix, rank)
                continue
            known = None if previous is None else previous.get(name)
            start = None if known is None else known.right
            yield name, subspace_factors(matrix, rank, seed=seed ^ zlib.crc32(name.encode()), start=start)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def _scaled(matrix: Tensor) -> tuple[Tensor, float]:
    """The matrix in fp32 with its largest element at 1, and that element; squares then neither vanish nor overflow.

    A zero matrix keeps scale 1. Raises ValueError for anything but a finite matrix.
    """
    if matrix.ndim != 2 or not matrix.is_floating_point():
        raise ValueError(f"a float matrix is wanted, got {matrix.dtype} {tuple(matrix.shape)}")
    matrix = matrix.detach().float()
    peak = float(matrix.abs().amax()) if matrix.numel() else 0.0
    if not math.isfinite(peak):
        raise ValueError(f"the matrix {tuple(matrix.shape)} is not finite")
    return (matrix / peak, peak) if peak > 0 else (matrix, 1.0)


def _start_block(start: Tensor | None, columns: int, block: int, seed: int, device: torch.device) -> Tensor:
    """Columns [n, block] to start from: those of `start` first, random ones for the rest."""
    generator = torch.Generator().manual_seed(seed & 0x7FFF_FFFF)
    drawn = torch.randn(columns, block, generator=generator).to(device)
    if start is not None and start.ndim == 2 and start.shape[0] == columns:
        known = min(block, int(start.shape[1]))
        candidate = start[:, :known].to(device=device, dtype=torch.float32)
        if bool(torch.isfinite(candidate).all()):
            # Random columns are sqrt(n) long, known ones 1; QR does not mind.
            drawn[:, :known] = candidate
    return drawn


def _finished(
    factors: Factors, scaled: Tensor, scale: float, *, iterations: int, residual: float
) -> Factorisation:
    """Factors of the matrix before it was scaled, with their share of its energy.

    Raises ValueError if a singular value does not fit fp32.
    """
    whole = float(scaled.double().square().sum())
    energy = float(factors.values.double().square().sum()) / whole if whole > 0 else 0.0
    values = (factors.values.double() * scale).float()
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"singular values of the matrix {factors.shape} exceed float32")
    return Factorisation(Factors(factors.left, values, factors.right), iterations, residual, energy)


def _relative(difference: Tensor, values: Tensor) -> float:
    """Frobenius norm of a difference against that of the singular values; 0 if these are 0."""
    size = float(torch.linalg.vector_norm(values))
    return float(torch.linalg.matrix_norm(difference)) / size if size > 0 else 0.0
