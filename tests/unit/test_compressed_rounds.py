"""Every compressor through the exchange: bits as in one process, nothing changed by failures, joiners who follow."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import peers.butterfly
import peers.exchange
from peers.engine import Engine
from peers.exchange import Exchange, ExchangeError
from peers.frames import Kind
from peers.limits import LIMITS
from peers.round_messages import Group
from peers.updates import averages_of, exchanged_update
from swarm.gradient.compressor import Compressor
from swarm.gradient.config import compressor_config
from swarm.gradient.registry import build_compressor
from swarm.gradient.simulate import average_group
from swarm.model.trainable import TrainableSet
from tests.kit.members import running_engine
from tests.kit.mesh import Mesh

CHUNK, SEED = 96, 11
LAYOUT = TrainableSet.of(
    {
        "q": torch.empty(24, 20),
        "norm": torch.empty(24),
        "up": torch.empty(40, 24),
        "bias": torch.empty(7),
    }
)
CONFIGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {},
    "bf16": {},
    "int8": {"block": 16},
    "fp8": {"block": 16},
    "e3m0": {"block": 16},
    "sign": {"block": 16},
    "topk": {"ratio": 0.05},
    "dgc": {"ratio": 0.05, "warmup_steps": 2},
    "randomk": {"ratio": 0.1},
    "powersgd": {"rank": 2},
    "scape": {"ratio": 0.1, "dense_steps": 1},
}
WEIGHTS = (3, 0, 5, 11)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = dataclasses.replace(LIMITS, averaging_chunk_elements=CHUNK, round_s=30.0)
    for module in (peers.exchange, peers.butterfly):
        monkeypatch.setattr(module, "LIMITS", limits)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine() as engine:
        yield engine


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


def build(name: str) -> Compressor:
    return build_compressor(compressor_config(name, **CONFIGS[name]), LAYOUT, SEED)


def gradients(step: int, scale: float = 1e-3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    common = torch.randn(LAYOUT.numel, generator=generator)
    return [scale * (common + torch.randn(LAYOUT.numel, generator=generator)) for _ in WEIGHTS]


class Compressed(Mesh):
    """A step's round of members with compressors of their own."""

    def __init__(
        self,
        engine: Engine,
        compressors: list[Compressor],
        step: int,
        vectors: list[Tensor],
        *,
        deadline_s: float | None = None,
        **more: Any,
    ) -> None:
        super().__init__(engine, vectors, list(WEIGHTS), "fp32", seed=step, **more)
        self.group = Group(
            f"g{step}", step, 1, "peer-0", tuple(self.names), WEIGHTS, ("",) * len(WEIGHTS), ""
        )
        self.compressions = {
            name: compressor.begin(vector, step, weight)
            for name, compressor, vector, weight in zip(
                self.names, compressors, vectors, WEIGHTS, strict=True
            )
        }
        self.exchanges = {
            name: Exchange(
                self.group,
                name,
                LAYOUT.numel,
                compressor.phases(step),
                engine,
                self._link_of(name),
                run_seed=SEED,
                deadline_s=deadline_s,
            )
            for name, compressor in zip(self.names, compressors, strict=True)
        }  # type: ignore[assignment]

    async def member(self, name: str) -> tuple[Tensor, str]:
        await asyncio.sleep(self.random.choice([0, 0, 0.02]))
        return await self.exchanges[name].run(self.compressions[name])  # type: ignore[arg-type]


@pytest.mark.parametrize("is_spoiled", [False, True], ids=["", "spoiled"])
@pytest.mark.parametrize("name", CONFIGS)
def test_members_hold_what_one_process_computes_bit_for_bit(
    engine: Engine, name: str, is_spoiled: bool
) -> None:
    """Also if one member has values that are not finite, and then one that are far too large, which do not count."""

    async def scenario() -> None:
        real, simulated = [build(name) for _ in WEIGHTS], [build(name) for _ in WEIGHTS]
        joiner = build(name)
        for step in range(4):
            vectors = gradients(step)
            if is_spoiled and step == 1:
                vectors[3][10:30] = float("nan")
            if is_spoiled and step == 2:
                vectors[2] *= 1000.0
            mesh = Compressed(engine, real, step, vectors)
            results = await mesh.run()
            assert not mesh.refused and all(isinstance(result, tuple) for result in results.values()), results
            assert len({digest for _, digest in results.values()}) == 1  # type: ignore[misc]
            assert float(results["peer-0"][0].norm()) < 30 * float(vectors[0].norm())  # type: ignore[index]
            expected = average_group(simulated, vectors, WEIGHTS, run_seed=SEED, step=step, most=CHUNK)
            for member, peer in enumerate(mesh.names):
                assert torch.equal(results[peer][0], expected[member])  # type: ignore[index]
                mesh.compressions[peer].commit()
                assert real[member].digest() == simulated[member].digest()
            update = exchanged_update(
                mesh.exchanges["peer-1"], group=mesh.group, run="r", stage=0, lineage="", digest="d"
            )
            replayed = joiner.replay(averages_of(update, joiner.phases(step)), step)
            assert torch.equal(replayed, expected[0])
            common, its = real[0].common_state(), joiner.common_state()
            assert common.keys() == its.keys() and all(torch.equal(common[key], its[key]) for key in common)

    run(scenario())


async def attempt_that_loses_a_member(
    engine: Engine, members: list[Compressor], phase: int
) -> dict[str, Any]:
    """A round of step 1 in which peer-2 is gone when it would send the first average of a phase."""
    mesh = Compressed(engine, members, 1, gradients(1), deadline_s=2.0)
    exchange: Any = mesh.exchanges["peer-2"]

    def tamper(source: str, target: str, kind: Kind, data: bytearray) -> None:
        if kind is Kind.AVERAGE and source == "peer-2" and exchange._number == phase:
            mesh.dead.add("peer-2")

    mesh.tamper = tamper
    return await mesh.run()


@pytest.mark.parametrize("name", CONFIGS)
def test_an_attempt_that_fails_in_any_phase_leaves_the_state_as_it_was(engine: Engine, name: str) -> None:
    async def scenario() -> None:
        members = [build(name) for _ in WEIGHTS]
        average_group(members, gradients(0), WEIGHTS, run_seed=SEED, step=0, most=CHUNK)
        before = [member.digest() for member in members]
        for phase in range(len(members[0].phases(1))):
            results = await attempt_that_loses_a_member(engine, members, phase)
            assert any(isinstance(result, ExchangeError) for result in results.values())
            assert [member.digest() for member in members] == before
        # And the next attempt is the one that would have been made without the failures.
        again = Compressed(engine, members, 1, gradients(1))
        results = await again.run()
        fresh = [build(name) for _ in WEIGHTS]
        average_group(fresh, gradients(0), WEIGHTS, run_seed=SEED, step=0, most=CHUNK)
        expected = average_group(fresh, gradients(1), WEIGHTS, run_seed=SEED, step=1, most=CHUNK)
        assert torch.equal(results["peer-0"][0], expected[0])  # type: ignore[index]

    run(scenario())
