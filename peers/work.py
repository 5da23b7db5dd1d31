"""The work of one stage peer: which microbatches it holds, where they came from and where they went.

Pure: methods take an event and the time, change this object and return what is to be done. The promise
(design section 7, exactly once): a key enters the ledger of its step once, at its backward, whatever is
repeated, returned twice or replayed; both coded payloads a peer sent for a key are kept until its commit of
the next step, so that when a neighbour dies only the dead peer's own stage works again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any

from peers.limits import LIMITS
from peers.routing import Router
from peers.work_items import (
    Action,
    AskHolders,
    Backward,
    ClearAccumulator,
    Entry,
    Forward,
    GiveUp,
    LedgerGrew,
    Phase,
    Reply,
    SendForward,
    SendGradient,
    SlotDone,
)
from swarm.plan import MicrobatchKey, Plan

MAX_TRIES = 3
"""Payloads of a microbatch that could not be decoded before the run counts as diverged."""


class WorkCore:
    """Microbatches of one stage peer, for the step being worked on and the one before.

    version: the step whose gradients are being accumulated (its weights are what forwards use).
    """

    def __init__(self, *, is_last: bool, router: Router[MicrobatchKey], source_window: int) -> None:
        self.version = 0
        self.plan: Plan | None = None
        self.router = router
        self.counters: Counter[str] = Counter()
        self._plan_hash = ""
        self._keys: frozenset[MicrobatchKey] = frozenset()
        self._is_last = is_last
        self._source_window = source_window
        self._entries: dict[MicrobatchKey, Entry] = {}
        self._early: OrderedDict[MicrobatchKey, tuple[str, Any, Any, bool]] = OrderedDict()
        self._pending: OrderedDict[MicrobatchKey, tuple[Any, bool]] = OrderedDict()
        self._own_slots: dict[int, set[MicrobatchKey]] = {}
        self._frozen = False

    # -- what others may ask ---------------------------------------------------------------------------

    @property
    def ledger(self) -> dict[MicrobatchKey, int]:
        """Keys of the current step in the accumulator, with their loss tokens."""
        return {
            key: entry.loss_tokens
            for key, entry in self._entries.items()
            if key.plan == self._plan_hash and entry.phase is Phase.DONE
        }

    @property
    def in_flight(self) -> int:
        """Microbatches accepted and not yet in the ledger."""
        return sum(1 for entry in self._entries.values() if entry.phase is not Phase.DONE)

    @property
    def is_settled(self) -> bool:
        """Whether every microbatch of the current plan that came here is in the ledger."""
        current = (e for k, e in self._entries.items() if k.plan == self._plan_hash)
        return not self._pending and all(e.phase is Phase.DONE for e in current)

    @property
    def loss(self) -> tuple[float, int]:
        """Sum of token losses and loss tokens of the current ledger."""
        done = [self._entries[key] for key in self.ledger]
        return sum(entry.loss_sum for entry in done), sum(entry.loss_tokens for entry in done)

    def entry(self, key: MicrobatchKey) -> Entry | None:
        """What this peer knows of a key."""
        return self._entries.get(key)

    def holds(self, key: MicrobatchKey) -> bool:
        """Whether this peer has accepted the key, in flight or done."""
        return key in self._entries or key in self._early

    # -- plans and steps -------------------------------------------------------------------------------

    def on_plan(self, plan: Plan, now: float) -> list[Action]:
        """The plan of the current step is known, or replaced by one of a later attempt.

        Work under an earlier attempt is dropped and counted.
        """
        digest = plan.digest()
        if plan.step != self.version or digest == self._plan_hash:
            return []
        if self.plan is not None and plan.attempt <= self.plan.attempt:
            self.counters["stale_plan"] += 1
            return []
        actions: list[Action] = [ClearAccumulator()] if self.plan is not None else []
        for key in [k for k in self._entries if k.step == plan.step]:
            self._drop(key)
        self._pending.clear()
        self._own_slots.clear()
        self.plan, self._plan_hash, self._keys = plan, digest, frozenset(plan.keys())
        return actions + self._release_early(now)

    def on_commit(self, step: int, now: float) -> list[Action]:
        """The round of `step` is committed and applied: the next step begins, the one before is forgotten."""
        if step != self.version:
            return []
        self.version = step + 1
        self.plan, self._plan_hash, self._keys, self._frozen = None, "", frozenset(), False
        self._pending.clear()
        self._own_slots.clear()
        for key in [k for k in self._entries if k.step < step]:
            self._drop(key, is_loss=False)
        return self._refuse_committed()

    def seal(self, step: int) -> list[Action]:
        """The round of `step` is decided: nothing of it may reach the accumulator any more.

        Replays that were under way are dropped; whoever sent them is told that the step is committed.
        """
        if step != self.version:
            return []
        self._frozen = True
        self._pending.clear()
        actions: list[Action] = []
        for key, entry in list(self._entries.items()):
            if key.step == step and entry.phase is not Phase.DONE:
                self._drop(key)
                if entry.upstream is not None:
                    actions.append(Reply(entry.upstream, "refused", key, "committed"))
        return actions

    def freeze(self, is_frozen: bool, now: float) -> list[Action]:
        """Hold new keys of the current step back while a group averages; release them if it failed."""
        self._frozen = is_frozen
        return [] if is_frozen else self._release_early(now)

    def assign(
        self, slot: int, works: Iterable[tuple[MicrobatchKey, Any]], is_replay: bool, now: float
    ) -> list[Action]:
        """This source runs a slot of the plan. Its microbatches start as the window allows."""
        keys = dict(works)
        self._own_slots[slot] = set(keys)
        for key, work in keys.items():
            if key not in self._entries:
                self._pending[key] = (work, is_replay)
        return self._start_pending() + self._slot_progress(slot)

    # -- events ------------------------------------------------------------------------------------------

    def on_forward(
        self, peer: str, key: MicrobatchKey, work: Any, payload: Any, is_replay: bool, now: float
    ) -> list[Action]:
        """A FORWARD of the previous stage, whose plan is known."""
        known = self._entries.get(key)
        if known is not None:
            known.upstream = peer
            self.counters["repeated_forward"] += 1
            if known.phase is Phase.DONE and known.gradient is not None:
                return [SendGradient(peer, known)]
            return [Reply(peer, "accepted", key)]
        if key.step < self.version:
            self.counters["late_forward"] += 1
            return [Reply(peer, "refused", key, "committed")]
        if key.step > self.version or self._frozen:
            if len(self._early) >= LIMITS.early_frames and key not in self._early:
                self.counters["busy"] += 1
                return [Reply(peer, "busy", key)]
            self._early[key] = (peer, work, payload, is_replay)
            return [Reply(peer, "accepted", key)]
        if key not in self._keys:
            self.counters["foreign_key"] += 1
            return [Reply(peer, "refused", key, "plan")]
        if self.in_flight >= LIMITS.in_flight:
            self.counters["busy"] += 1
            return [Reply(peer, "busy", key)]
        entry = Entry(key, peer, work, incoming=payload, is_replay=is_replay)
        self._entries[key] = entry
        self.counters["replayed"] += is_replay
        return [Reply(peer, "accepted", key), Forward(entry)]

    def on_forward_done(self, entry: Entry, outgoing: Any, now: float) -> list[Action]:
        """The compute thread has the coded forward output."""
        if self._entries.get(entry.key) is not entry:
            return []
        entry.outgoing, entry.incoming = outgoing, None
        entry.phase, entry.needs_route = Phase.OUT, True
        return self.route(now)

    def on_gradient(
        self, peer: str, key: MicrobatchKey, payload: Any, loss_sum: float, loss_tokens: int, now: float
    ) -> list[Action]:
        """A GRADIENT of the next stage."""
        entry = self._entries.get(key)
        if entry is None or entry.downstream != peer:
            self.counters["unknown_gradient"] += 1
            return []
        self.router.returned(peer, key, now)
        if entry.phase is not Phase.OUT:
            self.counters["duplicate_gradient"] += 1
            return self.route(now)
        entry.returned, entry.loss_sum, entry.loss_tokens = payload, loss_sum, loss_tokens
        entry.phase = Phase.RETURNED
        return [Backward(entry), *self.route(now)]

    def on_backward_done(
        self, entry: Entry, gradient: Any, loss: tuple[float, int] | None, now: float
    ) -> list[Action]:
        """The compute thread has added the microbatch to the accumulator. loss: the last stage's own."""
        if self._entries.get(entry.key) is not entry:
            return []
        if loss is not None:
            entry.loss_sum, entry.loss_tokens = loss
        entry.gradient, entry.returned, entry.incoming = gradient, None, None
        entry.phase = Phase.DONE
        self.counters["done"] += 1
        actions: list[Action] = [LedgerGrew(entry.key)]
        if entry.upstream is not None:
            actions.append(SendGradient(entry.upstream, entry))
        else:
            actions += self._slot_progress(entry.key.slot) + self._start_pending()
        return actions

    def on_busy(self, peer: str, key: MicrobatchKey, now: float) -> list[Action]:
        """The next stage had no room for a key: it looks for a place again."""
        entry = self._entries.get(key)
        if entry is None or entry.downstream != peer:
            return []
        self.router.busy(peer, key, now, LIMITS.busy_retry_s)
        entry.downstream, entry.needs_route = None, True
        return self.route(now)

    def on_refused(self, peer: str, key: MicrobatchKey, reason: str, now: float) -> list[Action]:
        """The next stage does not want a key: it has committed the step, or knows another plan."""
        entry = self._entries.get(key)
        if entry is None or entry.downstream != peer:
            return []
        self.counters[f"refused_{reason}" if reason in ("committed", "plan") else "refused_other"] += 1
        if reason == "committed" or entry.phase is Phase.DONE:
            self.router.forget(peer, key)
            return []
        entry.tries += reason == "payload"
        if entry.tries > MAX_TRIES:
            return [GiveUp(key)]
        self.router.failed(peer, key, now)
        entry.downstream, entry.needs_route = None, True
        return self.route(now)

    def on_unreadable(self, entry: Entry, now: float) -> list[Action]:
        """The compute thread could not decode what came for this entry: its sender is asked for another."""
        if self._entries.get(entry.key) is not entry:
            return []
        self.counters["unreadable"] += 1
        if entry.phase is Phase.QUEUED:
            self._drop(entry.key)
            return [Reply(entry.upstream, "refused", entry.key, "payload")] if entry.upstream else []
        entry.tries += 1
        if entry.tries > MAX_TRIES:
            return [GiveUp(entry.key)]
        if entry.downstream is not None:
            self.router.failed(entry.downstream, entry.key, now)
        entry.phase, entry.returned = Phase.OUT, None
        entry.downstream, entry.needs_route, entry.is_replay, entry.holders = None, True, True, "unknown"
        return self.route(now)

    def on_holder(self, entry: Entry, holder: str | None, now: float) -> list[Action]:
        """The answer to AskHolders: the peer of the next stage that holds the key, if any does."""
        if self._entries.get(entry.key) is not entry or not entry.needs_route:
            return []
        if holder is not None and holder in self.router.peers:
            entry.holders = "answered"
            return [self._send(entry, holder, now)]
        entry.holders = "answered"  # nobody holds it: it goes wherever there is room
        return self.route(now)

    def on_peer_up(self, peer: str, now: float) -> list[Action]:
        """A link to a peer of the next stage is up (again): what it owes is repeated."""
        self.router.add(peer)
        # Replays of what this peer has done already are owed too, until they are answered.
        outstanding = self.router.owed_by(peer)
        owed = [
            entry
            for key, entry in self._entries.items()
            if entry.downstream == peer and (entry.phase is Phase.OUT or key in outstanding)
        ]
        return [self._send(entry, peer, now) for entry in owed] + self.route(now)

    def on_peer_lost(self, peer: str, now: float) -> list[Action]:
        """A peer of the next stage is gone, its accumulator with it: all that went there goes elsewhere."""
        self.router.remove(peer)
        for entry in self._entries.values():
            if entry.downstream == peer:
                entry.downstream, entry.needs_route, entry.is_replay, entry.holders = (
                    None,
                    True,
                    True,
                    "unknown",
                )
                self.counters["rerouted"] += 1
        return self.route(now)

    def route(self, now: float) -> list[Action]:
        """Send what looks for a peer of the next stage, as far as windows allow. Call on a timer too."""
        actions: list[Action] = []
        for entry in self._entries.values():
            if not entry.needs_route or entry.outgoing is None:
                continue
            if entry.is_replay and entry.holders != "answered":
                if entry.holders == "unknown" and self.router.peers:
                    entry.holders = "asked"
                    actions.append(AskHolders(entry))
                continue
            peer = self.router.choose(now, is_urgent=entry.is_replay)
            if peer is None:
                break
            actions.append(self._send(entry, peer, now))
        return actions

    # -- inside ------------------------------------------------------------------------------------------

    def _send(self, entry: Entry, peer: str, now: float) -> SendForward:
        entry.downstream, entry.needs_route = peer, False
        self.router.sent(peer, entry.key, now)
        return SendForward(peer, entry)

    def _start_pending(self) -> list[Action]:
        actions: list[Action] = []
        while self._pending and not self._frozen and self.in_flight < self._source_window:
            key, (work, is_replay) = self._pending.popitem(last=False)
            entry = Entry(key, None, work, is_replay=is_replay)
            self._entries[key] = entry
            self.counters["replayed"] += is_replay
            actions.append(Forward(entry))
        return actions

    def _slot_progress(self, slot: int) -> list[Action]:
        open_keys = self._own_slots.get(slot)
        if open_keys is None:
            return []
        finished = {k for k in open_keys if k in self._entries and self._entries[k].phase is Phase.DONE}
        if len(finished) < len(open_keys):
            return []
        del self._own_slots[slot]
        return [SlotDone(slot)]

    def _release_early(self, now: float) -> list[Action]:
        actions: list[Action] = []
        if self.plan is None:
            return actions
        for key in [k for k in self._early if k.step <= self.version]:
            peer, work, payload, is_replay = self._early.pop(key)
            if key in self._keys:
                actions += self.on_forward(peer, key, work, payload, is_replay, now)
            else:
                self.counters["foreign_key"] += 1
                actions.append(Reply(peer, "refused", key, "plan"))
        return actions + self._start_pending()

    def _refuse_committed(self) -> list[Action]:
        """Held-back keys of steps that are committed: their senders must not wait for them."""
        late = [key for key in self._early if key.step < self.version]
        return [Reply(self._early.pop(key)[0], "refused", key, "committed") for key in late]

    def _drop(self, key: MicrobatchKey, is_loss: bool = True) -> None:
        entry = self._entries.pop(key)
        entry.is_dropped = True
        if entry.downstream is not None:
            self.router.forget(entry.downstream, key)
        self.counters["dropped"] += is_loss
