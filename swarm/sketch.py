"""Comparing and realigning the weights of replicas: a sketch of 64 sums, and a slice that walks over the vector.

Replicas apply the same bytes, so on equal devices their weights are equal bit for bit; devices that round
differently drift apart slowly. The sketch (a count sketch: every element is added to one of 64 sums with a
seeded sign) shows by 256 bytes how far: the distance of two sketches estimates the distance of the weights,
because the expected square of a sketch's norm is that of the vector. Replicas are taken for equal up to
`SKETCH_TOLERANCE`. The slice keeps the drift from growing: at each step everybody takes over a small part of
the leader's weights, another one each time.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

SKETCH_SUMS = 64
SKETCH_BYTES = 4 * SKETCH_SUMS
SKETCH_TOLERANCE = 1e-4
"""Relative distance up to which replicas' weights count as equal."""
SLICE_SHARE = 100
"""A slice is at most one part in so many of what the round exchanges..."""
SLICE_PARTS = 256
"""...and of the weights."""
_ROW = 256 * SKETCH_SUMS
_ROWS = 4096
"""Rows summed in fp32 before the sum goes on in fp64: the rounding stays far below the tolerance."""


def sketch(flat: Tensor, seed: int) -> bytes:
    """The sketch of a vector [n] (fp32, any device): 64 little-endian fp32. Reads it once.

    Element i goes to sum i mod 64, with the product of two seeded signs: one of its row, one of its column.
    """
    sums = torch.zeros(_ROW, dtype=torch.float64, device=flat.device)
    whole = flat.numel() // _ROW
    column_signs, row_signs = _signs(seed, whole + 1)
    rows = flat[: whole * _ROW].view(whole, _ROW)
    for start in range(0, whole, _ROWS):
        part = rows[start : start + _ROWS]
        sums += (row_signs[start : start + part.shape[0]].to(flat.device) @ part).double()
    rest = flat[whole * _ROW :]
    sums[: rest.numel()] += row_signs[whole].to(flat.device) * rest
    signed = sums * column_signs.to(flat.device)
    result = signed.view(-1, SKETCH_SUMS).sum(dim=0).float().cpu().numpy().astype("<f4")
    return bytes(result.tobytes())


def sketch_distance(first: bytes, second: bytes) -> float:
    """Relative distance of two sketches, at least 0; infinite if either is not finite.

    Raises ValueError for bytes that are no sketch.
    """
    a, b = _sums(first), _sums(second)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    scale = max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
    return float(np.linalg.norm(a - b)) / scale if scale > 0 else 0.0


def slice_span(step: int, numel: int, payload_elements: int) -> tuple[int, int]:
    """(offset, count) of the weights that the leader of step `step` hands to all members.

    numel: elements of the stage's weights. payload_elements: elements that the round exchanges. Consecutive
    steps take consecutive slices, from the start again after the last one, so that every weight has its turn.
    """
    if numel < 1:
        return 0, 0
    count = max(1, min(payload_elements // SLICE_SHARE, numel // SLICE_PARTS))
    slices = -(-numel // count)
    offset = step % slices * count
    return offset, min(count, numel - offset)


def _sums(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    if not isinstance(data, bytes) or len(data) != SKETCH_BYTES:
        raise ValueError(f"a sketch has {SKETCH_BYTES} bytes")
    return np.frombuffer(data, dtype="<f4").astype(np.float64)


@functools.lru_cache(maxsize=4)
def _signs(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    """Signs of the columns (fp64 [_ROW]) and of the rows (fp32 [rows])."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randint(0, 2, (_ROW,), generator=generator).double().mul_(2).sub_(1)
    return columns, torch.randint(0, 2, (rows,), generator=generator).float().mul_(2).sub_(1)
