"""Four peers over real links produce what one process does, bit for bit, whatever they average."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from peers.engine import Engine
from peers.exchange import Exchange
from peers.frames import Frame, Kind
from peers.limits import LIMITS
from peers.link import Link
from peers.round_messages import Group
from swarm.gradient.config import compressor_config
from swarm.gradient.registry import build_compressor
from swarm.gradient.simulate import average_group
from swarm.model.trainable import TrainableSet
from tests.kit.linked import Node, until
from tests.kit.processes import loop_that_leaves_nothing

pytestmark = pytest.mark.e2e

SEED, MEMBERS, WEIGHTS = 5, 4, (300, 200, 0, 500)
LAYOUT = TrainableSet.of(
    {
        "embed": torch.empty(512, 256),
        "q": torch.empty(256, 256),
        "norm": torch.empty(256),
        "up": torch.empty(700, 256),
    }
)
CONFIGS: dict[str, dict[str, Any]] = {
    "fp16": {},
    "int8": {},
    "fp8": {},
    "e3m0": {},
    "sign": {},
    "topk": {"ratio": 0.005},
    "dgc": {"ratio": 0.005},
    "randomk": {"ratio": 0.01},
    "powersgd": {"rank": 4},
    "scape": {"ratio": 0.05, "dense_steps": 1},
}


class Member(Node):
    """A peer that hands the frames of a round to its exchange."""

    exchange: Exchange | None = None

    def _on_frame(self, link: Link, frame: Frame) -> None:
        if frame.kind in (Kind.PART, Kind.AVERAGE):
            assert self.exchange is not None
            self.exchange.on_frame(link.peer, frame)


class Mesh:
    """Peers that are all linked with each other, of one stage, each with a compute thread."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.runner = runner
        self.engines = [Engine() for _ in range(MEMBERS)]
        self.threads = [threading.Thread(target=engine.run) for engine in self.engines]
        for thread in self.threads:
            thread.start()
        self.members: list[Any] = runner.run(self._linked())

    async def _linked(self) -> list[Any]:
        members = [await Member.start(0) for _ in range(MEMBERS)]
        for member in members:
            for other in members:
                if other is not member:
                    member.want(other)
        await until(
            lambda: all(a.links.get(b.links.me) for a in members for b in members if a is not b), 30.0
        )
        return members

    async def close(self) -> None:
        for member in self.members:
            await member.close()
        for engine, thread in zip(self.engines, self.threads, strict=True):
            engine.stop()
            thread.join()


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with loop_that_leaves_nothing(tmp_path_factory) as runner:
        mesh = Mesh(runner)
        yield mesh
        runner.run(mesh.close())


@pytest.mark.parametrize("name", CONFIGS)
def test_real_peers_hold_what_one_process_computes(mesh: Mesh, name: str) -> None:
    config = compressor_config(name, **CONFIGS[name])
    real, simulated = ([build_compressor(config, LAYOUT, SEED) for _ in WEIGHTS] for _ in range(2))

    async def scenario() -> None:
        names = tuple(member.links.me for member in mesh.members)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            common = torch.randn(LAYOUT.numel, generator=generator)
            vectors = [
                1e-3 * (common + torch.randn(LAYOUT.numel, generator=generator)) for _ in range(MEMBERS)
            ]
            group = Group(f"{name}-{step}", step, 0, names[0], names, WEIGHTS, ("",) * MEMBERS, "")
            for member, engine, compressor in zip(mesh.members, mesh.engines, real, strict=True):
                member.exchange = Exchange(
                    group,
                    member.links.me,
                    LAYOUT.numel,
                    compressor.phases(step),
                    engine,
                    member.links.get,
                    run_seed=SEED,
                    deadline_s=60.0,
                )
            rounds = [
                compressor.begin(vector, step, weight)
                for compressor, vector, weight in zip(real, vectors, WEIGHTS, strict=True)
            ]
            results = await asyncio.gather(
                *(member.exchange.run(each) for member, each in zip(mesh.members, rounds, strict=True))
            )
            assert len({digest for _, digest in results}) == 1
            expected = average_group(
                simulated, vectors, WEIGHTS, run_seed=SEED, step=step, most=LIMITS.averaging_chunk_elements
            )
            for number, each in enumerate(rounds):
                assert torch.equal(results[number][0], expected[number])
                each.commit()
                assert real[number].digest() == simulated[number].digest()

    mesh.runner.run(asyncio.wait_for(scenario(), 120))
