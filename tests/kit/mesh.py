"""The members of an averaging group over links in memory, whose frames a test may drop, change or hold back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgpack
import torch
from torch import Tensor

from peers.engine import Engine
from peers.exchange import Exchange
from peers.frames import Frame, FrameError, Kind
from peers.round_messages import Group
from swarm.gradient.chunk import FloatChunk
from swarm.gradient.plain import PlainCompressor
from swarm.gradient.values import ValueFormat

Tamper = Callable[[str, str, Kind, bytearray], None]


class Wire:
    """One direction between two members; frames take a few turns of the loop, in any order."""

    def __init__(self, mesh: Mesh, source: str, target: str) -> None:
        self.mesh, self.source, self.target = mesh, source, target

    async def send(self, kind: Kind, header: dict[str, Any], payload: list[memoryview]) -> None:
        await self.mesh.pause()
        if self.target in self.mesh.dead or self.source in self.mesh.dead:
            raise ConnectionError(f"link to {self.target} closed while sending")
        data = bytearray(b"".join(payload))
        self.mesh.tamper(self.source, self.target, kind, data)
        frame = Frame(kind, msgpack.unpackb(msgpack.packb(header)), (memoryview(data),))
        self.mesh.deliver(self.source, self.target, frame)


class Ready(Exchange):
    """An exchange that knows its contribution."""

    def __init__(self, group, name, contribution, values, engine, link_of):  # type: ignore[no-untyped-def]
        self._dense = PlainCompressor(contribution.numel(), FloatChunk(values), False)
        super().__init__(group, name, contribution.numel(), self._dense.phases(0), engine, link_of)
        self._own = contribution

    async def run(self, own_slice=None):  # type: ignore[no-untyped-def,override]
        return await super().run(self._dense.begin(self._own, 0, 1), own_slice)


class Mesh:
    """All members of a group."""

    def __init__(
        self,
        engine: Engine,
        contributions: list[Tensor],
        weights: list[int],
        values: ValueFormat,
        *,
        dead: frozenset[str] = frozenset(),
        seed: int = 0,
        tamper: Tamper = lambda source, target, kind, data: None,
    ) -> None:
        self.names = [f"peer-{i}" for i in range(len(contributions))]
        self.dead, self.tamper, self.random = set(dead), tamper, random.Random(seed)
        self.refused: list[FrameError] = []
        self.group = Group(
            "g", 0, 1, self.names[0], tuple(self.names), tuple(weights), ("",) * len(weights), ""
        )
        self.exchanges = {
            name: Ready(self.group, name, contribution, values, engine, self._link_of(name))
            for name, contribution in zip(self.names, contributions, strict=True)
        }

    def _link_of(self, source: str) -> Any:
        return lambda target: Wire(self, source, target)

    async def pause(self) -> None:
        for _ in range(self.random.randint(0, 3)):
            await asyncio.sleep(0)

    def deliver(self, source: str, target: str, frame: Frame) -> None:
        try:
            self.exchanges[target].on_frame(source, frame)
        except FrameError as error:
            self.refused.append(error)

    async def member(self, name: str) -> tuple[Tensor, str]:
        await asyncio.sleep(self.random.choice([0, 0, 0.02]))
        return await self.exchanges[name].run()

    async def run(self) -> dict[str, tuple[Tensor, str] | BaseException]:
        """Every living member's result or failure."""
        living = [name for name in self.names if name not in self.dead]
        results = await asyncio.gather(*(self.member(n) for n in living), return_exceptions=True)
        return dict(zip(living, results, strict=True))


def contributions(members: int, elements: int, scale: float = 1e-4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(members * 1000 + elements)
    return [scale * torch.randn(elements, generator=generator) for _ in range(members)]
