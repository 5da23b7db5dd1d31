"""Rounds with an outer loop at members that really compute: steps of their own, trials that can be taken back, averages
when they are due, and joiners who need only these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.engine import Engine
from peers.exchange import ExchangeError
from peers.round_messages import Group
from peers.updates import apply_update, read_update, write_update
from swarm.gradient.averaging import AveragingConfig
from swarm.gradient.config import compressor_config
from swarm.gradient.outer_config import LocalStepsConfig
from swarm.manifest import RunManifest
from swarm.optim import StageOptimizer
from tests.kit.members import running_engine, stage_compute, stage_run
from tests.kit.replicas import Replicas, weights_of

EVERY, STEPS = 3, 7
NAMES = ("member-0", "member-1")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine() as engine:
        yield engine


def make_run(folder: Path, name: str = "diloco", compressor: str = "fp32", **fields: Any) -> RunManifest:
    outer = LocalStepsConfig.model_validate({"name": name, "every": EVERY, **fields})
    averaging = AveragingConfig(compressor=compressor_config(compressor), outer=outer)
    return stage_run(folder, averaging=averaging, total_steps=STEPS)


def test_members_train_as_the_equations_say(engine: Engine, tmp_path: Path) -> None:
    """Against two optimizers and an outer step written out here."""
    manifest = make_run(tmp_path)
    replicas = Replicas(manifest, tmp_path, engine)
    compute: Any = replicas.computes[NAMES[0]]
    shared = weights_of(compute)
    shapes = [torch.Size(shape) for shape in compute.trainable.shapes]
    oracles = [StageOptimizer(manifest.optimizer, shared.clone(), shapes, 2) for _ in NAMES]
    momentum, counts = torch.zeros_like(shared), [(5, 3), (4, 0), (2, 6), (1, 1), (0, 7), (3, 3), (8, 2)]
    recent: list[tuple[int, int]] = []
    for step, tokens in enumerate(counts):
        weights = asyncio.run(replicas.step(step, tokens))
        recent.append(tokens)
        for name, oracle, count in zip(NAMES, oracles, tokens, strict=True):
            if count:
                oracle.apply(replicas.gradient(name, step), step, STEPS)
        if (step + 1) % EVERY == 0 or step + 1 == STEPS:
            sums = [sum(each[i] for each in recent[-EVERY:]) for i in range(2)]
            assert list(weights) == sums
            difference = sum(w * (shared - o.master) for w, o in zip(sums, oracles, strict=True)) / sum(sums)
            momentum = 0.9 * momentum + difference
            shared = shared - 0.7 * (0.9 * momentum + difference)
            for oracle in oracles:
                oracle.master.copy_(shared)
        else:
            assert weights == tokens
        for name, oracle in zip(NAMES, oracles, strict=True):
            torch.testing.assert_close(
                weights_of(replicas.computes[name]), oracle.master, rtol=1e-4, atol=1e-5
            )
    first, second = (weights_of(each) for each in replicas.computes.values())
    assert torch.equal(first, second)


@pytest.mark.parametrize("compressor", ["fp16", "powersgd", "topk"])
@pytest.mark.parametrize("name", ["local_sgd", "diloco", "streaming_diloco"])
def test_a_joiner_needs_a_snapshot_and_the_updates_only(
    engine: Engine, tmp_path: Path, name: str, compressor: str
) -> None:
    manifest = make_run(tmp_path, name, compressor, **({"fragments": 2} if "streaming" in name else {}))
    replicas = Replicas(manifest, tmp_path, engine)
    joiner, late = stage_compute(manifest, tmp_path), stage_compute(manifest, tmp_path)
    for step in range(STEPS):
        if step == 4:  # in the middle of an interval: what is served is what all share
            late.load_state(replicas.computes[NAMES[1]].state())
        asyncio.run(replicas.step(step, (3, 5)))
        write_update(tmp_path / "update", replicas.updates[step])
        update = read_update(tmp_path / "update")
        assert (update.way == "local") == (not joiner.compressor.phases(step))
        for follower in (joiner, late) if step >= 4 else (joiner,):
            apply_update(follower, update)
            assert follower.sketch() == replicas.computes[NAMES[0]].sketch()
    expected = replicas.computes[NAMES[0]].state()
    for follower in (joiner, late):
        state = follower.state()
        shared = [key for key in state if not key.startswith("optimizer.")]
        assert all(torch.equal(state[key], expected[key]) for key in shared)
    assert torch.equal(*(weights_of(each) for each in replicas.computes.values()))


def test_attempts_that_fail_leave_no_trace(engine: Engine, tmp_path: Path) -> None:
    manifest = make_run(tmp_path, compressor="powersgd")
    calm, troubled = (Replicas(manifest, tmp_path, engine) for _ in range(2))
    for step in range(STEPS):
        asyncio.run(calm.step(step, (3, 5)))
        asyncio.run(troubled.step(step, (3, 5), attempts=3))
    for name in NAMES:
        assert torch.equal(weights_of(calm.computes[name]), weights_of(troubled.computes[name]))
        assert calm.computes[name].compressor.digest() == troubled.computes[name].compressor.digest()
    states = calm.computes[NAMES[0]].state(), troubled.computes[NAMES[0]].state()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("compressor", ["int8", "powersgd", "topk"])
def test_an_attempt_that_breaks_anywhere_leaves_the_remainders_as_they_were(
    engine: Engine, tmp_path: Path, compressor: str
) -> None:
    """Also what is on trial: the next attempt is the one that would have been made without the failures."""
    manifest = make_run(tmp_path, compressor=compressor)
    calm, troubled = (Replicas(manifest, tmp_path, engine) for _ in range(2))
    tokens, due = (3, 5), 2 * EVERY - 1
    for step in range(due):
        for replicas in (calm, troubled):
            asyncio.run(replicas.step(step, tokens))
    for name in NAMES:
        troubled.accumulate(name, due, tokens[NAMES.index(name)])
    computes = list(troubled.computes.values())
    before = [compute.compressor.digest() for compute in computes]
    states = [compute.state() for compute in computes]
    weights = tuple(work.weight(due, n) for work, n in zip(troubled.works.values(), tokens, strict=True))
    frames = 2 * len(computes[0].compressor.phases(due))
    for last in range(frames):
        group = Group(f"broken-{last}", due, last, NAMES[0], NAMES, weights, ("", ""), "")
        with pytest.raises(ExchangeError):
            asyncio.run(troubled.attempt(group, tokens, last))
        assert [compute.compressor.digest() for compute in computes] == before
        for compute, state in zip(computes, states, strict=True):
            now = compute.state()
            assert now.keys() == state.keys() and all(torch.equal(now[key], state[key]) for key in state)
    for replicas in (calm, troubled):
        asyncio.run(replicas.step(due, tokens))
    for name in NAMES:
        assert torch.equal(weights_of(calm.computes[name]), weights_of(troubled.computes[name]))
        assert calm.computes[name].compressor.digest() == troubled.computes[name].compressor.digest()
    assert [compute.compressor.digest() for compute in computes] != before


def test_a_corrector_that_is_gone_fails_the_attempt_and_no_more(engine: Engine, tmp_path: Path) -> None:
    replicas = Replicas(make_run(tmp_path), tmp_path, engine)
    group = Group("g", EVERY - 1, 0, NAMES[0], NAMES, (1, 1), ("", ""), "", corrector="c" * 64)
    with pytest.raises(ExchangeError, match="not here any more"):
        asyncio.run(replicas.works[NAMES[0]].average(group, None, "", 1))


def test_a_step_on_trial_is_taken_back(tmp_path: Path) -> None:
    manifest = make_run(tmp_path)
    compute: Any = stage_compute(manifest, tmp_path)
    before, state = weights_of(compute), compute.state()
    compute._accumulator.fill_(1.0)
    first = compute.difference(5, 2)
    assert bool(first.any()) and torch.equal(compute.difference(5, 2), first)
    assert not torch.equal(weights_of(compute), before)
    during = compute.state()  # a snapshot in the middle of an attempt
    assert during.keys() == state.keys() and all(torch.equal(during[key], state[key]) for key in state)
    compute.clear()
    assert torch.equal(weights_of(compute), before) and not bool(compute._accumulator.any())
    assert not bool(compute.difference(0, 2).any())
    compute._accumulator.fill_(float("nan"))
    assert not bool(compute.difference(5, 2).any()) and torch.equal(weights_of(compute), before)
    with pytest.raises(ValueError, match="not finite"):
        compute.apply_outer(torch.full_like(before, float("nan")), 2)
    assert torch.equal(weights_of(compute), before)


def test_outer_state_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    compute = stage_compute(make_run(tmp_path), tmp_path)
    good = compute.state()
    for bad in (
        {**good, "outer.momentum": torch.zeros(3)},
        {**good, "outer.other": torch.zeros(3)},
        {**good, "outer.momentum": torch.full_like(good["outer.momentum"], float("inf"))},
    ):
        with pytest.raises(ValueError, match="momentum"):
            compute.load_state(bad)
    plain = stage_compute(stage_run(tmp_path / "plain"), tmp_path / "plain")
    with pytest.raises(ValueError, match="outer loop"):
        plain.load_state(good)
