"""Divide a bit budget over token classes and coordinates, and learn the levels: from samples.

The error of a coordinate in a class is its mean square there times what a width leaves of it. The table minimises
the sum of errors + price * bits, with the price found by bisection so that the classes' mean fits the budget
(Shoham and Gersho, "Efficient bit allocation for an arbitrary set of quantizers", 1988). Levels are means of the
values they stand for (Lloyd's iteration), learned from the very coordinates that the table gives their width, and
what a width leaves is measured on the same; so table and levels are fitted in turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.activation.codebook import WIDTHS, Codebook, default_levels, split_levels
from swarm.activation.quantise import WidthTable, gain_values, rank_tokens, token_gains, trellis_code
from swarm.activation.trellis import SUBSETS

_BISECTIONS = 60
_TURNS = 2
_LLOYD = 2
_SAMPLES_PER_LEVEL = 16
_LEARNED_STEPS = 1 << 15
"""Steps a width's levels are learned from: 64 for every level of the largest."""

_SMALLEST_UNIT = 1e-30

_BITS = torch.tensor([*(width.bits / width.span for width in WIDTHS), 0.0], dtype=torch.float64)
"""Bits per coordinate of every choice: the widths, and nothing."""


@dataclass(frozen=True, slots=True)
class Codes:
    """A table, levels float32 [LEVEL_VALUES], and what every choice of _BITS leaves of a mean square: float64."""

    table: WidthTable
    levels: Tensor
    left: Tensor


def fit_codes(
    coordinates: Tensor,
    coordinate_scale: Tensor,
    *,
    classes: int,
    budget_bits: int,
    escape_interval: int,
    known: Codes | None = None,
) -> Codes:
    """The table of least squared error on the samples, and the levels.

    coordinates: float32 [n, R], falling in variance along R. coordinate_scale: float32 [R]. budget_bits: mean
    bits per token that codes may take. escape_interval: the largest of every so many samples will not be coded.
    known: levels to keep, if given. Raises ValueError if the budget is less than a bit.
    """
    if budget_bits < 1:
        raise ValueError(f"{budget_bits} bits per token leave nothing for coordinates; lower mask_ratio")
    codes, offset = token_gains(coordinates, coordinate_scale)
    order = rank_tokens(codes)[codes.numel() // escape_interval :]
    coordinates = coordinates[order]
    units = gain_values(codes, offset)[order].clamp_min(_SMALLEST_UNIT).unsqueeze(1) * coordinate_scale
    edges = [c * order.numel() // classes for c in range(classes + 1)]
    # Fewer samples than classes: the nearest sample stands in.
    members = [
        slice(min(edges[c], order.numel() - 1), max(edges[c + 1], edges[c] + 1)) for c in range(classes)
    ]
    energy = torch.stack([coordinates[part].square().mean(dim=0).double().cpu() for part in members])

    def cheapest(left: Tensor) -> WidthTable:
        return _cheapest(energy.unsqueeze(1) * left.unsqueeze(1), classes * budget_bits)

    if known is not None:
        return Codes(cheapest(known.left), known.levels, known.left)
    normed = coordinates / units
    levels = default_levels()
    left = 0.6 * torch.exp2(-1.9 * _BITS)
    left[-1] = 1.0
    for _ in range(_TURNS):
        levels, left = _learn(normed, cheapest(left), levels, left, members)
    return Codes(cheapest(left), levels, left)


def _learn(
    normed: Tensor, table: WidthTable, levels: Tensor, left: Tensor, members: list[slice]
) -> tuple[Tensor, Tensor]:
    """Levels after some of Lloyd's iterations on what the table codes at each width, and what they leave of it.

    normed: float32 [n, R], coordinates in units of their expected deviation. Widths with few samples keep theirs.
    """
    generator = torch.Generator().manual_seed(0)
    parts = split_levels(levels)
    left = left.clone()
    for index, width in enumerate(WIDTHS):
        cells = []
        for row, part in zip(table.counts, members, strict=True):
            first = sum(row[:index])
            cells.append(normed[part, first : first + row[index]].reshape(-1, width.span))
        values = torch.cat(cells)
        if values.shape[0] < _SAMPLES_PER_LEVEL * width.levels:
            continue
        if values.shape[0] > _LEARNED_STEPS:
            values = values[torch.randperm(values.shape[0], generator=generator)[:_LEARNED_STEPS]]
        for _ in range(_LLOYD):
            numbers = _numbers(index, values, Codebook(_joined(parts))).long()
            counts = torch.bincount(numbers, minlength=width.levels).unsqueeze(1)
            sums = torch.zeros(width.levels, width.span, device=values.device).index_add_(0, numbers, values)
            new = torch.where(counts > 0, sums / counts.clamp_min(1), parts[index])
            parts[index] = new if width.span > 1 else new.sort(dim=0).values
        codebook = Codebook(_joined(parts))
        rest = values - codebook.restore(index, _numbers(index, values, codebook))
        left[index] = float(rest.square().mean() / values.square().mean().clamp_min(_SMALLEST_UNIT))
    return _joined(parts), left


def _joined(parts: list[Tensor]) -> Tensor:
    """Inverse of `split_levels`."""
    return torch.cat([part.reshape(-1) for part in parts])


def _numbers(index: int, values: Tensor, codebook: Codebook) -> Tensor:
    """Numbers of the levels, int32 [k], that float32 [k, span] are coded to at one width."""
    _, subset, place = trellis_code([(index, values)], codebook)
    return place.int() * SUBSETS + subset


def _cheapest(errors: Tensor, budget_bits: int) -> WidthTable:
    """The table of least error whose classes' bits together keep the budget. errors: float64 [C, choices, R]."""
    # Prices are searched on a logarithmic scale between one that keeps everything and one that keeps nothing.
    largest = float(errors.max()) or 1.0
    low, high = largest * 1e-20, largest * 10.0
    table = _table_at(errors, high)
    for _ in range(_BISECTIONS):
        price = (low * high) ** 0.5
        candidate = _table_at(errors, price)
        if sum(candidate.token_bits) <= budget_bits:
            high, table = price, candidate
        else:
            low = price
    return table


def _table_at(errors: Tensor, price: float) -> WidthTable:
    """Best table at a price per bit, half pairs left out, richest class first."""
    best = (errors + price * _BITS.unsqueeze(1)).argmin(dim=1)
    rows = []
    for choices in best:
        counts = torch.bincount(choices, minlength=len(_BITS))[: len(WIDTHS)].tolist()
        rows.append([n - n % width.span for n, width in zip(counts, WIDTHS, strict=True)])
    rows.sort(key=lambda row: -sum(n // w.span * w.bits for n, w in zip(row, WIDTHS, strict=True)))
    return WidthTable(rows)
