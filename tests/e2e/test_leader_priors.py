"""Priors of a boundary made by its two ends, over real p2pd and a real noticeboard, with random states."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import struct
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hivemind.p2p import P2P

from dht.host import start_host, stop_host, visible_addresses
from dht.identity import Identity
from dht.noticeboard import Noticeboard
from dht.records import PeerRecord
from peers.anchor_offers import AnchorOffers
from peers.fileserver import FileServer
from peers.leader_priors import LeaderPriors, rows_name
from peers.prior_parts import PriorPart
from peers.prior_shelf import Offer
from peers.prior_trust import PriorTrust
from peers.sealed_prior import publisher_of
from peers.traffic import Traffic
from peers.transfer import fetch_by_hash
from swarm.activation.base import CodecKey
from swarm.activation.config import BasisConfig, DenseConfig
from swarm.activation.registry import build_codec
from swarm.activation.versions import VersionedCodec
from swarm.anchor.boundary_prior import load_boundary_prior
from swarm.manifest import AnchorSection, RunManifest
from tests.kit.processes import loop_that_leaves_nothing
from tests.unit.test_manifest import KEY, manifest

pytestmark = pytest.mark.e2e
H = 8
EVERY = 2
CODEC = BasisConfig(mask_ratio=50, prediction="none", calibration_tokens=256)
PART = PriorPart("boundary", 1)


def make_manifest() -> RunManifest:
    run = manifest(codec=CODEC, anchors=AnchorSection(source="leaders", every=EVERY))
    return run.signed(KEY)


@dataclass
class End:
    """A peer of one of the boundary's stages."""

    stage: int
    p2p: P2P
    identity: Identity
    board: Noticeboard
    server: FileServer
    codec: VersionedCodec
    leader: LeaderPriors
    notes: list[str]
    counted: list[int]


class Ends:
    """A sender (stage 1) and a receiver (stage 2) of boundary 1."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stack = folder, AsyncExitStack()
        self.manifest = make_manifest()
        self.ends: list[End] = []

    async def __aenter__(self) -> Ends:
        self.tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        address: tuple[str, ...] = ()
        for stage in (1, 2):
            end = await self._start(stage, address)
            self.ends.append(end)
            address = (address or tuple(await visible_addresses(end.p2p)))[:1]
        for end in self.ends:
            await end.board.refresh()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.aclose()

    async def _start(self, stage: int, address: tuple[str, ...]) -> End:
        folder = self._folder / str(stage)
        identity = Identity.load_or_create(folder / "key")
        self._stack.enter_context(identity.lock())
        p2p = await start_host(identity.path)
        self._stack.push_async_callback(stop_host, p2p)
        if address:
            from dht.dial import connect_peer

            await connect_peer(p2p, address[0].rpartition("/")[2], address, 5)
        board = await Noticeboard.create(p2p, identity, address, self.manifest.run_id)
        self._stack.push_async_callback(board.close)
        server = FileServer(p2p, Traffic())
        server.add_run(self.manifest, folder)
        await server.start()
        self._stack.push_async_callback(server.close)
        plain = build_codec(
            DenseConfig(),
            hidden_size=H,
            boundary=1,
            run_seed=0,
            prior=None,
            device="cpu",
            dtype=torch.float32,
        )
        codec, notes, counted = VersionedCodec(1, plain), list[str](), list[int]()
        leader = LeaderPriors(
            manifest=self.manifest,
            codec=CODEC,
            stage=stage,
            codecs={1: codec},
            board=board,
            p2p=p2p,
            files=None,  # type: ignore[arg-type]  # holds the token table, which this codec needs not
            server=server,
            offers=AnchorOffers(
                run_id=self.manifest.run_id,
                identity=identity,
                board=board,
                server=server,
                directory=folder / "priors",
            ),
            directory=folder / "rows",
            traffic=Traffic(),
            tasks=self.tasks,
            note=notes.append,
            is_linked=lambda _: True,
            count=counted.append,
        )
        await board.publish(
            PeerRecord(
                run_id=self.manifest.run_id,
                peer_id=identity.peer_id,
                public_key=identity.public_key,
                incarnation=identity.incarnation,
                role="stage",
                stage=stage,
                state="online",
                training=True,
            )
        )
        return End(stage, p2p, identity, board, server, codec, leader, notes, counted)

    def train(self, steps: range) -> None:
        """What passes the boundary in these steps."""
        sender, receiver = self.ends
        for step in steps:
            for sample in range(0, 32, 4):
                starts = torch.zeros(4, 16, dtype=torch.bool)
                starts[:, 0] = True
                ids = torch.zeros(4, 16, dtype=torch.int64)
                key = CodecKey(step, torch.arange(sample, sample + 4), starts, (), ids)
                generator = torch.Generator().manual_seed(100 * step + sample)
                states = torch.randn(4, 16, H, generator=generator)
                sender.codec.encode(states, key)
                receiver.codec.encode_gradient(1e-4 * states.flip(-1), key)

    def tick(self, version: int) -> None:
        for end in self.ends:
            end.leader.tick(version, is_voting=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what is watched knows no events
            await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[asyncio.Runner]:
    with loop_that_leaves_nothing(tmp_path_factory) as one:
        yield one


def test_receiver_fits_the_prior_to_both_ends_rows_and_offers_it(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with Ends(tmp_path) as ends:
            sender, receiver = ends.ends
            ends.tick(0)
            ends.train(range(EVERY))
            ends.tick(1)
            assert not receiver.board.priors(), "not yet"
            ends.tick(EVERY)
            await until(lambda: bool(receiver.board.priors()) or bool(receiver.notes))
            (offer,) = receiver.board.priors()
            assert (offer.peer_id, offer.kind, offer.part, offer.step) == (
                receiver.identity.peer_id,
                "boundary",
                1,
                EVERY,
            )
            path = tmp_path / "fetched"
            name = f"prior/{PART.name}/{offer.sha256}"
            await fetch_by_hash(
                sender.p2p,
                [receiver.identity.peer_id],
                ends.manifest.run_id,
                name,
                offer.sha256,
                path,
            )
            assert publisher_of(path.read_bytes(), ends.manifest.run_id) == receiver.identity.peer_id
            prior = load_boundary_prior(path, CODEC, H)
            assert (prior.boundary, prior.step) == (1, EVERY)
            assert torch.isfinite(prior.arrays["encode"].float()).all()
            assert len(receiver.counted) == 1 and receiver.counted[0] > 0, "bytes of rows"

            # Whose offers count: those of who votes behind the boundary.
            links = {receiver.identity.peer_id}

            def trust_at(stage: int) -> PriorTrust:
                return PriorTrust(
                    ends.manifest, receiver.board, tuple, tuple, stage=stage, is_linked=links.__contains__
                )

            trust = trust_at(2)
            theirs = Offer(receiver.identity.peer_id, PART, EVERY, offer.sha256, offer.nbytes)
            assert trust.rank(theirs) is not None
            assert trust.rank(Offer(sender.identity.peer_id, PART, EVERY, "0" * 64, 9)) is None
            assert trust.rank(Offer("Qm" + "2" * 44, PART, EVERY, "0" * 64, 9)) is None
            assert trust.rank(dataclasses.replace(theirs, step=EVERY + 1)) is None, "none is due then"
            assert trust.rank(dataclasses.replace(theirs, step=0)) is None
            assert set(trust.makers) == {end.identity.peer_id for end in ends.ends}
            # Peers at the boundary go by those they have links with, others by what peers say that they hold.
            before = trust.makers
            links.clear()
            assert trust.rank(theirs) is None and trust_at(1).rank(theirs) is None
            assert trust_at(0).rank(theirs) is not None
            assert trust.makers != before, "what was said of offers is said anew"

    runner.run(scenario())


def unknown_dtype() -> bytes:
    """A safetensors file with a dtype that its library knows and torch does not."""
    header = json.dumps({"rows": {"dtype": "F8_E8M0", "shape": [8], "data_offsets": [0, 8]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(8)


@pytest.mark.parametrize(
    "content", [None, b"no rows at all", unknown_dtype()], ids=["nothing", "no file", "unknown dtype"]
)
def test_rows_that_do_not_come_or_are_garbage_cost_one_prior_and_nothing_else(
    runner: asyncio.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    async def scenario() -> None:
        async with Ends(tmp_path) as ends:
            sender, receiver = ends.ends
            ends.tick(0)
            ends.train(range(EVERY))
            if content is not None:
                garbage = tmp_path / "garbage"
                garbage.write_bytes(content)
                sender.server.register(rows_name(1, EVERY), garbage)
            with monkeypatch.context() as patched:
                patched.setattr("peers.leader_priors.PATIENCE_S", 0.0)
                receiver.leader.tick(EVERY, is_voting=True)
                await until(lambda: bool(receiver.notes))
            assert "no prior of boundary 1 at step 2" in receiver.notes[0]
            sender.leader.tick(EVERY, is_voting=True)
            ends.train(range(EVERY, 2 * EVERY))
            ends.tick(2 * EVERY)
            await until(lambda: bool(receiver.board.priors()))
            assert [record.step for record in receiver.board.priors()] == [2 * EVERY]
            assert len(receiver.notes) == 1
            assert not list((tmp_path / "2" / "rows").iterdir()), "nothing of what was fetched is left"

    runner.run(scenario())


def test_a_fit_that_does_not_converge_costs_one_prior_and_nothing_else(
    runner: asyncio.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverges(*_: object) -> None:
        raise torch.linalg.LinAlgError("eigh did not converge")

    async def scenario() -> None:
        async with Ends(tmp_path) as ends:
            receiver = ends.ends[1]
            ends.tick(0)
            with monkeypatch.context() as patched:
                patched.setattr("peers.leader_priors.fit_basis_prior", diverges)
                ends.train(range(EVERY))
                ends.tick(EVERY)
                await until(lambda: bool(receiver.notes))
            assert "eigh did not converge" in receiver.notes[0]
            ends.train(range(EVERY, 2 * EVERY))
            ends.tick(2 * EVERY)
            await until(lambda: bool(receiver.board.priors()))

    runner.run(scenario())
