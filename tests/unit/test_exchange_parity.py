"""Rounds over links give every compressor the bits of the simulation in one process."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import peers.butterfly
import peers.exchange
from peers.engine import Engine
from peers.exchange import Exchange
from peers.limits import LIMITS
from swarm.gradient.config import compressor_config
from swarm.gradient.registry import build_compressor
from swarm.gradient.simulate import average_group
from swarm.model.trainable import TrainableSet
from tests.kit.mesh import Mesh

LAYOUT = TrainableSet.of({"a": torch.zeros(16, 20), "norm": torch.zeros(9), "b": torch.zeros(24, 12)})
MOST, SEED = 64, 11
WEIGHTS = [[3, 5, 4], [0, 7, 2], [900, 1, 40]]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = dataclasses.replace(LIMITS, averaging_chunk_elements=MOST, round_s=10.0)
    monkeypatch.setattr(peers.exchange, "LIMITS", limits)
    monkeypatch.setattr(peers.butterfly, "LIMITS", limits)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine()
    thread = threading.Thread(target=engine.run)
    thread.start()
    yield engine
    engine.stop()
    thread.join()


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "fp16"},
        {"name": "int8", "block": 32},
        {"name": "fp8", "block": 32, "error_feedback": False},
        {"name": "e3m0", "block": 32},
        {"name": "sign", "block": 64},
        {"name": "topk", "ratio": 0.1},
        {"name": "dgc", "ratio": 0.05},
        {"name": "randomk", "ratio": 0.2},
        {"name": "powersgd", "rank": 2},
        {"name": "scape", "ratio": 0.2, "dense_steps": 1},
    ],
    ids=lambda fields: fields["name"],
)
@pytest.mark.parametrize("spoiled", [False, True])
def test_exchange_is_the_simulation(engine: Engine, fields: dict[str, Any], spoiled: bool) -> None:
    config = compressor_config(**fields)
    members, twins = ([build_compressor(config, LAYOUT, SEED) for _ in range(3)] for _ in range(2))
    generator = torch.Generator().manual_seed(1)

    async def scenario() -> None:
        for step, weights in enumerate(WEIGHTS):
            gradients = [torch.randn(LAYOUT.numel, generator=generator) for _ in members]
            if spoiled and step == 1:
                gradients[2][10:30] = float("nan")
            mesh = Mesh(engine, gradients, weights, "fp32", seed=step)
            group = dataclasses.replace(mesh.group, step=step)
            exchanges = {
                name: Exchange(
                    group, name, LAYOUT.numel, member.phases(step), engine, mesh._link_of(name), run_seed=SEED
                )
                for name, member in zip(mesh.names, members, strict=True)
            }
            mesh.exchanges = exchanges  # type: ignore[assignment]
            rounds = [m.begin(g, step, w) for m, g, w in zip(members, gradients, weights, strict=True)]
            results = await asyncio.gather(
                *(exchange.run(each) for exchange, each in zip(exchanges.values(), rounds, strict=True))
            )
            for each in rounds:
                each.commit()
            expected = average_group(twins, gradients, weights, run_seed=SEED, step=step, most=MOST)
            assert not mesh.refused and len({digest for _, digest in results}) == 1
            for (average, _), twin in zip(results, expected, strict=True):
                assert torch.equal(average.view(torch.int32), twin.view(torch.int32))
            assert [m.digest() for m in members] == [twin.digest() for twin in twins]

    asyncio.run(asyncio.wait_for(scenario(), 30))
