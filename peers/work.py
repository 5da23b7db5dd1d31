"""The work of one stage peer: which microbatches it holds, where they came from and where they went.

Pure: methods take an event and the time, change this object and return what is to be done. The promise
(design section 7, exactly once): a key enters the ledger of its step once, at its backward, whatever is
repeated, returned twice or replayed; both coded payloads a peer sent for a key are kept until its commit of
the next step, so that when a neighbour dies only the dead peer's own stage works again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from peers.limits import LIMITS
from peers.routing import Router
from peers.work_items import (
    Action,
    Backward,
    ClearAccumulator,
    Entry,
    Forward,
    KeyLost,
    LedgerGrew,
    Phase,
    Reply,
    SendGradient,
)
from peers.work_onward import Onward
from peers.work_slots import Slots
from peers.work_store import Store
from swarm.plan import MicrobatchKey, Plan


class WorkCore:
    """Microbatches of one stage peer, for the step being worked on and the one before.

    version: the step whose gradients are being accumulated (its weights are what forwards use).
    is_fenced: whether this peer takes no more work of the current plan.
    """

    def __init__(self, *, is_last: bool, router: Router[MicrobatchKey], source_window: int) -> None:
        self.version = 0
        self.plan: Plan | None = None
        self.router = router
        self.counters: Counter[str] = Counter()
        self.is_fenced = False
        self._plan_hash = ""
        self._keys: frozenset[MicrobatchKey] = frozenset()
        self._is_last = is_last
        self._source_window = source_window
        self._store = Store()
        self._slots = Slots(self._store)
        self._onward = Onward(self._store, router, self.counters, self._lose)
        self._early: OrderedDict[MicrobatchKey, Entry] = OrderedDict()
        self._is_frozen = self._is_sealed = self._is_suspended = False

    # -- what others may ask ---------------------------------------------------------------------------

    @property
    def ledger(self) -> Mapping[MicrobatchKey, int]:
        """Keys of the current step in the accumulator, with their loss tokens: a view, not a copy."""
        return self._store.ledger

    @property
    def lost(self) -> frozenset[MicrobatchKey]:
        """Keys of the current step that came here and whose gradient nobody can give any more."""
        return frozenset(self._store.lost)

    @property
    def in_flight(self) -> int:
        """Microbatches accepted, and neither in the ledger nor lost."""
        return self._store.in_flight

    @property
    def is_settled(self) -> bool:
        """Whether every microbatch of the current plan that came here is in the ledger or lost."""
        return not self._slots.has_pending and self._store.is_settled()

    @property
    def loss(self) -> tuple[float, int]:
        """Sum of token losses and loss tokens of the current ledger."""
        return self._store.loss_sum, self._store.loss_tokens

    def entry(self, key: MicrobatchKey) -> Entry | None:
        """What this peer knows of a key."""
        return self._store.entries.get(key)

    def holds(self, key: MicrobatchKey) -> bool:
        """Whether this peer has accepted the key, in flight or done, and has not given it up."""
        entry = self._store.entries.get(key)
        return key in self._early or (entry is not None and entry.phase is not Phase.LOST)

    def kept(self, keys: Iterable[MicrobatchKey]) -> list[MicrobatchKey]:
        """Those of these keys that this peer can still send on."""
        return [key for key in keys if self.holds(key)]

    # -- plans and steps -------------------------------------------------------------------------------

    def begin(self, version: int) -> list[Action]:
        """Start afresh at a step: everything is dropped, and whoever sent it looks elsewhere."""
        actions = self._drop_everything()
        self.version, self._is_suspended = version, False
        return actions

    def suspend(self) -> list[Action]:
        """Take no work until `begin`: everything is dropped, and whoever sent it looks elsewhere."""
        self._is_suspended = True
        return self._drop_everything()

    def on_plan(self, plan: Plan, now: float) -> list[Action]:
        """The plan of the current step is known, or replaced by one of a later attempt.

        Work under an earlier attempt is dropped and counted.
        """
        digest = plan.digest()
        if plan.step != self.version or digest == self._plan_hash or self._is_suspended:
            return []
        if self.plan is not None and plan.attempt <= self.plan.attempt:
            self.counters["stale_plan"] += 1
            return []
        actions: list[Action] = [ClearAccumulator()] if self.plan is not None else []
        dropped = self._drop([key for key in self._store.entries if key.step == plan.step])
        self.counters["dropped"] += len(dropped)
        self._turn(plan)
        return actions + self._release_early(now)

    def on_commit(self, step: int, now: float) -> list[Action]:
        """The round of `step` is committed and applied: the next step begins, the one before is forgotten."""
        if step != self.version or self._is_suspended:
            return []
        actions = self.seal(step)
        self._drop(self._store.keys(before_step=step))
        self.router.lift_fences(keep=self._plan_hash)
        self.version = step + 1
        self._turn(None)
        # Held-back keys of steps that are committed: their senders must not wait for them.
        late = [self._early.pop(key) for key in list(self._early) if key.step < self.version]
        return [*actions, *_refuse(late, "committed")]

    def seal(self, step: int) -> list[Action]:
        """The round of `step` is decided: nothing of it may reach the accumulator any more.

        Replays that were under way are dropped; whoever sent them is told that the step is committed.
        """
        if step != self.version:
            return []
        self._is_frozen = self._is_sealed = True
        self._slots.stop()
        dropped = self._drop(self._store.open_of_step(step))
        self.counters["dropped"] += len(dropped)
        return _refuse(dropped, "committed")

    def freeze(self, is_frozen: bool, now: float) -> list[Action]:
        """Hold new keys of the current step back while a group averages; release them if it failed."""
        self._is_frozen = is_frozen
        return [] if is_frozen else self._release_early(now)

    def fence(self, plan: str, now: float) -> list[Action]:
        """This peer is fenced: its ledger under the current plan is void, and it takes no more work of it.

        Nothing happens under another plan, or once the round is decided.
        """
        if plan != self._plan_hash or not plan or self.is_fenced or self._is_sealed:
            return []
        self.is_fenced = True
        dropped = self._drop(self._store.keys(of_plan=plan))
        self.counters["fenced"] += len(dropped)
        self._slots.clear()
        self._store.turn(plan)
        held_back = [self._early.pop(key) for key in list(self._early) if key.plan == plan]
        return [ClearAccumulator(), *_refuse(dropped + held_back, "fenced")]

    def unfence(self) -> None:
        """Nobody who is not fenced is left: this peer works again, with an empty ledger. It must say READY."""
        self.is_fenced = False

    def assign(
        self, slot: int, works: Iterable[tuple[MicrobatchKey, Any]], is_replay: bool, now: float
    ) -> list[Action]:
        """This source runs a slot of the plan. Its microbatches start as the window allows."""
        if self.is_fenced or self._is_suspended or self._is_sealed:
            return []
        ended = self._slots.assign(slot, works, is_replay)
        return [*self._start_pending(), *ended]

    # -- events of the previous stage and of the compute thread --------------------------------------------

    def on_forward(
        self, peer: str, key: MicrobatchKey, work: Any, payload: Any, is_replay: bool, now: float
    ) -> list[Action]:
        """A FORWARD of the previous stage, whose plan is known."""
        known = self._store.entries.get(key)
        if known is not None:
            return self._on_repeat(peer, known)
        if self._is_suspended:
            return [Reply(peer, "refused", key, "resync")]
        if key.step < self.version:
            self.counters["late_forward"] += 1
            return [Reply(peer, "refused", key, "committed")]
        if self.is_fenced and key.step == self.version:
            return [Reply(peer, "refused", key, "fenced" if key.plan == self._plan_hash else "plan")]
        if key.step > self.version or self._is_frozen:
            if (waiting := self._early.get(key)) is not None:
                waiting.add_upstream(peer)
                return [Reply(peer, "accepted", key)]
            if len(self._early) >= LIMITS.early_frames:
                self.counters["busy"] += 1
                return [Reply(peer, "busy", key)]
            self._early[key] = Entry(key, peer, work, incoming=payload, is_replay=is_replay)
            return [Reply(peer, "accepted", key)]
        if key not in self._keys:
            self.counters["foreign_key"] += 1
            return [Reply(peer, "refused", key, "plan")]
        if self.in_flight >= LIMITS.in_flight:
            self.counters["busy"] += 1
            return [Reply(peer, "busy", key)]
        return self._take(Entry(key, peer, work, incoming=payload, is_replay=is_replay))

    def on_forward_done(self, entry: Entry, outgoing: Any, now: float) -> list[Action]:
        """The compute thread has the coded forward output."""
        if not self._store.is_known(entry):
            return []
        entry.outgoing, entry.incoming = outgoing, None
        entry.phase = Phase.OUT
        self._onward.want(entry)
        return self.route(now)

    def on_backward_done(
        self, entry: Entry, gradient: Any, loss: tuple[float, int] | None, now: float
    ) -> list[Action]:
        """The compute thread has added the microbatch to the accumulator. loss: the last stage's own."""
        if not self._store.is_known(entry):
            return []
        if loss is not None:
            entry.loss_sum, entry.loss_tokens = loss
        entry.gradient, entry.returned, entry.incoming = gradient, None, None
        self._store.finish(entry)
        self.counters["done"] += 1
        actions: list[Action] = [LedgerGrew(entry.key)]
        if entry.upstream is not None:
            return actions + [SendGradient(peer, entry) for peer in entry.upstreams]
        return [*actions, *self._slots.settle(entry.key), *self._start_pending()]

    def on_unreadable(self, entry: Entry, now: float) -> list[Action]:
        """The compute thread could not decode what came for this entry: its sender is asked for another."""
        if not self._store.is_known(entry):
            return []
        self.counters["unreadable"] += 1
        if entry.phase is not Phase.QUEUED:
            return self._onward.on_unreadable(entry, now)
        self.counters["dropped"] += len(self._drop([entry.key]))
        return _refuse([entry], "payload")

    # -- events of the next stage --------------------------------------------------------------------------

    def on_gradient(
        self, peer: str, key: MicrobatchKey, payload: Any, loss_sum: float, loss_tokens: int, now: float
    ) -> list[Action]:
        """A GRADIENT."""
        entry = self._store.entries.get(key)
        if entry is None or entry.downstream != peer:
            self.counters["unknown_gradient"] += 1
            return []
        self.router.returned(peer, key, now)
        entry.is_on_way = False
        if entry.phase is not Phase.OUT:
            self.counters["duplicate_gradient"] += 1
            return self.route(now)
        entry.returned, entry.loss_sum, entry.loss_tokens = payload, loss_sum, loss_tokens
        entry.phase = Phase.RETURNED
        return [Backward(entry), *self.route(now)]

    def on_accepted(self, peer: str, key: MicrobatchKey) -> None:
        """See Onward."""
        self._onward.on_accepted(peer, key)

    def on_busy(self, peer: str, key: MicrobatchKey, now: float) -> list[Action]:
        """See Onward."""
        return self._onward.on_busy(peer, key, now)

    def on_refused(self, peer: str, key: MicrobatchKey, reason: str, now: float) -> list[Action]:
        """See Onward."""
        return self._onward.on_refused(peer, key, reason, now)

    def on_peer_up(self, peer: str, now: float) -> list[Action]:
        """See Onward. Called when the peer says READY, again after every break of its link."""
        return self._onward.on_peer_up(peer, now)

    def on_peer_lost(self, peer: str, now: float) -> list[Action]:
        """See Onward."""
        return self._onward.on_peer_lost(peer, now)

    def on_fenced(self, peer: str, plan: str, now: float) -> list[Action]:
        """See Onward. A plan this peer has nothing of is not remembered."""
        if plan != self._plan_hash and not self._store.keys(of_plan=plan):
            return []
        return self._onward.on_fenced(peer, plan, now)

    def on_missing(self, keys: Iterable[MicrobatchKey], now: float) -> list[Action]:
        """See Onward."""
        return self._onward.on_missing(keys, now)

    def askable(self, entry: Entry) -> frozenset[str]:
        """See Onward."""
        return self._onward.askable(entry)

    def on_holder(self, entry: Entry, holder: str | None, now: float) -> list[Action]:
        """See Onward."""
        return self._onward.on_holder(entry, holder, now)

    def on_holder_unknown(self, entry: Entry, now: float) -> list[Action]:
        """See Onward."""
        return self._onward.on_holder_unknown(entry, now)

    def route(self, now: float) -> list[Action]:
        """See Onward. Call on a timer too."""
        return self._onward.route(now)

    # -- inside ------------------------------------------------------------------------------------------

    def _on_repeat(self, peer: str, known: Entry) -> list[Action]:
        known.add_upstream(peer)
        self.counters["repeated_forward"] += 1
        if known.phase is Phase.LOST:
            return [Reply(peer, "refused", known.key, "lost")]
        if known.phase is Phase.DONE and known.gradient is not None:
            return [SendGradient(peer, known)]
        return [Reply(peer, "accepted", known.key)]

    def _lose(self, entry: Entry) -> list[Action]:
        self._store.lose(entry)
        self.counters["lost"] += 1
        actions: list[Action] = [KeyLost(entry.key), *_refuse([entry], "lost")]
        return [*actions, *self._slots.settle(entry.key), *self._start_pending()]

    def _take(self, entry: Entry) -> list[Action]:
        self._store.add(entry)
        self.counters["replayed"] += entry.is_replay
        return [*_answer([entry], "accepted"), Forward(entry)]

    def _start_pending(self) -> list[Action]:
        actions: list[Action] = []
        while self._slots.has_pending and not self._is_frozen and self.in_flight < self._source_window:
            actions += self._take(self._slots.start_next())
        return actions

    def _release_early(self, now: float) -> list[Action]:
        actions: list[Action] = []
        if self.plan is None:
            return actions
        for key in [k for k in self._early if k.step <= self.version]:
            entry = self._early.pop(key)
            if key not in self._keys:
                self.counters["foreign_key"] += 1
                actions += _refuse([entry], "plan")
            elif self._is_frozen:
                self._early[key] = entry
            elif self.in_flight >= LIMITS.in_flight:
                self.counters["busy"] += 1
                actions += _answer([entry], "busy")
            else:
                actions += self._take(entry)
        return actions + self._start_pending()

    def _turn(self, plan: Plan | None) -> None:
        """From now on this plan is worked on; None: none so far."""
        self.plan, self._plan_hash = plan, plan.digest() if plan is not None else ""
        self._keys = frozenset(plan.keys()) if plan is not None else frozenset()
        self.is_fenced = False
        if plan is None:
            self._is_frozen = self._is_sealed = False
        self._slots.clear()
        self._store.turn(self._plan_hash)

    def _drop_everything(self) -> list[Action]:
        current = [e for e in self._drop(self._store.keys()) if e.key.step >= self.version]
        self.counters["dropped"] += len(current)
        actions: list[Action] = [ClearAccumulator(), *_refuse([*current, *self._early.values()], "resync")]
        self._early.clear()
        self.router.reset()
        self._turn(None)
        return actions

    def _drop(self, keys: Iterable[MicrobatchKey]) -> list[Entry]:
        dropped = self._store.drop(keys)
        for entry in dropped:
            self._onward.forget(entry)
        return dropped


def _answer(entries: Iterable[Entry], kind: str, reason: str = "") -> list[Action]:
    return [Reply(peer, kind, entry.key, reason) for entry in entries for peer in entry.upstreams]


def _refuse(entries: Iterable[Entry], reason: str) -> list[Action]:
    return _answer(entries, "refused", reason)
