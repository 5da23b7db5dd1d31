"""An anchor under a test's control: a real host, noticeboard and file server, and whatever priors the test wants."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import uvloop
from safetensors.torch import load_file
from torch import Tensor

from dht.dial import connect_peer
from dht.host import start_host, stop_host
from dht.identity import Identity
from dht.noticeboard import Noticeboard
from dht.records import PriorRecord
from peers.fileserver import FileServer
from peers.prior_files import prior_file_name
from peers.prior_parts import PriorPart
from peers.sealed_prior import seal_prior
from peers.traffic import Traffic
from swarm.anchor.boundary_prior import BoundaryPrior, encode_boundary_prior
from swarm.anchor.config import NoCorrectorConfig
from swarm.anchor.factor import exact_factors
from swarm.anchor.memory import target_matrices
from swarm.anchor.prior import SpectralPrior, encode_spectral_prior
from swarm.manifest import RunManifest

R = TypeVar("R")


class PuppetAnchor:
    """Use as a context manager. key: its identity's file. address: of a peer of the run. upload_mbps: cap of what it
    serves.
    """

    def __init__(
        self, key: Path, address: str, run_dir: Path, folder: Path, upload_mbps: float | None = None
    ) -> None:
        self._key, self._address, self._folder = key, address, folder
        self._traffic = Traffic(upload_mbps, None)
        self._manifest = RunManifest.load(run_dir / "manifest.yaml")
        self._run_dir = run_dir
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._stack = AsyncExitStack()
        self._board: Noticeboard
        self._server: FileServer
        self._identity: Identity
        self._daemon: int

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        try:
            self._do(self._start)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._stack.aclose)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def bytes_served(self) -> int:
        """Of files, so far."""
        return self._traffic.total("up", "chunk")

    def kill(self) -> None:
        """End its libp2p daemon with -9: to others it is a machine that has lost its power."""
        os.kill(self._daemon, signal.SIGKILL)

    def arrays(self, boundary: int) -> dict[str, Tensor]:
        """The run's initial arrays of a boundary."""
        arrays: dict[str, Tensor] = load_file(self._run_dir / "artifacts" / f"prior-{boundary}.safetensors")
        return arrays

    def initial(self, boundary: int, step: int, **change: Any) -> bytes:
        """A good prior of a step: the run's initial arrays under this anchor's seal, some of them changed."""
        arrays = self.arrays(boundary)
        data = encode_boundary_prior(BoundaryPrior(boundary, 0, step, {**arrays, **change}))
        return seal_prior(data, self._manifest.run_id, self._identity)

    def corrector(self, stage: int, step: int, seed: int = 0, **change: Tensor) -> bytes:
        """A corrector's prior of a stage: factors of random matrices. change: arrays by `left`, `values` or `right`
        that take the place of the first matrix's.
        """
        generator = torch.Generator().manual_seed(seed + 1000 * stage)
        config = self._manifest.corrector
        rank = None if isinstance(config, NoCorrectorConfig) else config.rank
        factors = {
            name: exact_factors(1e-2 * torch.randn(shape, generator=generator), rank).factors
            for name, shape in self.matrices(stage).items()
        }
        for part, array in change.items():
            first = next(iter(factors))
            factors[first] = dataclasses.replace(factors[first], **{part: array})
        data = encode_spectral_prior(SpectralPrior(stage, 0, step, factors))
        return seal_prior(data, self._manifest.run_id, self._identity)

    def matrices(self, stage: int) -> dict[str, tuple[int, int]]:
        """The matrices of a stage that a corrector has priors of."""
        tensors = load_file(self._run_dir / "artifacts" / f"stage-{stage}.safetensors")
        return target_matrices({name: tuple(tensor.shape) for name, tensor in tensors.items()})

    def offer(self, part: int | PriorPart, step: int, data: bytes, *, served: bytes | None = None) -> str:
        """Say that a prior can be had here; served: other bytes that are given to who asks. Returns its hash.

        part: a number is that of a boundary.
        """
        part = part if isinstance(part, PriorPart) else PriorPart("boundary", part)
        sha256 = hashlib.sha256(data).hexdigest()
        path = self._folder / f"{part.name}-{sha256}"
        path.write_bytes(data if served is None else served)

        async def publish() -> None:
            self._server.register(prior_file_name(part, sha256), path, self._manifest.run_id)
            await self._board.publish(
                PriorRecord(
                    run_id=self._manifest.run_id,
                    peer_id=self._identity.peer_id,
                    public_key=self._identity.public_key,
                    incarnation=self._identity.incarnation,
                    kind=part.kind,
                    part=part.ordinal,
                    step=step,
                    sha256=sha256,
                    nbytes=len(data),
                )
            )

        self._do(publish)
        return sha256

    async def _start(self) -> None:
        identity = self._identity = Identity.load_or_create(self._key)
        self._stack.callback(identity.close)
        self._stack.enter_context(identity.lock())
        p2p = await start_host(identity.path)
        self._stack.push_async_callback(stop_host, p2p)
        self._daemon = p2p._child.pid
        await connect_peer(p2p, self._address.rpartition("/")[2], [self._address], 10)
        self._server = FileServer(p2p, self._traffic)
        self._server.add_run(self._manifest, self._folder)
        await self._server.start()
        self._stack.push_async_callback(self._server.close)
        self._board = await Noticeboard.create(p2p, identity, [self._address], self._manifest.run_id)
        self._stack.push_async_callback(self._board.close)
        running = asyncio.get_running_loop().create_task(self._board.run())

        async def end() -> None:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

        self._stack.push_async_callback(end)

    def _do(self, work: Callable[[], Awaitable[R]]) -> R:
        async def run() -> R:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(60)
