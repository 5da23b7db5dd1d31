"""Looking at a swarm from outside: reach a peer, read its manifest, read the noticeboard. Holds nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peers.config import UserError

if TYPE_CHECKING:
    from hivemind.p2p import P2P

    from dht.noticeboard import Noticeboard
    from swarm.manifest import RunManifest

DIAL_S = 15.0
MANIFEST_S = 20.0


@dataclass(frozen=True, slots=True)
class Observer:
    """An open view of one run. holders: peer ids of the initial peers that answered."""

    p2p: P2P
    board: Noticeboard
    manifest: RunManifest
    holders: tuple[str, ...]


@asynccontextmanager
async def observe(initial_peers: Sequence[str], run_id: str | None) -> AsyncIterator[Observer]:
    """Reach the run of the first initial peer that answers, or the run named.

    Raises UserError with every address's cause when none answers or none serves the run.
    """
    from dht.dial import describe_results, dial_all
    from dht.host import start_host, stop_host
    from dht.identity import Identity
    from dht.noticeboard import Noticeboard
    from peers.transfer import fetch_manifest
    from swarm.manifest import ManifestError, RunManifest

    if not initial_peers:
        raise UserError("--initial-peers is missing: give the address of the seed or of any peer of the run")
    async with AsyncExitStack() as stack:
        identity = Identity.load_or_create(None)
        stack.callback(identity.close)
        stack.enter_context(identity.lock())
        p2p = await start_host(identity.path, client_mode=True)
        stack.push_async_callback(stop_host, p2p)
        results = await dial_all(p2p, initial_peers, DIAL_S)
        good = [result.address for result in results if result.ok]
        if not good:
            raise UserError(f"none of the initial peers can be reached:\n{describe_results(results)}")
        manifest, problems = None, []
        for address in good:
            peer = address.rpartition("/")[2]
            try:
                manifest = RunManifest.from_bytes(await fetch_manifest(p2p, peer, run_id, MANIFEST_S))
                manifest.verify(run_id)
                break
            except (UserError, ManifestError) as error:
                manifest = None
                problems.append(str(error))
        if manifest is None:
            raise UserError("\n".join(problems))
        board = await Noticeboard.create(p2p, identity, good, manifest.run_id, client_mode=True)
        stack.push_async_callback(board.close)
        holders = tuple(address.rpartition("/")[2] for address in good)
        yield Observer(p2p, board, manifest, holders)
