"""What no prior can make of a gradient, and what the mixtures do not promise."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.anchor.config import (
    AdditiveConfig,
    BiasConfig,
    SignedConfig,
)
from swarm.anchor.diagnostics import gradient_cosine
from swarm.anchor.factor import Factors, exact_factors
from swarm.anchor.prior import SpectralPrior
from swarm.anchor.registry import build_corrector
from tests.kit.correctors import (
    FILTERS,
    LAYER,
    SHAPES,
    TARGETS,
    UP,
    clones,
    draw,
    make_prior,
    with_settings,
)

SIZES = st.integers(1, 9)


@st.composite
def poisoned_factors(draw_from: st.DrawFn, rows: int, columns: int) -> Factors:
    """Factors of any memory: random, huge, tiny, rank-deficient, or made up without one."""
    seed = draw_from(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    kind = draw_from(st.sampled_from(["random", "deficient", "repeated", "made_up"]))
    rank = draw_from(st.integers(1, min(rows, columns)))
    matrix = torch.randn(rows, columns, generator=generator)
    if kind == "deficient":
        matrix = torch.outer(matrix[:, 0], matrix[0])
    if kind == "repeated":
        matrix = matrix[:1].repeat(rows, 1)
    factors = exact_factors(matrix, rank).factors
    scale = draw_from(st.sampled_from([1e-10, 1e-3, 1.0, 1e6, 1e36]))
    values = factors.values * scale
    if kind == "made_up":
        # Not in order, not from any memory: only orthonormality and the sign are checked.
        values = torch.rand(rank, generator=generator) * scale
    return Factors(factors.left, values, factors.right)


@settings(deadline=None, max_examples=300)
@given(
    st.data(),
    SIZES,
    SIZES,
    st.sampled_from([0.0, 0.3, 0.9]),
    st.sampled_from([0.0, 1e-3, 1e3]),
    st.booleans(),
    st.sampled_from(FILTERS),
    st.sampled_from([1e-12, 1.0, 1e12]),
)
def test_no_prior_can_turn_a_gradient_around(
    data: st.DataObject,
    rows: int,
    columns: int,
    alpha: float,
    tau: float,
    is_relative: bool,
    config: Any,
    size: float,
) -> None:
    """<G, corrected> >= alpha ||G||^2 and ||corrected|| <= ||G||, whatever the prior is."""
    config = with_settings(config, {"alpha": alpha, "tau": tau, "tau_is_relative": is_relative, "rank": None})
    name = f"{LAYER}mlp.up_proj.weight"
    factors = data.draw(poisoned_factors(rows, columns))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    raw = torch.randn(rows, columns, generator=generator) * size
    if data.draw(st.booleans()):
        # The worst case: a gradient that lies in the prior's directions.
        raw = (
            factors.left
            @ torch.randn(factors.rank, factors.rank, generator=generator)
            @ factors.right.T
            * size
        )
    corrected = {name: raw.clone()}
    prior = SpectralPrior(stage=0, version=0, step=0, factors={name: factors})
    corrector = build_corrector(config, prior=prior, shapes={name: (rows, columns)})
    report = corrector(corrected, data.draw(st.integers(0, 40)))
    assert corrector.keeps_descent
    exact, changed = raw.double(), corrected[name].double()
    energy = float(exact.square().sum())
    assert float((exact * changed).sum()) >= (alpha - 1e-5) * energy
    assert float(changed.norm()) <= (1 + 1e-5) * math.sqrt(energy)
    assert sum(report.passed.values()) + report.corrected == 1


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**31), st.sampled_from(FILTERS), st.sampled_from([0.0, 0.3]))
def test_bases_that_are_not_orthonormal_cannot_turn_a_gradient_around_either(
    seed: int, config: Any, alpha: float
) -> None:
    """U diag(d) U' is positive semidefinite for any U; that a crooked basis is refused bounds the length only."""
    config = with_settings(config, {"alpha": alpha})
    generator = torch.Generator().manual_seed(seed)
    name, (rows, columns), rank = UP, TARGETS[UP], 5
    raw = torch.randn(rows, columns, generator=generator)
    factors = exact_factors(torch.randn(rows, columns, generator=generator), rank).factors
    crooked = Factors(
        factors.left + 0.1 * torch.randn(rows, rank, generator=generator) / math.sqrt(rows),
        torch.rand(rank, generator=generator),
        factors.right + 0.1 * torch.randn(columns, rank, generator=generator) / math.sqrt(columns),
    )
    corrected = {name: raw.clone()}
    prior = SpectralPrior(stage=0, version=0, step=0, factors={name: crooked})
    report = build_corrector(config, prior=prior, shapes={name: (rows, columns)})(corrected, 0)
    assert sum(report.passed.values()) + report.corrected == 1
    energy = float(raw.double().square().sum())
    assert float((raw.double() * corrected[name].double()).sum()) >= (alpha - 1e-5) * energy
    assert float(corrected[name].norm()) <= 1.6 * math.sqrt(energy)


def test_mixtures_do_not_promise_descent_and_can_break_it() -> None:
    raw = draw(TARGETS, 2)
    against = make_prior({name: -tensor for name, tensor in raw.items()}, None)
    for config in (
        SignedConfig(rank=None),
        BiasConfig(alpha=0.0, rank=None),
        AdditiveConfig(alpha=0.3, rank=None),
    ):
        corrector = build_corrector(config, prior=against, shapes=SHAPES)
        corrected = clones(raw)
        corrector(corrected, 10)
        assert not corrector.keeps_descent
        assert gradient_cosine(corrected, raw) < 0.1


def test_replicas_that_correct_then_average_get_what_averaging_then_correcting_gives() -> None:
    """The filters are linear."""
    first, second = draw(TARGETS, 2), draw(TARGETS, 3)
    mean = {name: (first[name] + second[name]) / 2 for name in first}
    for config in FILTERS:
        corrector = build_corrector(config, prior=make_prior(draw(TARGETS, 1), 3), shapes=SHAPES)
        one, two, both = clones(first), clones(second), clones(mean)
        for gradients in (one, two, both):
            corrector(gradients, 10)
        for name in both:
            torch.testing.assert_close((one[name] + two[name]) / 2, both[name], rtol=0, atol=1e-5)
