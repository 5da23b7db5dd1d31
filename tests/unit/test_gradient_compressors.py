"""Compressors over whole rounds: what all of them promise, and each one's equations in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.gradient.compressor import Compressor
from swarm.gradient.config import compressor_config
from swarm.gradient.dgc import warmup_ratios
from swarm.gradient.registry import build_compressor
from swarm.gradient.robust import RobustConfig
from swarm.gradient.select import strata
from swarm.gradient.simulate import average_group, average_phase
from swarm.model.trainable import TrainableSet
from tests.kit.butterfly import Array, Code, Exchanged, butterfly, exact, mean_sign, top_k

LAYOUT = TrainableSet.of(
    {"a": torch.zeros(24, 10), "norm": torch.zeros(7), "b": torch.zeros(12, 30), "c": torch.zeros(3, 4, 5)}
)
NUMEL = LAYOUT.numel
SEED, MOST, MEMBERS = 5, 90, 3
ALL_COUNT = RobustConfig(norm_bound=None)
WEIGHTS = [[5, 1, 3], [2, 2, 2], [0, 4, 7], [1, 9, 0], [3, 3, 1]]

ALL: list[dict[str, Any]] = [
    {"name": "fp32"},
    {"name": "bf16", "error_feedback": True},
    {"name": "int8", "block": 16},
    {"name": "int8", "block": 16, "error_feedback": False},
    {"name": "fp8", "block": 16},
    {"name": "e3m0", "block": 16},
    {"name": "sign", "block": 128},
    {"name": "topk", "ratio": 0.1},
    {"name": "dgc", "ratio": 0.05, "warmup_steps": 4, "local_clip": 20.0},
    {"name": "randomk", "ratio": 0.1},
    {"name": "randomk", "ratio": 0.1, "error_feedback": False},
    {"name": "powersgd", "rank": 2},
    {"name": "powersgd", "rank": 1, "error_feedback": False, "values": "fp32"},
    {"name": "scape", "ratio": 0.1, "dense_steps": 1, "exploration": 0.25},
    {"name": "scape", "ratio": 0.1, "dense_steps": 0, "error_feedback": False},
]
compressors = pytest.mark.parametrize("fields", ALL, ids=lambda f: "-".join(map(str, f.values())))
oracle = settings(max_examples=8, derandomize=True, deadline=None)
seeds = st.integers(0, 2**30)


def make(fields: dict[str, Any]) -> Compressor:
    return build_compressor(compressor_config(**fields), LAYOUT, SEED)


def group(fields: dict[str, Any]) -> list[Compressor]:
    return [make(fields) for _ in range(MEMBERS)]


def drawn(seed: int, step: int, weights: Sequence[int]) -> list[Tensor]:
    """Gradients of all members; a member without weight has none."""
    generator = torch.Generator().manual_seed(seed * 100 + step)
    common = torch.randn(NUMEL, generator=generator)
    found = [common + torch.randn(NUMEL, generator=generator) for _ in weights]
    return [
        gradient if weight else torch.zeros(NUMEL) for gradient, weight in zip(found, weights, strict=True)
    ]


def play(
    members: list[Compressor], seed: int, step: int, weights: Sequence[int], commit: bool = True
) -> list[Tensor]:
    gradients = drawn(seed, step, weights)
    return average_group(
        members, gradients, weights, run_seed=SEED, step=step, most=MOST, commit=commit, robust=ALL_COUNT
    )


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


def local(compressor: Any, name: str = "error") -> Array:
    found: Array = compressor._state.local(name).double().numpy()
    return found


def token_sums(errors: Array, seed: int, step: int, weights: Sequence[int]) -> Array:
    """e + w g of all members, [members, n]."""
    gradients = np.stack([gradient.double().numpy() for gradient in drawn(seed, step, weights)])
    found: Array = errors + np.array(weights)[:, None] * gradients
    return found


def means(sums: Array, weights: Sequence[int]) -> list[Array]:
    """What members contribute; zero without weight."""
    return [total / weight if weight else 0 * total for total, weight in zip(sums, weights, strict=True)]


def left(sums: Array, exchanged: Exchanged, weights: Sequence[int]) -> Array:
    """What of the sums is left: less what counted, and with what is owed, per token."""
    w = np.array(weights)[:, None]
    found: Array = sums - w * exchanged.counted + np.maximum(w, 1) * exchanged.owed
    return found


# -- what all promise ----------------------------------------------------------------------------------


@compressors
def test_members_get_the_same_bits_and_hold_the_same_common_state(fields: dict[str, Any]) -> None:
    members = group(fields)
    for step, weights in enumerate(WEIGHTS):
        results = play(members, 1, step, weights)
        assert all(result.shape == (NUMEL,) and result.dtype == torch.float32 for result in results)
        assert all(torch.equal(bits(result), bits(results[0])) for result in results)
        states = [member.common_state() for member in members]
        for state in states[1:]:
            assert state.keys() == states[0].keys()
            assert all(torch.equal(bits(state[name]), bits(states[0][name])) for name in state)


@compressors
def test_aborted_round_changes_nothing_and_can_be_repeated(fields: dict[str, Any]) -> None:
    members = group(fields)
    for step, weights in enumerate(WEIGHTS):
        before = [member.digest() for member in members]
        first = play(members, 2, step, weights, commit=False)
        assert [member.digest() for member in members] == before
        again = play(members, 2, step, weights)
        assert torch.equal(bits(first[0]), bits(again[0]))


@compressors
def test_gradient_is_not_changed_and_neither_is_a_vector_afterwards(fields: dict[str, Any]) -> None:
    member = make(fields)
    gradient = drawn(3, 0, [1])[0]
    before = gradient.clone()
    compression = member.begin(gradient, 0, 2)
    vector = compression.vector()
    sent = vector.clone()
    gradient.fill_(7.0)
    assert torch.equal(compression.vector(), sent)
    gradient.copy_(before)
    average_group([member, make(fields)], [gradient, gradient], [1, 1], run_seed=SEED, step=0, most=MOST)
    assert torch.equal(gradient, before) and torch.equal(vector, sent)


@compressors
def test_joiner_replays_rounds_to_the_members_averages_and_common_state(fields: dict[str, Any]) -> None:
    members, joiner, late = group(fields), make(fields), make(fields)
    for step, weights in enumerate(WEIGHTS):
        if step == 2:
            late.load_common_state(members[0].common_state())
        averages, result = spied_round(members, 4, step, weights)
        for each in (joiner, late) if step >= 2 else (joiner,):
            replayed = each.replay(averages, step)
            assert torch.equal(bits(replayed), bits(result))
            for name, value in members[0].common_state().items():
                assert torch.equal(bits(each.common_state()[name]), bits(value))
    # With the next round's snapshot the late one is a member like any other.
    fresh = make(fields)
    fresh.load_common_state(late.common_state())
    assert [p.elements for p in fresh.phases(9)] == [p.elements for p in members[0].phases(9)]


def spied_round(
    members: list[Compressor], seed: int, step: int, weights: Sequence[int]
) -> tuple[list[Tensor], Tensor]:
    """A round by hand: the phases' averages, and the averaged gradient."""
    gradients = drawn(seed, step, weights)
    rounds = [m.begin(g, step, w) for m, g, w in zip(members, gradients, weights, strict=True)]
    averages = []
    for number, phase in enumerate(members[0].phases(step)):
        vectors = [each.vector() for each in rounds]
        assert all(vector.shape == (phase.elements,) for vector in vectors)
        outcomes = average_phase(vectors, weights, phase, seeds=(SEED, step, number), most=MOST)
        for each, outcome in zip(rounds, outcomes, strict=True):
            each.take(outcome)
        averages.append(outcomes[0].average.clone())
    result = rounds[0].result()
    for each in rounds:
        each.commit()
    return averages, result


@compressors
def test_averages_that_are_not_finite_move_no_state(fields: dict[str, Any]) -> None:
    members = group(fields)
    play(members, 5, 0, [1, 2, 3])
    before = [member.digest() for member in members]
    gradients = [gradient * float("nan") for gradient in drawn(5, 1, [1, 2, 3])]
    try:
        results = average_group(members, gradients, [1, 2, 3], run_seed=SEED, step=1, most=MOST)
    except ValueError:
        pass
    else:
        assert not any(bool(torch.isfinite(result).all()) for result in results)
    assert [member.digest() for member in members] == before
    averages = [torch.full((phase.elements,), float("inf")) for phase in members[0].phases(1)]
    assert not bool(torch.isfinite(members[0].replay(averages, 1)).all())
    assert members[0].digest() == before[0]


@compressors
def test_gradient_that_is_not_finite_does_not_stay_with_its_member(fields: dict[str, Any]) -> None:
    members = group(fields)
    play(members, 5, 0, [1, 2, 3])
    gradients = drawn(5, 1, [1, 2, 3])
    gradients[1][NUMEL // 3 : NUMEL // 2] = float("nan")
    # Reducers leave out the parts that are not finite.
    results = average_group(members, gradients, [1, 2, 3], run_seed=SEED, step=1, most=MOST)
    assert bool(torch.isfinite(results[0]).all())
    for step in (2, 3):
        assert all(bool(torch.isfinite(result).all()) for result in play(members, 5, step, [1, 2, 3]))


@compressors
def test_other_sizes_are_refused_with_nothing_changed(fields: dict[str, Any]) -> None:
    members = group(fields)
    play(members, 6, 0, [1, 1, 1])
    member, before = members[0], members[0].digest()
    sizes = [phase.elements for phase in member.phases(1)]
    wrong = [
        [],
        [torch.zeros(size + 1) for size in sizes],
        [torch.zeros(size, dtype=torch.float64) for size in sizes],
        [torch.zeros(size) for size in (*sizes, 1)],
    ]
    for averages in wrong:
        with pytest.raises(ValueError, match="averages"):
            member.replay(averages, 1)
    for gradient in (torch.zeros(NUMEL + 1), torch.zeros(NUMEL, dtype=torch.float64)):
        with pytest.raises(ValueError, match="gradient"):
            member.begin(gradient, 1, 1)
    with pytest.raises(ValueError, match="weight"):
        member.begin(torch.zeros(NUMEL), 1, -1)
    state = member.common_state()
    spoiled = [{**state, "other": torch.zeros(3)}]
    for name, value in state.items():
        spoiled += [{name: value[:-1]}, {name: value.double()}, {name: value * float("nan")}]
    for each in spoiled:
        with pytest.raises(ValueError):
            member.load_common_state(each)
    assert member.digest() == before
    member.load_common_state({})
    assert member.digest() == make(fields).digest()


@compressors
def test_common_state_is_a_copy(fields: dict[str, Any]) -> None:
    members = group(fields)
    play(members, 7, 0, [1, 1, 1])
    before = members[0].digest()
    for value in members[0].common_state().values():
        value.fill_(9.0)
    assert members[0].digest() == before


def test_compression_cannot_commit_after_another_one() -> None:
    member = make({"name": "topk", "ratio": 0.1})
    rounds = [member.begin(drawn(8, 0, [1])[0], 0, 1) for _ in range(2)]
    phase = member.phases(0)[0]
    for each in rounds:
        with pytest.raises(RuntimeError, match="outcome"):
            each.commit()
        each.take(average_phase([each.vector()] * 2, [1, 1], phase, seeds=(SEED, 0, 0), most=MOST)[0])
    rounds[0].commit()
    with pytest.raises(RuntimeError, match="another"):
        rounds[1].commit()


# -- sums ----------------------------------------------------------------------------------------------

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
        # Member 0 reduces the first three of eight chunks.
        np.testing.assert_allclose(now[270:], held[270:], rtol=1e-6)
        assert not np.allclose(now[:270], held[:270])
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


# -- equations -----------------------------------------------------------------------------------------


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
