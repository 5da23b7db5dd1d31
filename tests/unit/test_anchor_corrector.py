"""Correctors against float64 oracles, and what passes through them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from swarm.anchor.config import (
    NoCorrectorConfig,
    SignedConfig,
    SpectralConfig,
)
from swarm.anchor.corrector import CorrectionReport, fade
from swarm.anchor.diagnostics import gradient_cosine, mean_filter_weight, subspace_share
from swarm.anchor.factor import Factors
from swarm.anchor.prior import SpectralPrior
from swarm.anchor.registry import build_corrector, needs_prior, remembers_bias
from swarm.anchor.spectral import filter_weights
from tests.kit.correctors import (
    ALL,
    DOWN,
    FILTERS,
    KEY,
    QUERY,
    SETTINGS,
    SHAPES,
    TARGETS,
    UP,
    clones,
    draw,
    make_prior,
    oracle,
    with_settings,
)


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
@pytest.mark.parametrize("config", ALL, ids=lambda c: f"{c.name}-{getattr(c, 'side', '')}")
def test_corrected_gradients_are_the_equations(config: Any, changes: dict[str, Any]) -> None:
    config = with_settings(config, changes)
    memory, raw = draw(TARGETS, 1), draw(SHAPES, 2)
    corrector = build_corrector(config, prior=make_prior(memory, config.rank), shapes=SHAPES)
    corrected = clones(raw)
    report = corrector(corrected, 10)
    assert (report.corrected, report.passed, report.weight) == (4, {}, 1.0)
    for name, gradient in raw.items():
        if name in TARGETS:
            np.testing.assert_allclose(
                corrected[name].numpy(), oracle(config, gradient, memory[name]), atol=2e-5, rtol=0
            )
        else:
            assert torch.equal(corrected[name], gradient), name


@pytest.mark.parametrize("config", FILTERS, ids=lambda c: f"{c.name}-{getattr(c, 'side', '')}")
def test_report_is_what_the_gradients_say(config: Any) -> None:
    config = with_settings(config, {"rank": 3, "tau": 0.5})
    memory, raw = draw(TARGETS, 1), draw(TARGETS, 2)
    prior = make_prior(memory, config.rank)
    corrected = clones(raw)
    report = build_corrector(config, prior=prior, shapes=SHAPES)(corrected, 10)
    assert report.cosine == pytest.approx(gradient_cosine(corrected, raw), abs=1e-5)
    difference = math.sqrt(sum(float((corrected[n] - raw[n]).square().sum()) for n in raw))
    assert report.relative_change == pytest.approx(
        difference / math.sqrt(sum(float(raw[n].square().sum()) for n in raw)), abs=1e-5
    )
    assert report.mean_filter_weight == pytest.approx(
        mean_filter_weight(prior.factors, 0.5, is_relative=False), abs=1e-6
    )
    if config.name == "spectral":
        energies = {name: float(raw[name].square().sum()) for name in raw}
        inside = sum(subspace_share(raw[name], prior.factors[name]) * energies[name] for name in raw)
        assert report.eta == pytest.approx(inside / sum(energies.values()), abs=1e-5)
    assert report.prior_step == 10


def test_a_mixture_reports_no_figures_of_a_filter() -> None:
    report = build_corrector(SignedConfig(), prior=make_prior(draw(TARGETS, 1), 64), shapes=SHAPES)(
        draw(SHAPES, 2), 10
    )
    assert (report.eta, report.cosine, report.mean_filter_weight) == (None, None, None)


@pytest.mark.parametrize("config", ALL, ids=lambda c: f"{c.name}-{getattr(c, 'side', '')}")
def test_alpha_one_leaves_every_bit(config: Any) -> None:
    config = with_settings(config, {"alpha": 1.0})
    raw = draw(SHAPES, 2)
    raw[UP][0, 0], raw[UP][0, 1], raw[UP][0, 2] = float("nan"), -0.0, 1e-42
    corrected = clones(raw)
    report = build_corrector(config, prior=make_prior(draw(TARGETS, 1), 64), shapes=SHAPES)(corrected, 10)
    for name in raw:
        assert torch.equal(corrected[name].view(torch.int32), raw[name].view(torch.int32)), name
    assert (report.corrected, report.passed) == (0, {"off": 4})
    assert not needs_prior(config)


def test_none_and_a_prior_that_is_not_here_leave_every_bit() -> None:
    for config, passed in ((NoCorrectorConfig(), {}), (SpectralConfig(), {"missing": 4})):
        raw = draw(SHAPES, 2)
        corrected = clones(raw)
        report = build_corrector(config, prior=None, shapes=SHAPES)(corrected, 10)
        assert all(torch.equal(corrected[name], raw[name]) for name in raw)
        assert (report.corrected, report.passed, report.prior_step) == (0, passed, None)
    assert not needs_prior(NoCorrectorConfig())
    assert needs_prior(SpectralConfig())
    assert [c.name for c in ALL if remembers_bias(c)] == ["bias"]


def change(factors: Factors, **changes: Tensor) -> Factors:
    parts = {name: getattr(factors, name).clone() for name in ("left", "values", "right")}
    return Factors(**{**parts, **changes})


def broken(factors: Factors, defect: str) -> Factors | None:
    """Factors with one defect each."""
    rows, columns = factors.shape
    bad = float("nan")
    match defect:
        case "nan_left":
            return change(factors, left=factors.left * bad)
        case "inf_right":
            return change(factors, right=factors.right.clone().index_fill_(0, torch.tensor([1]), math.inf))
        case "nan_values":
            return change(factors, values=factors.values * bad)
        case "overflowing":
            return change(factors, values=torch.full_like(factors.values, 3e38))
        case "negative":
            return change(factors, values=-factors.values)
        case "long_columns":
            return change(factors, left=factors.left * 1e30)
        case "same_column":
            return change(factors, right=factors.right[:, :1].repeat(1, factors.rank))
        case "cold":
            return change(factors, values=factors.values * 1e-14)
        case "zero":
            return change(factors, values=factors.values * 0)
        case "transposed":
            return Factors(factors.right, factors.values, factors.left)
        case "short":
            return change(factors, values=factors.values[:-1].clone())
        case "flat":
            return change(factors, left=factors.left.flatten())
        case "too_many":
            return Factors(torch.eye(rows)[:, :1].repeat(1, 30), torch.ones(30), torch.ones(columns, 30))
        case "empty":
            return Factors(torch.zeros(rows, 0), torch.zeros(0), torch.zeros(columns, 0))
        case "integers":
            return change(factors, left=torch.ones(rows, factors.rank, dtype=torch.int64))
        case "missing":
            return None
    raise AssertionError(defect)


@pytest.mark.parametrize(
    ("defect", "reason"),
    [
        ("nan_left", "non_finite"),
        ("inf_right", "non_finite"),
        ("nan_values", "non_finite"),
        ("overflowing", "non_finite"),
        ("negative", "no_basis"),
        ("long_columns", "no_basis"),
        ("same_column", "no_basis"),
        ("cold", "cold"),
        ("zero", "cold"),
        ("transposed", "wrong_shape"),
        ("short", "wrong_shape"),
        ("flat", "wrong_shape"),
        ("too_many", "wrong_shape"),
        ("empty", "wrong_shape"),
        ("integers", "wrong_shape"),
        ("missing", "missing"),
    ],
)
@pytest.mark.parametrize("config", ALL, ids=lambda c: f"{c.name}-{getattr(c, 'side', '')}")
def test_unusable_factors_pass_their_gradient_through_and_are_counted(
    config: Any, defect: str, reason: str
) -> None:
    prior = make_prior(draw(TARGETS, 1), 3)
    factors = dict(prior.factors)
    spoiled = broken(factors.pop(UP), defect)
    if spoiled is not None:
        factors[UP] = spoiled
    prior = SpectralPrior(stage=0, version=1, step=10, factors=factors)
    raw = draw(SHAPES, 2)
    corrected = clones(raw)
    report = build_corrector(config, prior=prior, shapes=SHAPES)(corrected, 10)
    assert (report.corrected, report.passed) == (3, {reason: 1})
    assert torch.equal(corrected[UP], raw[UP])
    assert not any(torch.equal(corrected[name], raw[name]) for name in (QUERY, KEY, DOWN))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in corrected.values())


@pytest.mark.parametrize("config", ALL, ids=lambda c: f"{c.name}-{getattr(c, 'side', '')}")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_gradient_that_is_not_finite_passes_as_it_is(config: Any, bad: float) -> None:
    raw = draw(SHAPES, 2)
    raw[DOWN][:2] = bad
    corrected = clones(raw)
    report = build_corrector(config, prior=make_prior(draw(TARGETS, 1), 64), shapes=SHAPES)(corrected, 10)
    assert (report.corrected, report.passed) == (3, {"gradient_non_finite": 1})
    assert torch.equal(corrected[DOWN].view(torch.int32), raw[DOWN].view(torch.int32))
    assert report.cosine is None or 0 < report.cosine <= 1


@pytest.mark.parametrize("config", ALL, ids=lambda c: f"{c.name}-{getattr(c, 'side', '')}")
def test_correction_fades_with_staleness_and_ends(config: Any) -> None:
    memory, raw = draw(TARGETS, 1), draw(TARGETS, 2)
    corrector = build_corrector(config, prior=make_prior(memory, config.rank, step=100), shapes=SHAPES)
    for step, weight in ((100, 1.0), (115, 1.0), (120, 2 / 3), (129, 1 / 15)):
        corrected = clones(raw)
        report = corrector(corrected, step)
        assert report.weight == pytest.approx(weight)
        assert report.corrected == 4
        for name in raw:
            wanted = oracle(config, raw[name], memory[name], weight)
            np.testing.assert_allclose(corrected[name].numpy(), wanted, atol=2e-5, rtol=0)
    for step, reason in ((130, "stale"), (131, "stale"), (10_000, "stale"), (99, "early")):
        corrected = clones(raw)
        report = corrector(corrected, step)
        assert report == CorrectionReport(step, 100, passed={reason: 4})
        assert all(torch.equal(corrected[name], raw[name]) for name in raw)


@given(st.integers(0, 500), st.integers(1, 200))
def test_fade_falls_from_one_to_nothing(staleness: int, limit: int) -> None:
    weight = fade(staleness, limit)
    assert 0.0 <= weight <= 1.0
    assert (weight == 1.0) == (2 * staleness <= limit)
    assert (weight == 0.0) == (staleness >= limit)
    assert fade(staleness + 1, limit) <= weight


class Allocations(TorchDispatchMode):
    """Counts tensors of at least `limit` elements in storages that no operator's arguments had."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.large = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() >= self.limit:
            self.large += result.untyped_storage().data_ptr() not in known
        return result


@pytest.mark.parametrize("config", ALL, ids=lambda c: f"{c.name}-{getattr(c, 'side', '')}")
def test_correcting_makes_no_matrix_of_the_gradients_size_but_one_for_signs(config: Any) -> None:
    name, shape = UP, (60, 40)
    config = with_settings(config, {"rank": 3})
    memory = {name: torch.randn(shape)}
    corrector = build_corrector(config, prior=make_prior(memory, 3), shapes={name: shape})
    gradients = {name: torch.randn(shape)}
    with Allocations(60 * 40) as seen:
        assert corrector(gradients, 10).corrected == 1
    assert seen.large == (1 if config.name == "signed" else 0)


def test_local_mistakes_raise_before_anything_is_changed() -> None:
    corrector = build_corrector(SpectralConfig(), prior=make_prior(draw(TARGETS, 1), 64), shapes=SHAPES)
    wrong = [
        {name: tensor for name, tensor in draw(SHAPES, 2).items() if name != UP},
        {**draw(SHAPES, 2), UP: torch.zeros(12, 20)},
        {**draw(SHAPES, 2), UP: torch.zeros(20, 12, dtype=torch.bfloat16)},
    ]
    for gradients in wrong:
        before = clones(gradients)
        with pytest.raises(ValueError, match="up_proj"):
            corrector(gradients, 10)
        assert all(torch.equal(gradients[name], before[name]) for name in gradients)


def test_views_into_one_flat_vector_are_corrected_in_it() -> None:
    memory, raw = draw(TARGETS, 1), draw(TARGETS, 2)
    flat = torch.cat([tensor.flatten() for tensor in raw.values()])
    parts = flat.split([tensor.numel() for tensor in raw.values()])
    views = {name: part.view(raw[name].shape) for name, part in zip(raw, parts, strict=True)}
    for config in ALL:
        expected = clones(raw)
        corrector = build_corrector(config, prior=make_prior(memory, config.rank), shapes=SHAPES)
        corrector(expected, 10)
        flat.copy_(torch.cat([tensor.flatten() for tensor in raw.values()]))
        corrector(views, 10)
        torch.testing.assert_close(flat, torch.cat([t.flatten() for t in expected.values()]))


def test_factors_in_bf16_correct_nearly_as_those_in_fp32() -> None:
    memory, raw = draw(TARGETS, 1), draw(TARGETS, 2)
    prior = make_prior(memory, 8)
    short = {
        name: change(each, left=each.left.bfloat16(), right=each.right.bfloat16())
        for name, each in prior.factors.items()
    }
    exact, rounded = clones(raw), clones(raw)
    build_corrector(SpectralConfig(), prior=prior, shapes=SHAPES)(exact, 10)
    report = build_corrector(SpectralConfig(), prior=SpectralPrior(0, 1, 10, short), shapes=SHAPES)(
        rounded, 10
    )
    assert report.corrected == 4
    for name in raw:
        torch.testing.assert_close(rounded[name], exact[name], rtol=0, atol=0.03)


@pytest.mark.parametrize("tau", [0.0, 1e-3, 2.0])
@pytest.mark.parametrize("is_relative", [False, True])
def test_filter_weights_are_tikhonovs(tau: float, is_relative: bool) -> None:
    values = torch.tensor([8.0, 1.0, 1e-3, 1e-9, 0.0])
    level = tau * 8.0 if is_relative else tau
    expected = [s / (s + level) if s > 0 else 0.0 for s in values.tolist()]
    found = filter_weights(values, tau, is_relative=is_relative)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)
    assert filter_weights(torch.zeros(0), tau, is_relative=is_relative).numel() == 0
