"""Codec `basis`: fitting, bytes, layout, error."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.activation.base import CodecKey, PayloadError
from swarm.activation.basis import BasisCodec, dense_positions, document_positions
from swarm.activation.compact import matrix_of, to_int8
from swarm.activation.config import BasisConfig, code_budget_bits, token_budget_bytes
from swarm.activation.fit import find_dense_offsets, fit_basis_prior, fit_mean_prior
from swarm.activation.registry import payload_bytes

HIDDEN = 64


def make_samples(
    count: int = 2000, hidden_size: int = HIDDEN, rows: int = 20, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """States with a decaying spectrum, a mean and massive first tokens; gradients of very different size."""
    generator = torch.Generator().manual_seed(seed)
    spectrum = torch.logspace(1, -2, hidden_size)
    mixing = torch.linalg.qr(
        torch.randn(hidden_size, hidden_size, generator=torch.Generator().manual_seed(9))
    ).Q
    hidden = torch.randn(count, hidden_size, generator=generator) * spectrum @ mixing + 3.0
    gradient = torch.randn(count, hidden_size, generator=generator) * spectrum.sqrt() @ mixing.flip(0)
    gradient *= torch.logspace(-6, -3, count)[torch.randperm(count, generator=generator)].unsqueeze(1)
    offsets = torch.arange(count) % (count // rows)
    hidden[offsets == 0] *= 300.0
    return hidden, gradient, offsets


def make_key(rows: int = 2, tokens: int = 50, starts: tuple[int, ...] = (0, 17)) -> CodecKey:
    document_starts = torch.zeros(rows, tokens, dtype=torch.bool)
    document_starts[:, 0] = True
    document_starts[0, list(starts)] = True
    return CodecKey(step=0, sample_ids=torch.arange(rows), document_starts=document_starts)


@functools.cache
def make_codec(
    ratio: float = 90, dtype: torch.dtype = torch.float32, hidden_size: int = HIDDEN, **options: Any
) -> BasisCodec:
    config = BasisConfig(mask_ratio=ratio, **options)
    prior = fit_basis_prior(*make_samples(hidden_size=hidden_size), config)
    return BasisCodec(config, hidden_size=hidden_size, boundary=0, prior=prior, device="cpu", dtype=dtype)


def microbatch(key: CodecKey, seed: int = 5) -> tuple[Tensor, Tensor]:
    rows, tokens = key.shape
    hidden, gradient, _ = make_samples(count=rows * tokens, rows=rows, seed=seed)
    return hidden.view(rows, tokens, -1), gradient.view(rows, tokens, -1)


@pytest.mark.parametrize("ratio", [50, 80, 90, 92.5])
@pytest.mark.parametrize("tokens", [1, 2, 9, 50])
def test_bytes_keep_the_budget_and_layout_is_known_before_encoding(ratio: float, tokens: int) -> None:
    codec = make_codec(ratio)
    key = make_key(tokens=tokens, starts=(0, min(17, tokens - 1)))
    hidden, gradient = microbatch(key)
    dense = int(key.document_starts.sum())
    for layout, payload in (
        (codec.layout(key), codec.encode(hidden, key)),
        (codec.gradient_layout(key), codec.encode_gradient(gradient, key)),
    ):
        assert {n: (t.dtype, tuple(t.shape)) for n, t in payload.items()} == {
            n: (s.dtype, s.shape) for n, s in layout.items()
        }
        coded = payload_bytes(layout) - layout["dense"].nbytes
        # Besides the tokens' budgets: the offset of their gains, and the rest of a byte.
        assert coded <= (2 * tokens - dense) * (100 - ratio) / 100 * 2 * HIDDEN + 3
    count = codec.byte_count(key)
    assert count.total == payload_bytes(codec.layout(key))
    assert count.dense_positions == dense * 2 * HIDDEN


def test_the_budget_is_used() -> None:
    codec = make_codec(90, hidden_size=256)
    key = make_key(tokens=100)
    ordinary = 200 - int(key.document_starts.sum())
    assert codec.byte_count(key).coded >= 0.95 * ordinary * token_budget_bytes(90, 256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_falls_with_the_bytes(dtype: torch.dtype) -> None:
    key = make_key()
    hidden, gradient = microbatch(key)
    ordinary = ~key.document_starts
    forward, backward = [], []
    for ratio in (90, 85, 80, 70):
        codec = make_codec(ratio, dtype)
        decoded = codec.decode(codec.encode(hidden.to(dtype), key), key)
        assert decoded.dtype == dtype
        forward.append(relative_error(decoded[ordinary], hidden[ordinary], centre=3.0))
        decoded = codec.decode_gradient(codec.encode_gradient(gradient.to(dtype), key), key)
        backward.append(relative_error(decoded[ordinary], gradient[ordinary]))
    assert forward == sorted(forward, reverse=True)
    assert backward == sorted(backward, reverse=True)
    # Rate-distortion arithmetic for this spectrum: a tenth of the bytes leaves a percent.
    assert forward[0] < 0.015
    assert backward[0] < 0.005
    assert forward[-1] < 3e-4
    assert backward[-1] < 3e-4


def relative_error(decoded: Tensor, exact: Tensor, centre: float = 0.0) -> float:
    return float((decoded.float() - exact).square().sum() / (exact - centre).square().sum())


def test_document_starts_are_exact() -> None:
    codec, key = make_codec(), make_key()
    hidden, gradient = (x.to(torch.bfloat16).float() for x in microbatch(key))
    starts = key.document_starts
    assert torch.equal(codec.decode(codec.encode(hidden, key), key)[starts], hidden[starts])
    decoded = codec.decode_gradient(codec.encode_gradient(gradient, key), key)
    assert torch.equal(decoded[starts], gradient[starts])


def test_massive_activations_anywhere_are_sent_in_full() -> None:
    """A few channels far larger than the others, in the middle of a document, hurt neither their token nor others."""
    codec, key = make_codec(outlier_interval=32), make_key()
    hidden, _ = microbatch(key)
    usual = codec.decode(codec.encode(hidden, key), key)
    channels = [3, 17, 40, 41, 63]
    hidden[1, 20, channels] = torch.tensor([900.0, -5e4, 333.0, 1024.0, -777.0]).to(torch.bfloat16).float()
    payload = codec.encode(hidden, key)
    assert tuple(payload["outliers"].shape) == ((100 - int(key.document_starts.sum())) // 32, 8)
    decoded = codec.decode(payload, key)
    assert torch.equal(decoded[1, 20, channels], hidden[1, 20, channels])
    ordinary = ~key.document_starts.unsqueeze(2).expand_as(hidden)
    ordinary[1, 20, channels] = False
    before = (usual - hidden)[ordinary].square().mean()
    assert (decoded - hidden)[ordinary].square().mean() < 1.5 * before


def test_the_fit_survives_massive_activations() -> None:
    """A few of them used to own the covariance, and with it every direction of the basis."""
    hidden, gradient, offsets = make_samples()
    config = BasisConfig(mask_ratio=80)
    key = make_key()
    states, _ = microbatch(key)
    errors = []
    for spoilt in (False, True):
        if spoilt:
            noise = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(2))
            hidden[[151, 777, 1203]] = 3000.0 * noise
        prior = fit_basis_prior(hidden, gradient, offsets, config)
        codec = BasisCodec(
            config, hidden_size=HIDDEN, boundary=0, prior=prior, device="cpu", dtype=torch.float32
        )
        decoded = codec.decode(codec.encode(states, key), key)
        ordinary = ~key.document_starts
        errors.append(relative_error(decoded[ordinary], states[ordinary], centre=3.0))
    assert errors[1] < 1.1 * errors[0]


def test_token_classes_help_gradients_of_unequal_size() -> None:
    key = make_key()
    _, gradient = microbatch(key)
    ordinary = ~key.document_starts
    errors = []
    for classes in (1, 8):
        codec = make_codec(token_classes=classes)
        decoded = codec.decode_gradient(codec.encode_gradient(gradient, key), key)
        errors.append(relative_error(decoded[ordinary], gradient[ordinary]))
    assert errors[1] < 0.7 * errors[0]


def test_encoding_is_deterministic_and_scale_free() -> None:
    codec, key = make_codec(), make_key()
    _, gradient = microbatch(key)
    first, second = codec.encode_gradient(gradient, key), codec.encode_gradient(gradient.clone(), key)
    tiny = codec.encode_gradient(gradient * 2.0**-40, key)
    assert all(torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in first)
    assert torch.equal(first["codes"], tiny["codes"])


def test_the_fit_does_not_depend_on_the_gradients_scale() -> None:
    """Gradients of a mean loss are tiny; absolute floors used to flatten the Fisher metric's spectrum."""
    hidden, gradient, offsets = make_samples()
    config = BasisConfig()
    usual = fit_basis_prior(hidden, gradient, offsets, config)
    tiny = fit_basis_prior(hidden, gradient * 2.0**-60, offsets, config)
    assert all(torch.equal(usual[name], tiny[name]) for name in usual)


def test_the_metric_favours_directions_that_cost_loss() -> None:
    """Two directions of equal variance and room for few: the one with gradient is kept better."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4000, 32, generator=generator)
    gradient = torch.randn(4000, 32, generator=generator) * torch.tensor([10.0] * 4 + [0.1] * 28)
    offsets = torch.arange(4000) % 100 + 1
    config = BasisConfig(mask_ratio=90)
    prior = fit_basis_prior(hidden, gradient, offsets, config)
    codec = BasisCodec(config, hidden_size=32, boundary=0, prior=prior, device="cpu", dtype=torch.float32)
    key = make_key(rows=1, tokens=200, starts=(0,))
    states = hidden[:200].view(1, 200, 32)
    error = (codec.decode(codec.encode(states, key), key) - states)[0, 1:].square().mean(dim=0)
    assert float(error[:4].mean()) < 0.5 * float(error[4:].mean())


def test_zero_gradients_decode_to_zero() -> None:
    """The last token of a row gets none: no loss and no later token depends on it."""
    codec, key = make_codec(), make_key()
    decoded = codec.decode_gradient(codec.encode_gradient(torch.zeros(2, 50, HIDDEN), key), key)
    assert not bool(decoded.any())


def test_dense_offsets_follow_the_calibration_rule() -> None:
    hidden = torch.ones(400, 8)
    offsets = torch.arange(400) % 20
    hidden[offsets == 2] *= 20.0
    hidden[offsets == 5] *= 7.0
    hidden[offsets == 9] *= 50.0
    assert find_dense_offsets(hidden, offsets, limit=8, factor=8.0).tolist() == [0, 2]


def test_dense_positions_follow_each_document() -> None:
    starts = torch.zeros(2, 8, dtype=torch.bool)
    starts[0, [0, 3, 4]] = True
    starts[1, 0] = True
    assert document_positions(starts).tolist() == [[0, 1, 2, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7]]
    found = dense_positions(starts, torch.tensor([0, 2]))
    assert found.nonzero().tolist() == [[0, 0], [0, 2], [0, 3], [0, 4], [0, 6], [1, 0], [1, 2]]


def test_mean_prior_leaves_document_starts_out() -> None:
    hidden, _, offsets = make_samples()
    assert torch.allclose(
        fit_mean_prior(hidden, offsets)["mean"], hidden[offsets != 0].mean(dim=0), atol=1e-5
    )


def test_malformed_payloads_are_refused() -> None:
    codec, key = make_codec(outlier_interval=32), make_key()
    good = codec.encode(microbatch(key)[0], key)
    infinite = torch.full_like(good["gain_offset"], 1 << 14)
    backward = codec.encode_gradient(microbatch(key)[1], key)
    nan = good["dense"].clone()
    nan[0, 3] = float("nan")
    for payload in (
        {},
        {name: good[name] for name in ("gains", "codes", "dense")},
        {**good, "codes": good["codes"][:-1]},
        {**good, "codes": good["codes"].to(torch.int8)},
        {**good, "gain_offset": infinite},
        {**good, "dense": nan},
        {**good, "outliers": good["outliers"] / 0.0},
        {**good, "outlier_tokens": good["outlier_tokens"] + 95},
        {**good, "outlier_channels": -1 - good["outlier_channels"]},
    ):
        with pytest.raises(PayloadError, match="payload tensor"):
            codec.decode(payload, key)
    for payload in (good, {**backward, "gain_offset": infinite}, {**backward, "dense": nan}):
        with pytest.raises(PayloadError, match="payload tensor"):
            codec.decode_gradient(payload, key)


@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=25, deadline=None)
def test_any_bytes_decode_to_finite_states(seed: int) -> None:
    codec, key = CODEC, make_key()
    generator = torch.Generator().manual_seed(seed)
    payload = {
        name: torch.randint(0, 256, (spec.nbytes,), dtype=torch.uint8, generator=generator)
        .view(spec.dtype)
        .view(spec.shape)
        for name, spec in codec.layout(key).items()
    }
    try:
        decoded = codec.decode(payload, key)
    except PayloadError:
        return
    assert decoded.shape == (2, 50, HIDDEN)


CODEC = make_codec()


def test_priors_that_do_not_fit_are_refused() -> None:
    config = BasisConfig()
    prior = fit_basis_prior(*make_samples(), config)
    arguments: Any = {"hidden_size": HIDDEN, "boundary": 2, "device": "cpu", "dtype": torch.float32}
    wrong: list[tuple[dict[str, Tensor], str]] = [
        ({n: t for n, t in prior.items() if n != "mean"}, "prior of boundary 2: lacks"),
        ({**prior, "encode": prior["encode"][:-1]}, "another model"),
        ({**prior, "encode_steps": prior["encode_steps"][:-1]}, "'encode_steps'"),
        ({**prior, "decode": prior["decode"].float()}, "where int8"),
        ({**prior, "decode_steps": prior["decode_steps"] / 0.0}, "not finite"),
        ({**prior, "scale": -prior["scale"]}, "must be positive"),
        ({**prior, "scale": prior["scale"] / 0.0}, "and finite"),
        ({**prior, "widths": prior["widths"] * 4}, "coordinates"),
        ({**prior, "dense_offsets": torch.zeros(1)}, "vector of integers"),
    ]
    for broken, reason in wrong:
        with pytest.raises(ValueError, match=reason):
            BasisCodec(config, prior=broken, **arguments)
    with pytest.raises(ValueError, match="lower mask_ratio"):
        BasisCodec(BasisConfig(mask_ratio=93), prior=prior, **arguments)


@given(seed=st.integers(0, 1 << 20), exponent=st.integers(-20, 20))
@settings(max_examples=30, deadline=None)
def test_matrices_of_a_prior_are_within_half_a_step(seed: int, exponent: int) -> None:
    matrix = torch.randn(9, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    matrix[:, 2] = 0.0
    matrix *= 2.0**exponent
    packed = to_int8("basis", matrix)
    assert {name: (array.dtype, array.shape) for name, array in packed.items()} == {
        "basis": (torch.int8, (9, 5)),
        "basis_steps": (torch.float32, (5,)),
    }
    restored = matrix_of(packed, "basis").double()
    assert bool(((restored - matrix).abs() <= matrix.abs().amax(dim=0) / 127 * 0.5001).all())
    assert torch.equal(matrix_of({"basis": matrix.float()}, "basis"), matrix.float())


def test_samples_that_cannot_be_fitted_are_refused() -> None:
    hidden, gradient, offsets = make_samples()
    config = BasisConfig()
    with pytest.raises(ValueError, match="ordinary tokens"):
        fit_basis_prior(hidden[:3], gradient[:3], torch.zeros(3, dtype=torch.int64), config)
    with pytest.raises(ValueError, match="samples must be"):
        fit_basis_prior(hidden, gradient[:-1], offsets, config)
    with pytest.raises(ValueError, match="non-finite"):
        fit_basis_prior(hidden, gradient * float("inf"), offsets, config)
    with pytest.raises(ValueError, match="too few for a gain"):
        code_budget_bits(98.5, HIDDEN, 8)
