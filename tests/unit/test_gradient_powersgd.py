"""PowerSGD against its equations in float64, and linear algebra whose bits do not depend on the machine."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.gradient.chunk import FloatChunk
from swarm.gradient.config import compressor_config
from swarm.gradient.portable import exact_product, filled_basis, orthonormal, tree_sum
from swarm.gradient.powersgd import LowRankLayout, PowerSGDCompressor, rank_for_ratio
from swarm.gradient.registry import build_compressor
from swarm.gradient.simulate import average_group
from swarm.model.trainable import TrainableSet
from tests.kit.butterfly import Array

SHAPES = {"a": (24, 10), "norm": (7,), "b": (12, 30), "small": (3, 4), "a2": (24, 10), "cube": (8, 3, 6)}
LAYOUT = TrainableSet.of({name: torch.zeros(shape) for name, shape in SHAPES.items()})
NUMEL, RANK, SEED, MOST = LAYOUT.numel, 2, 3, 100
COMPRESSED = {"a": (24, 10), "b": (12, 30), "a2": (24, 10), "cube": (8, 18)}
WEIGHTS = [[5, 1, 3], [2, 2, 2], [0, 4, 7], [1, 9, 0]]
seeds = st.integers(0, 2**30)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(values: str = "fp32", error_feedback: bool = True, rank: int = RANK) -> PowerSGDCompressor:
    config = compressor_config(
        "powersgd", rank=rank, values=values, error_feedback=error_feedback, min_compression=1.5
    )
    compressor = build_compressor(config, LAYOUT, SEED)
    assert isinstance(compressor, PowerSGDCompressor)
    return compressor


def matrices(flat: Array) -> dict[str, Array]:
    named = LAYOUT.views(torch.from_numpy(flat))
    return {name: named[name].reshape(shape).numpy() for name, shape in COMPRESSED.items()}


def play(members: list[PowerSGDCompressor], gradients: list[Tensor], weights: list[int], step: int) -> Tensor:
    results = average_group(members, gradients, weights, run_seed=SEED, step=step, most=MOST)
    assert all(torch.equal(result.view(torch.int32), results[0].view(torch.int32)) for result in results)
    return results[0]


@settings(max_examples=10, derandomize=True, deadline=None)
@given(seed=seeds, feedback=st.booleans())
def test_rounds_follow_the_equations(seed: int, feedback: bool) -> None:
    members = [make(error_feedback=feedback) for _ in range(3)]
    assert [matrix.name for matrix in members[0].layout.matrices] == list(COMPRESSED)
    # From a known Q, so that the oracle needs no random numbers of ours.
    start = normal(members[0].layout.right_elements, seed=seed)
    for member in members:
        member.load_common_state({"q": start})
    q, position = {}, 0
    for name, (_, columns) in COMPRESSED.items():
        q[name] = start[position : position + columns * RANK].view(columns, RANK).double().numpy()
        position += columns * RANK
    errors = np.zeros((3, NUMEL))
    for step, weights in enumerate(WEIGHTS):
        gradients = [normal(NUMEL, seed=seed + 10 * step + i) * (w > 0) for i, w in enumerate(weights)]
        w = np.array(weights)[:, None]
        sums = errors + w * np.stack([g.double().numpy() for g in gradients])
        a = sums / np.maximum(w, 1)
        expected = np.average(a, axis=0, weights=weights)
        for name, matrix in matrices(expected).items():
            hat = np.linalg.qr(matrix @ q[name])[0]
            # By linearity the averages are those of the averaged A.
            q[name] = matrix.T @ hat
            matrix[:] = hat @ q[name].T
        got = play(members, gradients, weights, step).double().numpy()
        np.testing.assert_allclose(got, expected, atol=2e-4)
        if feedback:
            compressed = np.zeros(NUMEL, dtype=bool)
            for name in COMPRESSED:
                LAYOUT.views(torch.from_numpy(compressed))[name].fill_(True)
            errors = sums - w * np.where(compressed, expected, a)
            for member, error in zip(members, errors, strict=True):
                found = member._state.local("error").double().numpy()
                np.testing.assert_allclose(found, error, atol=5e-3)


@pytest.mark.parametrize("values", ["fp16", "fp32"])
def test_matrices_of_low_rank_arrive_whole(values: str) -> None:
    gradient = LAYOUT.empty()
    for index, (name, view) in enumerate(LAYOUT.views(gradient).items()):
        rows = view.shape[0]
        if name in COMPRESSED:
            columns = COMPRESSED[name][1]
            view.copy_((normal(rows, RANK, seed=index) @ normal(RANK, columns, seed=-index)).view_as(view))
        else:
            view.copy_(normal(*view.shape))
    # Matrices of very different size share a chunk's scale.
    LAYOUT.views(gradient)["a2"].mul_(1e-6)
    members = [make(values), make(values)]
    for step in range(2):
        got = LAYOUT.views(play(members, [gradient, gradient], [1, 2], step))
        for name, view in LAYOUT.views(gradient).items():
            error = float((got[name] - view).norm() / view.norm())
            assert error <= (4e-3 if values == "fp16" else 1e-4), (name, step)


def test_what_is_left_out_comes_with_later_steps() -> None:
    gradient, members, applied = normal(NUMEL), [make("fp16"), make("fp16")], torch.zeros(NUMEL)
    for step in range(60):
        applied += play(members, [gradient, gradient], [1, 1], step)
    assert float((applied / 60 - gradient).norm() / gradient.norm()) < 0.12


def test_zero_matrices_give_zero_and_wake_up_again() -> None:
    members = [make("fp16"), make("fp16")]
    for step in range(3):
        assert not bool(play(members, [LAYOUT.empty(), LAYOUT.empty()], [1, 1], step).any())
    rank_one = LAYOUT.empty()
    LAYOUT.views(rank_one)["b"].copy_(torch.outer(normal(12, seed=1), normal(30, seed=2)))
    torch.testing.assert_close(play(members, [rank_one] * 2, [1, 1], 3), rank_one, atol=5e-3, rtol=0)
    # Its second column was dropped; a matrix of rank two finds both again.
    rank_two = LAYOUT.empty()
    LAYOUT.views(rank_two)["b"].copy_(normal(12, 2, seed=3) @ normal(2, 30, seed=4))
    torch.testing.assert_close(play(members, [rank_two] * 2, [1, 1], 4), rank_two, atol=2e-2, rtol=0)


@pytest.mark.parametrize("size", [1e-25, 1e-8, 1e20])
def test_gradients_of_any_size_pass(size: float) -> None:
    members = [make("fp16"), make("fp16")]
    whole = [make("fp16"), make("fp16")]
    gradient, scale = normal(NUMEL), 2.0 ** round(np.log2(size))
    for step in range(2):
        small = play(members, [gradient * scale] * 2, [1, 1], step)
        one = play(whole, [gradient] * 2, [1, 1], step)
        torch.testing.assert_close(small / scale, one, rtol=1e-3, atol=1e-3)


def test_common_state_is_the_decoded_average_and_first_starts_follow_the_seed() -> None:
    members = [make("fp16"), make("fp16")]
    play(members, [normal(NUMEL, seed=1), normal(NUMEL, seed=2)], [1, 2], 0)
    state = members[0].common_state()
    assert set(state) == {"q"} and state["q"].shape == (members[0].layout.right_elements,)
    codec = FloatChunk("fp16")
    part = state["q"][:MOST]
    assert torch.equal(codec.decode(codec.encode(part, 0), MOST), part)
    starts, others = make().starts(0), make().starts(1)
    for start, again, other in zip(starts, make().starts(0), others, strict=True):
        assert torch.equal(start, again) and not torch.equal(start, other)
        torch.testing.assert_close(start.T @ start, torch.eye(RANK), atol=1e-6, rtol=0)


def test_layout_compresses_what_it_pays_for() -> None:
    layout = LowRankLayout.of(LAYOUT, RANK, 1.5)
    assert {m.name: (m.rows, m.columns) for m in layout.matrices} == COMPRESSED
    assert layout.rest_elements == 7 + 12
    assert layout.sent_elements == 19 + RANK * sum(m + n for m, n in COMPRESSED.values())
    for rank in (1, 2, 3, 5, 50):
        found = {m.name for m in LowRankLayout.of(LAYOUT, rank, 2.0).matrices}
        assert found == {
            name for name, (m, n) in {**COMPRESSED, "small": (3, 4)}.items() if (m + n) * rank * 2 < m * n
        }
    unpaid = LowRankLayout.of(LAYOUT, 50, 2.0)
    members = [
        PowerSGDCompressor(NUMEL, unpaid, FloatChunk("fp32"), error_feedback=True, seed=0) for _ in range(2)
    ]
    assert len(members[0].phases(0)) == 1 and members[0].common_state() == {}
    torch.testing.assert_close(play(members, [normal(NUMEL)] * 2, [1, 1], 0), normal(NUMEL))
    assert members[0].common_state() == {}


@pytest.mark.parametrize("ratio", [1.5, 2.0, 3.0, 4.5])
def test_ratio_chooses_the_largest_rank_that_keeps_it(ratio: float) -> None:
    rank = rank_for_ratio(LAYOUT, ratio, 2.0)
    assert NUMEL / LowRankLayout.of(LAYOUT, rank, 2.0).sent_elements >= ratio
    larger = LowRankLayout.of(LAYOUT, rank + 1, 2.0)
    assert NUMEL / larger.sent_elements < ratio or not larger.matrices
    built = build_compressor(compressor_config("powersgd", ratio=ratio), LAYOUT, 0)
    assert isinstance(built, PowerSGDCompressor) and built.layout.rank == rank


def test_ratio_that_no_rank_keeps_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 1 is too much"):
        rank_for_ratio(LAYOUT, 50.0, 2.0)


# -- linear algebra ------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(seed=seeds, rows=st.integers(1, 40), rank=st.integers(1, 6), stretch=st.integers(0, 12))
def test_bases_are_those_of_qr(seed: int, rows: int, rank: int, stretch: int) -> None:
    rank = min(rank, rows)
    columns = normal(2, rows, rank, seed=seed).double() * torch.logspace(0, -stretch, rank)
    basis = orthonormal(columns)
    assert basis.dtype == torch.float64
    for got, matrix in zip(basis.numpy(), columns.numpy(), strict=True):
        if np.linalg.cond(matrix / np.linalg.norm(matrix, axis=0)) > 1e4:
            continue
        np.testing.assert_allclose(got.T @ got, np.eye(rank), atol=1e-12)
        exact, upper = np.linalg.qr(matrix)
        np.testing.assert_allclose(got, exact * np.sign(np.diag(upper)), atol=1e-8)


def test_dependent_and_zero_columns_become_zero_or_are_filled() -> None:
    first, second = normal(9, seed=1), normal(9, seed=2)
    columns = torch.stack([first, torch.zeros(9), 2 * first, second, first - 3 * second], dim=1)[None]
    basis = orthonormal(columns)[0]
    assert basis.any(dim=0).tolist() == [True, False, False, True, False]
    filled = filled_basis(columns, normal(1, 9, 5, seed=3))[0]
    torch.testing.assert_close(filled.T @ filled, torch.eye(5, dtype=torch.float64))
    assert not bool(orthonormal(torch.full((1, 4, 2), 1e-35)).any())


def test_same_bits_alone_and_beside_others_with_any_number_of_threads() -> None:
    columns = normal(5, 301, 4, seed=7)
    together = orthonormal(columns)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for index in range(5):
                assert torch.equal(orthonormal(columns[index : index + 1])[0], together[index])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 64, 100])
def test_tree_sum_is_a_sum(rows: int) -> None:
    values = normal(2, rows, 3, seed=rows).double()
    kept = values.clone()
    torch.testing.assert_close(tree_sum(values), values.sum(dim=1))
    assert torch.equal(values, kept)


@settings(max_examples=25, deadline=None)
@given(seed=seeds, rank=st.integers(1, 9), exponent=st.integers(-80, 80))
def test_product_is_exact_but_for_its_last_rounding(seed: int, rank: int, exponent: int) -> None:
    basis = orthonormal(normal(1, 12, rank, seed=seed))[0]
    other = normal(5, rank, seed=seed + 1) * 2.0**exponent
    got = exact_product(basis, other)
    torch.testing.assert_close(
        got.double() / 2.0**exponent, basis @ other.double().T / 2.0**exponent, atol=1e-5, rtol=0
    )
    # The rounded factors' product, in rationals.
    peak = float(other.abs().max())
    unit = Fraction(2) ** (int(np.frexp(peak)[1]) - (29 - int(np.ceil(np.log2(rank)))))
    for i in (0, 11):
        for j in (0, 4):
            terms = [
                round(Fraction(float(basis[i, k])) * 2**23) * round(Fraction(float(other[j, k])) / unit)
                for k in range(rank)
            ]
            assert float(got[i, j]) == float(np.float32(float(sum(terms) * unit / 2**23)))


def test_product_with_zero_is_zero_and_any_order_gives_the_same_bits() -> None:
    basis = orthonormal(normal(1, 50, 8, seed=1))[0]
    assert not bool(exact_product(basis, torch.zeros(6, 8)).any())
    other, order = normal(6, 8, seed=2), torch.randperm(8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(exact_product(basis, other), exact_product(basis[:, order], other[:, order]))
