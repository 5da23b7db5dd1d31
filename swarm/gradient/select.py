"""Which coordinates of a vector are sent: the largest ones, or ones that a seed names.

Both are functions that must give all members the same: random words come from Philox, whose stream NumPy keeps
stable, and ties between equal magnitudes go to the lowest index.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_SAMPLED = 4096
_STRIDE = 61


def largest(magnitudes: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest of fp32 [n], finite: int64 [min(count, n)], ascending; ties by lowest index."""
    values = magnitudes.contiguous().numpy()
    if count >= values.size:
        return torch.arange(values.size)
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    # Whatever is chosen, equal ones too, is above a bound that enough values are above; few others are.
    candidates = np.flatnonzero(values > _lower_bound(values, count)) if values.size > _SAMPLED else None
    if candidates is None or candidates.size < count:
        candidates = np.arange(values.size)
    found = values[candidates]
    place = found.size - count
    threshold = np.partition(found, place)[place]
    chosen = found > threshold
    ties = np.flatnonzero(found == threshold)
    chosen[ties[: count - np.count_nonzero(chosen)]] = True
    return torch.from_numpy(candidates[chosen])


def _lower_bound(values: npt.NDArray[np.float32], count: int) -> np.float32:
    """Out of a sample, what most likely (three standard deviations) `count` values are above."""
    sample = values[::_STRIDE]
    expected = count * sample.size / values.size
    rank = min(sample.size, int(expected + 3 * expected**0.5) + 2)
    return np.float32(np.partition(sample, sample.size - rank)[sample.size - rank])


def kept(elements: int, ratio: float) -> int:
    """How many of so many elements a ratio in (0, 1] keeps: at least one, if there are any."""
    return min(elements, max(1, round(ratio * elements)))


def random_words(count: int, *label: int | str) -> npt.NDArray[np.uint64]:
    """uint64 [count] that follow from the label alone, on every machine."""
    text = "/".join(str(part) for part in label)
    key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")
    return np.asarray(np.random.Philox(key=key).random_raw(count), dtype=np.uint64)


def uniform(count: int, *label: int | str) -> Tensor:
    """fp32 [count], uniform in [-1/2, 1/2): the same bits on every machine, which torch.randn does not promise."""
    high = (random_words(count, *label) >> np.uint64(40)).astype(np.float32)
    return torch.from_numpy(high * np.float32(2.0**-24) - np.float32(0.5))


def strata(elements: int, count: int, *label: int | str) -> tuple[Tensor, Tensor]:
    """One random index out of each of `count` even strata of [0, elements): int64 [count], ascending and distinct;
    and the size of each one's stratum, int64 [count].

    Every coordinate is as likely as any other, up to strata that differ by one, and it takes O(count) where a
    permutation takes O(elements).
    """
    edges = np.arange(count + 1, dtype=np.int64) * elements // max(1, count)
    sizes = np.diff(edges)
    offsets = (random_words(count, *label) % sizes.astype(np.uint64)).astype(np.int64)
    return torch.from_numpy(edges[:-1] + offsets), torch.from_numpy(sizes)
