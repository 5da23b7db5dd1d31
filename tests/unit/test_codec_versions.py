"""One boundary, several priors: the key says which one codes a microbatch."""

from __future__ import annotations

import pytest
import torch

from swarm.activation.base import CodecKey
from swarm.activation.config import BasisConfig
from swarm.activation.fit import fit_basis_prior
from swarm.activation.registry import build_codec
from swarm.activation.versions import MissingPriorError, VersionedCodec

HIDDEN, NEW = 32, "b" * 64


def codec(seed: int):  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(seed)
    config = BasisConfig(mask_ratio=50.0)
    prior = fit_basis_prior(
        torch.randn(600, HIDDEN, generator=generator) * torch.linspace(1, 5, HIDDEN),
        torch.randn(600, HIDDEN, generator=generator),
        torch.arange(600) % 50,
        config,
    )
    return build_codec(
        config, hidden_size=HIDDEN, boundary=1, run_seed=0, prior=prior, device="cpu", dtype=torch.float32
    )


def key(*priors: str) -> CodecKey:
    starts = torch.zeros(2, 20, dtype=torch.bool)
    starts[:, 0] = True
    return CodecKey(step=0, sample_ids=torch.arange(2), document_starts=starts, priors=priors)


def test_key_chooses_the_prior_of_its_own_boundary_in_both_directions() -> None:
    old, new = codec(1), codec(2)
    both = VersionedCodec(1, old)
    both.add(NEW, new)
    hidden = torch.randn(2, 20, HIDDEN, generator=torch.Generator().manual_seed(3))
    for wanted, at in ((old, key()), (old, key(NEW, "")), (new, key("", NEW))):
        payload = both.encode(hidden, at)
        assert all(torch.equal(payload[name], tensor) for name, tensor in wanted.encode(hidden, at).items())
        assert torch.equal(both.decode(payload, at), wanted.decode(payload, at))
        returned = both.encode_gradient(hidden, at)
        assert torch.equal(both.decode_gradient(returned, at), wanted.decode_gradient(returned, at))
        assert both.layout(at) == wanted.layout(at) and both.gradient_layout(at) == wanted.gradient_layout(at)
        assert both.byte_count(at) == wanted.byte_count(at)
    assert not torch.equal(both.decode(both.encode(hidden, key()), key()), hidden)


def test_prior_that_is_not_held_is_named() -> None:
    one = VersionedCodec(1, codec(1))
    with pytest.raises(MissingPriorError, match="boundary 1: prior bbbbbbbbbbbb"):
        one.layout(key("", NEW))


def test_initial_prior_stays_whatever_is_let_go() -> None:
    one = VersionedCodec(1, codec(1))
    one.add(NEW, codec(2))
    one.retain([NEW])
    assert one.holds(NEW) and one.holds("")
    one.retain([])
    assert not one.holds(NEW) and one.holds("")
