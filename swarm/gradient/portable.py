"""Linear algebra with the same bits on every machine.

What members compute out of an average must be equal bit for bit, and the order in which a BLAS or LAPACK adds
depends on the processor. Here sums are trees of elementwise float64 operations, each of which IEEE 754 fixes, or
they are exact, so that their order does not matter.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_DEPENDENT = 1e-6
"""Share of a column's norm that must be left beyond the columns before it."""

_COLD_NORM = 1e-30
"""Norm up to which a column counts as zero."""

_MANTISSA = 52
_BASIS_BITS = 23
_SLAB = 2**22


def tree_sum(values: Tensor) -> Tensor:
    """Sum over dimension 1 of [b, m, ...] in a fixed order: halves are added until one row is left; [b, ...]."""
    rows = values.shape[1]
    if rows == 0:
        return values.new_zeros(values.shape[0], *values.shape[2:])
    while rows > 1:
        half = (rows + 1) // 2
        head = values[:, :half].clone()
        head[:, : rows - half] += values[:, half:]
        values, rows = head, half
    return values[:, 0]


def orthonormal(columns: Tensor) -> Tensor:
    """Orthonormal bases of matrices, column after column: float [b, m, r] -> float64 [b, m, r].

    Gram-Schmidt, each column against all before it, twice ("twice is enough"). A column that is zero, or depends on
    those before it, becomes zero, never NaN. The input must be finite.
    """
    matrices = columns.double()
    basis = torch.zeros_like(matrices)
    for index in range(matrices.shape[2]):
        vector = matrices[:, :, index]
        before = tree_sum(vector * vector).sqrt()
        for _ in range(2 if index else 0):
            known = basis[:, :, :index]
            shares = tree_sum(known * vector[:, :, None])
            vector = vector - tree_sum((known * shares[:, None, :]).transpose(1, 2))
        norm = tree_sum(vector * vector).sqrt()
        is_new = (norm > _DEPENDENT * before) & (norm > _COLD_NORM)
        scaled = vector / torch.where(is_new, norm, 1.0)[:, None]
        basis[:, :, index] = torch.where(is_new[:, None], scaled, 0.0)
    return basis


def filled_basis(columns: Tensor, spare: Tensor) -> Tensor:
    """Like `orthonormal`, with the columns that became zero replaced by those of `spare` (float [b, m, r]) first."""
    basis = orthonormal(columns)
    is_zero = ~basis.any(dim=1, keepdim=True)
    if not bool(is_zero.any()):
        return basis
    return orthonormal(torch.where(is_zero, spare.double(), basis))


def exact_product(basis: Tensor, other: Tensor) -> Tensor:
    """basis @ other.T for float [m, r] with entries in [-1, 1] and finite float [n, r]: fp32 [m, n].

    Both are rounded to integers times a power of two, 23 bits for the basis and 29 - log2 r (rounded up), relative
    to the largest, for the other: then every sum of r products fits the 53 bits of a float64 and is exact in any
    order. The only rounding is the last one, to fp32.
    """
    rank = basis.shape[1]
    result = torch.empty(basis.shape[0], other.shape[0])
    peak = float(other.abs().max()) if other.numel() else 0.0
    if peak == 0.0:
        return result.zero_()
    other_bits = _MANTISSA - _BASIS_BITS - math.ceil(math.log2(max(1, rank)))
    scale = other_bits - math.frexp(peak)[1]
    right = (other.double() * 2.0**scale).round_().T.contiguous()
    left = (basis.double() * 2.0**_BASIS_BITS).round_()
    rows = max(1, _SLAB // max(1, other.shape[0]))
    for start in range(0, basis.shape[0], rows):
        product = left[start : start + rows] @ right
        result[start : start + rows] = product.mul_(2.0 ** -(scale + _BASIS_BITS))
    return result
