"""Mixed-width quantisation of coordinates, with one scale per token and a layout fixed by the prior.

A token's scale is the rms of its coordinates in units of their standard deviations; coordinate k is then
normal with deviation (token scale * coordinate scale k), about, and is rounded to 2^w levels around zero
(uniform mid-rise) at the step that suits w. Bits go where they lower the error most:

- over coordinates: those of large variance get 8, 4, 2 or 1 bits, the rest none (reverse water-filling);
- over tokens: they are ranked by scale and cut into C classes of equal size, of which each has its own
  numbers of 8-, 4-, 2- and 1-bit coordinates. Gradients of tokens span two orders of magnitude, so this
  halves their error.

The `WidthTable` of these numbers stands in the prior. With N tokens, class c holds the ranks from c N // C to
(c + 1) N // C, so the size of everything follows from N alone. Ranks are taken from the bit patterns of the
scales that travel, an integer comparison, so both ends always agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

WIDTHS = (8, 4, 2, 1)
"""Bits of a coded coordinate, in the order of a table's columns."""

_STEPS = {8: 0.0625, 4: 0.3352, 2: 0.9957, 1: 1.596}
"""Step per standard deviation. 1 to 4 bits: the optimum for a normal distribution (Max, "Quantizing for minimum
distortion", 1960). 8 bits go to the leading, heavy-tailed coordinates: twice the optimum, to reach 8
deviations."""


_SMALLEST_SCALE = 1e-30
"""Divisor for tokens that are zero, such as gradients of tokens nothing depends on."""


class WidthTable:
    """How many coordinates of each width the tokens of each class get.

    counts: C rows of numbers of 8-, 4-, 2- and 1-bit coordinates, in this order and in the order of the
    coordinates. Every number fills whole bytes, and classes are ordered by bytes, the richest first.
    Raises ValueError for counts that break this.
    """

    def __init__(self, counts: Sequence[Sequence[int]]) -> None:
        self.counts = tuple(tuple(row) for row in counts)
        if not self.counts:
            raise ValueError("a width table needs at least one class")
        for row in self.counts:
            if len(row) != len(WIDTHS) or any(n < 0 for n in row):
                raise ValueError(f"width table row {row} must be {len(WIDTHS)} counts")
            if any(n * width % 8 for n, width in zip(row, WIDTHS, strict=True)):
                raise ValueError(f"width table row {row} does not fill whole bytes")
        self.token_bytes = tuple(
            sum(n * width // 8 for n, width in zip(row, WIDTHS, strict=True)) for row in self.counts
        )
        if list(self.token_bytes) != sorted(self.token_bytes, reverse=True):
            raise ValueError(f"width table classes must not grow in bytes, got {self.token_bytes}")

    @property
    def classes(self) -> int:
        """Token classes C."""
        return len(self.counts)

    @property
    def coordinates(self) -> int:
        """Coordinates that any class codes."""
        return max(sum(row) for row in self.counts)

    def edges(self, tokens: int) -> list[int]:
        """First rank of every class, and the number of tokens: C + 1 numbers."""
        return [index * tokens // self.classes for index in range(self.classes + 1)]

    def nbytes(self, tokens: int) -> int:
        """Bytes of all codes of `tokens` tokens: never more than tokens times the classes' mean."""
        edges = self.edges(tokens)
        return sum((edges[c + 1] - edges[c]) * size for c, size in enumerate(self.token_bytes))

    def blocks(self, tokens: int) -> Iterator[tuple[slice, slice, int, slice]]:
        """Blocks of equal width in the order of their bytes: (ranks, coordinates, width, bytes)."""
        edges = self.edges(tokens)
        first_byte = 0
        for c, row in enumerate(self.counts):
            first = 0
            for count, width in zip(row, WIDTHS, strict=True):
                size = (edges[c + 1] - edges[c]) * count * width // 8
                if size:
                    yield (
                        slice(edges[c], edges[c + 1]),
                        slice(first, first + count),
                        width,
                        slice(first_byte, first_byte + size),
                    )
                first += count
                first_byte += size


def token_scales(coordinates: Tensor, coordinate_scale: Tensor) -> Tensor:
    """Rms of every token's coordinates over their scales: bfloat16 [n] from float32 [n, R] and [R]."""
    return (coordinates / coordinate_scale).square().mean(dim=1).sqrt().to(torch.bfloat16)


def unit_scales(scales: Tensor, coordinate_scale: Tensor) -> Tensor:
    """Standard deviation expected of every coordinate: positive float32 [n, R] from bfloat16 [n] and [R]."""
    return scales.float().clamp_min(_SMALLEST_SCALE).unsqueeze(1) * coordinate_scale


def rank_tokens(scales: Tensor) -> Tensor:
    """Token indices by falling scale, ties by index: int64 [n] from bfloat16 [n]."""
    # Non-negative floats order as their bit patterns do; integers leave no room for a device's opinion.
    return scales.view(torch.int16).argsort(descending=True, stable=True)


def to_levels(normed: Tensor, width: int) -> Tensor:
    """Levels 0 .. 2^width - 1 as uint8, from coordinates in standard deviations (float32, any shape)."""
    half = 1 << (width - 1)
    return (normed / _STEPS[width]).floor_().clamp_(-half, half - 1).add_(half).to(torch.uint8)


def from_levels(levels: Tensor, width: int) -> Tensor:
    """Coordinates in standard deviations, float32, from levels."""
    return levels.float().add_(0.5 - (1 << (width - 1))).mul_(_STEPS[width])


def quantise(coordinates: Tensor, scales: Tensor, coordinate_scale: Tensor, table: WidthTable) -> Tensor:
    """Codes uint8 [table.nbytes(n)] of tokens in the order of `rank_tokens`.

    coordinates: float32 [n, R], R >= table.coordinates. scales: bfloat16 [n], as they travel. coordinate_scale:
    float32 [R], positive.
    """
    normed = coordinates / unit_scales(scales, coordinate_scale)
    codes = torch.empty(table.nbytes(normed.shape[0]), dtype=torch.uint8, device=coordinates.device)
    for ranks, columns, width, where in table.blocks(normed.shape[0]):
        codes[where] = _pack(to_levels(normed[ranks, columns], width), width).reshape(-1)
    return codes


def dequantise(codes: Tensor, scales: Tensor, coordinate_scale: Tensor, table: WidthTable) -> Tensor:
    """Coordinates float32 [n, R] from `quantise`'s codes, in the same order; uncoded ones are 0.

    All bytes are valid codes.
    """
    tokens = scales.shape[0]
    coordinates = torch.zeros((tokens, coordinate_scale.shape[0]), dtype=torch.float32, device=codes.device)
    for ranks, columns, width, where in table.blocks(tokens):
        levels = _unpack(codes[where].view(ranks.stop - ranks.start, -1), width)
        coordinates[ranks, columns] = from_levels(levels, width)
    return coordinates.mul_(scales.float().unsqueeze(1)).mul_(coordinate_scale)


def _pack(levels: Tensor, width: int) -> Tensor:
    """Levels uint8 [n, m] to bytes [n, m * width / 8], the first level in the lowest bits."""
    if width == 8:
        return levels
    lanes = levels.view(levels.shape[0], -1, 8 // width)
    packed = lanes[:, :, 0].clone()
    for lane in range(1, 8 // width):
        packed |= lanes[:, :, lane] << (lane * width)
    return packed


def _unpack(packed: Tensor, width: int) -> Tensor:
    """Inverse of `_pack`: bytes [n, b] to levels uint8 [n, 8 b / width]."""
    if width == 8:
        return packed
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(2) >> shifts).bitwise_and_((1 << width) - 1).flatten(1)
