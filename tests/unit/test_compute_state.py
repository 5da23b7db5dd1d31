"""A stage's state can be taken over whole, and by nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peers.compute import Boundaries, StageCompute, build_compute, take_step
from swarm.optim import OptimizerConfig
from swarm.sketch import sketch_distance
from tests.kit.members import FILE, stage_compute, stage_run


@pytest.fixture(params=["fp32", "bf16"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[StageCompute, StageCompute]:
    manifest = stage_run(tmp_path, compute=request.param)
    return stage_compute(manifest, tmp_path), stage_compute(manifest, tmp_path)


def gradient(compute: StageCompute, seed: int) -> torch.Tensor:
    return torch.randn(compute.trainable.numel, generator=torch.Generator().manual_seed(seed))


def assert_equal(first: StageCompute, second: StageCompute) -> None:
    a, b = first.state(), second.state()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert first.sketch() == second.sketch()
    for name, parameter in first._parameters.items():  # type: ignore[attr-defined]
        assert torch.equal(parameter, second._parameters[name])  # type: ignore[attr-defined]


def test_training_goes_on_bit_for_bit_from_a_state_that_was_taken_over(
    pair: tuple[StageCompute, StageCompute],
) -> None:
    first, second = pair
    for step in range(3):
        first.apply(gradient(first, step), step)
    second.load_state(first.state())
    assert_equal(first, second)
    for step in range(3, 5):
        for compute in pair:
            compute.apply(gradient(compute, step), step)
    assert_equal(first, second)
    first.load_state(second.state())  # its own moments must not be shared with the other's
    first.apply(gradient(first, 9), 5)
    assert first.sketch() != second.sketch()


def test_the_initial_state_is_that_of_a_stage_just_built(
    pair: tuple[StageCompute, StageCompute], tmp_path: Path
) -> None:
    first, second = pair
    first.apply(gradient(first, 0), 0)
    assert sketch_distance(first.sketch(), second.sketch()) > 0
    first.load_state(first.initial_state(tmp_path / FILE))
    assert_equal(first, second)
    with pytest.raises(OSError, match="absent"):
        first.initial_state(tmp_path / "absent")
    (tmp_path / "rubbish").write_bytes(b"rubbish")
    with pytest.raises(ValueError, match="rubbish"):
        first.initial_state(tmp_path / "rubbish")


def test_a_state_that_does_not_fit_is_refused_by_name_and_nothing_changes(
    pair: tuple[StageCompute, StageCompute],
) -> None:
    first, second = pair
    first.apply(gradient(first, 0), 0)
    second.load_state(first.state())
    good = first.state()
    weight = next(name for name in good if name.startswith("weight."))
    moment = next(name for name in good if name.endswith("exp_avg"))
    wrong = {
        "missing": {name: tensor for name, tensor in good.items() if name != weight},
        "1 unexpected": {**good, "weight.other": torch.zeros(1)},
        f"{weight} must be": {**good, weight: good[weight].flatten()[:-1]},
        f"{moment} must be": {**good, moment: good[moment].double()},
        f"{moment} holds": {**good, moment: torch.full_like(good[moment], float("nan"))},
        f"{weight} holds": {**good, weight: torch.full_like(good[weight], float("inf"))},
        "tensors missing": {name: tensor for name, tensor in good.items() if name != moment},
    }
    for message, state in wrong.items():
        with pytest.raises(ValueError, match=message):
            first.load_state(state)
    assert_equal(first, second)


def test_a_state_taken_over_leaves_nothing_accumulated(pair: tuple[StageCompute, StageCompute]) -> None:
    first, _ = pair
    first._accumulator.fill_(1.0)  # type: ignore[attr-defined]
    first.load_state(first.state())
    assert not first.contribution(1).any()


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_every_optimizer_state_comes_back(optimizer: str, tmp_path: Path) -> None:
    momentum = 0.9 if optimizer == "momentum" else 0.0
    manifest = stage_run(tmp_path, optimizer=OptimizerConfig(name="sgd", momentum=momentum))
    first, second = stage_compute(manifest, tmp_path), stage_compute(manifest, tmp_path)
    first.apply(gradient(first, 0), 0)
    second.load_state(first.state())
    for compute in (first, second):
        compute.apply(gradient(compute, 1), 1)
    assert_equal(first, second)


def test_a_slice_replaces_weights_and_nothing_else(pair: tuple[StageCompute, StageCompute]) -> None:
    first, second = pair
    first.apply(gradient(first, 0), 0)
    second.load_state(first.state())
    values = second.read_slice(10, 20) + 1
    take_step(first, gradient(first, 1), 1, (10, values))
    second.write_slice(10, values)
    second.apply(gradient(second, 1), 1)
    assert_equal(first, second)
    for offset, count in ((-1, 2), (first.trainable.numel - 1, 2), (0, -1)):
        with pytest.raises(ValueError, match="outside"):
            first.read_slice(offset, count)
    with pytest.raises(ValueError, match="outside"):
        first.write_slice(first.trainable.numel, torch.zeros(1))


def test_a_refused_step_leaves_replicas_equal(pair: tuple[StageCompute, StageCompute]) -> None:
    """The slice was written when the gradient turned out not to be finite: the module must follow."""
    first, second = pair
    values = first.read_slice(0, 5) + 1
    bad = gradient(first, 0)
    bad[3] = float("nan")
    for compute in pair:
        compute._accumulator.fill_(1.0)  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="not finite"):
            take_step(compute, bad, 0, (0, values))
        assert not compute.contribution(1).any()
    assert torch.equal(first.read_slice(0, 5), values)
    assert_equal(first, second)
    with pytest.raises(ValueError, match="not finite"):
        take_step(first, gradient(first, 0), 0, (0, torch.full((3,), float("inf"))))
    assert_equal(first, second)


def test_a_calibrated_stage_takes_over_its_own_state(tmp_path: Path) -> None:
    manifest = stage_run(tmp_path)
    boundaries = Boundaries(None, None)
    compute = build_compute(
        manifest, 0, tmp_path / "none", boundaries, device="cpu", microseconds_per_token=1.0
    )
    compute.load_state(compute.state())
    compute.load_state(compute.initial_state(tmp_path / "none"))
    assert sketch_distance(compute.sketch(), compute.sketch()) == 0.0
    take_step(compute, compute.contribution(1), 0, (3, compute.read_slice(3, 4)))
    with pytest.raises(ValueError, match="missing"):
        compute.load_state({})
