"""Codecs `dense` and `mask`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from swarm.activation.base import BoundaryCodec, CodecKey, PayloadError
from swarm.activation.config import CodecConfig, DenseConfig, MaskConfig, kept_coordinates
from swarm.activation.mask import MaskCodec
from swarm.activation.registry import build_codec, needs_prior, payload_bytes

HIDDEN = 96


def make_key(samples: list[int], tokens: int = 12, step: int = 4) -> CodecKey:
    starts = torch.zeros(len(samples), tokens, dtype=torch.bool)
    starts[:, 0] = True
    return CodecKey(step=step, sample_ids=torch.tensor(samples), document_starts=starts)


def build(config: Any, dtype: torch.dtype = torch.float32, boundary: int = 1) -> BoundaryCodec:
    prior = {"mean": torch.linspace(-1, 1, HIDDEN)} if needs_prior(config) else None
    return build_codec(
        config, hidden_size=HIDDEN, boundary=boundary, run_seed=9, prior=prior, device="cpu", dtype=dtype
    )


def states(key: CodecKey, seed: int = 0) -> Tensor:
    return torch.randn(*key.shape, HIDDEN, generator=torch.Generator().manual_seed(seed))


CONFIGS = [
    DenseConfig(),
    DenseConfig(values="fp32"),
    *(
        MaskConfig(mask_ratio=ratio, values=values)
        for ratio in (0, 50, 95)
        for values in ("bf16", "int8", "fp32")
    ),
    MaskConfig(fill="mean", rescale="const"),
    MaskConfig(mask_ratio=80, rescale="rms", values="int8"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_layout_is_known_before_encoding(config: Any) -> None:
    codec = build(config)
    key = make_key([3, 1])
    for layout, payload in (
        (codec.layout(key), codec.encode(states(key), key)),
        (codec.gradient_layout(key), codec.encode_gradient(states(key), key)),
    ):
        assert {n: (t.dtype, tuple(t.shape)) for n, t in payload.items()} == {
            n: (s.dtype, s.shape) for n, s in layout.items()
        }
        assert all(t.is_contiguous() for t in payload.values())
        assert sum(t.nbytes for t in payload.values()) == payload_bytes(layout) == codec.byte_count(key).total


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_encoding_twice_gives_the_same_bytes(config: Any) -> None:
    key = make_key([3, 1])
    first, second = (build(config).encode(states(key), key) for _ in range(2))
    assert all(torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in first)


@pytest.mark.parametrize(("values", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_dense_is_exact_at_its_own_precision(values: Any, dtype: torch.dtype) -> None:
    key = make_key([0])
    codec = build(DenseConfig(values=values), dtype)
    hidden = states(key).to(dtype)
    assert torch.equal(codec.decode(codec.encode(hidden, key), key), hidden)
    assert torch.equal(codec.decode_gradient(codec.encode_gradient(hidden, key), key), hidden)


@pytest.mark.parametrize("rescale", ["none", "const", "rms"])
@pytest.mark.parametrize("fill", ["zero", "mean"])
@pytest.mark.parametrize("ratio", [0, 70, 95])
def test_gradient_equals_autograd_of_the_coded_forward(rescale: Any, fill: Any, ratio: int) -> None:
    codec = build(MaskConfig(mask_ratio=ratio, values="fp32", fill=fill, rescale=rescale))
    key = make_key([5, 2])
    hidden = states(key).requires_grad_()
    upstream = states(key, seed=1)
    (codec.decode(codec.encode(hidden, key), key) * upstream).sum().backward()
    assert torch.allclose(codec.decode_gradient(codec.encode_gradient(upstream, key), key), hidden.grad)


def test_masked_gradient_has_the_forward_mask() -> None:
    codec = build(MaskConfig(mask_ratio=90))
    key = make_key([5, 2])
    forward = codec.decode(codec.encode(torch.ones(*key.shape, HIDDEN), key), key) != 0
    backward = codec.decode_gradient(codec.encode_gradient(torch.ones(*key.shape, HIDDEN), key), key) != 0
    assert torch.equal(forward, backward)
    assert forward.sum(dim=2).unique().tolist() == [kept_coordinates(90, HIDDEN)]


def test_masks_do_not_depend_on_packing() -> None:
    codec = build(MaskConfig(values="fp32"))
    together, alone = make_key([11, 7, 3]), make_key([7])
    hidden = states(together)
    whole = codec.decode(codec.encode(hidden, together), together)
    part = codec.decode(codec.encode(hidden[1:2], alone), alone)
    assert torch.equal(whole[1:2], part)
    # Longer rows, and documents that start elsewhere, leave the first columns' masks alone.
    longer = make_key([7], tokens=20)
    longer.document_starts[0, 5] = True
    extended = torch.cat([hidden[1:2], torch.ones(1, 8, HIDDEN)], dim=1)
    assert torch.equal(codec.decode(codec.encode(extended, longer), longer)[:, :12], part)


def test_boundaries_and_steps_have_different_masks() -> None:
    ones = torch.ones(2, 12, HIDDEN)

    def support(boundary: int, step: int) -> Tensor:
        codec, key = build(MaskConfig(), boundary=boundary), make_key([0, 1], step=step)
        return codec.decode(codec.encode(ones, key), key) != 0

    assert not torch.equal(support(0, 0), support(1, 0))
    assert not torch.equal(support(0, 0), support(0, 1))


def test_fill_and_rescale() -> None:
    key = make_key([0])
    ones = torch.full((1, 12, HIDDEN), 5.0)
    filled = build(MaskConfig(fill="mean", values="fp32"))
    decoded = filled.decode(filled.encode(ones, key), key)
    assert bool(((decoded == 5.0) | (decoded == torch.linspace(-1, 1, HIDDEN))).all())
    const = build(MaskConfig(mask_ratio=75, rescale="const", values="fp32"))
    assert float(const.decode(const.encode(ones, key), key).mean()) == pytest.approx(5.0)
    rms = build(MaskConfig(mask_ratio=75, rescale="rms", values="fp32"))
    assert float(rms.decode(rms.encode(ones, key), key).square().mean()) == pytest.approx(25.0)


def test_int8_values_are_within_half_a_step() -> None:
    codec = build(MaskConfig(mask_ratio=0, values="int8"))
    key = make_key([0, 1])
    hidden = states(key) * torch.logspace(-6, 3, 24).view(2, 12, 1)
    hidden[0, 0] = 0.0
    decoded = codec.decode(codec.encode(hidden, key), key)
    largest = hidden.abs().amax(dim=2, keepdim=True)
    # Half a step, and what rounding the scale to bfloat16 clips from the largest value.
    assert bool(((decoded - hidden).abs() <= largest * (0.5 / 127 + 2**-8)).all())


@given(ratio=st.integers(0, 999), hidden_size=st.integers(1, 16384))
@settings(deadline=None)
def test_kept_coordinates_round_the_exact_share(ratio: int, hidden_size: int) -> None:
    kept = kept_coordinates(ratio / 10, hidden_size)
    assert 1 <= kept <= hidden_size
    assert kept == 1 or abs(kept - (1000 - ratio) * hidden_size / 1000) <= 0.5


def test_bytes_of_the_paper_setting() -> None:
    """95 percent at width 2048: 102 bf16 coordinates per token."""
    codec = MaskCodec(
        MaskConfig(), hidden_size=2048, boundary=0, run_seed=0, device="cpu", dtype=torch.bfloat16
    )
    assert codec.byte_count(make_key([0], tokens=100)).total == 100 * 102 * 2


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_malformed_payloads_are_refused(config: Any) -> None:
    codec, key = build(config), make_key([1, 2])
    good = codec.encode(states(key), key)
    name = next(iter(good))
    malformed = [
        {},
        {**good, "extra": good[name]},
        {**good, name: good[name][..., :-1]},
        {**good, name: good[name].to(torch.float64)},
        {**good, name: good[name].reshape(-1)},
    ]
    poisoned = "scales" if "scales" in good else name
    for value in (float("nan"), float("inf")):
        bad = good[poisoned].clone()
        bad.view(-1)[3] = value
        malformed.append({**good, poisoned: bad})
    for payload in malformed:
        with pytest.raises(PayloadError, match="payload tensor"):
            codec.decode(payload, key)
        with pytest.raises(PayloadError, match="payload tensor"):
            codec.decode_gradient(payload, key)


def test_configurations_parse_by_name_and_refuse_the_unknown() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(CodecConfig)
    assert adapter.validate_python({"name": "mask", "mask_ratio": 92.5}) == MaskConfig(mask_ratio=92.5)
    assert adapter.validate_json('{"name": "dense"}') == DenseConfig()
    for wrong in ({"name": "mask", "ratio": 9}, {"name": "topk"}, {"name": "mask", "mask_ratio": 100}):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)
    with pytest.raises(ValidationError, match=r"steps of 0\.1 percent"):
        MaskConfig(mask_ratio=95.55)


def test_missing_priors_are_named() -> None:
    arguments: Any = {"hidden_size": 8, "boundary": 3, "run_seed": 0, "prior": None, "device": "cpu"}
    for config in ({"name": "basis"}, {"name": "mask", "fill": "mean"}):
        parsed: Any = TypeAdapter(CodecConfig).validate_python(config)
        with pytest.raises(ValueError, match=r"prior.* for boundary 3"):
            build_codec(parsed, **arguments, dtype=torch.float32)
