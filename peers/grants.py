"""The anchors of a run as of now: the manifest's, and those that its owner has granted or revoked since.

A grant is a file, `anchors.grant`, in a run's folder, and a record on the noticeboard. A peer takes the newest of
both, keeps it in its own copy of the folder, and puts it up again when it is about to expire: who serves the owner's
folder at once, of the others only a few. So a grant reaches a swarm that is running, and outlives its seed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dht.grants import MAX_GRANT_BYTES, AnchorGrant, GrantError, decode_grant
from dht.identity import Identity
from dht.noticeboard import Noticeboard
from dht.records import GrantRecord
from swarm.anchor.prior_file import write_atomically
from swarm.manifest import RunManifest

logger = logging.getLogger("swarm_peer.grants")
FILE = "anchors.grant"
LOOK_S = 2.0
"""Between two looks at the file and the noticeboard."""
RENEW_S, RENEW_BY_OTHERS_S = 20.0, 10.0
"""A record with no more life than this is put up again, by seeds and by other peers."""
RENEWERS = 3
"""Of the other peers, so many do that, the first by peer id."""


def read_grant(directory: Path, run_id: str) -> AnchorGrant | None:
    """The grant in a run's folder; None if there is none. Raises GrantError, OSError."""
    try:
        with (directory / FILE).open("rb") as file:
            grant = decode_grant(file.read(MAX_GRANT_BYTES + 1))
    except FileNotFoundError:
        return None
    if grant.run_id != run_id:
        raise GrantError(f"{directory / FILE} is a grant of run {grant.run_id}, not of run {run_id}")
    return grant


def write_grant(directory: Path, grant: AnchorGrant) -> None:
    """Put a grant into a run's folder, whole or not at all. Raises OSError."""
    write_atomically(directory / FILE, grant.encode())


class Grants:
    """See the module. anchors: peer ids whose priors count, the first most. former: those that the owner has revoked.
    Lives in the communication loop.
    """

    def __init__(
        self,
        *,
        manifest: RunManifest,
        directory: Path,
        identity: Identity,
        board: Noticeboard,
        is_seed: bool,
        note: Callable[[str], None],
    ) -> None:
        self.anchors = manifest.anchors.peers
        self.former: tuple[str, ...] = ()
        self.grant: AnchorGrant | None = None
        self._manifest, self._directory, self._identity = manifest, directory, identity
        self._board, self._is_seed, self._note = board, is_seed, note
        self._looked_at: tuple[int, int] | None = None
        self._said: set[str] = set()

    async def run(self) -> None:
        """Look now and then; ends only by cancellation."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Take the newest grant of file and noticeboard, and see that it stands on the noticeboard."""
        await self._look_at_file()
        found = self._board.grant()
        if found is not None and self._take(found[0]):
            try:
                await asyncio.to_thread(write_grant, self._directory, found[0])
            except OSError as error:
                self._say_once(f"warning: cannot keep the owner's grant in {self._directory}: {error}")
        left_s = found[1] if found is not None and found[0] == self.grant else 0.0
        if self.grant is not None and left_s < self._renew_s():
            record = GrantRecord(
                run_id=self._manifest.run_id,
                peer_id=self._identity.peer_id,
                public_key=self._identity.public_key,
                incarnation=self._identity.incarnation,
                grant=self.grant.encode(),
            )
            with suppress(RuntimeError):  # the noticeboard is closed
                await self._board.publish(record)
                self._board.withdraw(record)  # one peer at a time renews it, whoever that is

    def _renew_s(self) -> float:
        """The life below which this peer puts the record up again."""
        if self._is_seed:
            return RENEW_S
        peers = [peer for peer, record in self._board.view().items() if record.state == "online"]
        return RENEW_BY_OTHERS_S if self._identity.peer_id in sorted(peers)[:RENEWERS] else 0.0

    async def _look_at_file(self) -> None:
        try:
            status = await asyncio.to_thread(os.stat, self._directory / FILE)
            seen = (status.st_mtime_ns, status.st_size)
            if seen == self._looked_at:
                return
            self._looked_at = seen
            grant = await asyncio.to_thread(read_grant, self._directory, self._manifest.run_id)
        except FileNotFoundError:
            return
        except (GrantError, OSError) as error:
            self._say_once(f"warning: {self._directory / FILE} cannot be used: {error}")
            return
        if grant is not None:
            self._take(grant)

    def _take(self, grant: AnchorGrant) -> bool:
        """Go by this grant from now on, if it is newer than the one known."""
        if self.grant is not None and grant.number <= self.grant.number:
            return False
        self.grant = grant
        before, self.anchors = self.anchors, grant.order(self._manifest.anchors.peers)
        self.former = grant.revoked
        for what, peers in (
            ("granted", set(self.anchors) - set(before)),
            ("revoked", set(before) - set(self.anchors)),
        ):
            if peers:
                names = ", ".join(sorted(peer[-8:] for peer in peers))
                self._note(f"the owner has {what} anchors: {names}")
        return True

    def _say_once(self, text: str) -> None:
        if text not in self._said and len(self._said) < 8:
            self._said.add(text)
            self._note(text)
