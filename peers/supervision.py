"""What a peer stands on, watched as long as it lives: its libp2p daemon, its identity, its view of the swarm."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from hivemind.p2p import P2P

from dht.host import HostDeath
from dht.noticeboard import Noticeboard
from dht.revive import supervise_host
from peers.config import UserError
from peers.metrics import Metrics

logger = logging.getLogger("swarm_peer.supervision")
LOOK_S = 1.0


class Supervision:
    """One task of the peer's group.

    identity: the key's file, None for one that is made anew at every start. note: tells the user.
    """

    def __init__(
        self,
        p2p: P2P,
        board: Noticeboard,
        identity: Path | None,
        metrics: Metrics,
        note: Callable[[str], None],
    ) -> None:
        self._p2p, self._board, self._identity = p2p, board, identity
        self._metrics, self._note = metrics, note
        self._died_at = 0.0

    async def run(self) -> None:
        """Until cancelled, or until the host is stopped.

        Raises HostError when the daemon does not stay alive, UserError when a newer start of this identity is
        seen elsewhere.
        """
        async with asyncio.TaskGroup() as tasks:
            looking = tasks.create_task(self._look())
            await supervise_host(self._p2p, on_death=self._on_death, on_revived=self._on_revived)
            looking.cancel()

    def _on_death(self, death: HostDeath) -> None:
        self._died_at = time.monotonic()
        self._metrics.host_restarts.inc()
        self._note(f"the libp2p daemon (p2pd) ended with code {death.returncode}: starting it again")
        for line in death.last_output[-3:]:
            logger.info("p2pd said: %s", line)

    async def _on_revived(self) -> None:
        self._note(f"the libp2p daemon is back after {time.monotonic() - self._died_at:.1f} s")
        try:
            await self._board.reconnect()
        except Exception as error:  # as on the noticeboard's own timer: it tries again
            logger.warning("could not reconnect at once: %r", error)

    async def _look(self) -> None:
        while True:
            self._metrics.known_peers.set(len(self._board.view()))
            if (newer := self._board.rival_incarnation) is not None:
                raise UserError(self._superseded(newer))
            await asyncio.sleep(LOOK_S)

    def _superseded(self, newer: int) -> str:
        file = f" (this one uses {self._identity})" if self._identity is not None else ""
        return (
            f"this peer's identity was started again somewhere else (start {newer} of it; this is "
            f"{self._board.incarnation}), and the later start counts: two peers cannot share one identity. If "
            f"both shall run, give each a file of its own with --identity{file}"
        )
