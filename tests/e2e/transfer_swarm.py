"""Holders and a fetching peer on real p2pd, in one loop, for the tests of transfers.

PYTEST_DONT_REWRITE: the test modules import it before pytest loads it as a plugin.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.p2p import P2P

from dht.dial import connect_peer
from dht.host import start_host, stop_host, visible_addresses
from peers.fileserver import FileServer
from peers.limits import PROTOCOL_VERSION
from peers.traffic import Traffic
from swarm.activation.config import DenseConfig
from swarm.data.index import ChunkInfo, DataIndex
from swarm.manifest import ARTIFACT_CHUNK_BYTES, Artifact, ModelSection, RunManifest
from tests.kit.processes import loop_that_leaves_nothing

MIB = ARTIFACT_CHUNK_BYTES
NAME = "stage-0.safetensors"


@dataclass
class Holder:
    """A peer that may serve, with what it has counted."""

    p2p: P2P
    server: FileServer
    traffic: Traffic

    @property
    def id(self) -> str:
        return str(self.p2p.peer_id.to_base58())


class Swarm:
    """One loop with a fetching peer and, one by one, holders that it is connected with."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self.me: P2P = runner.run(start_host(None))
        self._holders: list[Holder] = []
        self._spare: list[P2P] = []

    def run(self, coroutine: Coroutine[Any, Any, Any], deadline_s: float = 120.0) -> Any:
        return self._runner.run(asyncio.wait_for(coroutine, deadline_s))

    async def holder(self, protocol: int = PROTOCOL_VERSION, max_upload_mbps: float | None = None) -> Holder:
        p2p = self._spare.pop() if self._spare else await self._connected()
        traffic = Traffic(max_upload_mbps)
        holder = Holder(p2p, FileServer(p2p, traffic, protocol), traffic)
        self._holders.append(holder)
        await holder.server.start()
        return holder

    async def _connected(self) -> P2P:
        p2p = await start_host(None)
        await connect_peer(self.me, p2p.peer_id.to_base58(), await visible_addresses(p2p), 5)
        return p2p

    async def release(self) -> None:
        """Keep the holders that still live for the next test: a start takes a second."""
        for holder in self._holders:
            await holder.server.close()
            if holder.p2p._child.returncode is None:
                self._spare.append(holder.p2p)
            else:
                await stop_host(holder.p2p)
        self._holders.clear()

    async def close(self) -> None:
        await self.release()
        for p2p in (self.me, *self._spare):
            await stop_host(p2p)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    with loop_that_leaves_nothing(tmp_path_factory) as runner:
        swarm = Swarm(runner)
        yield swarm
        runner.run(swarm.close())


@pytest.fixture
def swarm(shared: Swarm) -> Iterator[Swarm]:
    yield shared
    shared.run(shared.release())


def content_of(nbytes: int, seed: int = 0) -> bytes:
    return hashlib.shake_128(str(seed).encode()).digest(nbytes)


def make_run(directory: Path, content: bytes, name: str = "a run") -> RunManifest:
    """A signed manifest with one artifact, which lies in `directory`."""
    path = directory / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    rows = ChunkInfo(name="train-00000.safetensors", sha256="0" * 64, nbytes=1, samples=1)
    data = DataIndex(
        sequence_length=8,
        vocabulary_size=16,
        token_dtype="uint16",
        train=(rows,),
        heldout=(),
        train_samples=1,
        heldout_samples=0,
        train_tokens=8,
        heldout_tokens=0,
        train_documents=1,
        heldout_documents=0,
    )
    return RunManifest(
        protocol=PROTOCOL_VERSION,
        name=name,
        owner_public_key="0" * 64,
        seed=1,
        model=ModelSection(name="tiny", config={"hidden_size": 8}, cuts=(1,)),
        data=data,
        rows_per_microbatch=1,
        samples_per_step=1,
        total_steps=1,
        codec=DenseConfig(),
        artifacts=(Artifact.of(path, NAME),),
    ).signed(Ed25519PrivateKey.generate())
