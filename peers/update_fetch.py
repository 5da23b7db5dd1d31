"""Getting the update of one step: from this peer's own disk, or from whichever replica has the right one."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hivemind.p2p import P2P
from pydantic import ValidationError

from peers.config import UserError
from peers.fetch_stream import HolderError, open_fetch_stream
from peers.fileserver import HASHING_PATIENCE_S
from peers.limits import LIMITS, MIB
from peers.metrics import Metrics
from peers.traffic import Traffic
from peers.transfer import TransferError, fetch_artifact
from peers.update_log import UpdateLog
from peers.updates import Update, UpdateError, read_update, update_bytes, update_name
from swarm.manifest import Artifact

logger = logging.getLogger("swarm_peer.catchup")
Donors = Mapping[str, object] | Sequence[str] | Callable[[], Mapping[str, object] | Sequence[str]]
"""Peer ids of replicas that may have updates, or a function that says who they are now."""
HASH_LIST_BYTES = 16 * MIB
RETRY_S = 0.25
BEING_WRITTEN = LIMITS.updates_pending
"""The last few updates may not have reached their donors' disks: they are waited for."""


class CatchUpError(UserError):
    """This peer could not come to hold what the others hold."""


class LineageError(CatchUpError):
    """The stage went on from other weights than those that this peer holds."""


class UpdateMissing(CatchUpError):  # noqa: N818 - what happened, not a mistake
    """Nobody has the next update any more: a newer snapshot is needed."""


class _WrongLineageError(Exception):
    """A donor's update begins from other weights."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """An update in memory. nbytes, seconds: of its transfer; 0 if it was on this peer's disk."""

    update: Update
    nbytes: int
    seconds: float


def donor_ids(donors: Donors) -> list[str]:
    """The peer ids among donors."""
    return list(donors() if callable(donors) else donors)


class UpdateFetcher:
    """Fetches updates of one stage. What arrived whole and right is kept, and offered to others, at once."""

    def __init__(
        self,
        *,
        p2p: P2P,
        run_id: str,
        stage: int,
        elements: int,
        updates: UpdateLog,
        traffic: Traffic,
        metrics: Metrics,
        note: Callable[[str], None],
    ) -> None:
        self._p2p, self._run_id, self._stage, self._elements = p2p, run_id, stage, elements
        self._updates, self._traffic, self._metrics, self._note = updates, traffic, metrics, note
        self._me = p2p.peer_id.to_base58()
        self._failed_at: dict[str, float] = {}

    async def fetch(self, step: int, lineage: str, newest: int, donors: Donors) -> Fetched:
        """The update of a step that begins from weights of this lineage.

        newest: the version that others are at; the updates just before it may still be on their way to a disk.
        Raises LineageError, UpdateMissing, TransferError (this peer's own disk).
        """
        path = self._updates.path(step)
        with suppress(FileNotFoundError, UpdateError, _WrongLineageError, OSError):
            return Fetched(await asyncio.to_thread(self._read, path, step, lineage), 0, 0.0)
        deadline = time.monotonic() + LIMITS.update_wait_s
        causes: dict[str, str] = {}
        useless: set[str] = {self._me}
        strayed: set[str] = set()
        while True:
            is_worth_waiting = step >= newest - BEING_WRITTEN
            for donor in self._in_order(donor_ids(donors)):
                if donor in useless:
                    continue
                try:
                    return await self._from(donor, step, lineage, path, donors, useless)
                except _WrongLineageError as error:
                    strayed.add(donor)
                    useless.add(donor)
                    causes[donor] = str(error)
                except UpdateError as error:
                    useless.add(donor)
                    causes[donor] = str(error)
                    self._metrics.update("corrupt")
                    self._note(f"warning: {donor} gave a bad update of step {step}: {error}")
                except HolderError as error:
                    causes[donor] = str(error)
                    is_worth_waiting = is_worth_waiting or not error.is_final
                self._failed_at[donor] = time.monotonic()
            left = [donor for donor in donor_ids(donors) if donor not in useless]
            if not (left and is_worth_waiting) or time.monotonic() > deadline:
                break
            await asyncio.sleep(RETRY_S * random.uniform(0.5, 1.0))
        listed = (
            "".join(f"\n  {donor}: {cause}" for donor, cause in causes.items()) or "\n  there is no donor"
        )
        if strayed:
            raise LineageError(f"the update of step {step} begins from other weights:{listed}")
        raise UpdateMissing(f"nobody gave the update of step {step} of stage {self._stage}:{listed}")

    def _in_order(self, donors: list[str]) -> list[str]:
        """In random order, so that several joiners spread; whoever failed lately comes last."""
        random.shuffle(donors)
        return sorted(donors, key=lambda donor: self._failed_at.get(donor, 0.0))

    async def _from(
        self, donor: str, step: int, lineage: str, path: Path, donors: Donors, useless: set[str]
    ) -> Fetched:
        """Take one donor's update; others that have the very same file may finish it.

        Raises HolderError, UpdateError or _WrongLineageError, with no file left, and TransferError (disk).
        """
        began = time.monotonic()
        artifact = await self._ask(donor, step)
        others = [peer for peer in self._in_order(donor_ids(donors)) if peer not in useless and peer != donor]
        try:
            await fetch_artifact(
                self._p2p, [donor, *others], artifact, self._run_id, path, traffic=self._traffic
            )
        except TransferError as error:
            if isinstance(error.__cause__, OSError):
                raise
            raise HolderError(f"its update could not be had: {error}") from error
        seconds = time.monotonic() - began
        try:
            update = await asyncio.to_thread(self._read, path, step, lineage)
        except (UpdateError, _WrongLineageError):
            with suppress(OSError):
                await asyncio.to_thread(path.unlink, missing_ok=True)
            raise
        except OSError as error:
            raise TransferError(f"cannot read {path}: {error.strerror or error}") from error
        self._updates.adopt(step)
        return Fetched(update, artifact.nbytes, seconds)

    async def _ask(self, donor: str, step: int) -> Artifact:
        """Size and hashes of a donor's update. Raises HolderError."""
        name = update_name(step, self._stage)
        idle_s = LIMITS.fetch_idle_s + HASHING_PATIENCE_S
        async with open_fetch_stream(self._p2p, donor, idle_s, self._traffic) as stream:
            await stream.ask("meta", self._run_id, name=name)
            document = await stream.document(HASH_LIST_BYTES)
        try:
            artifact = await asyncio.to_thread(Artifact.model_validate_json, document)
        except ValidationError as error:
            raise HolderError("it sent a malformed hash list", is_final=True) from error
        if artifact.name != name or artifact.nbytes > update_bytes(self._elements):
            raise HolderError(f"it offers {artifact.name} of {artifact.nbytes} bytes", is_final=True)
        return artifact

    def _read(self, path: Path, step: int, lineage: str) -> Update:
        """Read and verify an update. Raises UpdateError, _WrongLineageError, OSError."""
        update = read_update(path)
        if (update.run, update.stage, update.step) != (self._run_id, self._stage, step):
            raise UpdateError(f"it is of run {update.run} stage {update.stage} step {update.step}")
        if update.elements != self._elements:
            raise UpdateError(f"{update.elements} elements where this stage has {self._elements}")
        update.check_content()
        if update.lineage != lineage:
            raise _WrongLineageError(
                f"its step {step} begins from lineage {update.lineage or 'initial'!r}, not {lineage or 'initial'!r}"
            )
        return update
