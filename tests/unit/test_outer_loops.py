"""Outer loops against torch's own Nesterov, plain averages of weights, and a schedule counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.gradient.averaging import AveragingConfig, build_averaging
from swarm.gradient.config import compressor_config
from swarm.gradient.fragments import random_slices, split_into_fragments
from swarm.gradient.outer import LocalSteps
from swarm.gradient.outer_config import LocalStepsConfig, due
from swarm.gradient.registry import build_compressor
from swarm.gradient.simulate import average_group
from swarm.model.trainable import TrainableSet

LAYOUT = TrainableSet.of(
    {
        "model.embed_tokens.weight": torch.empty(9, 4),
        **{f"model.layers.{layer}.up.weight": torch.empty(6, 4) for layer in range(5)},
        "model.norm.weight": torch.empty(4),
    }
)
MOST, SEED = 32, 3


def loop(name: str = "diloco", every: int = 4, **fields: Any) -> LocalStepsConfig:
    return LocalStepsConfig.model_validate({"name": name, "every": every, **fields})


def vectors(count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(LAYOUT.numel, generator=generator) for _ in range(count)]


# -- the outer step --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "momentum"), [(0.7, 0.9), (1.0, 0.0), (0.4, 0.5)])
def test_the_outer_step_is_nesterovs_along_old_minus_new(rate: float, momentum: float) -> None:
    start, *differences = vectors(6, 0)
    parameter = torch.nn.Parameter(start.double().clone())
    oracle = torch.optim.SGD([parameter], lr=rate, momentum=momentum, nesterov=momentum > 0)
    outer = LocalSteps(loop(learning_rate=rate, momentum=momentum, every=1), LAYOUT, 100, start)
    local = start.clone()
    for step, difference in enumerate(differences):
        parameter.grad = difference.double()
        oracle.step()
        outer.apply(difference, step, local)
        torch.testing.assert_close(outer.globals.double(), parameter.detach(), rtol=1e-5, atol=1e-5)
        assert torch.equal(local, outer.globals)


def test_replicas_that_came_the_same_way_go_that_way() -> None:
    """The sign: old minus new, descended."""
    start, way = vectors(2, 1)
    outer = LocalSteps(loop("local_sgd"), LAYOUT, 100, start)
    local = start + way
    outer.apply(outer.difference(local), 3, local)
    torch.testing.assert_close(outer.globals, start + way)
    fast = LocalSteps(loop(), LAYOUT, 100, start)
    local = start + way
    fast.apply(fast.difference(local), 3, local)
    torch.testing.assert_close(fast.globals, start + 0.7 * 1.9 * way)


def test_local_sgd_averages_weights() -> None:
    start, *ways = vectors(4, 2)
    weights = (1, 3, 4)
    config = AveragingConfig(compressor=compressor_config("fp32"), outer=loop("local_sgd"))
    outers = [LocalSteps(loop("local_sgd"), LAYOUT, 100, start) for _ in ways]
    compressors = [build_averaging(config, LAYOUT, 100, SEED) for _ in ways]
    locals_ = [start + way for way in ways]
    averages = average_group(
        compressors,
        [outer.difference(local) for outer, local in zip(outers, locals_, strict=True)],
        weights,
        run_seed=SEED,
        step=3,
        most=MOST,
    )
    for outer, average, local in zip(outers, averages, locals_, strict=True):
        outer.apply(average, 3, local)
    mean = sum(w * (start + way).double() for w, way in zip(weights, ways, strict=True)) / sum(weights)
    torch.testing.assert_close(locals_[0].double(), mean, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(local, locals_[0]) for local in locals_)


def test_a_share_of_the_local_weights_stays_until_the_last_step() -> None:
    start, way = vectors(2, 4)
    outer = LocalSteps(loop("diloco", 2, learning_rate=1.0, momentum=0.0, keep_local=0.25), LAYOUT, 4, start)
    local = start + way
    outer.apply(0.5 * outer.difference(local), 1, local)
    torch.testing.assert_close(outer.globals, start + 0.5 * way)
    torch.testing.assert_close(local, 0.75 * (start + 0.5 * way) + 0.25 * (start + way))
    outer.apply(outer.difference(local), 3, local)
    assert torch.equal(local, outer.globals)


def test_a_difference_that_is_not_finite_changes_nothing() -> None:
    start, way = vectors(2, 5)
    outer = LocalSteps(loop(), LAYOUT, 100, start)
    local = start + way
    bad = way.clone()
    bad[3] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        outer.apply(bad, 3, local)
    assert torch.equal(outer.globals, start) and torch.equal(local, start + way)
    assert not bool(outer.momentum.any())


# -- fragments -------------------------------------------------------------------------------------------


def test_fragments_stride_over_the_layers_and_cover_every_element_once() -> None:
    fragments = split_into_fragments(LAYOUT, 2)
    assert fragments[0].trainable.names == (
        "model.embed_tokens.weight",
        "model.layers.0.up.weight",
        "model.layers.2.up.weight",
        "model.layers.4.up.weight",
        "model.norm.weight",
    )
    covered = torch.zeros(LAYOUT.numel)
    for fragment in split_into_fragments(LAYOUT, 3):
        assert isinstance(fragment.places, tuple)
        assert sum(span.stop - span.start for span in fragment.places) == fragment.trainable.numel
        fragment.scatter(fragment.gather(covered) + 1, covered)
    assert torch.equal(covered, torch.ones(LAYOUT.numel))


@given(every=st.integers(1, 30), fragments=st.integers(1, 8), total=st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_every_fragment_is_due_once_in_every_interval_and_all_at_the_end(
    every: int, fragments: int, total: int
) -> None:
    fragments = min(fragments, every)
    config = loop("streaming_diloco", every, fragments=fragments)
    seen = [due(config, fragments, step, total) for step in range(total)]
    assert seen[-1] == tuple(range(fragments))
    for first in range(0, total - every, every):
        found = [f for step in range(first, first + every) for f in seen[step] if step + 1 < total]
        assert sorted(found) == list(range(fragments))
        assert max(len(one) for one in seen[first : first + every]) == 1


@pytest.mark.parametrize("name", ["fp16", "topk", "powersgd", "sign"])
def test_a_fragments_rounds_are_those_of_a_compressor_of_its_own(name: str) -> None:
    fields: dict[str, Any] = {"topk": {"ratio": 0.2}, "powersgd": {"rank": 1, "min_compression": 1.0}}.get(
        name, {}
    )
    config = AveragingConfig(
        compressor=compressor_config(name, **fields), outer=loop("streaming_diloco", 4, fragments=2)
    )
    whole = [build_averaging(config, LAYOUT, 100, SEED) for _ in range(3)]
    joiner = build_averaging(config, LAYOUT, 100, SEED)
    fragments = split_into_fragments(LAYOUT, 2)
    alone = [
        [build_compressor(config.compressor, fragment.trainable, SEED + number) for _ in range(3)]
        for number, fragment in enumerate(fragments)
    ]
    for step in range(8):
        differences = vectors(3, 10 + step)
        expected = torch.zeros(LAYOUT.numel)
        now = due(loop("streaming_diloco", 4, fragments=2), 2, step, 100)
        assert (not whole[0].phases(step)) == (not now) == (step % 2 == 0)
        if not now:
            continue
        for number in now:
            parts = [fragments[number].gather(difference) for difference in differences]
            found = average_group(alone[number], parts, (2, 1, 1), run_seed=SEED, step=step, most=MOST)
            fragments[number].scatter(found[0], expected)
        results = average_group(whole, differences, (2, 1, 1), run_seed=SEED, step=step, most=MOST)
        assert all(torch.equal(result, expected) for result in results)
        if joiner.common_state():
            joiner.load_common_state(whole[0].common_state())
    state = whole[0].common_state()
    joiner.load_common_state(state)
    again = joiner.common_state()
    assert state.keys() == again.keys() and all(torch.equal(state[key], again[key]) for key in state)
    with pytest.raises(ValueError, match="no fragment"):
        joiner.load_common_state({"7.x": torch.zeros(1)})


# -- configuration ---------------------------------------------------------------------------------------


def test_names_bring_their_defaults() -> None:
    assert (loop().learning_rate, loop().momentum, loop().fragments) == (0.7, 0.9, 1)
    assert (loop("local_sgd").learning_rate, loop("local_sgd").momentum) == (1.0, 0.0)
    assert loop("streaming_diloco").fragments == 4 and loop("streaming_diloco", 2).fragments == 2


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"name": "local_sgd", "momentum": 0.9}, "belongs to diloco"),
        ({"name": "sparta", "learning_rate": 0.5}, "belongs to diloco"),
        ({"name": "sparta", "keep_local": 0.5}, "no place"),
        ({"name": "diloco", "fragments": 2}, "belong to streaming_diloco"),
        ({"name": "streaming_diloco", "every": 6, "fragments": 3, "overlap": 3}, "overlap of 3 steps"),
        ({"name": "streaming_diloco", "every": 3, "fragments": 4}, "at most one"),
        ({"name": "diloco", "every": 0}, "every"),
        ({"name": "gasloc"}, "name"),
    ],
)
def test_loops_that_make_no_sense_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        loop(**fields)


@pytest.mark.parametrize("name", ["dgc", "scape"])
def test_compressors_of_gradients_are_refused_for_differences_of_weights(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} accumulates gradients"):
        AveragingConfig(compressor=compressor_config(name), outer=loop())


# -- random slices ---------------------------------------------------------------------------------------


@given(elements=st.integers(1, 5000), count=st.integers(1, 60), seed=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_slices_cover_every_element_once_and_are_even(elements: int, count: int, seed: int) -> None:
    slices = random_slices(elements, count, seed)
    covered = torch.zeros(elements)
    for each in slices:
        each.scatter(each.gather(covered) + 1, covered)
        assert each.trainable.numel in (elements // count, elements // count + 1)
    assert torch.equal(covered, torch.ones(elements))
    again = random_slices(elements, count, seed)
    assert all(torch.equal(a.places, b.places) for a, b in zip(slices, again, strict=True))  # type: ignore[arg-type]


def test_slices_are_random_and_those_of_another_run_are_others() -> None:
    first, other = (random_slices(20_000, 10, seed)[0].places for seed in (1, 2))
    assert isinstance(first, Tensor) and isinstance(other, Tensor)
    shared = len(set(first.tolist()) & set(other.tolist()))
    assert 120 < shared < 280  # a tenth of 2,000, give or take six deviations
    assert float((first % 10).double().mean()) == pytest.approx(4.5, abs=0.4)


def test_sparta_averages_a_slice_and_leaves_the_rest() -> None:
    start, *ways = vectors(3, 6)
    outers = [LocalSteps(loop("sparta", 4, fragments=4), LAYOUT, 100, start, SEED) for _ in ways]
    locals_ = [start + way for way in ways]
    for step in range(4):
        differences = [outer.difference(local) for outer, local in zip(outers, locals_, strict=True)]
        for outer, local in zip(outers, locals_, strict=True):
            outer.apply(sum(differences, torch.zeros(())) / 2, step, local)
        equal = locals_[0] == locals_[1]
        assert int(equal.sum()) == sum(outers[0].fragments[f].trainable.numel for f in range(step + 1))
    torch.testing.assert_close(locals_[0], start + (ways[0] + ways[1]) / 2)
    assert torch.equal(locals_[0], outers[1].globals)
