"""The priors that a peer needs: fetched as anchors offer them, held, and ready when a plan names one.

They are those of its two boundaries and, if the run's corrector has priors, that of its stage. A prior is a
safetensors file. It is known by its hash: from an anchor's signed record, or from a plan that its round has
committed. Either way it is used only if an anchor has sealed it. Whoever holds one serves it. Nothing here is waited
for by training, except by a peer that cannot code what the plan names: it takes no work of that step until it can. A
corrector's prior is not waited for: a group corrects with it if all of its members hold it. Lives in the
communication loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hivemind.p2p import P2P

from dht.noticeboard import Noticeboard
from dht.records import MAX_PRIOR_BYTES, PRIOR_NAME_CHARACTERS, PeerRecord
from peers.compute import Correct
from peers.corrections import Corrections
from peers.fileserver import FileServer
from peers.frames import Kind
from peers.planning import PriorRef, prior_refs
from peers.prior_age import PriorAge
from peers.prior_files import prior_file_name, prior_path
from peers.prior_parts import PriorPart, parts_of
from peers.prior_shelf import Offer, PriorShelf, able
from peers.prior_trust import PriorTrust
from peers.prior_uses import BoundaryUse, CodecOf, PriorUse
from peers.sealed_prior import UntrustedPriorError
from peers.traffic import Traffic
from peers.transfer import TransferError, fetch_by_hash
from swarm.activation.config import BasisConfig
from swarm.activation.versions import VersionedCodec
from swarm.anchor.prior_file import PriorFileError, read_bounded
from swarm.manifest import RunManifest
from swarm.plan import Plan

logger = logging.getLogger("swarm_peer.priors")
HELD = 4
"""Priors per part that are held: those of the steps around the current one, the next, and for those who catch up."""
RETRY_S = 0.5
AHEAD_STEPS = 50
"""A peer that lags may hear of priors of weights that it has not reached; none is of later ones than this."""
AGAIN_S = 5.0
"""A prior that nobody gave is asked for again after so long."""


class Priors:
    """See the module. codecs: of the boundaries this peer codes at, by boundary. corrections: of its stage. trust:
    whose priors count.

    is_linked: whether there is a link with a peer. counters: priors fetched, and refused by reason (hash: nobody gave
    the right bytes; file: not this part's prior by form or shapes; arrays: values that nothing can be made of;
    publisher: no anchor has made it; disk: this peer's own cannot be written or read). waited_s:
    seconds in which the plan in force named a prior that was not here, so that this peer could take no work of it.
    on_came: called when one has come.
    """

    def __init__(
        self,
        *,
        manifest: RunManifest,
        stage: int,
        codecs: dict[int, VersionedCodec],
        codec_of: CodecOf,
        corrections: Corrections,
        board: Noticeboard,
        p2p: P2P,
        server: FileServer,
        directory: Path,
        traffic: Traffic,
        tasks: asyncio.TaskGroup,
        note: Callable[[str], None],
        trust: PriorTrust,
        is_linked: Callable[[str], bool],
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.bytes_fetched = 0
        self._trust, self._is_linked = trust, is_linked
        self.corrections = corrections
        self.on_came: Callable[[], None] = lambda: None
        self._parts = parts_of(manifest)
        self._own = PriorPart("corrector", stage)
        self.shelf = PriorShelf(
            trust.makers, self._parts, MAX_PRIOR_BYTES, trust.rank if trust.is_leaders else None
        )
        self._manifest, self._stage = manifest, stage
        self._has_basis = isinstance(manifest.codec, BasisConfig)
        self._uses: dict[PriorPart, PriorUse] = {
            PriorPart("boundary", boundary): BoundaryUse(codec, codec_of, manifest)
            for boundary, codec in codecs.items()
        }
        if self._own in self._parts:
            self._uses[self._own] = corrections
        self._board, self._p2p, self._server, self._directory = board, p2p, server, directory
        self._traffic, self._tasks, self._note = traffic, tasks, note
        self._held: dict[PriorPart, list[str]] = {part: [] for part in self._uses}
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._refused: dict[str, float] = {}
        self._untrusted: dict[str, tuple[tuple[str, ...], bool]] = {}
        self._named: dict[str, None] = {}
        self._in_force: tuple[PriorRef, ...] = ()
        self._age, self._step = PriorAge(manifest.renewed_every), 0
        self._waited_s = 0.0
        self._lacking_since: float | None = None
        self._came = asyncio.Event()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the priors held, for this peer's record."""
        names: dict[str, None] = {}
        for part, held in self._held.items():
            in_force = self._ref(part).sha256
            names |= dict.fromkeys(sha256 for sha256 in held if sha256 == in_force or sha256 in held[-HELD:])
        return tuple(sha256[:PRIOR_NAME_CHARACTERS] for sha256 in names)[:16]

    @property
    def in_force(self) -> tuple[PriorRef, ...]:
        """The priors of the latest plan that this peer was told of; empty before the first."""
        return self._in_force

    @property
    def age(self) -> int | None:
        """Most steps that a prior in force here is old; None where none can be renewed, or nothing is known of them."""
        return max((age for part in self._renewed() if (age := self._age_of(part)) is not None), default=None)

    @property
    def waited_s(self) -> float:
        """See the class."""
        since = self._lacking_since
        return self._waited_s + (0.0 if since is None else time.monotonic() - since)

    def count(self, nbytes: int) -> None:
        """Count bytes that were fetched for a prior that is made here."""
        self.bytes_fetched += nbytes

    @property
    def _traffic_share(self) -> float:
        """Bytes of priors fetched over bytes of FORWARD and GRADIENT frames received; 0 before the first."""
        work = sum(
            count
            for (direction, kind, _), count in self._traffic.bytes.items()
            if direction == "down" and kind in (Kind.FORWARD, Kind.GRADIENT)
        )
        return round(self.bytes_fetched / work, 6) if work else 0.0

    def status(self) -> dict[str, Any]:
        """Figures for /status: the prior in force at each boundary, and that of the corrector: how often it has
        changed, the beginning of its hash, and the version of the weights behind it.
        """
        in_force: dict[str, Any] = {}
        for part in self._uses:
            ref = self._ref(part)
            offer = self.shelf.find(part, ref.sha256)
            in_force[str(part.ordinal) if part.kind == "boundary" else part.kind] = {
                "version": ref.version,
                "hash": ref.sha256[:PRIOR_NAME_CHARACTERS],
                "step": offer.step if offer is not None else 0 if not ref.version else None,
                "age": self._age_of(part),
            }
        return {
            "in_force": in_force,
            "corrector": self.corrections.status() if self._own in self._uses else None,
            "age_limit": self._age.limit,
            "is_old": self._age.is_old,
            "counters": dict(self.counters),
            "offers": dict(self.shelf.counters),
            "bytes": self.bytes_fetched,
            "traffic_share": self._traffic_share,
            "waited_s": round(self.waited_s, 3),
        }

    def _renewed(self) -> list[PriorPart]:
        """The parts whose priors somebody is expected to renew."""
        return [part for part in self._uses if part.kind == "corrector" or self._has_basis]

    def _ref(self, part: PriorPart) -> PriorRef:
        """The prior of a part in the latest plan."""
        return self._in_force[self._parts.index(part)] if self._in_force else PriorRef()

    def _age_of(self, part: PriorPart) -> int | None:
        """Steps since the weights behind the prior in force; None for one of which no offer is known."""
        ref = self._ref(part)
        offer = self.shelf.find(part, ref.sha256)
        if offer is None and ref.version:
            return None
        return max(0, self._step - (offer.step if offer is not None else 0))

    def tick(self) -> None:
        """Look at what anchors offer, and fetch the newest of each part."""
        now = time.monotonic()
        self._trust.look(self.shelf.hashes, now)
        self.shelf.recognise(self._trust.makers)
        conflicts = self.shelf.counters["conflict"]
        if self._in_force:
            ahead = self._manifest.anchors.every if self._trust.is_leaders else AHEAD_STEPS
            self.shelf.forget_beyond(self._step + ahead)
        for record in self._board.priors():
            part = PriorPart(record.kind, record.part)
            offer = Offer(record.peer_id, part, record.step, record.sha256, record.nbytes)
            if self._trust.is_unlinked(offer):
                continue
            verdict = self.shelf.take(offer, now)
            if verdict == "stranger" and self.shelf.counters["stranger"] == 1:  # they cost a stranger nothing
                self._note(
                    f"warning: {offer.publisher[-8:]} offers a prior and is no {self._trust.maker} of this run (more "
                    f"of this is only counted)"
                )
            elif not conflicts and self.shelf.counters["conflict"]:  # whichever of the two came first
                conflicts = self.shelf.counters["conflict"]
                self._note(
                    f"warning: two anchors offer different priors of {part} at step {offer.step}: that of the first "
                    f"anchor counts (more of this is only counted)"
                )
        said = self._age.look(map(self._age_of, self._renewed()), has_anchors=self._trust.has_makers)
        if said is not None:
            self._note(said)
        for part in self._uses:
            newest = self.shelf.newest(part)
            if newest is not None:
                self._want(part, newest.sha256)

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

    def able_sources(self, sources: Sequence[str], hashes: Sequence[str]) -> list[str]:
        """Of these sources those that can code at their boundary under a plan that names these priors."""
        part = PriorPart("boundary", 0)
        if not self._has_basis or part not in self._parts:
            return list(sources)
        view = self._board.view()
        held: dict[str, Collection[str]] = {peer: view[peer].priors for peer in sources if peer in view}
        held[str(self._p2p.peer_id)] = self.names
        return able(sources, hashes[self._parts.index(part)], held)

    def adopt(self, plan: Plan) -> None:
        """A plan is in force: what it names and is not here is fetched, before it is needed."""
        self._in_force, self._step = prior_refs(plan), plan.step
        self._trust.named(plan.prior_hashes, time.monotonic())
        self.corrections.expected = self._ref(self._own).sha256 if self._own in self._uses else ""
        self.holds(plan)
        self._watch_wait()

    def holds(self, plan: Plan) -> bool:
        """Whether work of this plan can be coded here. What is missing is fetched."""
        missing = {
            part: sha256
            for part, sha256 in zip(self._parts, plan.prior_hashes, strict=True)
            if part in self._uses and not self._uses[part].holds(sha256)
        }
        for part, sha256 in missing.items():
            self._want(part, sha256, is_named=True)
        return all(part == self._own for part in missing)

    def corrector_held(self, plan: Plan) -> str:
        """Hash of the corrector's prior that the plan names, if this peer can correct with it, else ""."""
        if self._own not in self._uses:
            return ""
        sha256 = plan.prior_hashes[self._parts.index(self._own)]
        return sha256 if self.corrections.holds(sha256) else ""

    async def correct_by(self, sha256: str, deadline_s: float) -> Correct | None:
        """What corrects by the prior with this hash; fetched if it is not here.

        deadline_s: within which a transfer must have begun; one that goes on may take longer. Raises TransferError if
        nobody gives it.
        """
        deadline = time.monotonic() + deadline_s
        while not self.corrections.holds(sha256):
            if self._own in self._uses:
                self._want(self._own, sha256, is_named=True)
            fetching = self._fetching.get(sha256)
            if fetching is not None:
                await asyncio.wait([fetching])
            elif time.monotonic() > deadline or self._own not in self._uses:
                raise TransferError(f"nobody gives the corrector's prior {sha256[:12]}")
            else:
                await asyncio.sleep(RETRY_S)
        return self.corrections.of(sha256)

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
            not use.holds(self._ref(part).sha256) for part, use in self._uses.items() if part != self._own
        )
        now = time.monotonic()
        if self._lacking_since is not None:
            self._waited_s += now - self._lacking_since
        self._lacking_since = now if is_lacking else None

    def _want(self, part: PriorPart, sha256: str, *, is_named: bool = False) -> None:
        """Fetch a prior, unless that is going on or hopeless. is_named: by a plan, or by an update."""
        if self._uses[part].holds(sha256):
            return
        if is_named:
            self._named[sha256] = None
            while len(self._named) > 64:
                self._named.pop(next(iter(self._named)))
        if self._untrusted.get(sha256) == (self._trust.makers, sha256 in self._named):
            return  # who made it has not become an anchor since
        since = time.monotonic() - self._refused.get(sha256, float("-inf"))
        if sha256 in self._fetching or since < AGAIN_S or (self._fetching and not is_named):
            return
        task = self._tasks.create_task(self._fetch(part, sha256))
        self._fetching[sha256] = task
        task.add_done_callback(lambda _: self._fetching.pop(sha256, None))

    async def _fetch(self, part: PriorPart, sha256: str) -> None:
        path = prior_path(self._directory, part, sha256)
        limit_bytes = min(MAX_PRIOR_BYTES, self._uses[part].limit_bytes)
        is_named, was_here = False, path.is_file()
        try:
            await fetch_by_hash(
                self._p2p,
                self._holders(part, sha256),
                self._manifest.run_id,
                prior_file_name(part, sha256),
                sha256,
                path,
                traffic=self._traffic,
                limit_bytes=limit_bytes,
                is_urgent=lambda: part.kind == "boundary" and sha256 in self._named,
            )
            is_named = sha256 in self._named
            made = await asyncio.to_thread(self._load, part, path, sha256, is_named)
            nbytes = 0 if was_here else path.stat().st_size
        except (TransferError, ValueError, RuntimeError, OSError) as error:
            self._refuse(part, sha256, error, is_named)
            return
        self._keep(part, sha256, made, path)
        self.counters["fetched"] += 1
        self.bytes_fetched += nbytes
        self._came.set()
        self._came = asyncio.Event()
        self.on_came()

    def _load(self, part: PriorPart, path: Path, sha256: str, is_named: bool) -> Any:
        """What the prior in a file gives, if whoever made it may."""
        use = self._uses[part]
        self._trust.check(read_bounded(path, use.limit_bytes), sha256, is_named=is_named)
        return use.load(path)

    def _keep(self, part: PriorPart, sha256: str, made: Any, path: Path) -> None:
        """Hold and serve a prior; let go of those that no plan can name any more."""
        self._uses[part].add(sha256, made)
        self._watch_wait()
        self._server.register(
            prior_file_name(part, sha256),
            path,
            self._manifest.run_id,
            is_urgent=lambda peer: self._is_waiting(peer, part, sha256),
        )
        held = self._held[part]
        held.append(sha256)
        in_force = self._ref(part).sha256
        for old in [old for old in held[:-HELD] if old != in_force]:
            held.remove(old)
            self._server.unregister(prior_file_name(part, old), self._manifest.run_id)
            with suppress(OSError):
                prior_path(self._directory, part, old).unlink()
        self._uses[part].retain(held)

    def _is_waiting(self, peer: str, part: PriorPart, sha256: str) -> bool:
        """Whether a peer cannot work without this prior: it is a boundary's and in force, and the peer, a neighbour
        that codes there, does not say that it holds it. Anybody else's fetches wait behind the training.
        """
        record = self._board.view().get(peer)
        if record is None or part.kind != "boundary" or self._ref(part).sha256 != sha256:
            return False
        is_near = record.stage in part.stages and self._is_linked(peer)
        return is_near and sha256[:PRIOR_NAME_CHARACTERS] not in record.priors

    def _refuse(self, part: PriorPart, sha256: str, error: Exception, is_named: bool) -> None:
        kinds: dict[type[Exception], str] = {
            TransferError: "hash",
            OSError: "disk",
            PriorFileError: "file",
            UntrustedPriorError: "publisher",
        }
        reason = next((name for kind, name in kinds.items() if isinstance(error, kind)), "arrays")
        if sha256 not in self._refused:
            self.counters[f"refused_{reason}"] += 1
            self._note(f"warning: prior {sha256[:12]} of {part} cannot be used: {error}")
        # Bytes with this hash that are no prior will never be one; transfers and disks recover.
        is_final = reason in ("file", "arrays")
        self._refused[sha256] = float("inf") if is_final else time.monotonic()
        if reason == "publisher":
            self._untrusted[sha256] = (self._trust.makers, is_named)
        if is_final or reason == "publisher":
            with suppress(OSError):
                prior_path(self._directory, part, sha256).unlink()
        remembered: tuple[dict[str, Any], ...] = (self._refused, self._untrusted)
        for refused in remembered:
            while len(refused) > 64:
                refused.pop(next(iter(refused)))

    def _holders(self, part: PriorPart, sha256: str) -> list[str]:
        """Who says that it holds a prior, then its anchor, then whoever needs it too."""
        name = sha256[:PRIOR_NAME_CHARACTERS]
        offer = self.shelf.find(part, sha256)
        view = self._board.view()

        def near(record: PeerRecord) -> bool:
            return record.stage in part.stages

        holders = [peer for peer, record in view.items() if name in record.priors]
        holders += [offer.publisher] if offer is not None else []
        holders += [peer for peer, record in view.items() if near(record)]
        return list(dict.fromkeys(holders))
