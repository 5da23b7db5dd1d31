"""The noticeboard: publish what this peer offers, see what the others offer.

    board = await Noticeboard.create(host, identity, good_addresses, run_id="...")
    board.start(task_group)                      # refreshes the view, re-publishes, heals
    await board.publish(PeerRecord(...))
    while True:
        seen = board.view_version
        peers = board.view()                     # a plain dict, at once
        await board.wait_changed(seen, deadline_s=10)

Everything runs in the caller's event loop on the caller's host. If the host's daemon dies and is revived
(`dht.revive`), call `reconnect`: the board goes on.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P

from dht.addresses import parse_address
from dht.clock import SwarmClock
from dht.contacts import Contacts
from dht.grants import AnchorGrant
from dht.identity import Identity
from dht.node import create_node
from dht.records import (
    MANIFESTS_KEY,
    MAX_RECORD_LIFE_S,
    RECORD_LIFE_S,
    GrantRecord,
    ManifestPointer,
    PeerRecord,
    PriorRecord,
    Record,
    RecordError,
    encode_record,
    grants_key,
    peers_key,
    place_of,
    priors_key,
)
from dht.table import RecordTable
from dht.validators import SignedRecordValidator

logger = logging.getLogger(__name__)

REFRESH_S = 3.0
REFRESH_CEILING_S = 10.0
REFRESH_BYTES_PER_S = 16_000
"""The refresh slows down, up to the ceiling, to keep the records it reads below this rate."""

PUBLISH_S = 10.0
HEAL_S = 30.0
HEAL_SOON_S = 5.0
"""When the view has shrunk, healing does not wait for its turn, but is not repeated sooner than this."""
READ_BREADTH = 3
"""How many of the nodes nearest to a key are read; each holds all records, so more only costs bytes."""

OPERATION_DEADLINE_S = 8.0
CLOSE_DEADLINE_S = 2.0


class NoticeboardError(RuntimeError):
    """No initial peer answers as a noticeboard."""


class Noticeboard:
    """One peer's place on the DHT. Made by `create`; see the module's example.

    counters: publishes and refreshes done, rejected and failed, for metrics. validator.refused: records
    refused, by reason. clock: swarm time.
    """

    def __init__(self, p2p: P2P, identity: Identity, run_id: str | None, clock: SwarmClock) -> None:
        self.run_id = run_id
        self.clock = clock
        self.validator = SignedRecordValidator(clock.now)
        self.counters: Counter[str] = Counter()
        self._p2p = p2p
        self._identity = identity
        self._own: dict[tuple[str, str], Record] = {}
        self._published_until: dict[tuple[str, str], float] = {}
        self._peers: RecordTable[PeerRecord] = RecordTable()
        self._manifests: RecordTable[ManifestPointer] = RecordTable()
        self._priors: RecordTable[PriorRecord] = RecordTable()
        self._grants: RecordTable[GrantRecord] = RecordTable()
        self._changed = asyncio.Event()
        self._bytes_read = 0
        self._failing: set[str] = set()
        self._node: DHTNode | None = None
        self._publish_lock = asyncio.Lock()
        self._contacts = Contacts(p2p, (), clock, self._live_node)
        self._live_peers = 0
        self._has_shrunk = asyncio.Event()

    @classmethod
    async def create(
        cls,
        p2p: P2P,
        identity: Identity,
        initial_peers: Sequence[str] = (),
        run_id: str | None = None,
        client_mode: bool = False,
        *,
        clock: SwarmClock | None = None,
        deadline_s: float = 15.0,
    ) -> Noticeboard:
        """Join the DHT through `initial_peers` (multiaddrs with peer id that a dial found good).

        Without any this is the first node. run_id: whose peers to watch; None, or later `watch_run`, for a
        peer that first has to find out. client_mode: stores nothing for others (behind NAT). Measures the
        clock offset to the initial peers. The identity must be locked.

        Raises NoticeboardError if initial peers are given and none answers, ClockSkewError if the local
        clock is too far off, TimeoutError after `deadline_s`, ValueError if host and identity differ.
        """
        if str(p2p.peer_id) != identity.peer_id:
            raise ValueError(f"the host is {p2p.peer_id}, but the identity is {identity.peer_id}")
        board = cls(p2p, identity, run_id, clock or SwarmClock())
        initial = [parse_address(text, needs_peer_id=True) for text in initial_peers]
        contacts = board._contacts = Contacts(p2p, initial, board.clock, board._live_node)
        board.clock.install()
        async with asyncio.timeout(deadline_s):
            node = board._node = await create_node(p2p, board.validator, client_mode=client_mode)
            try:
                if initial and not await contacts.greet():
                    names = ", ".join(address.with_peer_id(address.peer_id or "") for address in initial)
                    raise NoticeboardError(f"no initial peer answers as a noticeboard: {names}")
                await node.find_nearest_nodes([node.node_id])
                await board.refresh()
            except BaseException:
                await board.close()
                raise
        return board

    def start(self, group: asyncio.TaskGroup) -> asyncio.Task[None]:
        """Run in the background of a task group until cancelled."""
        return group.create_task(self.run(), name="noticeboard")

    async def run(self) -> None:
        """Refresh, re-publish and heal for ever; ends only by cancellation."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._every(REFRESH_S, self._refresh_period, self.refresh))
            group.create_task(self._every(PUBLISH_S, lambda: PUBLISH_S, self._publish_all))
            group.create_task(self._keep_together())
            group.create_task(self._expire_on_time())

    def watch_run(self, run_id: str) -> None:
        """Watch the peers of this run from now on; the view fills with the next refresh."""
        if run_id != self.run_id:
            self.run_id = run_id
            self._peers, self._priors, self._grants = RecordTable(), RecordTable(), RecordTable()
            self._notify()

    def view(self) -> dict[str, PeerRecord]:
        """Live peers of the run by peer id, this one included once published; at once, from memory.

        What an earlier start of this identity left behind is not shown.
        """
        peers = self._peers.live(self.clock.now())
        own = peers.get(self._identity.peer_id)
        if own is not None and own.incarnation != self._identity.incarnation:
            del peers[self._identity.peer_id]
        return peers

    @property
    def rival_incarnation(self) -> int | None:
        """Incarnation of a newer start of this very identity, seen elsewhere (a copied key); else None.

        The newer one wins everywhere: this peer's records are refused, and it should stop and say so.
        """
        own = self._peers.live(self.clock.now()).get(self._identity.peer_id)
        return own.incarnation if own is not None and own.incarnation > self._identity.incarnation else None

    @property
    def incarnation(self) -> int:
        """Incarnation of this start."""
        return self._identity.incarnation

    def manifests(self) -> list[ManifestPointer]:
        """Live manifest pointers of all runs; at once, from memory."""
        return list(self._manifests.live(self.clock.now()).values())

    def priors(self) -> list[PriorRecord]:
        """Live offers of priors of the run, whoever makes them; at once, from memory."""
        return list(self._priors.live(self.clock.now()).values())

    def grant(self) -> tuple[AnchorGrant, float] | None:
        """The owner's latest grant that stands on the board, and the seconds for which it still does."""
        now = self.clock.now()
        for record in self._grants.live(now).values():
            return record.content, record.expires_at - now
        return None

    @property
    def view_version(self) -> int:
        """Grows whenever `view`, `manifests`, `priors` or `grant` change in more than expiry times."""
        tables = (self._peers, self._manifests, self._priors, self._grants)
        return sum(table.version for table in tables)

    async def wait_changed(self, seen_version: int, deadline_s: float) -> bool:
        """Wait until `view_version` differs from `seen_version`; False if it does not within the deadline."""
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while self.view_version == seen_version:
                    await self._changed.wait()
        return self.view_version != seen_version

    async def publish(self, record: Record, deadline_s: float = OPERATION_DEADLINE_S) -> bool:
        """Put up a record of this peer, in place of the one before; `run` keeps it up.

        Its expires_at is filled in: `RECORD_LIFE_S` from now, and always later than the one before, since
        the DHT silently rejects anything else. True if the DHT took it; False (counted) if it did not
        within the deadline, in which case `run` tries again. Raises RecordError or ValueError for a record
        that cannot be signed by this identity, before anything changes.
        """
        encode_record(record, self._identity)
        self._own[place_of(record)] = record
        return await self._store(place_of(record), deadline_s)

    def withdraw(self, record: Record) -> None:
        """Stop re-publishing the record at this record's place; what stands there expires by itself."""
        self._own.pop(place_of(record), None)

    async def refresh(self, deadline_s: float = OPERATION_DEADLINE_S) -> bool:
        """Read the board once into the view; False (counted) if that failed."""
        keys = [MANIFESTS_KEY]
        if self.run_id is not None:
            keys += [peers_key(self.run_id), priors_key(self.run_id), grants_key(self.run_id)]
        try:
            async with asyncio.timeout(deadline_s):
                found = await self._live_node().get_many(
                    keys, sufficient_expiration_time=float("inf"), beam_size=READ_BREADTH
                )
        except Exception as error:  # hivemind lets many kinds through; the next refresh may do better
            self._note_failure("refresh", error)
            return False
        records: list[tuple[str, Record]] = []
        self._bytes_read = 0
        for entry in found.values():
            for subkey, item in (
                entry.value if entry is not None and isinstance(entry.value, dict) else {}
            ).items():
                self._bytes_read += len(item.value) * READ_BREADTH
                with suppress(RecordError):
                    records.append((subkey, self.validator.decode(item.value)))
        self._take_in(records)
        self.counters["refresh_done"] += 1
        self._note_success("refresh")
        return True

    async def reconnect(self) -> None:
        """The host's daemon is a new one and knows nobody: dial who was known, publish and read at once."""
        await self._contacts.heal()
        await self._publish_all()
        await self.refresh()

    async def close(self) -> None:
        """Leave the DHT (the host stays); harmless when the host is dead already."""
        node, self._node = self._node, None
        if node is None:
            return
        node.is_alive = False
        if node.cache_refresh_task is not None:
            node.cache_refresh_task.cancel()
        child = self._p2p._child
        if child is not None and child.returncode is not None:
            return  # nobody is left to remove the handlers from; hivemind would wait for an answer
        with suppress(Exception):
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await node.shutdown()

    async def _store(self, place: tuple[str, str], deadline_s: float) -> bool:
        """Sign the own record of a place anew and store it; see `publish`."""
        key, subkey = place
        try:
            async with asyncio.timeout(deadline_s), self._publish_lock:
                record = self._own.get(place)
                if record is None:
                    return False
                record = record.model_copy(update={"expires_at": self._next_expiry(place)})
                data = encode_record(record, self._identity)
                self._take_in([(subkey, record)])
                accepted = await self._live_node().store(key, data, record.expires_at, subkey=subkey)
        except Exception as error:
            self._note_failure("publish", error)
            return False
        self._note_success("publish")
        self.counters["publish_done" if accepted else "publish_rejected"] += 1
        return bool(accepted)

    def _next_expiry(self, place: tuple[str, str]) -> float:
        """An expiry later than any this peer has used here, in this start or (if still seen) before."""
        now = self.clock.now()
        # Subkeys of one kind of record are none of another's.
        tables = (self._manifests, self._peers, self._priors, self._grants)
        seen = max(table.expires_at(place[1]) for table in tables)
        before = max(self._published_until.get(place, 0.0), seen)
        expiry = max(now + RECORD_LIFE_S, before + 0.001)
        expiry = min(expiry, now + MAX_RECORD_LIFE_S)
        self._published_until[place] = expiry
        return expiry

    def _take_in(self, records: Sequence[tuple[str, Record]]) -> None:
        """Merge records into the tables and wake up who waits for changes."""
        now, version = self.clock.now(), self.view_version
        self._manifests.merge(((s, r) for s, r in records if isinstance(r, ManifestPointer)), now)
        self._peers.merge(
            ((s, r) for s, r in records if isinstance(r, PeerRecord) and r.run_id == self.run_id), now
        )
        self._priors.merge(
            ((s, r) for s, r in records if isinstance(r, PriorRecord) and r.run_id == self.run_id), now
        )
        self._grants.merge(
            ((s, r) for s, r in records if isinstance(r, GrantRecord) and r.run_id == self.run_id), now
        )
        self.validator.forget_expired(now)
        peers = self._peers.live(now)
        self._contacts.acquaintances.remember(peers.values(), now)
        if len(peers) < self._live_peers:
            self._has_shrunk.set()
        self._live_peers = len(peers)
        if self.view_version != version:
            self._notify()

    def _live_node(self) -> DHTNode:
        """The DHT node; RuntimeError after `close`."""
        if self._node is None:
            raise RuntimeError("the noticeboard is closed")
        return self._node

    def _notify(self) -> None:
        """Wake all waiters once."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _keep_together(self) -> None:
        """Heal now and then, and soon after peers have vanished from the view."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(HEAL_S * random.uniform(0.8, 1.2)):
                    await self._has_shrunk.wait()
            self._has_shrunk.clear()
            try:
                await self._contacts.heal()
                self._note_success("heal")
            except Exception as error:
                self._note_failure("heal", error)
            await asyncio.sleep(min(HEAL_SOON_S, HEAL_S))

    async def _publish_all(self) -> None:
        """Put all own records up again."""
        for place in list(self._own):
            await self._store(place, OPERATION_DEADLINE_S)

    async def _expire_on_time(self) -> None:
        """Notice expiries between refreshes."""
        while True:
            await asyncio.sleep(1.0)
            self._take_in(())

    def _refresh_period(self) -> float:
        return min(REFRESH_CEILING_S, max(REFRESH_S, self._bytes_read / REFRESH_BYTES_PER_S))

    async def _every(
        self, first_s: float, period_s: Callable[[], float], action: Callable[[], Awaitable[object]]
    ) -> None:
        """Call `action` again and again, with jitter; its errors are counted and end nothing."""
        await asyncio.sleep(first_s * random.uniform(0.5, 1.0))
        while True:
            try:
                await action()
            except Exception as error:
                self._note_failure(getattr(action, "__name__", "task").strip("_"), error)
            await asyncio.sleep(period_s() * random.uniform(0.8, 1.2))

    def _note_failure(self, what: str, error: BaseException) -> None:
        """Count a failure; log only the first of a row."""
        self.counters[f"{what}_failed"] += 1
        if what not in self._failing:
            logger.warning("noticeboard: %s failed (%r); trying again", what, error)
        self._failing.add(what)

    def _note_success(self, what: str) -> None:
        """End a row of failures."""
        if what in self._failing:
            logger.warning("noticeboard: %s works again", what)
        self._failing.discard(what)
