"""What a work core answers to single events; their order is `test_work_property`'s matter."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import peers.work
from peers.limits import LIMITS
from peers.routing import Router
from peers.work import WorkCore
from peers.work_items import (
    Action,
    AskHolders,
    Backward,
    ClearAccumulator,
    Entry,
    Forward,
    KeyLost,
    LedgerGrew,
    Reply,
    SendForward,
    SendGradient,
    SlotDone,
)
from swarm.plan import MicrobatchKey, Plan, Slot


def plan_of(step: int, attempt: int = 0) -> Plan:
    return Plan(
        step=step,
        attempt=attempt,
        group="",
        rows_per_microbatch=1,
        slots=(Slot(number=0, samples=(0, 1, 2)),),
        prior_versions=(),
        prior_hashes=(),
    )


PLAN, NEXT = plan_of(0), plan_of(1)
KEY, OTHER, THIRD = PLAN.keys()


def middle(*peers: str) -> WorkCore:
    """A core of a middle stage at step 0, with peers of the next stage."""
    core = WorkCore(is_last=False, router=Router(window=8), source_window=8)
    core.on_plan(PLAN, 0.0)
    for peer in peers:
        core.on_peer_up(peer, 0.0)
    return core


def only(actions: list[Action], kind: type[Any]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def forwarded(core: WorkCore, key: MicrobatchKey, upstream: str = "up", *, is_replay: bool = False) -> Entry:
    """An entry whose forward is computed; without replay it is at a peer of the next stage."""
    (forward,) = only(core.on_forward(upstream, key, "work", "payload", is_replay, 0.0), Forward)
    core.on_forward_done(forward.entry, "outgoing", 0.0)
    entry: Entry = forward.entry
    return entry


def done(core: WorkCore, key: MicrobatchKey, upstream: str = "up") -> Entry:
    entry = forwarded(core, key, upstream)
    assert entry.downstream is not None
    core.on_gradient(entry.downstream, key, "returned", 2.0, 7, 0.1)
    core.on_backward_done(entry, "gradient", None, 0.2)
    return entry


def lost(core: WorkCore, key: MicrobatchKey) -> list[Action]:
    """A key that went to "a", which has committed without it, while nobody holds it."""
    entry = forwarded(core, key)
    assert only(core.on_refused("a", key, "committed", 1.0), AskHolders) == [AskHolders(entry)]
    return core.on_holder(entry, None, 1.1)


# -- keys that nobody can give ---------------------------------------------------------------------------


def test_committed_stage_that_holds_no_gradient_loses_the_key_and_upstream_is_told() -> None:
    core = middle("a")
    actions = lost(core, KEY)
    assert actions == [KeyLost(KEY), Reply("up", "refused", KEY, "lost")]
    assert core.lost == {KEY} and core.is_settled and not core.ledger and core.counters["lost"] == 1
    assert not core.holds(KEY) and core.in_flight == 0
    assert core.on_forward("up", KEY, None, None, True, 2.0) == [Reply("up", "refused", KEY, "lost")]


def test_committed_stage_that_holds_the_gradient_gives_it() -> None:
    core = middle("a", "b")
    entry = forwarded(core, KEY)
    first = entry.downstream
    assert first is not None
    core.on_refused(first, KEY, "committed", 1.0)
    other = "b" if first == "a" else "a"
    assert core.on_holder(entry, other, 1.1) == [SendForward(other, entry)]
    assert only(core.on_gradient(other, KEY, "returned", 2.0, 7, 1.2), Backward) and not core.lost


def test_key_in_the_ledger_stays_there_when_the_next_stage_has_lost_it() -> None:
    core = middle("a")
    entry = done(core, KEY)
    for reason in ("lost", "committed"):
        core.on_peer_lost("a", 1.0)
        core.on_peer_up("a", 1.0)
        core.on_holder(entry, None, 1.1)
        assert entry.downstream == "a"
        assert not only(core.on_refused("a", KEY, reason, 1.2), KeyLost)
        assert set(core.ledger) == {KEY} and not core.lost and core.is_settled


def test_lost_keys_end_the_slot_of_their_source() -> None:
    core = WorkCore(is_last=False, router=Router(window=8), source_window=8)
    core.on_plan(PLAN, 0.0)
    core.on_peer_up("a", 0.0)
    forwards = only(core.assign(0, [(key, "work") for key in (KEY, OTHER, THIRD)], False, 0.0), Forward)
    for forward in forwards:
        core.on_forward_done(forward.entry, "outgoing", 0.0)
    for forward in forwards[:2]:
        core.on_gradient("a", forward.entry.key, "returned", 2.0, 7, 0.1)
        assert not only(core.on_backward_done(forward.entry, None, None, 0.2), SlotDone)
    core.on_refused("a", THIRD, "lost", 0.3)
    assert core.on_holder(forwards[2].entry, None, 0.4) == [KeyLost(THIRD), SlotDone(0)]


def test_holder_that_does_not_answer_is_no_reason_to_lose_a_key() -> None:
    core = middle("a")
    entry = forwarded(core, KEY)
    core.on_refused("a", KEY, "committed", 1.0)
    assert core.on_holder_unknown(entry, 1.1) == [] and core.route(1.1 + LIMITS.ask_again_s / 2) == []
    assert core.route(1.2 + LIMITS.ask_again_s) == [AskHolders(entry)]


# -- fences ------------------------------------------------------------------------------------------------


def test_fenced_peer_drops_its_ledger_and_takes_no_more_of_the_step() -> None:
    core = middle("a")
    done(core, KEY)
    forwarded(core, OTHER, "up2")
    actions = core.fence(PLAN.digest(), 1.0)
    assert only(actions, ClearAccumulator)
    assert {(r.peer, r.key, r.reason) for r in only(actions, Reply)} == {
        ("up", KEY, "fenced"),
        ("up2", OTHER, "fenced"),
    }
    assert not core.ledger and core.is_settled and core.is_fenced and core.counters["fenced"] == 2
    assert not core.holds(KEY) and core.loss == (0.0, 0)
    assert core.on_forward("up", THIRD, "w", "p", False, 1.0) == [Reply("up", "refused", THIRD, "fenced")]
    assert core.assign(0, [(THIRD, "w")], True, 1.0) == []
    core.on_commit(0, 2.0)
    core.on_plan(NEXT, 2.0)
    key = next(NEXT.keys())
    assert not core.is_fenced and only(core.on_forward("up", key, "w", "p", False, 2.0), Forward)


@pytest.mark.parametrize("way", ["a later attempt", "unfence"])
def test_fence_is_lifted(way: str) -> None:
    core, later = middle("a"), plan_of(0, attempt=1)
    core.fence(PLAN.digest(), 1.0)
    if way == "unfence":
        core.unfence()
    else:
        core.on_plan(later, 2.0)
    key = KEY if way == "unfence" else next(later.keys())
    assert only(core.on_forward("up", key, "w", "p", False, 2.0), Forward)


def test_fence_of_another_plan_or_after_the_decision_changes_nothing() -> None:
    core = middle("a")
    done(core, KEY)
    assert core.fence(NEXT.digest(), 1.0) == []
    core.seal(0)
    assert core.fence(PLAN.digest(), 1.0) == [] and set(core.ledger) == {KEY}


@pytest.mark.parametrize("way", ["told", "refused"])
def test_work_of_a_fenced_peer_goes_elsewhere_and_no_more_of_the_plan_to_it(way: str) -> None:
    core = middle("a")
    entry = done(core, KEY)
    core.on_peer_up("b", 1.0)
    is_told = way == "told"
    told = core.on_fenced("a", PLAN.digest(), 1.0) if is_told else []
    actions = told or core.on_refused("a", KEY, "fenced", 1.0)
    assert actions == [AskHolders(entry)] and core.askable(entry) == {"b"}
    assert core.on_holder(entry, None, 1.1) == [SendForward("b", entry)]
    assert forwarded(core, OTHER).downstream == "b"
    assert set(core.ledger) == {KEY}, "it is in the ledger here, whoever computes it below"
    core.on_commit(0, 2.0)
    core.on_plan(NEXT, 2.0)
    core.on_peer_lost("b", 2.0)
    assert forwarded(core, next(NEXT.keys())).downstream == "a"


def test_word_of_a_fenced_peer_that_does_not_know_it_yet_counts_for_nothing() -> None:
    core = middle("a", "b")
    entry = done(core, KEY)
    fenced = entry.downstream
    assert fenced is not None
    core.on_fenced(fenced, PLAN.digest(), 1.0)
    assert core.on_holder(entry, fenced, 1.1) == [] and entry.downstream is None


# -- beginning anew --------------------------------------------------------------------------------------------


def test_peer_that_begins_anew_sends_everybody_elsewhere() -> None:
    core = middle("a")
    done(core, KEY)
    forwarded(core, OTHER)
    key = next(NEXT.keys())
    core.on_forward("up2", key, "w", "p", False, 0.5)  # held back: it is of the next step
    actions = core.begin(5)
    assert only(actions, ClearAccumulator)
    assert {(r.peer, r.key, r.reason) for r in only(actions, Reply)} == {
        ("up", KEY, "resync"),
        ("up", OTHER, "resync"),
        ("up2", key, "resync"),
    }
    assert core.version == 5 and core.plan is None and not core.ledger and core.in_flight == 0
    assert core.router.peers == ["a"] and core.router.outstanding("a") == 0


def test_suspended_peer_takes_nothing_until_it_begins() -> None:
    core = middle("a")
    core.suspend()
    core.on_plan(PLAN, 1.0)
    assert core.plan is None
    assert core.on_forward("up", KEY, "w", "p", False, 1.0) == [Reply("up", "refused", KEY, "resync")]
    core.begin(0)
    core.on_plan(PLAN, 2.0)
    assert only(core.on_forward("up", KEY, "w", "p", False, 2.0), Forward)


def test_refusal_of_a_peer_that_begins_anew_counts_as_its_loss_until_it_is_ready() -> None:
    core = middle("a")
    entry, returned = forwarded(core, KEY), done(core, OTHER)
    core.on_refused("a", KEY, "resync", 1.0)
    assert entry.downstream is None and returned.downstream is None and core.router.peers == []
    asked = only(core.on_peer_up("a", 2.0), AskHolders)
    assert {action.entry.key for action in asked} == {KEY, OTHER}


# -- keys that are missing ---------------------------------------------------------------------------------------


def test_missing_keys_are_sent_again_after_asking_unless_they_are_on_their_way() -> None:
    core = middle("a")
    kept, on_way = done(core, KEY), forwarded(core, OTHER)
    assert core.on_missing([KEY, OTHER, THIRD], 1.0) == [AskHolders(kept)]
    core.on_accepted("a", OTHER)
    assert core.on_missing([KEY, OTHER], 1.0) == [AskHolders(on_way)]
    assert core.counters["missing_resent"] == 2
    assert core.kept([KEY, OTHER, THIRD]) == [KEY, OTHER]


def test_forward_that_nobody_answers_for_long_counts_as_gone() -> None:
    core = middle("a")
    entry = forwarded(core, KEY)
    assert core.on_missing([KEY], LIMITS.forward_s / 2) == []
    assert core.on_missing([KEY], LIMITS.forward_s * 2) == [AskHolders(entry)]


# -- payloads and upstreams ------------------------------------------------------------------------------------


def test_both_payloads_are_kept_until_the_commit_of_the_next_step() -> None:
    core = middle("a")
    entry = done(core, KEY)
    core.on_commit(0, 1.0)
    assert (entry.outgoing, entry.gradient) == ("outgoing", "gradient") and core.holds(KEY)
    assert core.on_forward("new", KEY, None, None, True, 1.0) == [SendGradient("new", entry)]
    assert only(core.on_peer_lost("a", 1.0) + core.on_peer_up("b", 1.0), AskHolders) == [AskHolders(entry)]
    core.on_plan(NEXT, 1.0)
    core.on_commit(1, 2.0)
    assert core.entry(KEY) is None and not core.holds(KEY)


def test_everybody_who_sent_a_key_gets_its_gradient() -> None:
    """After a false loss two replicas of the previous stage may wait for the same key."""
    core = middle("a")
    entry = forwarded(core, KEY, "up")
    core.on_forward("up2", KEY, None, None, True, 0.0)
    core.on_forward("up", KEY, None, None, False, 0.0)
    core.on_gradient("a", KEY, "returned", 2.0, 7, 0.1)
    actions = core.on_backward_done(entry, "gradient", None, 0.2)
    assert actions == [LedgerGrew(KEY), SendGradient("up", entry), SendGradient("up2", entry)]


def test_everybody_who_sent_a_held_back_key_is_answered() -> None:
    core = middle("a")
    core.freeze(True, 0.0)
    for peer in ("up", "up2"):
        assert core.on_forward(peer, KEY, "w", "p", True, 0.0) == [Reply(peer, "accepted", KEY)]
    refused = core.on_commit(0, 1.0)
    assert refused == [Reply("up", "refused", KEY, "committed"), Reply("up2", "refused", KEY, "committed")]


def test_replay_does_not_wait_behind_fresh_work_without_room() -> None:
    core = WorkCore(is_last=False, router=Router(window=1), source_window=8)
    core.on_plan(PLAN, 0.0)
    core.on_peer_up("a", 0.0)
    assert forwarded(core, KEY).downstream == "a" and forwarded(core, OTHER).downstream is None
    replay = forwarded(core, THIRD, is_replay=True)
    assert core.on_holder(replay, None, 0.1) == [SendForward("a", replay)]


def test_no_room_is_said_and_taken_back_when_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.work, "LIMITS", dataclasses.replace(LIMITS, in_flight=1))
    core = middle("a")
    entry = forwarded(core, KEY)
    assert core.on_forward("up", OTHER, "w", "p", False, 0.0) == [Reply("up", "busy", OTHER)]
    core.on_gradient("a", KEY, "returned", 2.0, 7, 0.1)
    core.on_backward_done(entry, "gradient", None, 0.2)
    assert only(core.on_forward("up", OTHER, "w", "p", False, 0.3), Forward)
    assert core.loss == (2.0, 7) and dict(core.ledger) == {KEY: 7}
