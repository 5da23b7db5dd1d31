"""The mask's random coordinates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.activation.prf import (
    MAX_HIDDEN_SIZE,
    StratifiedSampler,
    mix64_,
    token_keys,
)

WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(word: int) -> int:
    """SplitMix64's finalizer, written from the paper on unbounded integers."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)


def absorb(state: int, value: int) -> int:
    return mix(((state ^ (value & WORD)) + GOLDEN) & WORD)


def coordinates_by_hand(
    seed: int, boundary: int, step: int, sample: int, position: int, h: int, k: int
) -> list[int]:
    state = 0
    for value in (seed, boundary, step, sample, position):
        state = absorb(state, value)
    chosen = []
    for j in range(k):
        word = mix((state + (j // 4 + 1) * GOLDEN) & WORD)
        lane = (word >> (16 * (j % 4))) & 0xFFFF ^ 0x8000
        first, last = j * h // k, (j + 1) * h // k
        chosen.append(first + ((lane * (last - first)) >> 16))
    return chosen


@given(
    seed=st.integers(0, WORD),
    boundary=st.integers(0, 63),
    step=st.integers(0, 1 << 40),
    sample=st.integers(0, 1 << 50),
    hidden_size=st.integers(1, 300),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_tensor_arithmetic_equals_unbounded_integers(
    seed: int, boundary: int, step: int, sample: int, hidden_size: int, data: st.DataObject
) -> None:
    kept = data.draw(st.integers(1, hidden_size))
    keys = token_keys(
        run_seed=seed, boundary=boundary, step=step, sample_ids=torch.tensor([sample]), tokens=3
    )
    found = StratifiedSampler(hidden_size, kept).coordinates(keys.reshape(-1))
    for position in range(3):
        expected = coordinates_by_hand(seed, boundary, step, sample, position, hidden_size, kept)
        assert found[position].tolist() == expected


def test_known_answers() -> None:
    """Published outputs of SplitMix64 from state 1234567, so that no refactor changes every run's masks."""
    states = [(1234567 + (n + 1) * GOLDEN) & WORD for n in range(3)]
    words = mix64_(torch.tensor([s - (1 << 64) if s >> 63 else s for s in states]))
    assert [int(w) & WORD for w in words] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(hidden_size=st.integers(1, 4096), data=st.data())
@settings(max_examples=40, deadline=None)
def test_every_stratum_keeps_one_coordinate(hidden_size: int, data: st.DataObject) -> None:
    kept = data.draw(st.integers(1, hidden_size))
    keys = token_keys(run_seed=5, boundary=0, step=1, sample_ids=torch.arange(2), tokens=4).reshape(-1)
    chosen = StratifiedSampler(hidden_size, kept).coordinates(keys).long()
    assert chosen.shape == (8, kept)
    low = torch.arange(kept) * hidden_size // kept
    high = torch.arange(1, kept + 1) * hidden_size // kept
    assert bool(((chosen >= low) & (chosen < high)).all())


def test_coordinates_are_uniform_and_tokens_independent() -> None:
    hidden_size, kept, tokens = 640, 32, 16_384
    keys = token_keys(
        run_seed=1, boundary=2, step=3, sample_ids=torch.arange(16), tokens=tokens // 16
    ).reshape(-1)
    chosen = StratifiedSampler(hidden_size, kept).coordinates(keys).long()
    counts = torch.bincount(chosen.reshape(-1), minlength=hidden_size).double()
    expected = tokens * kept / hidden_size
    # Chi-squared with 19 degrees of freedom in each of 32 strata: 608 in all, deviation sqrt(2 * 608) = 35.
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_squared - 608) < 5 * 35
    # Equal offsets in neighbouring strata, and in the same stratum of the next token, happen by chance 1 in 20.
    offsets = chosen - torch.arange(kept) * hidden_size // kept
    for pairs in (offsets[:, 1:] == offsets[:, :-1], offsets[1:] == offsets[:-1]):
        share, n = float(pairs.double().mean()), pairs.numel()
        assert abs(share - 0.05) < 5 * (0.05 * 0.95 / n) ** 0.5


@pytest.mark.parametrize("changed", ["run_seed", "boundary", "step"])
def test_every_part_of_the_key_changes_the_mask(changed: str) -> None:
    base = {"run_seed": 1, "boundary": 1, "step": 1}
    sampler = StratifiedSampler(1000, 50)

    def coordinates(**key: int) -> torch.Tensor:
        return sampler.coordinates(token_keys(**key, sample_ids=torch.arange(4), tokens=8).reshape(-1))

    same = coordinates(**base) == coordinates(**{**base, changed: 2})
    assert float(same.double().mean()) < 0.1


def test_chunked_generation_equals_one_piece() -> None:
    """More tokens than fit one cache-sized piece."""
    sampler = StratifiedSampler(2048, 2048)
    keys = token_keys(run_seed=3, boundary=0, step=0, sample_ids=torch.arange(2), tokens=300).reshape(-1)
    assert torch.equal(sampler.coordinates(keys)[-5:], sampler.coordinates(keys[-5:]))


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1\.\.8, got 9"):
        StratifiedSampler(8, 9)
    with pytest.raises(ValueError, match="exceeds the mask codec's limit"):
        StratifiedSampler(MAX_HIDDEN_SIZE + 1, 9)
