"""Divide a byte budget over token classes and coordinates: fit a `WidthTable` to samples.

For every class and coordinate the squared error of each width is measured on the samples with the quantiser
itself; the table minimises the sum of errors + price * bits, with the price found by bisection so that the
classes' mean fits the budget (Shoham and Gersho, "Efficient bit allocation for an arbitrary set of
quantizers", 1988).
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarm.activation.quantise import (
    WIDTHS,
    WidthTable,
    from_levels,
    rank_tokens,
    to_levels,
    token_scales,
    unit_scales,
)

_BISECTIONS = 60
_CHOICES = (*WIDTHS, 0)


def fit_width_table(
    coordinates: Tensor, coordinate_scale: Tensor, *, classes: int, budget_bytes: int, escape_interval: int
) -> WidthTable:
    """The table of least squared error on the samples.

    coordinates: float32 [n, R], falling in variance along R. coordinate_scale: float32 [R]. budget_bytes: mean
    bytes per token that codes may take. escape_interval: the largest of every so many samples will not be coded.
    Raises ValueError if the budget is less than a byte.
    """
    if budget_bytes < 1:
        raise ValueError(f"{budget_bytes} bytes per token leave nothing for coordinates; lower mask_ratio")
    errors = _errors(coordinates, coordinate_scale, classes, escape_interval)
    # Prices are searched on a logarithmic scale between one that keeps everything and one that keeps nothing.
    largest = float(errors.max()) or 1.0
    low, high = largest * 1e-20, largest * 10.0
    table = _table_at(errors, high)
    for _ in range(_BISECTIONS):
        price = (low * high) ** 0.5
        candidate = _table_at(errors, price)
        if sum(candidate.token_bytes) <= classes * budget_bytes:
            high, table = price, candidate
        else:
            low = price
    return table


def _errors(coordinates: Tensor, coordinate_scale: Tensor, classes: int, escape_interval: int) -> Tensor:
    """Mean squared error per class, choice of width and coordinate: float64 [C, len(_CHOICES), R]."""
    scales = token_scales(coordinates, coordinate_scale)
    unit = unit_scales(scales, coordinate_scale)
    order = rank_tokens(scales)[scales.numel() // escape_interval :]
    edges = [c * order.numel() // classes for c in range(classes + 1)]
    errors = torch.zeros((classes, len(_CHOICES), coordinates.shape[1]), dtype=torch.float64)
    for c in range(classes):
        # Fewer samples than classes: the nearest sample stands in.
        members = order[min(edges[c], order.numel() - 1) : max(edges[c + 1], edges[c] + 1)]
        values, units = coordinates[members], unit[members]
        for choice, width in enumerate(_CHOICES):
            coded = from_levels(to_levels(values / units, width), width) * units if width else 0.0
            errors[c, choice] = (values - coded).square().double().mean(dim=0).cpu()
    return errors


def _table_at(errors: Tensor, price: float) -> WidthTable:
    """Best table at a price per bit, its counts rounded down to whole bytes, richest class first."""
    widths = torch.tensor(_CHOICES, dtype=torch.float64).unsqueeze(1)
    best = (errors + price * widths).argmin(dim=1)
    rows = []
    for choices in best:
        counts = []
        carried = 0
        for choice, width in enumerate(WIDTHS):
            # What does not fill a byte at this width is coded at the next smaller one.
            wanted = int((choices == choice).sum()) + carried
            count = wanted - wanted % (8 // width)
            carried = wanted - count
            counts.append(count)
        rows.append(counts)
    rows.sort(key=lambda row: -sum(n * width for n, width in zip(row, WIDTHS, strict=True)))
    return WidthTable(rows)
