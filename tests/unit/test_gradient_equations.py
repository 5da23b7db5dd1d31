"""Each compressor's equations over whole rounds, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.gradient.dgc import warmup_ratios
from swarm.gradient.select import strata
from swarm.gradient.simulate import average_group
from tests.kit.butterfly import Code, butterfly, exact, mean_sign, top_k
from tests.kit.compressors import (
    MEMBERS,
    MOST,
    NUMEL,
    SEED,
    WEIGHTS,
    drawn,
    group,
    left,
    local,
    make,
    means,
    play,
    token_sums,
)

oracle = settings(max_examples=8, derandomize=True, deadline=None)
seeds = st.integers(0, 2**30)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"name": "fp32", "error_feedback": True}, exact),
        ({"name": "topk", "ratio": 0.1}, top_k(0.1)),
        ({"name": "sign", "block": 1024}, mean_sign),
    ],
)
@oracle
@given(seed=seeds)
def test_plain_with_error_feedback(fields: dict[str, Any], code: Code, seed: int) -> None:
    members, errors = group(fields), np.zeros((MEMBERS, NUMEL))
    for step, weights in enumerate(WEIGHTS):
        sums = token_sums(errors, seed, step, weights)
        vectors = means(sums, weights)
        expected = butterfly(vectors, weights, code, MOST)
        got = play(members, seed, step, weights)[0].double().numpy()
        np.testing.assert_allclose(got, expected.average, atol=5e-3)
        errors = left(sums, expected, weights)
        for member, error in zip(members, errors, strict=True):
            np.testing.assert_allclose(local(member), error, atol=0.1)


@oracle
@given(seed=seeds, momentum=st.sampled_from([0.0, 0.5, 0.9]))
def test_dgc(seed: int, momentum: float) -> None:
    clip = 25.0
    members = group(
        {"name": "dgc", "ratio": 0.05, "momentum": momentum, "local_clip": clip, "warmup_steps": 3}
    )
    u, v = np.zeros((MEMBERS, NUMEL)), np.zeros((MEMBERS, NUMEL))
    for step, (weights, ratio) in enumerate(zip(WEIGHTS, [0.25, 0.25, 0.0625, 0.05, 0.05], strict=True)):
        for i, gradient in enumerate(drawn(seed, step, weights)):
            g = gradient.double().numpy()
            norm = np.linalg.norm(g)
            u[i] = momentum * u[i] + weights[i] * (g * clip / norm if norm > clip else g)
            v[i] = v[i] + u[i]
        expected = butterfly(means(v, weights), weights, top_k(ratio), MOST)
        got = play(members, seed, step, weights)[0].double().numpy()
        np.testing.assert_allclose(got, expected.average, atol=2e-2)
        for i in range(MEMBERS):
            u[i] = np.where(expected.counted[i] != 0, 0.0, u[i])
        v = left(v, expected, weights)
        for i in range(MEMBERS):
            np.testing.assert_allclose(local(members[i], "momentum"), u[i], atol=5e-3)
            np.testing.assert_allclose(local(members[i], "accumulated"), v[i], atol=0.4)


def test_dgc_sends_less_from_stage_to_stage_of_its_warm_up() -> None:
    assert warmup_ratios(0.001) == (0.25, 0.0625, 0.015625, 0.00390625)
    assert warmup_ratios(0.25) == ()
    member = make({"name": "dgc", "ratio": 0.001, "warmup_steps": 8})
    sizes = [member.phases(step)[0].codec.nbytes(60_000) for step in range(10)]
    assert sizes == [2 + 4 * k for k in (15000, 15000, 3750, 3750, 938, 938, 234, 234, 60, 60)]


@oracle
@given(seed=seeds, feedback=st.booleans())
def test_random_k(seed: int, feedback: bool) -> None:
    members = group({"name": "randomk", "ratio": 0.1, "values": "fp32", "error_feedback": feedback})
    errors, count = np.zeros((MEMBERS, NUMEL)), round(0.1 * NUMEL)
    edges = [i * NUMEL // count for i in range(count + 1)]
    for step, weights in enumerate(WEIGHTS):
        sums = (
            token_sums(errors, seed, step, weights)
            if feedback
            else token_sums(0 * errors, seed, step, weights)
        )
        a = np.stack(means(sums, weights))
        got = play(members, seed, step, weights)[0].double().numpy()
        chosen = np.flatnonzero(got)
        assert len(chosen) == count
        assert all(low <= index < high for low, high, index in zip(edges, edges[1:], chosen, strict=False))
        mean = np.average(a, axis=0, weights=weights)
        scale = 1.0 if feedback else np.diff(edges)
        np.testing.assert_allclose(got[chosen], mean[chosen] * scale, rtol=1e-4, atol=1e-5)
        if feedback:
            sent = np.isin(np.arange(NUMEL), chosen) & (np.array(weights)[:, None] > 0)
            errors = np.where(sent, 0.0, sums)
            for member, error in zip(members, errors, strict=True):
                np.testing.assert_allclose(local(member), error, atol=1e-4)


def test_random_coordinates_are_equally_likely_and_follow_seed_and_step() -> None:
    hits = np.zeros(100)
    for step in range(2000):
        indices, sizes = strata(100, 7, "x", 1, step)
        assert bool((indices.diff() > 0).all()) and set(sizes.tolist()) == {14, 15}
        hits[indices.numpy()] += 1
    expected = 2000 * 7 / 100
    assert np.abs(hits - expected).max() <= 6 * np.sqrt(expected)
    assert torch.equal(strata(100, 7, "x", 1, 3)[0], strata(100, 7, "x", 1, 3)[0])
    assert not torch.equal(strata(100, 7, "x", 1, 3)[0], strata(100, 7, "x", 2, 3)[0])


def test_random_k_without_feedback_is_unbiased() -> None:
    gradient, total = drawn(12, 0, [1])[0], torch.zeros(NUMEL)
    members = [
        make({"name": "randomk", "ratio": 0.2, "error_feedback": False, "values": "fp32"}) for _ in range(2)
    ]
    for step in range(600):
        total += average_group(members, [gradient] * 2, [1, 1], run_seed=SEED, step=step, most=10**6)[0]
    assert bool(((total / 600 - gradient).abs() <= 6 * gradient.abs() * 2.0 / 600**0.5 + 1e-6).all())


@oracle
@given(seed=seeds, feedback=st.booleans(), exploration=st.sampled_from([0.0, 0.3]))
def test_scape(seed: int, feedback: bool, exploration: float) -> None:
    members = group(
        {
            "name": "scape", "ratio": 0.1, "beta": 0.8, "exploration": exploration, "dense_steps": 2,
            "values": "fp32", "error_feedback": feedback,
        }
    )  # fmt: skip
    errors, moment = np.zeros((MEMBERS, NUMEL)), np.zeros(NUMEL)
    count = round(0.1 * NUMEL)
    explored = int(exploration * count)
    for step, weights in enumerate(WEIGHTS):
        sums = token_sums(errors, seed, step, weights)
        a = np.stack(means(sums, weights))
        got = play(members, seed, step, weights)[0].double().numpy()
        mean = np.average(a, axis=0, weights=weights)
        chosen = np.flatnonzero(got)
        if step < 2:
            assert len(chosen) == NUMEL
        else:
            # All but the drawn ones are those of largest moment; each drawn one stands in for the next largest.
            assert len(chosen) == count
            ranked = np.argsort(-np.abs(moment), kind="stable")
            assert set(ranked[: count - explored]) <= set(chosen)
            drawn_ones = np.setdiff1d(chosen, ranked[: count - explored])
            assert len(drawn_ones) == explored
        expected = np.where(np.isin(np.arange(NUMEL), chosen), mean, 0.0)
        np.testing.assert_allclose(got, expected, atol=1e-5)
        moment = 0.8 * moment + 0.2 * expected
        np.testing.assert_allclose(members[0].common_state()["moment"].double().numpy(), moment, atol=1e-5)
        if feedback:
            sent = np.isin(np.arange(NUMEL), chosen) & (np.array(weights)[:, None] > 0)
            errors = np.where(sent, 0.0, sums)
            for member, error in zip(members, errors, strict=True):
                np.testing.assert_allclose(local(member), error, atol=2e-3)


def test_scape_draws_its_coordinates_while_it_knows_nothing() -> None:
    members = group({"name": "scape", "ratio": 0.1, "dense_steps": 0})
    first = play(members, 13, 0, [1, 1, 1])[0].nonzero()
    assert len(first) == round(0.1 * NUMEL) and int(first.max()) > NUMEL // 2


def test_moment_of_what_is_no_longer_chosen_fades_to_zero() -> None:
    members = group({"name": "scape", "ratio": 0.1, "dense_steps": 1, "beta": 0.1})
    play(members, 14, 0, [1, 1, 1])
    for step in range(1, 80):
        average_group(
            members, [torch.zeros(NUMEL)] * MEMBERS, [1] * MEMBERS, run_seed=SEED, step=step, most=MOST
        )
    moment = members[0].common_state()["moment"]
    assert not bool(((moment != 0) & (moment.abs() < 1e-30)).any())
