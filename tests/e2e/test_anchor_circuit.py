"""Passes through anchors on real p2pd, with arithmetic in place of a model."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hivemind.p2p import P2P, PeerID
from torch import Tensor

from dht.dial import connect_peer
from dht.host import start_host, stop_host, visible_addresses
from peers.anchor_circuit import HANDLER, AnchorCircuit, PassError
from peers.anchor_cover import Leg
from peers.frames import Kind
from peers.traffic import Traffic
from peers.transfer import TransferError
from tests.kit.processes import loop_that_leaves_nothing

pytestmark = pytest.mark.e2e
SHAPE = (2, 3, 4)


@dataclass
class Work:
    """Stages that add one to what they are given, and double gradients."""

    microbatches: int = 3
    loaded: list[tuple[int, int, int]] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)
    returned: list[float] = field(default_factory=list)
    finished: int = 0
    is_last: bool = False
    spoils: str = ""
    on_forward: Any = None
    on_load: Any = None
    on_finish: Any = None

    async def load(self, version: int, first: int, last: int) -> None:
        if self.spoils == "load":
            raise ValueError("these weights are damaged")
        if self.spoils == "fetch":
            raise TransferError("weights that are damaged", {"donor": "it has left"})
        if self.on_load is not None:
            await self.on_load()
        self.loaded.append((version, first, last))

    def shape(self, index: int) -> tuple[int, int, int]:
        return SHAPE

    async def forward(self, index: int, incoming: Tensor | None) -> Tensor | None:
        if self.on_forward is not None:
            await self.on_forward(index)
        hidden = torch.zeros(SHAPE) if incoming is None else incoming.float()
        self.seen.append(float(hidden.mean()))
        if self.spoils == "nan":
            return torch.full(SHAPE, float("nan"))
        if self.spoils == "shape":
            return torch.zeros(9, 9, 9)
        return None if self.is_last else hidden + 1

    async def backward(self, index: int, gradient: Tensor | None) -> Tensor | None:
        found = torch.ones(SHAPE) if gradient is None else gradient.float()
        self.returned.append(float(found.mean()))
        return 2 * found

    async def finish(self) -> None:
        if self.on_finish is not None:
            await self.on_finish()
        self.finished += 1


async def until(condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
    """Wait for a condition. Raises TimeoutError."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 (what is waited for knows of no event)
            await asyncio.sleep(0.01)


class Row:
    """Three anchors, of two, one and two stages."""

    def __init__(self, hosts: list[P2P], addresses: dict[str, list[str]]) -> None:
        self.ids = [host.peer_id.to_base58() for host in hosts]
        self.legs = [
            Leg(peer, first, last) for peer, first, last in zip(self.ids, (0, 2, 3), (1, 2, 4), strict=True)
        ]
        self.anchors = tuple(self.ids)
        self.work = [Work(), Work(), Work(is_last=True)]
        self.abandoned: list[tuple[int, int, str]] = []
        self.traffic = [Traffic() for _ in hosts]
        self.circuits = [
            AnchorCircuit(
                p2p=host,
                run_id="r",
                stages=5,
                span=(leg.first, leg.last),
                anchors=lambda: self.anchors,
                addresses=lambda peer: addresses[peer],
                traffic=self.traffic[place],
                work=self.work[place],
                on_abandoned=lambda version, why, place=place: self.abandoned.append(  # type: ignore[misc]
                    (place, version, why)
                ),
            )
            for place, (host, leg) in enumerate(zip(hosts, self.legs, strict=True))
        ]

    async def __aenter__(self) -> Row:
        for circuit in self.circuits:
            await circuit.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for circuit in self.circuits:
            await circuit.close()

    async def lead(self, version: int = 20) -> None:
        await asyncio.wait_for(self.circuits[0].lead(version, self.legs), 20)

    async def settled(self, count: int) -> None:
        """Until so many anchors have said that they gave up a pass."""
        await until(lambda: len(self.abandoned) >= count)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[asyncio.Runner]:
    with loop_that_leaves_nothing(tmp_path_factory) as one:
        yield one


@pytest.fixture
def row(runner: asyncio.Runner) -> Iterator[Row]:
    async def start() -> tuple[list[P2P], dict[str, list[str]]]:
        hosts = [await start_host(None) for _ in range(3)]
        return hosts, {host.peer_id.to_base58(): await visible_addresses(host) for host in hosts}

    hosts, addresses = runner.run(start())
    yield Row(hosts, addresses)

    async def stop() -> None:
        for host in hosts:
            await stop_host(host)

    runner.run(stop())


def test_microbatches_go_through_all_anchors_and_gradients_come_back(
    runner: asyncio.Runner, row: Row
) -> None:
    async def scenario() -> None:
        async with row:
            await row.lead(20)
            await row.lead(40)
            await until(lambda: [work.finished for work in row.work] == [2, 2, 2])
        assert [work.loaded for work in row.work] == [
            [(20, 0, 1), (40, 0, 1)],
            [(20, 2, 2), (40, 2, 2)],
            [(20, 3, 4), (40, 3, 4)],
        ]
        assert [set(work.seen) for work in row.work] == [{0.0}, {1.0}, {2.0}]
        assert [set(work.returned) for work in row.work] == [{4.0}, {2.0}, {1.0}]
        assert not row.abandoned
        sent = row.traffic[0].total("up", Kind.DENSE)
        assert 6 * 48 <= sent <= 6 * (48 + 64), "two bytes a value"

    runner.run(scenario())


SPOILT = [(place, spoils) for place in range(3) for spoils in ("load", "fetch", "nan", "shape")]


# The last anchor sends no states that could be wrong.
@pytest.mark.parametrize(
    ("place", "spoils"), [case for case in SPOILT if case not in {(2, "nan"), (2, "shape")}]
)
def test_what_goes_wrong_at_one_anchor_ends_the_pass_at_all_and_not_the_next(
    runner: asyncio.Runner, row: Row, place: int, spoils: str
) -> None:
    async def scenario() -> None:
        async with row:
            row.work[place].spoils = spoils
            with pytest.raises(PassError, match=r"damaged|not finite|bytes|gone"):
                await row.lead()
            row.work[place].spoils = ""
            assert [work.finished for work in row.work] == [0, 0, 0]
            await until(lambda: all(circuit._current is None for circuit in row.circuits))
            await row.lead(40)
            await until(lambda: [work.finished for work in row.work] == [1, 1, 1])
        refusing = {who for who, version, _ in row.abandoned if version == 20}
        assert refusing <= {1, 2} and (place == 0 or spoils not in ("load", "fetch") or place in refusing)
        assert all(version == 20 for _, version, _ in row.abandoned)

    runner.run(scenario())


def test_anchor_that_dies_in_a_pass_is_noticed_at_once_by_both_its_neighbours(
    runner: asyncio.Runner, row: Row
) -> None:
    async def scenario() -> None:
        async def die(index: int) -> None:
            if index == 1:
                os.kill(row.circuits[1]._p2p._child.pid, signal.SIGKILL)
                await asyncio.sleep(60)

        async with row:
            row.work[1].on_forward = die
            with pytest.raises(PassError, match="has gone"):
                await row.lead()
            await row.settled(1)
            assert [(who, version) for who, version, _ in row.abandoned] == [(2, 20)]
            assert [work.finished for work in row.work] == [0, 0, 0]

    runner.run(scenario())


def test_who_is_no_anchor_or_not_before_this_one_opens_no_pass(runner: asyncio.Runner, row: Row) -> None:
    async def scenario() -> None:
        async with row:
            row.anchors = tuple(row.ids[1:])
            with pytest.raises(PassError, match="is no anchor"):
                await row.lead()
            row.anchors = tuple(row.ids)
            with pytest.raises(PassError, match="not before this anchor"):
                await row.circuits[0].lead(20, [Leg(row.ids[2], 0, 1), *row.legs[1:2], Leg(row.ids[0], 3, 4)])
            row.work[0].microbatches = 2
            with pytest.raises(PassError, match="3 microbatches"):
                await row.lead()
            assert not row.work[1].loaded and not row.abandoned

    runner.run(scenario())


@pytest.mark.parametrize("junk", [b"", b"\0" * 64, b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n" * 9])
def test_garbage_on_the_stream_of_passes_hurts_nobody(runner: asyncio.Runner, row: Row, junk: bytes) -> None:
    async def scenario() -> None:
        async with row:
            sender, target = row.circuits[0]._p2p, row.circuits[1]._p2p
            await connect_peer(sender, row.ids[1], await visible_addresses(target), 5)
            for _ in range(3):
                _, _, writer = await sender.call_binary_stream_handler(target.peer_id, HANDLER)
                writer.write(junk)
                writer.close()
            await row.lead()
            await until(lambda: [work.finished for work in row.work] == [1, 1, 1])
            assert not row.abandoned

    runner.run(scenario())


def test_lead_that_begins_anew_is_not_kept_waiting_by_what_it_left(runner: asyncio.Runner, row: Row) -> None:
    async def scenario() -> None:
        async def hang(index: int) -> None:
            await asyncio.sleep(60)

        async with row:
            row.work[2].on_forward = hang
            first = asyncio.create_task(row.lead(20))
            await until(lambda: bool(row.work[1].seen))
            await row.circuits[0]._drop()
            with pytest.raises(PassError, match="given up here"):
                await first
            row.work[2].on_forward = None
            await row.lead(40)
            await until(lambda: [work.finished for work in row.work] == [1, 1, 1])
            await row.settled(1)
            assert all(version == 20 for _, version, _ in row.abandoned)

    runner.run(scenario())


def test_next_pass_waits_where_the_last_one_is_still_being_fitted(runner: asyncio.Runner, row: Row) -> None:
    """The lead hears nothing of that: it opens its next pass when it is ready itself."""

    async def scenario() -> None:
        may_finish = asyncio.Event()

        async with row:
            row.work[1].on_finish = row.work[2].on_finish = may_finish.wait
            await row.lead(20)
            second = asyncio.create_task(row.lead(40))
            await until(lambda: (40, 0, 1) in row.work[0].loaded)
            await asyncio.sleep(0.2)  # as long as the opening takes
            assert [len(work.loaded) for work in row.work] == [2, 1, 1]
            may_finish.set()
            await second
            await until(lambda: [work.finished for work in row.work] == [2, 2, 2])
        assert not row.abandoned

    runner.run(scenario())


def test_lead_that_goes_while_the_others_load_ends_the_pass_there_at_once(
    runner: asyncio.Runner, row: Row
) -> None:
    async def scenario() -> None:
        loading = asyncio.Event()

        async def load() -> None:
            loading.set()
            await asyncio.sleep(60)

        async with row:
            row.work[1].on_load = row.work[0].on_load = load
            first = asyncio.create_task(row.lead(20))
            await loading.wait()
            await until(lambda: bool(row.work[2].loaded))
            await row.circuits[0]._drop()
            await row.settled(2)
            assert all("gone" in why for _, _, why in row.abandoned)
            with pytest.raises(PassError, match="given up here"):
                await first

    runner.run(scenario())


def test_strangers_take_no_anchors_place(
    runner: asyncio.Runner, row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peers.anchor_circuit.STREAMS", 1)
    monkeypatch.setattr("peers.anchor_circuit.STRANGERS", 1)

    async def scenario() -> None:
        async with row:
            stranger = row.ids[2]
            row.anchors = (row.ids[0], row.ids[1])
            host, victim = row.circuits[2]._p2p, row.circuits[1]
            await connect_peer(host, row.ids[1], row.circuits[0]._addresses(row.ids[1]), 5)
            writers = [
                (await host.call_binary_stream_handler(PeerID.from_base58(row.ids[1]), HANDLER))[2]
                for _ in range(2)
            ]
            await until(lambda: victim._strangers[stranger] > 0)
            assert not victim._streams
            row.legs = [Leg(row.ids[0], 0, 1), Leg(row.ids[1], 2, 4)]
            victim._span, row.work[1].is_last = (2, 4), True
            await row.lead()
            for writer in writers:
                writer.close()

    runner.run(scenario())
