"""Mixed-width quantisation of coordinates, with one gain per token and a layout fixed by the prior.

A token's gain is the rms of its coordinates in units of their standard deviations; a coordinate divided by
gain and deviation is then of unit size, whatever token and direction it comes from. Such values are trellis
coded (`trellis`) at 8 to 1 bits each, or as a pair at one bit. Bits go where they lower the error most:

- over coordinates: those of large variance get many, those of small variance none (reverse water-filling);
- over tokens: they are ranked by gain and cut into C classes, of which each has its own numbers of coordinates
  of every width. Gradients of tokens span two orders of magnitude, so this halves their error.

The `WidthTable` of these numbers stands in the prior, and the sizes of the classes follow from N, so the size of
everything follows from N alone. Ranks are taken from the integer gain codes that travel, so both ends always
agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor
from torch.nn import functional

from swarm.activation.codebook import WIDTHS, Codebook
from swarm.activation.trellis import SPARE_ROWS, best_path, subsets

_STEPS = 128
"""Steps of a lane: long enough for its fixed first state not to matter, short enough for many lanes."""

_OCTAVE = 8
"""Gain codes per octave."""

_LARGEST = 1 << 14
"""Exponent, in gain codes, of what is no finite number; 2^(_LARGEST / _OCTAVE) overflows fp32."""

LARGEST_OFFSET = 96 * _OCTAVE - 255
"""Of a payload: gains up to 2^96, which leaves the restored values room in fp32."""

_SMALLEST_GAIN = 1e-30
"""Divisor for tokens that are zero, such as gradients of tokens nothing depends on."""


@dataclass(frozen=True, slots=True)
class Block:
    """Coordinates that one class codes at one width: where they are, and where their steps begin in the stream."""

    width: int
    ranks: slice
    coordinates: slice
    steps: slice


class WidthTable:
    """How many coordinates the tokens of each class get at each width.

    counts: C rows, one count per entry of WIDTHS, in this order and in the order of the coordinates. Classes are
    ordered by bits, the richest first. Raises ValueError for counts that break this, or half a pair.
    """

    def __init__(self, counts: Sequence[Sequence[int]]) -> None:
        self.counts = tuple(tuple(row) for row in counts)
        if not self.counts:
            raise ValueError("a width table needs at least one class")
        for row in self.counts:
            if len(row) != len(WIDTHS) or any(n < 0 for n in row):
                raise ValueError(f"width table row {row} must be {len(WIDTHS)} counts")
            if any(n % width.span for n, width in zip(row, WIDTHS, strict=True)):
                raise ValueError(f"width table row {row} splits a pair")
        self.token_bits = tuple(
            sum(n // width.span * width.bits for n, width in zip(row, WIDTHS, strict=True))
            for row in self.counts
        )
        if list(self.token_bits) != sorted(self.token_bits, reverse=True):
            raise ValueError(f"width table classes must not grow in bits, got {self.token_bits}")

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
        """Bytes of all codes of `tokens` tokens: at most tokens times the classes' mean, rounded up."""
        edges = self.edges(tokens)
        bits = sum((edges[c + 1] - edges[c]) * size for c, size in enumerate(self.token_bits))
        return (bits + 7) // 8

    def blocks(self, tokens: int) -> Iterator[Block]:
        """Blocks in the order of their steps: by falling width, then by class."""
        edges = self.edges(tokens)
        step = 0
        for index, width in enumerate(WIDTHS):
            for c, row in enumerate(self.counts):
                first = sum(row[:index])
                steps = (edges[c + 1] - edges[c]) * (row[index] // width.span)
                if steps:
                    yield Block(
                        width=index,
                        ranks=slice(edges[c], edges[c + 1]),
                        coordinates=slice(first, first + row[index]),
                        steps=slice(step, step + steps),
                    )
                step += steps


def token_gains(coordinates: Tensor, coordinate_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gain codes uint8 [n] and their offset int16 [1] of float32 [n, R], given deviations [R].

    A gain is the rms of a token's coordinates over their deviations, 2^((code + offset) / 8); the offset puts the
    largest gain of the microbatch at 255, and what lies 32 octaves lower at 0. A gain that is not finite raises
    the offset beyond any float, so that the other end sees it.
    """
    gains = (coordinates / coordinate_scale).square().mean(dim=1).sqrt()
    exponents = (gains.log2() * _OCTAVE).round().clamp(-_LARGEST, _LARGEST).nan_to_num(_LARGEST)
    if not exponents.numel():
        return exponents.to(torch.uint8), torch.zeros(1, dtype=torch.int16, device=gains.device)
    offset = exponents.max() - 255
    return (exponents - offset).clamp_min(0).to(torch.uint8), offset.to(torch.int16).view(1)


def gain_values(codes: Tensor, offset: Tensor) -> Tensor:
    """Gains float32 [n] from `token_gains`' codes and offset; infinite for codes that were not finite."""
    return torch.exp2((codes.float() + offset.float()) / _OCTAVE)


def rank_tokens(codes: Tensor) -> Tensor:
    """Token indices by falling gain, ties by index: int64 [n] from gain codes uint8 [n]."""
    return codes.argsort(descending=True, stable=True)


def quantise(
    coordinates: Tensor, gains: Tensor, coordinate_scale: Tensor, table: WidthTable, codebook: Codebook
) -> Tensor:
    """Codes uint8 [table.nbytes(n)] of tokens in the order of `rank_tokens`.

    coordinates: float32 [n, R], R >= table.coordinates. gains: float32 [n], as they travel. coordinate_scale:
    float32 [R], positive.
    """
    normed = coordinates * gains.clamp_min(_SMALLEST_GAIN).reciprocal().unsqueeze(1) / coordinate_scale
    blocks = list(table.blocks(coordinates.shape[0]))
    if not blocks:
        return torch.empty(0, dtype=torch.uint8, device=coordinates.device)
    values = [
        (index, torch.cat([normed[b.ranks, b.coordinates].reshape(-1) for b in part]).view(-1, span))
        for index, _, span, part in _by_width(blocks)
    ]
    path, _, places = trellis_code(values, codebook)
    planes = [path]
    for bit, end in enumerate(_plane_ends(blocks)):
        planes.append((places[:end] >> bit) & 1)
    return _pack(torch.cat(planes))


def trellis_code(values: Sequence[tuple[int, Tensor]], codebook: Codebook) -> tuple[Tensor, Tensor, Tensor]:
    """Path bits, subsets and places in the subset, all uint8 [k], that approach values best.

    values: pieces of the stream, each with its index in WIDTHS and float32 [steps, span]; k steps in all, at least
    one.
    """
    ends = list(accumulate(value.shape[0] for _, value in values))
    steps = ends[-1]
    shape = _lane_shape(steps)
    distances = torch.empty(
        (SPARE_ROWS, shape[0] * shape[1]), dtype=torch.float32, device=values[0][1].device
    )
    distances[:, steps:] = 0.0
    cells = [codebook.cells(index, value) for index, value in values]
    for (index, value), cell, end in zip(values, cells, ends, strict=True):
        codebook.distances(index, value, cell, distances[:, end - value.shape[0] : end])
    path = best_path(distances.view(SPARE_ROWS, *shape))
    chosen = subsets(path).view(-1)[:steps]
    places = [
        codebook.choose(index, cell, chosen[end - value.shape[0] : end])
        for (index, value), cell, end in zip(values, cells, ends, strict=True)
    ]
    return path.view(-1)[:steps], chosen, torch.cat(places)


def dequantise(
    codes: Tensor, gains: Tensor, coordinate_scale: Tensor, table: WidthTable, codebook: Codebook
) -> Tensor:
    """Coordinates float32 [n, R] from `quantise`'s codes, in the same order; uncoded ones are 0.

    All bytes are valid codes.
    """
    tokens = gains.shape[0]
    coordinates = torch.zeros((tokens, coordinate_scale.shape[0]), dtype=torch.float32, device=codes.device)
    blocks = list(table.blocks(tokens))
    if not blocks:
        return coordinates
    steps = blocks[-1].steps.stop
    bits = _unpack(codes)
    shape = _lane_shape(steps)
    path = torch.zeros(shape[0] * shape[1], dtype=torch.uint8, device=codes.device)
    path[:steps] = bits[:steps]
    numbers = subsets(path.view(shape)).view(-1)[:steps].to(torch.int16)
    first = steps
    for bit, end in enumerate(_plane_ends(blocks)):
        numbers[:end] |= bits[first : first + end].to(torch.int16) << (bit + 2)
        first += end
    for index, where, _, part in _by_width(blocks):
        restored = codebook.restore(index, numbers[where]).view(-1)
        done = 0
        for b in part:
            target = coordinates[b.ranks, b.coordinates]
            target.copy_(restored[done : done + target.numel()].view(target.shape))
            done += target.numel()
    return coordinates.mul_(gains.unsqueeze(1)).mul_(coordinate_scale)


def _lane_shape(steps: int) -> tuple[int, int]:
    """Steps per lane and lanes, [T, L]: step k of the stream is step k // L of lane k % L. The last row may be cut."""
    lanes = -(-steps // _STEPS)
    return -(-steps // lanes), lanes


def _by_width(blocks: Sequence[Block]) -> Iterator[tuple[int, slice, int, list[Block]]]:
    """Blocks of each width: its index, its steps, coordinates per step, and the blocks."""
    for index, group in groupby(blocks, key=lambda block: block.width):
        part = list(group)
        yield index, slice(part[0].steps.start, part[-1].steps.stop), WIDTHS[index].span, part


def _plane_ends(blocks: Sequence[Block]) -> list[int]:
    """Steps that have a second bit, a third, and so on: a prefix of all steps each."""
    bits = WIDTHS[blocks[0].width].bits
    return [
        max(block.steps.stop for block in blocks if WIDTHS[block.width].bits > bit) for bit in range(1, bits)
    ]


def _pack(bits: Tensor) -> Tensor:
    """Bits uint8 [n] to bytes [ceil(n / 8)]: bit i of byte b is number i * bytes + b, so nothing is strided."""
    size = (bits.numel() + 7) // 8
    lanes = functional.pad(bits, (0, 8 * size - bits.numel())).view(8, size)
    packed = lanes[0].clone()
    for lane in range(1, 8):
        packed |= lanes[lane] << lane
    return packed


def _unpack(packed: Tensor) -> Tensor:
    """Inverse of `_pack`, with the padding: uint8 [8 b] from bytes [b]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device).unsqueeze(1)
    return (packed >> shifts).bitwise_and_(1).view(-1)
