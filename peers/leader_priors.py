"""Boundaries' priors from what the stages train, where a run has no anchors (`anchors.source: leaders`).

Every `every` steps the senders of a boundary serve some rows of their hidden states (`swarm.activation.rows`) as a
file, and one peer of the stage behind, the first in an order seeded by boundary and step, fetches them at low priority,
joins them with the gradients it kept of the same tokens, fits the prior in a thread and offers it. Nobody waits for
any of it: if it fails, the next one comes `every` steps later, from another peer. Lives in the communication loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from hivemind.p2p import P2P
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from dht.noticeboard import Noticeboard
from peers.anchor_offers import AnchorOffers
from peers.fileserver import FileServer
from peers.prior_parts import PriorPart
from peers.prior_trust import leader_rank
from peers.run_files import RunFiles
from peers.traffic import Traffic
from peers.transfer import TransferError, fetch_copy
from swarm.activation.config import BasisConfig
from swarm.activation.fit import fit_basis_prior
from swarm.activation.registry import needs_tokens
from swarm.activation.rows import JoinedRows, KeptRows, RowTap, check_rows, join_rows, pack_rows, pick_rows
from swarm.activation.versions import VersionedCodec
from swarm.anchor.boundary_prior import BoundaryPrior, encode_boundary_prior
from swarm.anchor.prior_file import PriorFileError, read_bounded
from swarm.manifest import RunManifest

logger = logging.getLogger("swarm_peer.priors")
ROWS_PER_COLUMN = 4
"""Rows that a boundary's prior is fitted to, for each column of its hidden states, if calibration takes no fewer."""
HELD_PER_SHARE = 4
"""A peer may hold so many times its equal share of these rows: shares of a step are not equal."""
KEPT_FILES = 2
FETCH_S, AGAIN_S = 60.0, 1.5
PATIENCE_S = 20.0
"""For so long a sender is asked again for rows that it does not have: it may not have committed the step yet."""
MOST_SENDERS = 64
HEAD_BYTES = 4096


def rows_name(boundary: int, step: int) -> str:
    """Name under which a sender serves its rows of the steps before `step`."""
    return f"rows/{boundary}/{step}"


class LeaderPriors:
    """One peer's part in it. codecs: of its boundaries, which are tapped from here on, by boundary.

    is_linked: whether there is a link with a peer; rows of others are not asked for. count: told how many bytes of
    rows were fetched.
    """

    def __init__(
        self,
        *,
        manifest: RunManifest,
        codec: BasisConfig,
        stage: int,
        codecs: dict[int, VersionedCodec],
        board: Noticeboard,
        p2p: P2P,
        files: RunFiles,
        server: FileServer,
        offers: AnchorOffers,
        directory: Path,
        traffic: Traffic,
        tasks: asyncio.TaskGroup,
        note: Callable[[str], None],
        is_linked: Callable[[str], bool],
        count: Callable[[int], None],
    ) -> None:
        self._is_linked, self._count = is_linked, count
        self._manifest, self._codec, self._stage = manifest, codec, stage
        self._board, self._p2p, self._files, self._server = board, p2p, files, server
        self._offers, self._directory = offers, directory
        self._traffic, self._tasks, self._note = traffic, tasks, note
        self._me: str = p2p.peer_id.to_base58()
        wanted = min(codec.calibration_tokens, ROWS_PER_COLUMN * manifest.model.hidden_size)
        tokens = manifest.samples_per_step * manifest.data.sequence_length * manifest.anchors.every
        # Who fits has only the gradients of its own share of the microbatches.
        shared = wanted * manifest.min_replicas
        self._limit = HELD_PER_SHARE * wanted
        self._taps: dict[int, RowTap] = {}
        for boundary, tapped in codecs.items():
            tap = RowTap(
                run_seed=manifest.seed,
                boundary=boundary,
                one_in=max(1, tokens // shared),
                limit=self._limit,
            )
            self._taps[boundary] = tapped.tap = tap
        self._served: list[tuple[str, Path]] = []
        self._reading = asyncio.Lock()
        self._version: int | None = None
        self._has_failed = False
        self._task: asyncio.Task[None] | None = None

    def tick(self, version: int, *, is_voting: bool) -> None:
        """Time passes. version: of this peer's weights."""
        every = self._manifest.anchors.every
        before, self._version = self._version, version
        if before is None or version // every <= before // every or not is_voting:
            return
        step = version // every * every
        if (tap := self._taps.get(self._stage)) is not None:
            self._tasks.create_task(self._serve(self._stage, step, tap.take(step)))
        if (tap := self._taps.get(self._stage - 1)) is not None:
            kept = tap.take(step)
            is_idle = self._task is None or self._task.done()
            if kept and is_idle and self._fits(self._stage - 1, step):
                self._task = self._tasks.create_task(self._make(self._stage - 1, step, kept))

    def _fits(self, boundary: int, step: int) -> bool:
        """Whether it is this peer's turn."""
        peers = {self._me, *self._voting(self._stage)}
        run_id = self._manifest.run_id
        first: str = min(peers, key=lambda peer: leader_rank(run_id, boundary, step, peer))
        return first == self._me

    def _voting(self, stage: int) -> list[str]:
        return [
            peer
            for peer, record in self._board.view().items()
            if record.training and record.stage == stage and record.state == "online"
        ]

    # -- the sender ------------------------------------------------------------------------------------------

    async def _serve(self, boundary: int, step: int, kept: list[KeptRows]) -> None:
        if not kept:
            return
        name, run_id = rows_name(boundary, step), self._manifest.run_id
        path = self._directory / f"rows-{boundary}-{step}.safetensors"

        def write() -> None:
            self._directory.mkdir(parents=True, exist_ok=True)
            path.write_bytes(save(pack_rows(kept)))

        try:
            await asyncio.to_thread(write)
        except OSError as error:
            self._say_failed(f"rows of boundary {boundary} cannot be kept: {error}")
            return
        self._server.register(name, path, run_id)
        self._served.append((name, path))
        while len(self._served) > KEPT_FILES:
            old, path = self._served.pop(0)
            self._server.unregister(old, run_id)
            with suppress(OSError):
                await asyncio.to_thread(path.unlink)

    # -- the receiver ----------------------------------------------------------------------------------------

    async def _make(self, boundary: int, step: int, kept: list[KeptRows]) -> None:
        """Fetch, fit and offer. What goes wrong is said once."""
        senders = [peer for peer in self._voting(boundary) if self._is_linked(peer)][:MOST_SENDERS]
        wanted = {name for one in kept for name in one.names()}
        try:
            received = await asyncio.gather(*(self._fetch(boundary, step, peer, wanted) for peer in senders))
            data = await asyncio.to_thread(self._fit, boundary, step, [r for r in received if r], kept)
            await self._offers.offer(step, PriorPart("boundary", boundary), data)
        except (ValueError, OSError, RuntimeError, MemoryError) as error:
            # RuntimeError: what torch raises for a decomposition that does not converge.
            why = str(error) or type(error).__name__
            self._say_failed(f"no prior of boundary {boundary} at step {step}: {why}")

    async def _fetch(
        self, boundary: int, step: int, peer: str, wanted: set[tuple[int, int, int]]
    ) -> dict[str, Tensor] | None:
        """A sender's rows with these names, which are wanted of nobody else then: what is held of all senders is no
        more than was kept here. None if it has none, or none that can be used, or does not give them in time.
        """
        path = self._directory / f"rows-{boundary}-{step}-{peer[-8:]}.safetensors"
        limit = self._limit * (2 * self._manifest.model.hidden_size + 24) + HEAD_BYTES

        def read() -> dict[str, Tensor]:
            tensors: dict[str, Tensor] = load(read_bounded(path, limit))
            check_rows(tensors, self._manifest.model.hidden_size, self._limit)
            picked = pick_rows(tensors, wanted)
            wanted.difference_update(map(tuple, picked["names"].tolist()))
            return picked

        name, run_id = rows_name(boundary, step), self._manifest.run_id
        try:
            until = time.monotonic() + PATIENCE_S
            async with asyncio.timeout(FETCH_S):
                while True:
                    try:
                        await fetch_copy(
                            self._p2p, [peer], run_id, name, path, traffic=self._traffic, limit_bytes=limit
                        )
                        break
                    except TransferError:
                        if time.monotonic() > until:
                            raise
                    await asyncio.sleep(AGAIN_S)
            self._count(path.stat().st_size)
            async with self._reading:  # one file at a time in memory
                return await asyncio.to_thread(read)
        except (
            TransferError,
            PriorFileError,
            SafetensorError,
            ValueError,
            TypeError,
            KeyError,
            RuntimeError,
            OSError,
        ) as error:  # what safetensors says of files depends on what is wrong with them
            logger.info("no rows of boundary %d from %s: %s", boundary, peer[-8:], error)
            return None
        finally:
            for left in (path, path.with_name(f"{path.name}.partial")):
                with suppress(OSError):
                    await asyncio.to_thread(left.unlink, missing_ok=True)

    def _fit(
        self, boundary: int, step: int, received: list[dict[str, Tensor]], kept: list[KeptRows]
    ) -> bytes:
        """The prior's file. Raises ValueError if the rows are too few, or cannot be fitted to."""
        joined: JoinedRows = join_rows(received, kept)
        hidden_size = self._manifest.model.hidden_size
        if joined.hidden.shape[0] < hidden_size:
            raise ValueError(f"{joined.hidden.shape[0]} rows for {hidden_size} columns are too few")
        if not bool(torch.isfinite(joined.gradient).all()):
            raise ValueError("gradients that are not finite")
        features = None
        if needs_tokens(self._codec):
            features = joined.tokens.features(self._files.tokens("cpu"), self._codec.prediction)
        arrays = fit_basis_prior(joined.hidden, joined.gradient, joined.offsets, self._codec, features)
        return encode_boundary_prior(BoundaryPrior(boundary, 0, step, arrays))

    def _say_failed(self, why: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._note(f"warning: {why} (more of this is only logged)")
        logger.info("%s", why)
