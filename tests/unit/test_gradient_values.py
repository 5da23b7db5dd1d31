from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from swarm.gradient.values import ValueFormat, decode_values, encode_values, encoded_bytes

FORMATS: list[ValueFormat] = ["fp16", "fp32"]
floats = st.floats(-(2.0**126), 2.0**126, width=32)
chunks = st.lists(floats, max_size=40).map(lambda values: torch.tensor(values, dtype=torch.float32))


@given(chunks)
def test_fp32_returns_the_same_bits(chunk: torch.Tensor) -> None:
    again = decode_values(encode_values(chunk, "fp32"), "fp32", chunk.numel())
    assert torch.equal(again.view(torch.int32), chunk.view(torch.int32))


@given(chunks)
@example(torch.tensor([3 * 2.0**-149]))
def test_fp16_keeps_eleven_bits_of_every_value_within_38_octaves_of_the_peak(chunk: torch.Tensor) -> None:
    again = decode_values(encode_values(chunk, "fp16"), "fp16", chunk.numel()).double()
    peak = float(chunk.abs().max()) if chunk.numel() else 0.0
    # The scale's exponent ends at -120, fp16's own at -24.
    allowed = chunk.abs().double() * 2.0**-11 + peak * 2.0**-38 + 2.0**-144
    assert bool((again - chunk.double()).abs().le(allowed).all())


@given(chunks, st.integers(-40, 40))
def test_scaling_by_a_power_of_two_commutes_with_the_encoding(chunk: torch.Tensor, exponent: int) -> None:
    chunk = chunk.clamp(-1e3, 1e3)
    chunk = torch.where(chunk.abs() < 1e-3, torch.zeros(()), chunk)
    one = decode_values(encode_values(chunk, "fp16"), "fp16", chunk.numel()) * 2.0**exponent
    other = decode_values(encode_values(chunk * 2.0**exponent, "fp16"), "fp16", chunk.numel())
    assert torch.equal(one, other)


@pytest.mark.parametrize("size", [1e-8, 1e-20, 1e-37, 1.0, 1e30])
def test_gradients_of_any_size_survive(size: float) -> None:
    chunk = size * torch.linspace(0.1, 1.0, 50)
    again = decode_values(encode_values(chunk, "fp16"), "fp16", 50)
    torch.testing.assert_close(again, chunk, rtol=2.0**-10, atol=0.0)


@pytest.mark.parametrize("values", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_chunk_that_is_not_finite_never_becomes_finite(values: ValueFormat, bad: float) -> None:
    chunk = torch.tensor([1.0, bad, 2.0])
    assert not bool(torch.isfinite(decode_values(encode_values(chunk, values), values, 3)).all())


@pytest.mark.parametrize("values", FORMATS)
@given(chunk=chunks)
def test_size_is_known_before_encoding_and_bytes_depend_on_the_chunk_alone(
    values: ValueFormat, chunk: torch.Tensor
) -> None:
    encoded = encode_values(chunk, values)
    assert encoded.dtype == torch.uint8 and encoded.numel() == encoded_bytes(values, chunk.numel())
    if chunk.numel() > 1:
        strided = torch.stack([chunk, chunk], dim=1)[:, 0]
        assert torch.equal(encoded, encode_values(strided, values))


def test_encoding_is_no_view_of_the_gradient() -> None:
    for values in FORMATS:
        chunk = torch.ones(4)
        encoded = encode_values(chunk, values)
        before = encoded.clone()
        chunk.zero_()
        assert torch.equal(encoded, before)


@pytest.mark.parametrize("values", FORMATS)
@given(data=st.binary(max_size=40), elements=st.integers(0, 12))
def test_any_bytes_decode_or_raise_value_error(values: ValueFormat, data: bytes, elements: int) -> None:
    encoded = torch.tensor(list(data), dtype=torch.uint8)
    try:
        decoded = decode_values(encoded, values, elements)
    except ValueError:
        return
    assert decoded.shape == (elements,) and decoded.dtype == torch.float32


def test_scale_outside_the_format_is_refused() -> None:
    for exponent in (121, -121, 2**31 - 1, -(2**31)):
        scale = torch.tensor([exponent], dtype=torch.int32).view(torch.uint8)
        with pytest.raises(ValueError, match="scale exponent"):
            decode_values(torch.cat([scale, torch.zeros(2, dtype=torch.uint8)]), "fp16", 1)
