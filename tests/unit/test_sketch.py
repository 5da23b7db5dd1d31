"""Weights are compared by 256 bytes, and every weight has its turn in the slice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.sketch import SKETCH_BYTES, SKETCH_TOLERANCE, sketch, sketch_distance, slice_span


def weights(count: int, seed: int = 0) -> torch.Tensor:
    return 0.02 * torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [1, 63, 64, 16_384, 16_385, 200_000])
def test_equal_weights_have_equal_sketches_and_others_do_not(count: int) -> None:
    flat = weights(count)
    assert len(sketch(flat, 3)) == SKETCH_BYTES
    assert sketch(flat, 3) == sketch(flat.clone(), 3)
    assert sketch_distance(sketch(flat, 3), sketch(flat, 3)) == 0.0
    assert sketch_distance(sketch(flat, 3), sketch(weights(count, 1), 3)) > 100 * SKETCH_TOLERANCE
    assert sketch(flat, 3) != sketch(flat, 4) or count == 1


@pytest.mark.parametrize("relative", [1e-1, 1e-3, 1e-5])
def test_the_distance_estimates_that_of_the_weights(relative: float) -> None:
    flat = weights(300_000)
    moved = flat.double() + relative * weights(300_000, 1).double()
    distances = [sketch_distance(sketch(flat, seed), sketch(moved.float(), seed)) for seed in range(8)]
    assert 0.6 * relative < sum(distances) / 8 < 1.6 * relative


def test_rounding_stays_within_the_tolerance_and_one_step_of_training_does_not() -> None:
    flat = weights(200_000)
    rounded = flat * (1 + 2.0**-23 * torch.randint(-2, 3, flat.shape))
    assert sketch_distance(sketch(flat, 0), sketch(rounded, 0)) < SKETCH_TOLERANCE / 10
    assert sketch_distance(sketch(flat, 0), sketch(flat + 1e-4 * flat.sign(), 0)) > SKETCH_TOLERANCE


def test_a_change_of_a_single_tensor_shows() -> None:
    flat = weights(1_000_000)
    other = flat.clone()
    other[500_000:501_000] = 0
    assert sketch_distance(sketch(flat, 0), sketch(other, 0)) > SKETCH_TOLERANCE


def test_what_is_no_sketch_is_refused_and_what_is_not_finite_is_infinitely_far() -> None:
    good = sketch(weights(100), 0)
    for bad in (b"", good[:-1], good + b"\0", "x" * 256):
        with pytest.raises(ValueError, match="256 bytes"):
            sketch_distance(good, bad)  # type: ignore[arg-type]
    assert sketch_distance(good, b"\xff" * 256) == float("inf")
    assert sketch_distance(bytes(256), bytes(256)) == 0.0
    assert sketch_distance(good, bytes(256)) == 1.0


@given(numel=st.integers(1, 5_000), payload=st.integers(0, 5_000), start=st.integers(0, 10_000))
def test_every_weight_has_its_turn_in_the_slice(numel: int, payload: int, start: int) -> None:
    count = slice_span(0, numel, payload)[1]
    assert 1 <= count <= max(1, min(payload // 100, numel // 256))
    steps = -(-numel // count)
    seen = [0] * numel
    for step in range(start, start + steps):
        offset, size = slice_span(step, numel, payload)
        assert 0 < size <= count
        for index in range(offset, offset + size):
            seen[index] += 1
    assert seen == [1] * numel


def test_a_stage_without_weights_has_no_slice() -> None:
    assert slice_span(5, 0, 0) == (0, 0)
