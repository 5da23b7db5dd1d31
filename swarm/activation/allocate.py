"""Divide a bit budget over token classes and coordinates: fit a `WidthTable` to samples.

The error of a coordinate in a class is its mean square there times the share that its width loses. The table
minimises the sum of errors + price * bits, with the price found by bisection so that the classes' mean fits the
budget (Shoham and Gersho, "Efficient bit allocation for an arbitrary set of quantizers", 1988).
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarm.activation.codebook import WIDTHS
from swarm.activation.quantise import WidthTable, rank_tokens, token_gains

_BISECTIONS = 60

_USUAL = 256
"""One token in so many, the largest, has no say."""

_BITS = torch.tensor([*(width.bits / width.span for width in WIDTHS), 0.0], dtype=torch.float64)
_LOST = torch.tensor([*(width.lost for width in WIDTHS), 1.0], dtype=torch.float64)
"""Of every choice, the widths and nothing: bits per coordinate, and the share of a mean square that is lost."""


def fit_width_table(
    coordinates: Tensor, coordinate_scale: Tensor, *, classes: int, budget_bits: int
) -> WidthTable:
    """The table of least squared error on the samples.

    coordinates: float32 [n, R], falling in variance along R. coordinate_scale: float32 [R]. budget_bits: mean
    bits per token that codes may take. Raises ValueError if the budget is less than a bit.
    """
    if budget_bits < 1:
        raise ValueError(f"{budget_bits} bits per token leave nothing for coordinates; lower mask_ratio")
    codes, _ = token_gains(coordinates, coordinate_scale)
    order = rank_tokens(codes)[codes.numel() // _USUAL :]
    energy = []
    for c in range(classes):
        first, end = c * order.numel() // classes, (c + 1) * order.numel() // classes
        # Fewer samples than classes: the nearest sample stands in.
        members = order[min(first, order.numel() - 1) : max(end, first + 1)]
        energy.append(coordinates[members].square().mean(dim=0).double().cpu())
    errors = torch.stack(energy).unsqueeze(1) * _LOST.unsqueeze(1)
    # Prices are searched on a logarithmic scale between one that keeps everything and one that keeps nothing.
    largest = float(errors.max()) or 1.0
    low, high = largest * 1e-20, largest * 10.0
    table = _table_at(errors, high)
    for _ in range(_BISECTIONS):
        price = (low * high) ** 0.5
        candidate = _table_at(errors, price)
        if sum(candidate.token_bits) <= classes * budget_bits:
            high, table = price, candidate
        else:
            low = price
    return table


def _table_at(errors: Tensor, price: float) -> WidthTable:
    """Best table at a price per bit, half pairs left out, richest class first. errors: float64 [C, choices, R]."""
    best = (errors + price * _BITS.unsqueeze(1)).argmin(dim=1)
    rows = []
    for choices in best:
        counts = torch.bincount(choices, minlength=len(_BITS))[: len(WIDTHS)].tolist()
        rows.append([n - n % width.span for n, width in zip(counts, WIDTHS, strict=True)])
    rows.sort(key=lambda row: -sum(n // w.span * w.bits for n, w in zip(row, WIDTHS, strict=True)))
    return WidthTable(rows)
