"""The priors of a peer's two boundaries: fetched as anchors offer them, held, and ready when a plan names one.

A prior is a safetensors file. It is known by its hash: from an anchor's signed record, or from a plan that its
round has committed. Whoever holds one serves it. Nothing here is waited for by training, except by a peer that
has none of what the plan names: it takes no work of that step until it has it. Lives in the communication loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from hivemind.p2p import P2P
from torch import Tensor

from dht.noticeboard import Noticeboard
from dht.records import MAX_PRIOR_BYTES, PRIOR_NAME_CHARACTERS, PeerRecord
from peers.fileserver import FileServer
from peers.planning import PriorRef, prior_refs
from peers.prior_shelf import Offer, PriorShelf
from peers.traffic import Traffic
from peers.transfer import TransferError, fetch_by_hash
from swarm.activation.base import BoundaryCodec
from swarm.activation.versions import VersionedCodec
from swarm.anchor.boundary_prior import load_boundary_prior
from swarm.anchor.prior_file import PriorFileError
from swarm.manifest import RunManifest
from swarm.plan import Plan

logger = logging.getLogger("swarm_peer.priors")
HELD = 4
"""Priors per boundary that are held: those of the steps around the current one, and the next."""
AGAIN_S = 5.0
"""A prior that nobody gave is asked for again after so long."""

CodecOf = Callable[[int, dict[str, Tensor]], BoundaryCodec]
"""Makes the codec of a boundary from a prior's arrays. Raises ValueError."""


def prior_file_name(boundary: int, sha256: str) -> str:
    """Name under which peers serve a prior."""
    return f"prior/{boundary}/{sha256}"


def prior_path(directory: Path, boundary: int, sha256: str) -> Path:
    """Where a prior is kept."""
    return directory / f"{boundary}-{sha256}.safetensors"


def write_prior(directory: Path, boundary: int, data: bytes) -> tuple[str, Path]:
    """Keep a prior that was made here, whole or not at all; returns its hash and file. Raises OSError."""
    sha256 = hashlib.sha256(data).hexdigest()
    path = prior_path(directory, boundary, sha256)
    directory.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".new")
    partial.write_bytes(data)
    partial.replace(path)
    return sha256, path


class Priors:
    """See the module. codecs: of the boundaries this peer codes at, by boundary. anchors: whose priors count, now.

    counters: priors fetched, and refused by reason (hash: nobody gave the right bytes; file: not this boundary's
    prior by form or shapes; arrays: values that no codec can use). waited_s: seconds in which the plan in force
    named a prior that was not here, so that this peer could take no work of it.
    """

    def __init__(
        self,
        *,
        manifest: RunManifest,
        stage: int,
        codecs: dict[int, VersionedCodec],
        codec_of: CodecOf,
        board: Noticeboard,
        p2p: P2P,
        server: FileServer,
        directory: Path,
        traffic: Traffic,
        tasks: asyncio.TaskGroup,
        note: Callable[[str], None],
        anchors: Callable[[], tuple[str, ...]],
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.bytes_fetched = 0
        self._anchors = anchors
        self.shelf = PriorShelf(anchors(), manifest.model.stages - 1, MAX_PRIOR_BYTES)
        self._manifest, self._stage, self._codecs, self._codec_of = manifest, stage, codecs, codec_of
        self._board, self._p2p, self._server, self._directory = board, p2p, server, directory
        self._traffic, self._tasks, self._note = traffic, tasks, note
        self._held: dict[int, list[str]] = {boundary: [] for boundary in codecs}
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._refused: dict[str, float] = {}
        self._in_force: tuple[PriorRef, ...] = ()
        self._waited_s = 0.0
        self._lacking_since: float | None = None
        self._came = asyncio.Event()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the priors held, for this peer's record."""
        return tuple(
            sha256[:PRIOR_NAME_CHARACTERS] for held in self._held.values() for sha256 in held[-HELD:]
        )[:16]

    @property
    def in_force(self) -> tuple[PriorRef, ...]:
        """The priors of the latest plan that this peer was told of; empty before the first."""
        return self._in_force

    @property
    def waited_s(self) -> float:
        """See the class."""
        since = self._lacking_since
        return self._waited_s + (0.0 if since is None else time.monotonic() - since)

    def status(self) -> dict[str, Any]:
        """Figures for /status: of each boundary the prior in force, and its age in versions of the weights."""
        in_force = {}
        for boundary in self._codecs:
            ref = self._in_force[boundary] if self._in_force else PriorRef()
            offer = self.shelf.find(boundary, ref.sha256)
            in_force[str(boundary)] = {
                "version": ref.version,
                "hash": ref.sha256[:PRIOR_NAME_CHARACTERS],
                "step": offer.step if offer is not None else 0 if not ref.version else None,
            }
        return {
            "in_force": in_force,
            "counters": dict(self.counters),
            "offers": dict(self.shelf.counters),
            "bytes": self.bytes_fetched,
            "waited_s": round(self.waited_s, 3),
        }

    def tick(self) -> None:
        """Look at what anchors offer, and fetch the newest of each boundary."""
        now = time.monotonic()
        self.shelf.recognise(self._anchors())
        for record in self._board.priors():
            offer = Offer(record.peer_id, record.boundary, record.step, record.sha256, record.nbytes)
            verdict = self.shelf.take(offer, now)
            if verdict == "stranger" and self.shelf.counters["stranger"] == 1:  # they cost a stranger nothing
                self._note(
                    f"warning: {offer.publisher[-8:]} offers a prior and is no anchor of this run (more of this is "
                    f"only counted)"
                )
            elif verdict == "conflict" and self.shelf.counters["conflict"] == 1:
                self._note(
                    f"warning: two anchors offer different priors of boundary {offer.boundary} at step "
                    f"{offer.step}: that of the first anchor counts (more of this is only counted)"
                )
        for boundary in self._codecs:
            newest = self.shelf.newest(boundary)
            if newest is not None:
                self._want(boundary, newest.sha256)

    def choose(self, current: Sequence[PriorRef]) -> tuple[PriorRef, ...]:
        """The priors of the next plan, by what the peers at work in each stage say that they hold."""
        rosters: list[list[str]] = [[] for _ in range(self._manifest.model.stages)]
        held: dict[str, Collection[str]] = {}
        for peer, record in self._board.view().items():
            if record.training and record.stage is not None and record.stage < len(rosters):
                rosters[record.stage].append(peer)
                held[peer] = record.priors
        me = str(self._p2p.peer_id)
        if me not in rosters[self._stage]:
            rosters[self._stage].append(me)
        held[me] = self.names
        return self.shelf.choose(current, held, rosters, time.monotonic())

    def adopt(self, plan: Plan) -> None:
        """A plan is in force: what it names and is not here is fetched, before it is needed."""
        self._in_force = prior_refs(plan)
        self.holds(plan)
        self._watch_wait()

    def holds(self, plan: Plan) -> bool:
        """Whether work of this plan can be coded here. What is missing is fetched."""
        missing = self._missing(plan)
        for boundary in missing:
            self._want(boundary, plan.prior_hashes[boundary], is_urgent=True)
        return not missing

    async def wait(self, plan: Plan) -> bool:
        """Whether work of this plan can be coded here, at the latest `AGAIN_S` from now."""
        if not self.holds(plan):
            with suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S):
                    await self._came.wait()
        return self.holds(plan)

    def _watch_wait(self) -> None:
        """Start or stop the clock of `waited_s`."""
        is_lacking = any(
            not codec.holds(self._in_force[b].sha256) for b, codec in self._codecs.items() if self._in_force
        )
        now = time.monotonic()
        if self._lacking_since is not None:
            self._waited_s += now - self._lacking_since
        self._lacking_since = now if is_lacking else None

    def _missing(self, plan: Plan) -> list[int]:
        return [b for b, codec in self._codecs.items() if not codec.holds(plan.prior_hashes[b])]

    def _want(self, boundary: int, sha256: str, *, is_urgent: bool = False) -> None:
        if sha256 in self._fetching or self._codecs[boundary].holds(sha256):
            return
        since = time.monotonic() - self._refused.get(sha256, float("-inf"))
        if since < AGAIN_S or (self._fetching and not is_urgent):
            return
        task = self._tasks.create_task(self._fetch(boundary, sha256))
        self._fetching[sha256] = task
        task.add_done_callback(lambda _: self._fetching.pop(sha256, None))

    async def _fetch(self, boundary: int, sha256: str) -> None:
        name = prior_file_name(boundary, sha256)
        path = prior_path(self._directory, boundary, sha256)
        try:
            await fetch_by_hash(
                self._p2p,
                self._holders(boundary, sha256),
                self._manifest.run_id,
                name,
                sha256,
                path,
                traffic=self._traffic,
                limit_bytes=MAX_PRIOR_BYTES,
            )
            codec = await asyncio.to_thread(self._load, boundary, path)
        except (TransferError, ValueError, OSError) as error:
            self._refuse(boundary, sha256, error)
            return
        self._keep(boundary, sha256, codec, path)
        self.counters["fetched"] += 1
        self.bytes_fetched += path.stat().st_size  # just written
        self._came.set()
        self._came = asyncio.Event()

    def _load(self, boundary: int, path: Path) -> BoundaryCodec:
        manifest = self._manifest
        prior = load_boundary_prior(path, manifest.codec, manifest.model.hidden_size)
        if prior.boundary != boundary:
            raise PriorFileError(f"it is the prior of boundary {prior.boundary}")
        for name, array in prior.arrays.items():
            if array.is_floating_point() and not bool(torch.isfinite(array).all()):
                raise ValueError(f"{name!r} holds values that are not finite")
        return self._codec_of(boundary, dict(prior.arrays))

    def _keep(self, boundary: int, sha256: str, codec: BoundaryCodec, path: Path) -> None:
        """Hold and serve a prior; let go of those that no plan can name any more."""
        self._codecs[boundary].add(sha256, codec)
        self._watch_wait()
        self._server.register(prior_file_name(boundary, sha256), path, self._manifest.run_id)
        held = self._held[boundary]
        held.append(sha256)
        in_force = self._in_force[boundary].sha256 if self._in_force else ""
        for old in [old for old in held[:-HELD] if old != in_force]:
            held.remove(old)
            self._server.unregister(prior_file_name(boundary, old), self._manifest.run_id)
            with suppress(OSError):
                prior_path(self._directory, boundary, old).unlink()
        self._codecs[boundary].retain(held)

    def _refuse(self, boundary: int, sha256: str, error: Exception) -> None:
        kinds = {TransferError: "hash", PriorFileError: "file"}
        reason = next((name for kind, name in kinds.items() if isinstance(error, kind)), "arrays")
        if sha256 not in self._refused:
            self.counters[f"refused_{reason}"] += 1
            self._note(f"warning: prior {sha256[:12]} of boundary {boundary} cannot be used: {error}")
        self._refused[sha256] = time.monotonic()
        while len(self._refused) > 64:
            self._refused.pop(next(iter(self._refused)))

    def _holders(self, boundary: int, sha256: str) -> list[str]:
        """Who says that it holds a prior, then its anchor, then whoever codes at the boundary."""
        name = sha256[:PRIOR_NAME_CHARACTERS]
        offer = self.shelf.find(boundary, sha256)
        view = self._board.view()

        def near(record: PeerRecord) -> bool:
            return record.stage in (boundary, boundary + 1)

        holders = [peer for peer, record in view.items() if name in record.priors]
        holders += [offer.publisher] if offer is not None else []
        holders += [peer for peer, record in view.items() if near(record)]
        return list(dict.fromkeys(holders))
