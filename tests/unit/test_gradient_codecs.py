"""Chunk codecs against oracles written from their equations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from swarm.gradient.chunk import ChunkCodec
from swarm.gradient.config import CODECS
from swarm.gradient.registry import chunk_codec
from swarm.gradient.select import largest
from tests.kit.butterfly import top_k

Array = np.ndarray[Any, Any]
BLOCK = 16
ALL: list[dict[str, Any]] = [
    {"name": "fp32"},
    {"name": "fp16"},
    {"name": "bf16"},
    {"name": "int8", "block": BLOCK},
    {"name": "fp8", "block": BLOCK},
    {"name": "e3m0", "block": BLOCK},
    {"name": "sign", "block": BLOCK},
    {"name": "topk", "ratio": 0.25},
    {"name": "topk", "ratio": 1.0},
]
codecs = pytest.mark.parametrize("config", ALL, ids=lambda config: "-".join(map(str, config.values())))
floats = st.floats(-(2.0**100), 2.0**100, width=32)
chunks = st.lists(floats | st.sampled_from([0.0, 1.0, -1.0, 1e-40]), max_size=50).map(
    lambda values: torch.tensor(values, dtype=torch.float32)
)


def codec_of(config: dict[str, Any]) -> ChunkCodec:
    return chunk_codec(CODECS.validate_python(config))


def again(codec: ChunkCodec, chunk: Tensor, seed: int = 0) -> Tensor:
    return codec.decode(codec.encode(chunk, seed), chunk.numel())


def normal(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def blocks(chunk: Tensor, block: int) -> list[Array]:
    values = chunk.double().numpy()
    return [values[start : start + block] for start in range(0, len(values), block)]


def e4m3_values() -> Array:
    """All finite magnitudes of E4M3: exponent bias 7, three bits of mantissa, 1111.111 is no number."""
    found = [m / 8 * 2.0**-6 for m in range(8)]
    found += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    return np.array(found)


# -- every codec ---------------------------------------------------------------------------------------


@codecs
@settings(max_examples=40)
@given(chunk=chunks, seed=st.integers(0, 2**63 - 1))
def test_size_is_known_before_and_equal_bytes_give_equal_bits(
    config: dict[str, Any], chunk: Tensor, seed: int
) -> None:
    codec = codec_of(config)
    before = chunk.clone()
    encoded = codec.encode(chunk, seed)
    assert encoded.dtype == torch.uint8 and encoded.shape == (codec.nbytes(chunk.numel()),)
    assert torch.equal(chunk.view(torch.int32), before.view(torch.int32))
    if chunk.numel() > 1:
        strided = torch.stack([chunk, chunk], dim=1)[:, 0]
        assert torch.equal(encoded, codec.encode(strided, seed))
    # Bytes as they come out of a larger message, at an odd place.
    moved = torch.cat([torch.zeros(3, dtype=torch.uint8), encoded])[3:]
    first, second = codec.decode(encoded, chunk.numel()), codec.decode(moved, chunk.numel())
    assert first.dtype == torch.float32 and first.shape == chunk.shape
    assert torch.equal(first.view(torch.int32), second.view(torch.int32))
    assert bool(torch.isfinite(first).all())


@codecs
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 20, 39])
def test_chunk_that_is_not_finite_never_becomes_finite(
    config: dict[str, Any], bad: float, place: int
) -> None:
    chunk = normal(40)
    chunk[place] = bad
    codec = codec_of(config)
    try:
        decoded = again(codec, chunk)
    except ValueError:
        return
    assert not bool(torch.isfinite(decoded).all())


@codecs
@settings(max_examples=60)
@given(data=st.data(), elements=st.integers(0, 40))
def test_any_bytes_decode_or_raise_value_error(
    config: dict[str, Any], data: st.DataObject, elements: int
) -> None:
    codec = codec_of(config)
    size = codec.nbytes(elements)
    raw = data.draw(st.binary(min_size=size, max_size=size) | st.binary(max_size=60))
    try:
        decoded = codec.decode(torch.tensor(list(raw), dtype=torch.uint8), elements)
    except ValueError:
        return
    assert decoded.shape == (elements,) and decoded.dtype == torch.float32
    if config["name"] not in {"fp32", "fp16", "bf16"}:
        assert bool(torch.isfinite(decoded).all())


@codecs
@settings(max_examples=40)
@given(place=st.integers(0, 10**6), flip=st.integers(1, 255))
def test_one_changed_byte_decodes_or_raises_value_error(
    config: dict[str, Any], place: int, flip: int
) -> None:
    codec = codec_of(config)
    encoded = codec.encode(normal(37), 0)
    encoded[place % encoded.numel()] ^= flip
    try:
        decoded = codec.decode(encoded, 37)
    except ValueError:
        return
    if config["name"] not in {"fp32", "fp16", "bf16"}:
        assert bool(torch.isfinite(decoded).all())


@codecs
@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e-8, 1.0, 1e30])
def test_gradients_of_any_size_are_coded_alike(config: dict[str, Any], size: float) -> None:
    codec = codec_of(config)
    scale = 2.0 ** round(math.log2(size))
    chunk = normal(64)
    assert torch.equal(again(codec, chunk * scale), again(codec, chunk) * scale)


@codecs
def test_zeros_stay_zero_and_an_empty_chunk_has_a_size(config: dict[str, Any]) -> None:
    codec = codec_of(config)
    assert not bool(again(codec, torch.zeros(35)).any())
    assert again(codec, torch.zeros(0)).shape == (0,)


@codecs
def test_wrong_sizes_and_types_are_refused(config: dict[str, Any]) -> None:
    codec = codec_of(config)
    encoded = codec.encode(normal(33), 0)
    for wrong in (encoded[:-1], torch.cat([encoded, encoded[:1]]), encoded.view(torch.int8)):
        with pytest.raises(ValueError, match="bytes"):
            codec.decode(wrong, 33)


def test_unknown_codecs_and_settings_are_refused_naming_the_known_ones() -> None:
    with pytest.raises(ValidationError, match=r"'int8'.*'sign'.*'topk'"):
        CODECS.validate_python({"name": "int7"})
    for config in (
        {"name": "int8", "block": 8},
        {"name": "topk", "ratio": 0.0},
        {"name": "fp16", "block": 256},
    ):
        with pytest.raises(ValidationError):
            CODECS.validate_python(config)


# -- rounding ------------------------------------------------------------------------------------------


@given(chunks)
def test_bf16_is_the_nearest_with_eight_bits(chunk: Tensor) -> None:
    decoded = again(codec_of({"name": "bf16"}), chunk).double().numpy()
    exact = chunk.double().numpy()
    assert np.all(np.abs(decoded - exact) <= np.abs(exact) * 2.0**-8 + 2.0**-134)
    assert not np.any(chunk.clone().numpy().view(np.uint32)[decoded == exact] & 0xFFFF)


@settings(max_examples=60)
@given(chunk=chunks, seed=st.integers(0, 2**40))
@example(chunk=torch.tensor([3.0, 127.0, -127.0, 0.0]), seed=1)
def test_int8_gives_one_of_the_two_steps_next_to_a_value(chunk: Tensor, seed: int) -> None:
    decoded = again(codec_of({"name": "int8", "block": BLOCK}), chunk, seed)
    for exact, got in zip(blocks(chunk, BLOCK), blocks(decoded, BLOCK), strict=True):
        scale = np.abs(exact).max() / 127
        if scale < 2.0**-110:
            assert not got.any()
            continue
        assert np.all(np.abs(got - exact) <= scale * (1 + 1e-6))
        steps = got / scale
        assert np.all(np.abs(steps - np.round(steps)) <= 1e-4) and np.abs(steps).max() <= 127.001


@settings(max_examples=60)
@given(chunk=chunks, seed=st.integers(0, 2**40))
def test_fp8_gives_one_of_the_two_numbers_next_to_a_value(chunk: Tensor, seed: int) -> None:
    decoded = again(codec_of({"name": "fp8", "block": BLOCK}), chunk, seed)
    grid = e4m3_values()
    for exact, got in zip(blocks(chunk, BLOCK), blocks(decoded, BLOCK), strict=True):
        scale = np.abs(exact).max() / 448
        if scale < 2.0**-110:
            assert not got.any()
            continue
        for value, code in zip(np.abs(exact) / scale, np.abs(got) / scale, strict=True):
            below = grid[grid <= value * (1 + 1e-6)].max()
            above = grid[grid >= value * (1 - 1e-6)].min(initial=448.0)
            assert min(abs(code - below), abs(code - above)) <= 1e-4 * max(1.0, code)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_stochastic_rounding_is_unbiased_and_follows_its_seed(name: str) -> None:
    codec = codec_of({"name": name, "block": 64})
    chunk = normal(64)
    draws = torch.stack([again(codec, chunk, seed) for seed in range(500)]).double()
    error = (draws.mean(dim=0) - chunk).abs()
    # A value next to a code may see no draw of the other one.
    rare = float(chunk.abs().max()) / (100 if name == "int8" else 10) / 100
    assert bool((error <= 5 * draws.std(dim=0) / math.sqrt(500) + rare).all())
    assert torch.equal(draws[7].float(), again(codec, chunk, 7))
    assert not torch.equal(draws[7], draws[8])


@settings(max_examples=60)
@given(chunk=chunks)
@example(chunk=torch.tensor([1.0, 1.0, 1.0, 20.0, 0.124, 0.126, -0.7, 0.0, 0.0]))
@example(chunk=torch.tensor([0.0] * 14 + [3.0]))
def test_e3m0_is_the_nearest_power_of_two_of_the_median(chunk: Tensor) -> None:
    decoded = again(codec_of({"name": "e3m0", "block": BLOCK}), chunk)
    for exact, got in zip(blocks(chunk, BLOCK), blocks(decoded, BLOCK), strict=True):
        sizes = np.sort(np.abs(exact[exact != 0]))
        scale = sizes[(len(sizes) - 1) // 2] if len(sizes) else 0.0
        if scale < 2.0**-110:
            assert not got.any()
            continue
        for value, code in zip(exact, got, strict=True):
            ratio = abs(value) / scale
            if ratio < 0.125:
                assert code == 0
                continue
            # Half-way cases may go either way in fp32.
            near = {np.clip(np.round(np.log2(ratio * by)), -2, 4) for by in (1 - 1e-6, 1.0, 1 + 1e-6)}
            assert code in {math.copysign(scale * 2.0**exponent, value) for exponent in near}


@settings(max_examples=60)
@given(chunk=chunks)
def test_sign_is_the_mean_magnitude_with_the_sign(chunk: Tensor) -> None:
    decoded = again(codec_of({"name": "sign", "block": BLOCK}), chunk)
    for exact, got in zip(blocks(chunk, BLOCK), blocks(decoded, BLOCK), strict=True):
        scale = np.abs(exact).mean()
        if scale < 2.0**-109:
            assert np.abs(got).max() <= scale * (1 + 1e-5)
            continue
        np.testing.assert_allclose(got, np.where(np.signbit(exact), -scale, scale), rtol=1e-5)


@pytest.mark.parametrize("value", [0.3, 7.5, -64.9, 0.002])
def test_int8_goes_up_as_often_as_the_fraction_says(value: float) -> None:
    chunk = torch.full((65_536,), value)
    chunk[::64] = 127.0
    decoded = again(codec_of({"name": "int8", "block": 64}), chunk)[chunk != 127.0].double()
    fraction = value - math.floor(value)
    allowed = 6 * math.sqrt(fraction * (1 - fraction) / decoded.numel()) + 2.0**-15
    assert abs(float(decoded.mean()) - value) <= allowed
    assert set(decoded.unique().tolist()) <= {float(math.floor(value)), float(math.ceil(value))}


@pytest.mark.parametrize("value", [200.0, 3.3, -0.017, 0.011, 0.0003])
def test_fp8_goes_up_as_often_as_the_fraction_says(value: float) -> None:
    """Also below 2^-6, where steps no longer shrink."""
    chunk = torch.full((65_536,), value)
    chunk[::64] = 448.0
    decoded = again(codec_of({"name": "fp8", "block": 64}), chunk)[chunk != 448.0].double()
    step = max(2.0 ** math.floor(math.log2(abs(value))), 2.0**-6) / 8
    fraction = value / step - math.floor(value / step)
    allowed = 6 * math.sqrt(fraction * (1 - fraction) / decoded.numel()) + 1 / 256
    assert abs(float(decoded.mean()) - value) <= step * allowed
    assert len(decoded.unique()) <= 2


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_largest_values_never_pass_the_last_code(name: str) -> None:
    """For any mantissa of the scale, whatever the noise."""
    generator = torch.Generator().manual_seed(2)
    peaks = torch.rand(4096, generator=generator) + 1.0
    chunk = torch.stack([peaks, -peaks], dim=1).repeat_interleave(8, dim=0).reshape(-1)
    decoded = again(codec_of({"name": name, "block": 16}), chunk)
    torch.testing.assert_close(decoded, chunk, rtol=2e-7, atol=0.0)


@pytest.mark.parametrize("count", [1, 50, 328, 5000, 20_000])
@pytest.mark.parametrize("kind", ["normal", "ties", "sparse", "periodic"])
def test_largest_of_many_is_found_whatever_a_sample_says(count: int, kind: str) -> None:
    values = normal(20_011).abs()
    if kind == "ties":
        values = (values * 2).round()
    elif kind == "sparse":
        values[torch.arange(20_011) % 97 != 0] = 0.0
    elif kind == "periodic":  # what a sample at even distances misses, or sees alone
        values[::61] += 100.0 if count > 1000 else -values[::61]
    expected = np.sort(np.argsort(-values.numpy(), kind="stable")[:count])
    np.testing.assert_array_equal(largest(values, count).numpy(), expected)


# -- top-k ---------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(chunk=chunks, ratio=st.sampled_from([0.01, 0.25, 0.5, 1.0]))
@example(chunk=torch.tensor([1.0, -1.0, 1.0, 1.0, 0.5, 1.0]), ratio=0.5)
def test_top_k_keeps_exactly_the_largest_and_the_first_of_equals(chunk: Tensor, ratio: float) -> None:
    decoded = again(codec_of({"name": "topk", "ratio": ratio}), chunk)
    if chunk.numel():
        np.testing.assert_array_equal(decoded.double().numpy(), top_k(ratio)(chunk.double().numpy()))


def test_top_k_of_several_blocks_takes_four_bytes_per_entry() -> None:
    codec = codec_of({"name": "topk", "ratio": 0.001})
    chunk = normal(131_072 + 700)
    assert codec.nbytes(chunk.numel()) == 2 * (2 + 4 * 66) + (2 + 4 * 1)
    decoded = again(codec, chunk)
    for start, count in ((0, 66), (65_536, 66), (131_072, 1)):
        part, exact = decoded[start : start + 65_536], chunk[start : start + 65_536]
        assert int((part != 0).sum()) == count
        assert float(part[part != 0].abs().min()) >= float(exact[part == 0].abs().max()) * (1 - 2.0**-10)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda entries: entries.__setitem__(1, entries[0]), "ascend"),
        (lambda entries: entries.__setitem__(slice(0, 2), entries[[1, 0]]), "ascend"),
        (lambda entries: entries.__setitem__(7, 32), "ascend"),
        (lambda entries: entries.__setitem__(8, 0x7C00), "not finite"),
        (lambda entries: entries.__setitem__(9, 0xFE00), "not finite"),
    ],
)
def test_malformed_entries_are_refused(spoil: Callable[[Array], None], reason: str) -> None:
    codec = codec_of({"name": "topk", "ratio": 0.25})
    encoded = codec.encode(normal(32), 0).numpy()
    entries = encoded[2:].copy().view(np.uint16)
    spoil(entries)
    with pytest.raises(ValueError, match=reason):
        codec.decode(torch.from_numpy(np.concatenate([encoded[:2], entries.view(np.uint8)])), 32)


@pytest.mark.parametrize("name", ["int8", "fp8", "e3m0", "sign"])
@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0, 1e-40, 1e35])
def test_impossible_scales_are_refused(name: str, scale: float) -> None:
    codec = codec_of({"name": name, "block": BLOCK})
    encoded = codec.encode(normal(32), 0)
    encoded[4:8] = torch.tensor([scale]).view(torch.uint8)
    with pytest.raises(ValueError, match="scale"):
        codec.decode(encoded, 32)


def test_exponent_that_no_block_has_is_refused() -> None:
    codec = codec_of({"name": "topk", "ratio": 0.25})
    encoded = codec.encode(normal(32), 0)
    for exponent in (-121, 98, 2**15 - 1, -(2**15)):
        encoded[:2] = torch.tensor([exponent], dtype=torch.int16).view(torch.uint8)
        with pytest.raises(ValueError, match="exponent"):
            codec.decode(encoded, 32)
