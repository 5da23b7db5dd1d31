"""What an exchange leaves beside the average: its coded bytes, the leader's slice, and whom it waited for."""

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
from peers.frames import Frame, FrameError, Kind
from peers.limits import LIMITS
from swarm.gradient.chunk import FloatChunk
from swarm.gradient.plain import PlainCompressor
from swarm.gradient.values import decode_values
from tests.kit.members import running_engine
from tests.kit.mesh import Mesh, contributions

CHUNK = 16


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = dataclasses.replace(LIMITS, averaging_chunk_elements=CHUNK, round_s=0.7)
    monkeypatch.setattr(peers.exchange, "LIMITS", limits)
    monkeypatch.setattr(peers.butterfly, "LIMITS", limits)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine() as engine:
        yield engine


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))


def test_the_coded_average_is_kept_as_everybody_decoded_it(engine: Engine) -> None:
    async def scenario() -> None:
        mesh = Mesh(engine, contributions(3, CHUNK * 5 + 3), [1, 2, 3], "fp16")
        results = await mesh.run()
        kept = [exchange.encoded[0] for exchange in mesh.exchanges.values()]
        assert all(torch.equal(a, b) for other in kept for a, b in zip(kept[0], other, strict=True))
        sizes = [len(chunk) // 2 - 2 for chunk in kept[0]]
        decoded = [decode_values(chunk, "fp16", size) for chunk, size in zip(kept[0], sizes, strict=True)]
        assert torch.equal(torch.cat(decoded), results["peer-0"][0])  # type: ignore[index]

    run(scenario())


class Slices(Mesh):
    """A group whose leader, the first member, hands out a slice of its weights."""

    def __init__(self, engine: Engine, span: tuple[int, int], *, elements: int = 100, **more: Any) -> None:
        vectors = contributions(3, elements)
        super().__init__(engine, vectors, [1, 1, 0], "fp16", **more)
        self.weights = torch.arange(elements, dtype=torch.float32)
        self.own = self.weights[span[0] : span[0] + span[1]]
        self.dense = PlainCompressor(elements, FloatChunk("fp16"), False)
        self.exchanges = {
            name: Exchange(
                self.group,
                name,
                elements,
                self.dense.phases(0),
                engine,
                self._link_of(name),
                slice_span=span,
                deadline_s=0.5,
            )
            for name in self.names
        }
        self.vectors = dict(zip(self.names, vectors, strict=True))

    async def member(self, name: str) -> tuple[Tensor, str]:
        own = self.own if name == self.names[0] else None
        return await self.exchanges[name].run(self.dense.begin(self.vectors[name], 0, 1), own)


@pytest.mark.parametrize("span", [(0, 5), (90, 10), (20, CHUNK), (7, 3 * CHUNK + 1)])
def test_everybody_holds_the_leaders_slice_and_the_digest_covers_it(
    engine: Engine, span: tuple[int, int]
) -> None:
    async def scenario() -> None:
        mesh = Slices(engine, span)
        results = await mesh.run()
        assert len({result[1] for result in results.values()}) == 1  # type: ignore[index]
        for exchange in mesh.exchanges.values():
            assert exchange.slice is not None
            assert exchange.slice[0] == span[0]
            assert torch.equal(exchange.slice[1], mesh.own)
        assert not mesh.refused

        def tamper(source: str, target: str, kind: Kind, data: bytearray) -> None:
            if kind is Kind.SLICE and target == "peer-2":
                data[0] ^= 1

        results = await Slices(engine, span, tamper=tamper).run()
        digests = [result[1] for result in results.values()]  # type: ignore[index]
        assert digests[0] == digests[1] != digests[2]

    run(scenario())


def test_a_slice_that_does_not_belong_is_refused(engine: Engine) -> None:
    async def scenario() -> None:
        mesh = Slices(engine, (20, 10))
        exchange = mesh.exchanges["peer-1"]
        good = {"group": "g", "offset": 20}
        for sender, header, nbytes in (
            ("peer-2", good, 40),
            ("stranger", good, 40),
            ("peer-0", good, 36),
            ("peer-0", {**good, "offset": 21}, 40),
            ("peer-0", {**good, "offset": -1}, 40),
            ("peer-0", {**good, "offset": "20"}, 40),
            ("peer-0", {"group": "g"}, 40),
        ):
            with pytest.raises(FrameError):
                exchange.on_frame(sender, Frame(Kind.SLICE, header, (memoryview(bytearray(nbytes)),)))
        no_slice = Mesh(engine, contributions(2, 50), [1, 1], "fp16").exchanges["peer-1"]
        with pytest.raises(FrameError):
            no_slice.on_frame("peer-0", Frame(Kind.SLICE, good, (memoryview(bytearray(40)),)))

    run(scenario())


@pytest.mark.parametrize("silent", [Kind.PART, Kind.AVERAGE, Kind.SLICE])
def test_whoever_kept_an_exchange_waiting_is_named(engine: Engine, silent: Kind) -> None:
    async def scenario() -> None:
        mesh = Slices(engine, (0, 4))
        guilty = "peer-0" if silent is Kind.SLICE else "peer-1"
        deliver = mesh.deliver

        def drop(source: str, target: str, frame: Frame) -> None:
            if not (source == guilty and frame.kind is silent):
                deliver(source, target, frame)

        mesh.deliver = drop  # type: ignore[method-assign]
        results = await mesh.run()
        victim = results["peer-2" if silent is not Kind.PART else "peer-0"]
        assert isinstance(victim, ExchangeError)
        assert victim.reason == "late"
        assert guilty == victim.suspects[0]
        if silent is Kind.PART:
            # Without its parts nobody has averages: those who reduce are not to blame for that.
            assert victim.suspects == (guilty,)

    run(scenario())


def test_a_member_that_takes_nothing_more_is_named(engine: Engine) -> None:
    async def scenario() -> None:
        mesh = Slices(engine, (0, 4))
        blocked = asyncio.Event()
        link_of = mesh.exchanges["peer-0"]._link_of

        class Stuck:
            async def send(self, *arguments: Any) -> None:
                await blocked.wait()

        mesh.exchanges["peer-0"]._link_of = lambda target: Stuck() if target == "peer-2" else link_of(target)  # type: ignore[assignment,return-value]
        results = await mesh.run()
        failure = results["peer-0"]
        assert isinstance(failure, ExchangeError)
        assert failure.suspects[-1] == "peer-2"

    run(scenario())


def test_a_broken_link_names_its_peer(engine: Engine) -> None:
    async def scenario() -> None:
        mesh = Mesh(engine, contributions(2, 64), [1, 1], "fp16", dead=frozenset({"peer-1"}))
        results = await mesh.run()
        failure = results["peer-0"]
        assert isinstance(failure, ExchangeError)
        assert (failure.reason, failure.suspects) == ("disconnected", ("peer-1",))

    run(scenario())
