"""GASLoC against its equations, and what replicas share although they are never equal."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from peers.engine import Engine
from peers.updates import apply_update, read_update, write_update
from swarm.gradient.averaging import AveragingConfig
from swarm.gradient.config import compressor_config
from swarm.gradient.gossip import pair_of
from swarm.gradient.outer_config import OUTERS
from swarm.manifest import RunManifest
from swarm.optim import StageOptimizer
from tests.kit.members import running_engine, stage_compute, stage_run
from tests.kit.replicas import Replicas, weights_of

STEPS = 13


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine() as engine:
        yield engine


def make_run(folder: Path, compressor: str = "fp32", **fields: Any) -> RunManifest:
    outer = OUTERS.validate_python({"name": "gasloc", "every": 2, "consensus": 3, **fields})
    averaging = AveragingConfig(compressor=compressor_config(compressor), outer=outer)
    return stage_run(folder, averaging=averaging, total_steps=STEPS)


def test_pairs_are_the_same_for_both_and_change() -> None:
    names = [f"peer-{number}" for number in range(5)]
    met: Counter[tuple[str, ...]] = Counter()
    for step in range(200):
        pairs = {name: pair_of(name, names, 7, 0, step) for name in names}
        assert sorted(len(pair) for pair in set(pairs.values())) == [1, 2, 2]
        for name, pair in pairs.items():
            assert name in pair and all(pairs[other] == pair for other in pair)
        met.update(tuple(sorted(pair)) for pair in set(pairs.values()))
    assert len(met) == 15 and min(met.values()) > 20


@pytest.mark.parametrize("fields", [{}, {"learning_rate": 0.7, "momentum": 0.8, "coupling": 0.4}])
def test_members_go_as_the_equations_say(engine: Engine, tmp_path: Path, fields: dict[str, float]) -> None:
    """Three members, of which one meets nobody, with numpy's arithmetic; all meet every third time and at the end."""
    manifest = make_run(tmp_path, **fields)
    replicas = Replicas(manifest, tmp_path, engine, 3)
    eta, gamma, coupling = (
        fields.get(name, default)
        for name, default in (("learning_rate", 1.0), ("momentum", 0.5), ("coupling", 1.0))
    )
    compute: Any = replicas.computes["member-0"]
    shapes = [torch.Size(shape) for shape in compute.trainable.shapes]
    first = weights_of(compute)
    oracles = {name: StageOptimizer(manifest.optimizer, first.clone(), shapes, 2) for name in replicas.names}
    theta = {name: first.double().numpy() for name in replicas.names}
    before = dict(theta)
    for step in range(STEPS):
        asyncio.run(replicas.step(step, (3, 1, 8)))
        for name, oracle in oracles.items():
            oracle.apply(replicas.gradient(name, step), step, STEPS)
        if (step + 1) % 2 == 0 or step == STEPS - 1:
            is_all = (step + 1) % 6 == 0 or step == STEPS - 1
            y = {
                name: theta[name] + eta * (oracle.master.double().numpy() - theta[name])
                for name, oracle in oracles.items()
            }
            for name, oracle in oracles.items():
                met = replicas.names if is_all else pair_of(name, replicas.names, manifest.seed, 0, step)
                mean = np.mean([y[other] for other in met], axis=0)
                theta[name] = y[name] - coupling * (y[name] - mean) + gamma * (y[name] - before[name])
                if step == STEPS - 1:
                    theta[name] = mean
                oracle.master.copy_(torch.from_numpy(theta[name]))
            before = y
            expected = {replicas.names} if is_all else {2}
            assert (
                replicas.meetings[step] == expected
                or {len(pair) for pair in replicas.meetings[step]} == expected
            )
        else:
            assert replicas.meetings[step] == set()
        for name, oracle in oracles.items():
            torch.testing.assert_close(
                weights_of(replicas.computes[name]), oracle.master, rtol=1e-4, atol=1e-5
            )
    final = replicas.weights()
    assert torch.equal(final[0], final[1]) and torch.equal(final[0], final[2])


@pytest.mark.parametrize("compressor", ["fp16", "int8", "topk"])
def test_what_is_served_is_what_all_share(engine: Engine, tmp_path: Path, compressor: str) -> None:
    manifest = make_run(tmp_path, compressor)
    replicas = Replicas(manifest, tmp_path, engine, 3)
    joiner = stage_compute(manifest, tmp_path)
    for step in range(STEPS):
        asyncio.run(replicas.step(step, (3, 1, 8)))
        write_update(tmp_path / "update", replicas.updates[step])
        update = read_update(tmp_path / "update")
        assert (update.way == "exchanged") == ((step + 1) % 6 == 0 or step == STEPS - 1)
        apply_update(joiner, update)
        assert torch.equal(weights_of(joiner), joiner.outer.globals)  # type: ignore[union-attr]
        assert torch.equal(joiner.difference(0, step), torch.zeros(joiner.trainable.numel))
        states = [compute.state() for compute in (joiner, *replicas.computes.values())]
        shared = [name for name in states[0] if not name.startswith("optimizer.")]
        assert all(torch.equal(state[name], states[0][name]) for state in states for name in shared)
        sketches = {compute.sketch() for compute in (joiner, *replicas.computes.values())}
        assert len(sketches) == 1


def test_meetings_that_fail_leave_no_trace(engine: Engine, tmp_path: Path) -> None:
    manifest = make_run(tmp_path, "topk")
    calm, troubled = (Replicas(manifest, tmp_path, engine, 3) for _ in range(2))
    for step in range(STEPS):
        asyncio.run(calm.step(step, (3, 1, 8), attempts=3, first=2))
        asyncio.run(troubled.step(step, (3, 1, 8), attempts=3))
    for name in calm.names:
        assert torch.equal(weights_of(calm.computes[name]), weights_of(troubled.computes[name]))
        assert calm.computes[name].compressor.digest() == troubled.computes[name].compressor.digest()


@pytest.mark.parametrize(
    ("compressor", "reason"),
    [("powersgd", "pairs have each their own"), ("dgc", "accumulates gradients"), ("scape", "accumulates")],
)
def test_compressors_with_common_state_are_refused(compressor: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        AveragingConfig(
            compressor=compressor_config(compressor),
            outer=OUTERS.validate_python({"name": "gasloc", "every": 2}),
        )
