"""What coding left out is kept, by sums over whole rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from swarm.gradient.config import compressor_config
from swarm.gradient.registry import build_compressor
from swarm.gradient.simulate import average_group, average_phase
from swarm.gradient.split import Split
from swarm.model.trainable import TrainableSet
from tests.kit.compressors import (
    ALL,
    MEMBERS,
    MOST,
    NUMEL,
    SEED,
    WEIGHTS,
    drawn,
    group,
    local,
    make,
    play,
)

CONSERVING = [f for f in ALL if f.get("error_feedback", True) and f["name"] not in {"fp32", "dgc"}]


@pytest.mark.parametrize("fields", CONSERVING, ids=lambda f: "-".join(map(str, f.values())))
def test_error_feedback_loses_nothing(fields: dict[str, Any]) -> None:
    """Sum of all tokens' gradients = total weights times averages + what members hold, what reducers owe included:
    for weights that change from round to round, and for reducers without weight.
    """
    members = group(fields)
    given_, applied = np.zeros(NUMEL), np.zeros(NUMEL)
    for step, weights in enumerate([*WEIGHTS, [100, 1, 1], [1, 100, 0]]):
        for gradient, weight in zip(drawn(9, step, weights), weights, strict=True):
            given_ += weight * gradient.double().numpy()
        applied += sum(weights) * play(members, 9, step, weights)[0].double().numpy()
    kept = sum(local(member) for member in members)
    np.testing.assert_allclose(applied + kept, given_, atol=2e-3)


def test_dgc_loses_nothing_of_what_it_accumulated() -> None:
    members = group({"name": "dgc", "ratio": 0.05})
    for step, weights in enumerate(WEIGHTS):
        held = sum(0.9 * local(m, "momentum") + local(m, "accumulated") for m in members)
        for gradient, weight in zip(drawn(10, step, weights), weights, strict=True):
            held += weight * gradient.double().numpy()
        result = play(members, 10, step, weights)[0].double().numpy()
        kept = sum(local(m, "accumulated") for m in members)
        np.testing.assert_allclose(sum(weights) * result + kept, held, atol=1e-3)


def test_remainder_of_many_tokens_counts_once_after_few_tokens_and_the_other_way_round() -> None:
    """A reducer of one token owes what a mean of a thousand lost; it must not bring it in a thousand times."""
    members = [make({"name": "topk", "ratio": 0.01}) for _ in range(2)]
    gradient = torch.ones(NUMEL)
    for step, weights in enumerate([[1000, 1], [1, 1000], [1000, 1], [500, 500]]):
        result = average_group(members, [gradient] * 2, weights, run_seed=SEED, step=step, most=MOST)[0]
        assert float(result.abs().max()) <= (step + 1) * 1.01


@pytest.mark.parametrize("name", ["topk", "dgc", "randomk", "scape", "powersgd", "sign", "int8"])
def test_member_without_weight_keeps_what_it_held_but_for_what_it_owes(name: str) -> None:
    members = group({"name": name})
    play(members, 11, 0, [1, 1, 1])
    key = "accumulated" if name == "dgc" else "error"
    held = local(members[0], key)
    if name == "dgc":
        held = held + 0.9 * local(members[0], "momentum")
    gradients = drawn(11, 1, [0, 1, 1])
    # Nobody looks at what it did not compute.
    gradients[0].fill_(float("nan"))
    average_group(members, gradients, [0, 1, 1], run_seed=SEED, step=1, most=MOST)
    now = local(members[0], key)
    if name in {"topk", "sign", "int8", "dgc"}:
        split = Split(NUMEL, MEMBERS, MOST)
        end = split.span([split.reducer(chunk) for chunk in range(split.chunks)].index(1)).start
        np.testing.assert_allclose(now[end:], held[end:], rtol=1e-6)
        assert not np.allclose(now[:end], held[:end])
    else:
        np.testing.assert_allclose(now, held, atol=5e-2)


@pytest.mark.parametrize(
    "fields", [{"name": "topk", "ratio": 0.0025}, {"name": "dgc", "ratio": 0.001}, {"name": "e3m0"}]
)
def test_reducers_do_not_leave_out_their_own_parts(fields: dict[str, Any]) -> None:
    layout = TrainableSet.of({"a": torch.zeros(200, 200)})
    members = [build_compressor(compressor_config(**fields), layout, SEED) for _ in range(4)]
    generator = torch.Generator().manual_seed(1)
    is_heavy = fields["name"] == "e3m0"
    scale = torch.exp(1.5 * torch.randn(40_000, generator=generator)) if is_heavy else 1.0
    for step in range(40):
        rounds = [m.begin(torch.randn(40_000, generator=generator) * scale, step, 5) for m in members]
        (phase,) = members[0].phases(step)
        vectors = [each.vector() for each in rounds]
        outcomes = average_phase(vectors, [5] * 4, phase, seeds=(SEED, step, 0), most=10_000)
        for each, outcome in zip(rounds, outcomes, strict=True):
            # Something of every member counts in every chunk.
            assert bool(outcome.counted.view(4, 10_000).any(dim=1).all()), step
            each.take(outcome)
            each.commit()
