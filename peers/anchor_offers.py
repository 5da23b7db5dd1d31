"""What an anchor offers: priors sealed, served, and named on the noticeboard."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from dht.identity import Identity
from dht.noticeboard import Noticeboard
from dht.records import PriorRecord
from peers.fileserver import FileServer
from peers.prior_files import prior_file_name, write_prior
from peers.prior_parts import PriorPart
from peers.sealed_prior import seal_prior

KEPT_PASSES = 4
"""Passes whose priors stay on offer: of those that plans may still name."""


class AnchorOffers:
    """One anchor's priors. directory: where they are kept."""

    def __init__(
        self, *, run_id: str, identity: Identity, board: Noticeboard, server: FileServer, directory: Path
    ) -> None:
        self._run_id, self._identity = run_id, identity
        self._board, self._server, self._directory = board, server, directory
        self._offered: dict[PriorPart, list[tuple[str, Path]]] = {}

    async def offer(self, version: int, part: PriorPart, data: bytes) -> None:
        """Keep a prior's file, serve it and say so; let go of what no plan can name any more.

        version: of the weights it was made from. Raises OSError if it cannot be kept, TimeoutError.
        """
        data = await asyncio.to_thread(seal_prior, data, self._run_id, self._identity)
        sha256, path = await asyncio.to_thread(write_prior, self._directory, part, data)
        name = prior_file_name(part, sha256)
        self._server.register(name, path, self._run_id)
        await self._board.publish(
            PriorRecord(
                run_id=self._run_id,
                peer_id=self._identity.peer_id,
                public_key=self._identity.public_key,
                incarnation=self._identity.incarnation,
                kind=part.kind,
                part=part.ordinal,
                step=version,
                sha256=sha256,
                nbytes=len(data),
            )
        )
        offered = self._offered.setdefault(part, [])
        if (name, path) not in offered:
            offered.append((name, path))
        while len(offered) > KEPT_PASSES:
            name, path = offered.pop(0)
            self._server.unregister(name, self._run_id)
            with suppress(OSError):
                await asyncio.to_thread(path.unlink)
