"""The trellis, the codebook and the stream of `quantise`, against searches and decoders written out plainly."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.activation.allocate import fit_width_table
from swarm.activation.codebook import LEVEL_VALUES, WIDTHS, Codebook, normal_codebook, normal_levels
from swarm.activation.quantise import (
    WidthTable,
    dequantise,
    gain_values,
    quantise,
    rank_tokens,
    token_gains,
    trellis_code,
)
from swarm.activation.trellis import best_path, subsets

CODEBOOK = normal_codebook("cpu")


def plain_subsets(path: tuple[int, ...]) -> list[int]:
    """Subset of every step from path bits, one at a time."""
    bits = (0, 0, *path)
    return [bits[t + 1] + 2 * (bits[t + 2] ^ bits[t]) for t in range(len(path))]


@given(steps=st.integers(1, 8), seed=st.integers(0, 1 << 20))
@settings(max_examples=40, deadline=None)
def test_the_best_path_is_the_best_of_all(steps: int, seed: int) -> None:
    distances = torch.rand(6, steps, 3, generator=torch.Generator().manual_seed(seed))
    path = best_path(distances)
    assert subsets(path)[:, 0].tolist() == plain_subsets(tuple(path[:, 0].tolist()))
    for lane in range(3):
        costs = {
            bits: sum(float(distances[j, t, lane]) for t, j in enumerate(plain_subsets(bits)))
            for bits in itertools.product((0, 1), repeat=steps)
        }
        assert costs[tuple(path[:, lane].tolist())] == pytest.approx(min(costs.values()), rel=1e-6)


@pytest.mark.parametrize("index", range(len(WIDTHS)))
def test_the_error_lies_between_the_best_scalar_quantiser_and_the_bound(index: int) -> None:
    """Normal values: Max's table (1960) above, the rate-distortion function 4^-w below."""
    width = WIDTHS[index]
    values = torch.randn(60_000, generator=torch.Generator().manual_seed(0)).view(-1, width.span)
    coded = restore(index, values, CODEBOOK)
    error = float((coded - values).square().mean() / values.square().mean())
    scalar = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}
    # Half a bit by a scalar quantiser: one bit for every second value.
    upper = 1.3634 / 2 if width.span == 2 else scalar.get(width.bits, 2.7 * 4.0**-width.bits)
    assert 4.0 ** (-width.bits / width.span) < error < 0.92 * upper
    assert error == pytest.approx(width.lost, rel=0.05)


def restore(index: int, values: Tensor, codebook: Codebook) -> Tensor:
    _, subset, place = trellis_code([(index, values)], codebook)
    return codebook.restore(index, place.int() * 4 + subset)


@given(seed=st.integers(0, 1 << 20), width=st.integers(0, len(WIDTHS) - 2))
@settings(max_examples=30, deadline=None)
def test_the_nearest_level_is_found_but_for_the_grid(seed: int, width: int) -> None:
    values = 2.0 * torch.randn(200, 1, generator=torch.Generator().manual_seed(seed))
    distances = torch.empty(4, 200)
    CODEBOOK.distances(width, values, CODEBOOK.cells(width, values), distances)
    levels = normal_levels().split([w.levels * w.span for w in WIDTHS])[width]
    exact = torch.stack([(values - levels[j::4]).square().min(dim=1).values for j in range(4)])
    assert bool((distances >= exact - 1e-6).all())
    # A cell is (1 + |x|)^2 / 512 wide.
    cell = (1.0 + values.abs().squeeze(1)) ** 2 / 512
    assert bool((distances.sqrt() - exact.sqrt() < 1.1 * cell + 1e-3).all())


def table_strategy(data: st.DataObject, classes: int) -> WidthTable:
    rows = [[data.draw(st.integers(0, 3)) * width.span for width in WIDTHS] for _ in range(classes)]
    rows.sort(key=lambda row: -sum(n // w.span * w.bits for n, w in zip(row, WIDTHS, strict=True)))
    return WidthTable(rows)


@given(data=st.data(), tokens=st.integers(0, 40), classes=st.integers(1, 5), seed=st.integers(0, 1 << 20))
@settings(max_examples=60, deadline=None)
def test_any_codes_decode_as_the_format_says(
    data: st.DataObject, tokens: int, classes: int, seed: int
) -> None:
    table = table_strategy(data, classes)
    generator = torch.Generator().manual_seed(seed)
    size = table.coordinates + 2
    codes = torch.randint(0, 256, (table.nbytes(tokens),), dtype=torch.uint8, generator=generator)
    gains = torch.rand(tokens, generator=generator) + 0.5
    scale = torch.rand(size, generator=generator) + 0.5
    levels = torch.randn(LEVEL_VALUES, generator=generator)
    decoded = dequantise(codes, gains, scale, table, Codebook(levels))
    expected = plain_decode(codes.numpy(), table.counts, tokens, size, levels.numpy())
    exact = expected * gains.numpy()[:, None] * scale.numpy()
    assert np.allclose(decoded.numpy(), exact, rtol=1e-5, atol=1e-6)


def plain_decode(
    codes: npt.NDArray[np.uint8],
    counts: tuple[tuple[int, ...], ...],
    tokens: int,
    size: int,
    levels: npt.NDArray[np.float32],
) -> npt.NDArray[np.float64]:
    """The decoder as docs/protocol.md describes it, value by value."""
    bits = [int(codes[i % len(codes)] >> (i // len(codes))) & 1 for i in range(8 * len(codes))]
    steps: list[tuple[int, int, int, int]] = []  # width, bits, token, first coordinate
    for width, (w, span) in enumerate(
        [(8, 1), (7, 1), (6, 1), (5, 1), (4, 1), (3, 1), (2, 1), (1, 1), (1, 2)]
    ):
        for c, row in enumerate(counts):
            for token in range(c * tokens // len(counts), (c + 1) * tokens // len(counts)):
                first = sum(row[:width])
                steps += [(width, w, token, first + i) for i in range(0, row[width], span)]
    lanes = -(-len(steps) // 128)
    path = bits[: len(steps)]
    used = len(steps)
    numbers = []
    for k in range(len(steps)):
        latest = path[k - lanes] if k >= lanes else 0
        earlier = path[k - 2 * lanes] if k >= 2 * lanes else 0
        numbers.append(latest + 2 * (path[k] ^ earlier))
    for plane in range(1, 8):
        for k, step in enumerate(steps):
            if step[1] > plane:
                numbers[k] += bits[used] << (plane + 1)
                used += 1
    assert used <= len(bits) < used + 8
    output = np.zeros((tokens, size))
    starts = np.cumsum([0, 512, 256, 128, 64, 32, 16, 8, 4])
    for (width, _, token, first), number in zip(steps, numbers, strict=True):
        span = 2 if width == 8 else 1
        at = starts[width] + number * span
        output[token, first : first + span] = levels[at : at + span]
    return output


@given(data=st.data(), tokens=st.integers(0, 70), classes=st.integers(1, 6), seed=st.integers(0, 1 << 20))
@settings(max_examples=40, deadline=None)
def test_what_is_decoded_is_what_the_encoder_chose(
    data: st.DataObject, tokens: int, classes: int, seed: int
) -> None:
    table = table_strategy(data, classes)
    bits = sum(table.token_bits)
    assert table.nbytes(tokens) * 8 * classes <= tokens * bits + 7 * classes
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(table.coordinates + 1, generator=generator) + 0.1
    coordinates = torch.randn(tokens, scale.numel(), generator=generator) * scale
    codes, offset = token_gains(coordinates, scale)
    order = rank_tokens(codes)
    gains, coordinates = gain_values(codes, offset)[order], coordinates[order]
    coded = quantise(coordinates, gains, scale, table, CODEBOOK)
    assert coded.numel() == table.nbytes(tokens)
    decoded = dequantise(coded, gains, scale, table, CODEBOOK)
    units = gains.unsqueeze(1) * scale
    # Decoding what was decoded changes nothing: every value is a level, and no step of the stream is misplaced.
    for block in table.blocks(tokens):
        part = decoded[block.ranks, block.coordinates]
        wide = WIDTHS[block.width].bits >= 5
        exact, unit = coordinates[block.ranks, block.coordinates], units[block.ranks, block.coordinates]
        if wide:
            assert float(((part - exact).abs() / unit).max()) < 0.5


@given(exponents=st.lists(st.integers(-600, 600), min_size=1, max_size=20))
@settings(max_examples=80, deadline=None)
def test_gain_codes_keep_order_and_size(exponents: list[int]) -> None:
    exact = torch.tensor(exponents) / 10.0
    codes, offset = token_gains(torch.exp2(exact).unsqueeze(1), torch.ones(1))
    assert codes.dtype == torch.uint8 and int(codes.max()) == 255
    restored = gain_values(codes, offset).log2()
    kept = exact > exact.max() - 31
    assert torch.allclose(restored[kept], exact[kept], atol=1 / 16 + 1e-3)
    ranked = exact[rank_tokens(codes)][: int(kept.sum())]
    assert bool((ranked[:-1] - ranked[1:] > -1 / 8 - 1e-3).all())


def test_gains_that_are_not_finite_are_seen_by_the_other_end() -> None:
    for value in (float("nan"), float("inf")):
        codes, offset = token_gains(torch.tensor([[1.0], [value]]), torch.ones(1))
        assert not bool(torch.isfinite(gain_values(codes, offset)).all())
    codes, offset = token_gains(torch.zeros(3, 2), torch.ones(2))
    assert gain_values(codes, offset).tolist() == [0.0, 0.0, 0.0]


def test_width_tables_are_checked() -> None:
    none = [0] * len(WIDTHS)
    for counts, reason in (
        ([], "at least one class"),
        ([[1, 0, 0]], "9 counts"),
        ([[*none[:-1], 1]], "splits a pair"),
        ([[-1, *none[1:]]], "9 counts"),
        ([[1, *none[1:]], [2, *none[1:]]], "must not grow"),
    ):
        with pytest.raises(ValueError, match=reason):
            WidthTable(counts)
    with pytest.raises(ValueError, match="levels must be"):
        Codebook(torch.zeros(3))


@given(budget=st.integers(1, 320), classes=st.integers(1, 5), size=st.integers(8, 48))
@settings(max_examples=8, deadline=None)
def test_fitted_tables_keep_the_budget(budget: int, classes: int, size: int) -> None:
    scale = torch.logspace(1, -2, size)
    coordinates = torch.randn(50, size, generator=torch.Generator().manual_seed(1)) * scale
    table = fit_width_table(coordinates, scale, classes=classes, budget_bits=budget)
    assert sum(table.token_bits) <= classes * budget
    assert table.coordinates <= size
    # What is left would not pay for one more pair of bits in every class.
    assert sum(table.token_bits) >= classes * min(budget, 8 * size) - 3 * classes * size


SENDER = """
import sys, torch
from swarm.activation.codebook import Codebook, normal_levels
from swarm.activation.quantise import WidthTable, gain_values, quantise, rank_tokens, token_gains
torch.set_num_threads(int(sys.argv[1]))
generator = torch.Generator().manual_seed(3)
scale = torch.logspace(0, -2, 60)
coordinates = torch.randn(400, 60, generator=generator) * scale * torch.rand(400, 1, generator=generator)
codes, offset = token_gains(coordinates, scale)
order = rank_tokens(codes)
table = WidthTable([[2, 2, 2, 3, 5, 5, 8, 9, 12], [0, 0, 0, 1, 2, 4, 6, 8, 10]])
stream = quantise(coordinates[order], gain_values(codes[order], offset), scale, table, Codebook(normal_levels()))
sys.stdout.buffer.write(codes.numpy().tobytes() + offset.numpy().tobytes() + stream.numpy().tobytes())
"""


def test_another_process_with_other_threads_makes_the_same_bytes() -> None:
    sent = []
    for threads in ("1", "2"):
        environment = {**os.environ, "OMP_NUM_THREADS": threads}
        done = subprocess.run(
            [sys.executable, "-c", SENDER, threads], check=True, capture_output=True, env=environment
        )
        sent.append(done.stdout)
    assert sent[0] == sent[1]
    assert len(sent[0]) > 400
