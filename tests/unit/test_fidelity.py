"""The fidelity probe's own arithmetic: errors, bytes, cosines, and a coded boundary's two directions."""

from __future__ import annotations

import pytest
import torch

from benchmarks.fidelity import Coded, cosines, fit_codecs, measure
from benchmarks.fidelity_states import Captured
from swarm.activation.base import CodecKey
from swarm.activation.config import BasisConfig
from swarm.batch import Batch, default_loss_positions

HIDDEN = 24


def captured(count: int, seed: int) -> Captured:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.zeros(2, 64, dtype=torch.bool)
    starts[:, [0, 40]] = True
    batches = [
        Batch(
            token_ids=torch.randint(0, 9, (2, 64), generator=generator),
            document_starts=starts,
            loss_positions=default_loss_positions(starts),
            sample_ids=torch.arange(2),
        )
        for _ in range(count)
    ]
    spectrum = torch.logspace(1, -2, HIDDEN)
    tensors = [torch.randn(count, 2, 64, HIDDEN, generator=generator) * spectrum for _ in range(2)]
    return Captured(hidden=[tensors[0] + 2.0], gradient=[tensors[1].flip(-1)], batches=batches)


def test_errors_and_bytes_are_those_of_the_codec() -> None:
    fitted, tested = captured(8, 0), captured(2, 1)
    [codec] = fit_codecs(fitted, BasisConfig(mask_ratio=80), None)
    found = measure(codec, tested.hidden[0], tested.gradient[0], tested.batches)
    error, energy = 0.0, 0.0
    ordinary = ~tested.batches[0].document_starts
    for batch, hidden in zip(tested.batches, tested.hidden[0], strict=True):
        key = CodecKey.of(batch, 0)
        error += float((codec.decode(codec.encode(hidden, key), key) - hidden)[ordinary].square().sum())
    states = tested.hidden[0][:, ordinary].reshape(-1, HIDDEN)
    energy = float((states - states.mean(dim=0)).square().sum())
    assert found["forward"] == pytest.approx(error / energy, rel=1e-4)
    assert 0.0 < found["backward"] < 0.1
    assert found["bytes"] == codec.byte_count(CodecKey.of(tested.batches[0], 0)).coded / int(ordinary.sum())
    assert found["bytes"] <= 0.2 * 2 * HIDDEN + 3 / int(ordinary.sum())


def test_a_coded_boundary_codes_both_ways() -> None:
    fitted = captured(8, 0)
    [codec] = fit_codecs(fitted, BasisConfig(mask_ratio=80), None)
    key = CodecKey.of(fitted.batches[0], 0)
    hidden = fitted.hidden[0][0].clone().requires_grad_(True)
    through = Coded.apply(hidden, codec, key)
    assert torch.equal(through, codec.decode(codec.encode(hidden.detach(), key), key))
    through.backward(fitted.gradient[0][0])
    assert hidden.grad is not None
    expected = codec.decode_gradient(codec.encode_gradient(fitted.gradient[0][0], key), key)
    assert torch.equal(hidden.grad, expected)


def test_cosines_by_stage() -> None:
    one = {"model.layers.3.w": torch.tensor([[1.0, 0.0]]), "model.layers.29.w": torch.tensor([[0.0, 2.0]])}
    other = {"model.layers.3.w": torch.tensor([[0.0, 3.0]]), "model.layers.29.w": torch.tensor([[0.0, 1.0]])}
    found = cosines(one, other)
    assert found["stage0"] == 0.0
    assert found["stage3"] == pytest.approx(1.0)
    assert found["all"] == pytest.approx(2.0 / (5.0 * 10.0) ** 0.5)
