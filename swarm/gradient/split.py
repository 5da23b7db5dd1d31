"""How a vector is cut for a group of members, and what a reducer makes of a chunk. Pure; the exchange and the
in-process simulation share it, so that both give the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_ALIGNMENTS = (1024, 256)
"""Chunks are a multiple of one of these where balance allows: then all but the last hold whole blocks of codecs."""

_SLACK = 32
"""Alignment may add one in so many elements to a chunk."""


@dataclass(frozen=True, slots=True)
class Split:
    """How a vector of `elements` is cut for a group of `members`: chunks of at most `most` elements, and the
    reducer of each.

    All chunks but the last have the same size, and their number is a multiple of the members', so that all reduce
    equally much; unless the vector has fewer elements than the square of that number.
    """

    elements: int
    members: int
    most: int

    @property
    def chunk_elements(self) -> int:
        """Elements of every chunk but the last."""
        return _chunk_elements(self.elements, self.members, self.most)

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.elements // self.chunk_elements)

    def span(self, chunk: int) -> slice:
        """Elements of a chunk."""
        start = chunk * self.chunk_elements
        return slice(start, min(start + self.chunk_elements, self.elements))

    def size(self, chunk: int) -> int:
        """Number of elements of a chunk."""
        span = self.span(chunk)
        return int(span.stop - span.start)

    def reducer(self, chunk: int) -> int:
        """Member (by position in the group) that reduces a chunk: contiguous, even shares."""
        return chunk * self.members // self.chunks


@lru_cache(maxsize=64)
def _chunk_elements(elements: int, members: int, most: int) -> int:
    number = members * max(1, -(-elements // (members * most)))
    even = max(1, -(-elements // number))
    for alignment in _ALIGNMENTS:
        aligned = -(-even // alignment) * alignment
        keeps_number = (number - 1) * aligned < elements
        if keeps_number and aligned <= min(most, even + even // _SLACK):
            return aligned
    return even


def weighted_mean(parts: Mapping[int, Tensor], weights: Sequence[int]) -> Tensor:
    """sum_i w_i x_i / sum_i w_i in the group's order, over members of positive weight: fp32 [n].

    parts: fp32 [n] of every such member, by position. The order makes the result the same wherever it is computed.
    """
    total = float(sum(weights))
    mean: Tensor | None = None
    for member, weight in enumerate(weights):
        if weight > 0:
            mean = torch.zeros_like(parts[member]) if mean is None else mean
            mean.add_(parts[member], alpha=weight / total)
    if mean is None:
        raise ValueError("a mean of members without weight")
    return mean


def chunk_seed(run_seed: int, step: int, phase: int, chunk: int, member: int) -> int:
    """Seed of the stochastic rounding of one encoding, 63 bits. member: whose vector it is, by position in the group;
    -1 for the average. Whoever decodes needs none.
    """
    text = f"{run_seed}/{step}/{phase}/{chunk}/{member}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
