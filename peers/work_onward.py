"""Microbatches on their way to the next stage: who gets them, and who gets them again. Pure.

A microbatch that is sent again, because the peer it went to is gone or fenced, is a replay: before it chooses
a peer it asks the whole next stage who holds its key, so that nobody computes it a second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from peers.limits import LIMITS
from peers.routing import Router
from peers.work_items import Action, AskHolders, Entry, GiveUp, Phase, SendForward
from peers.work_store import Store
from swarm.plan import MicrobatchKey

MAX_TRIES = 3
"""Payloads of a microbatch that could not be decoded before the run counts as diverged."""
REFUSALS = ("committed", "plan", "payload", "fenced", "lost", "resync")


class Onward:
    """What goes to the next stage. `on_lost(entry)` says what follows from a key that nobody can give."""

    def __init__(
        self,
        store: Store,
        router: Router[MicrobatchKey],
        counters: Counter[str],
        on_lost: Callable[[Entry], list[Action]],
    ) -> None:
        self._store, self.router, self._counters, self._on_lost = store, router, counters, on_lost
        self._waiting: dict[MicrobatchKey, Entry] = {}

    # -- looking for a peer ------------------------------------------------------------------------------

    def want(self, entry: Entry, *, is_replay: bool = False) -> None:
        """An entry looks for a peer of the next stage."""
        if entry.downstream is not None:
            self.router.forget(entry.downstream, entry.key)
        entry.downstream, entry.needs_route, entry.is_on_way = None, True, False
        if is_replay:
            entry.is_replay, entry.holders, entry.ask_after = True, "unknown", 0.0
        self._waiting[entry.key] = entry

    def forget(self, entry: Entry) -> None:
        """An entry needs no peer any more, and is owed by none."""
        self._waiting.pop(entry.key, None)
        entry.needs_route = entry.is_on_way = False
        if entry.downstream is not None:
            self.router.forget(entry.downstream, entry.key)

    def route(self, now: float) -> list[Action]:
        """Send what looks for a peer, replays first, as far as windows allow."""
        actions: list[Action] = []
        fresh: list[Entry] = []
        for entry in list(self._waiting.values()):
            if not entry.is_replay:
                fresh.append(entry)
            elif entry.holders == "unknown":
                if now >= entry.ask_after and self.askable(entry):
                    entry.holders = "asked"
                    actions.append(AskHolders(entry))
            elif entry.holders == "denied":
                peer = self.router.choose(now, is_urgent=True, plan=entry.key.plan)
                if peer is not None:
                    actions.append(self._send(entry, peer, now))
        for entry in fresh:
            peer = self.router.choose(now, plan=entry.key.plan)
            if peer is None:
                break
            actions.append(self._send(entry, peer, now))
        return actions

    def askable(self, entry: Entry) -> frozenset[str]:
        """Peers of the next stage whose word on who holds a key is needed.

        One that is fenced under the key's plan may not know it yet, and still believe that it holds the key.
        """
        plan = entry.key.plan
        return frozenset(peer for peer in self.router.peers if not self.router.is_fenced(peer, plan))

    def on_holder(self, entry: Entry, holder: str | None, now: float) -> list[Action]:
        """The answer to AskHolders: who holds the key. None: nobody, by the word of all who are askable."""
        if not self._store.is_known(entry) or not entry.needs_route or entry.holders != "asked":
            return []
        if holder is not None:
            if holder not in self.askable(entry):
                return self.on_holder_unknown(entry, now)  # it says READY soon, or drops the key
            entry.holders, entry.is_doomed = "found", False
            return [self._send(entry, holder, now)]
        if entry.is_doomed:
            self.forget(entry)
            entry.downstream = None
            return self._on_lost(entry)
        entry.holders = "denied"  # it goes wherever there is room
        return self.route(now)

    def on_holder_unknown(self, entry: Entry, now: float) -> list[Action]:
        """Somebody who may hold the key did not answer: all are asked again in a while."""
        if entry.holders == "asked":
            entry.holders, entry.ask_after = "unknown", now + LIMITS.ask_again_s
        return []

    # -- answers of the next stage -------------------------------------------------------------------------

    def on_accepted(self, peer: str, key: MicrobatchKey) -> None:
        """The peer has the microbatch."""
        entry = self._sent_to(peer, key)
        if entry is not None:
            entry.is_on_way = False
            self.router.accepted(peer)

    def on_busy(self, peer: str, key: MicrobatchKey, now: float) -> list[Action]:
        """The peer had no room: the microbatch looks for a place again."""
        entry = self._sent_to(peer, key)
        if entry is None:
            return []
        self.router.busy(peer, key, now)
        self.want(entry)
        if entry.holders == "found":
            entry.holders = "unknown"
        return self.route(now)

    def on_refused(self, peer: str, key: MicrobatchKey, reason: str, now: float) -> list[Action]:
        """The peer does not take the microbatch."""
        entry = self._sent_to(peer, key)
        if entry is None:
            return []
        self._counters[f"refused_{reason}" if reason in REFUSALS else "refused_other"] += 1
        if reason == "resync":
            return self.on_peer_lost(peer, now)  # it has dropped everything, and is not ready
        if reason == "fenced":
            self.router.fence(peer, key.plan)
            self.want(entry, is_replay=True)
            return self.route(now)
        is_out = entry.phase is Phase.OUT
        if reason in ("committed", "lost"):
            self.forget(entry)
            if is_out:
                # Somebody may hold it all the same: if nobody does by now, nobody ever will.
                entry.is_doomed = True
                self.want(entry, is_replay=True)
            return self.route(now)
        if entry.phase is Phase.DONE:
            self.forget(entry)
            return []
        entry.tries += reason == "payload"
        if entry.tries > MAX_TRIES:
            return [GiveUp(key)]
        self.router.failed(peer, key, now)
        self.want(entry)
        return self.route(now)

    def on_unreadable(self, entry: Entry, now: float) -> list[Action]:
        """The gradient that came back could not be decoded: the microbatch is sent again."""
        entry.tries += 1
        if entry.tries > MAX_TRIES:
            return [GiveUp(entry.key)]
        if entry.downstream is not None:
            self.router.failed(entry.downstream, entry.key, now)
        entry.phase, entry.returned = Phase.OUT, None
        self.want(entry, is_replay=True)
        return self.route(now)

    # -- peers and leaders of the next stage -----------------------------------------------------------------

    def on_peer_up(self, peer: str, now: float) -> list[Action]:
        """A peer of the next stage is ready (again): what it owes is repeated."""
        self.router.add(peer)
        self.router.lift_fences_of(peer)  # if it is fenced still, it refuses, and is avoided again
        # Replays of what this peer has done already are owed too, until they are answered.
        outstanding = self.router.owed_by(peer)
        owed = [
            entry
            for key, entry in self._store.entries.items()
            if entry.downstream == peer and (entry.phase is Phase.OUT or key in outstanding)
        ]
        return [self._send(entry, peer, now) for entry in owed] + self.route(now)

    def on_peer_lost(self, peer: str, now: float) -> list[Action]:
        """A peer is gone, its accumulator with it: all that went there goes elsewhere, returned or not."""
        self.router.remove(peer)
        return self._reroute(peer, None, now)

    def on_fenced(self, peer: str, plan: str, now: float) -> list[Action]:
        """A peer has dropped what it accumulated under a plan, and takes no more work of it."""
        self.router.fence(peer, plan)
        return self._reroute(peer, plan, now)

    def on_missing(self, keys: Iterable[MicrobatchKey], now: float) -> list[Action]:
        """The next stage's ledgers lack these keys: those kept here ask who holds them, and go again."""
        for key in keys:
            entry = self._store.entries.get(key)
            if entry is None or entry.outgoing is None or entry.needs_route:
                continue
            if entry.is_on_way and now - self.router.sent_at(entry.downstream, key) < LIMITS.forward_s:
                continue  # nobody holds it yet, and a second copy would find another peer
            self._counters["missing_resent"] += 1
            self.want(entry, is_replay=True)
        return self.route(now)

    # -- inside ------------------------------------------------------------------------------------------

    def _sent_to(self, peer: str, key: MicrobatchKey) -> Entry | None:
        entry = self._store.entries.get(key)
        return entry if entry is not None and entry.downstream == peer else None

    def _reroute(self, peer: str, plan: str | None, now: float) -> list[Action]:
        for entry in self._store.entries.values():
            if entry.downstream == peer and entry.outgoing is not None and plan in (None, entry.key.plan):
                self.want(entry, is_replay=True)
                self._counters["rerouted"] += 1
        return self.route(now)

    def _send(self, entry: Entry, peer: str, now: float) -> SendForward:
        self._waiting.pop(entry.key, None)
        entry.downstream, entry.needs_route, entry.is_on_way = peer, False, True
        self.router.sent(peer, entry.key, now)
        return SendForward(peer, entry)
