"""Levels of the trellis-coded quantiser at every width, and which of them is nearest to a value.

A width spends `bits` on a step of `span` coordinates and has 2^(bits + 1) levels of that many numbers; level
4 i + j is the i-th of subset j (see `trellis`). They suit values of a standard normal distribution, and do as well
on coordinates of hidden states and gradients over their expected deviation as levels learned from those.

The nearest level of a subset is read from a table over a grid of values, denser near zero. Between grid points
it may name the second nearest; that costs the encoder next to nothing, and the decoder nothing at all.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.activation.trellis import SUBSETS


@dataclass(frozen=True, slots=True)
class Width:
    """Bits of a step, how many coordinates it codes, and the share of a normal value's square that is lost."""

    bits: int
    span: int
    lost: float

    @property
    def levels(self) -> int:
        """Levels, of `span` numbers each."""
        return 2 << self.bits


WIDTHS = (
    Width(8, 1, 2.90e-5),
    Width(7, 1, 1.144e-4),
    Width(6, 1, 4.52e-4),
    Width(5, 1, 1.722e-3),
    Width(4, 1, 6.57e-3),
    Width(3, 1, 0.02448),
    Width(2, 1, 0.0892),
    Width(1, 1, 0.318),
    Width(1, 2, 0.566),
)
"""In the order of a table's columns and of the stream: a plane of bits covers a prefix of the steps."""

LEVEL_VALUES = sum(width.levels * width.span for width in WIDTHS)
"""Numbers of all levels, of one width after the other."""

_SPREAD = {8: 1.73, 7: 1.73, 6: 1.7, 5: 1.6, 4: 1.5, 3: 1.37}
"""By bits: levels are these times the normal distribution's quantiles. At high rate the best factor is 3^(1/2)
(Panter and Dite, "Quantization distortion in pulse-count modulation with nonuniform spacing of levels", 1951)."""

_FEW_LEVELS = {2: (0.18, 0.62, 1.07, 1.86), 1: (0.385, 1.19)}
"""By bits: the positive ones, found by Lloyd's iteration."""

_PAIR_LEVELS = ((-0.82, 0.44), (-0.44, -0.82), (0.82, -0.44), (0.44, 0.82))
"""A square, tilted: the best four points found for pairs."""

_CELLS = 1024
"""Cells of the grid on which the nearest level is tabulated."""


class Codebook:
    """levels: float32 [LEVEL_VALUES]; for a width of one coordinate they rise. Raises ValueError for another size."""

    def __init__(self, levels: Tensor) -> None:
        if tuple(levels.shape) != (LEVEL_VALUES,):
            raise ValueError(f"levels must be [{LEVEL_VALUES}], got {tuple(levels.shape)}")
        self._levels = split_levels(levels.float())
        centres = _cell_centres(levels.device).expand(SUBSETS, -1).contiguous()
        # Per width of one coordinate: for every subset and cell the place in the subset, and the level there.
        self._places: list[Tensor] = []
        self._nearest: list[Tensor] = []
        for width, table in zip(WIDTHS, self._levels, strict=True):
            if width.span == 1:
                subset = table.view(-1, SUBSETS).T.contiguous()
                middles = (subset[:, 1:] + subset[:, :-1]) / 2
                places = torch.searchsorted(middles.contiguous(), centres)
                self._places.append(places.to(torch.uint8))
                self._nearest.append(subset.gather(1, places))

    def cells(self, index: int, values: Tensor) -> Tensor | None:
        """What `distances` and `choose` look levels up by; None where subsets have one level."""
        return None if WIDTHS[index].levels == SUBSETS else _cells(values.squeeze(1))

    def distances(self, index: int, values: Tensor, cells: Tensor | None, out: Tensor) -> None:
        """Squared distance of every step's values to the nearest level of each subset, into `out` [4, k].

        index: of the width in WIDTHS. values: float32 [k, span], in units of their expected deviation. cells: theirs.
        """
        for subset in range(SUBSETS):
            if cells is not None:
                nearest = self._nearest[index][subset].index_select(0, cells)
                torch.sub(values.squeeze(1), nearest, out=out[subset])
                out[subset].square_()
                continue
            level = self._levels[index][subset]
            torch.sub(values[:, 0], level[0], out=out[subset]).square_()
            for place in range(1, WIDTHS[index].span):
                out[subset].add_((values[:, place] - level[place]).square_())

    def choose(self, index: int, cells: Tensor | None, subsets: Tensor) -> Tensor:
        """Place of the nearest level in each step's subset: uint8 [k]. subsets: uint8 [k]."""
        if cells is None:
            return torch.zeros_like(subsets)
        return self._places[index].view(-1).index_select(0, cells.add(subsets, alpha=_CELLS))

    def restore(self, index: int, numbers: Tensor) -> Tensor:
        """Values float32 [k, span] of levels 4 * place + subset, integer [k]."""
        return self._levels[index].index_select(0, numbers.int())


def split_levels(levels: Tensor) -> list[Tensor]:
    """[LEVEL_VALUES] as [levels, span] of every width."""
    parts = torch.split(levels, [width.levels * width.span for width in WIDTHS])
    return [part.view(-1, width.span) for part, width in zip(parts, WIDTHS, strict=True)]


def normal_levels() -> Tensor:
    """Levels for a standard normal distribution: float32 [LEVEL_VALUES]."""
    parts = []
    for width in WIDTHS:
        if width.span > 1:
            part = torch.tensor(_PAIR_LEVELS, dtype=torch.float64)
        elif width.bits in _FEW_LEVELS:
            positive = torch.tensor(_FEW_LEVELS[width.bits], dtype=torch.float64)
            part = torch.cat([-positive.flip(0), positive])
        else:
            share = (torch.arange(width.levels, dtype=torch.float64) + 0.5) / width.levels
            part = _SPREAD[width.bits] * torch.special.ndtri(share)
        parts.append(part.reshape(-1).float())
    return torch.cat(parts)


@functools.cache
def normal_codebook(device: torch.device | str) -> Codebook:
    """The codebook of `normal_levels` on a device."""
    return Codebook(normal_levels().to(device))


def _cells(values: Tensor) -> Tensor:
    """Cell of every value, int32: x / (1 + |x|) in equal parts. Anything that is no number falls in a cell too."""
    part = values / values.abs().add_(1.0)
    return part.nan_to_num_(0.0).add_(1.0).mul_(_CELLS / 2).clamp_(0, _CELLS - 1).int()


def _cell_centres(device: torch.device) -> Tensor:
    """The value in the middle of every cell: float32 [_CELLS]."""
    part = (torch.arange(_CELLS, device=device) + 0.5) / (_CELLS / 2) - 1.0
    return part / (1.0 - part.abs())
