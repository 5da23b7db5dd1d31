"""Single rules of the rounds, one at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peers import rounds
from peers.frames import Kind
from peers.limits import LIMITS
from peers.round_ledgers import cover
from peers.round_messages import Arrival, Digest, Failure, Group
from tests.kit.round_core import (
    HELD,
    KEYS,
    LEADER,
    NAMES,
    PLAN,
    arrival,
    core_of,
    entered,
    exchanging,
    groups,
)

# -- who corrects by what ---------------------------------------------------------------------------------

OTHER = "d" * 64


@pytest.mark.parametrize(
    ("correctors", "common"),
    [((HELD, HELD), HELD), ((HELD, ""), ""), (("", HELD), ""), ((HELD, OTHER), ""), (("", ""), "")],
)
def test_a_group_corrects_by_a_prior_that_all_of_its_members_hold(
    correctors: tuple[str, str], common: str
) -> None:
    core = core_of(LEADER, NAMES[:2])
    core.on_ready(replace(arrival(0, 1, 2), corrector=correctors[0]), 0.0)
    group = entered(core.on_arrive(NAMES[1], replace(arrival(3, 4, 5), corrector=correctors[1]), 1.0))
    assert group.corrector == common
    member = core_of(NAMES[1], NAMES[:2])
    member.on_ready(replace(arrival(3, 4, 5), corrector=correctors[1]), 0.0)
    assert entered(member.on_group(LEADER, group, 1.0)) == group


def test_a_member_refuses_a_group_that_corrects_by_what_it_does_not_hold() -> None:
    core = core_of(LEADER, NAMES[:2])
    core.on_ready(replace(arrival(0, 1, 2), corrector=HELD), 0.0)
    group = entered(core.on_arrive(NAMES[1], replace(arrival(3, 4, 5), corrector=HELD), 1.0))
    for own in ("", OTHER):
        member = core_of(NAMES[1], NAMES[:2])
        member.on_ready(replace(arrival(3, 4, 5), corrector=own), 0.0)
        refused = member.on_group(LEADER, group, 1.0)
        assert [type(a.body) for a in refused if isinstance(a, rounds.Send)] == [Failure, Arrival]
        assert member.failures["schema"] == 1


# -- who is late -------------------------------------------------------------------------------------------


def test_a_late_member_without_keys_is_left_out_and_told_by_the_commit() -> None:
    core = core_of(LEADER)
    core.on_ready(arrival(0, 1, 2), 0.0)
    assert not groups(core.on_arrive(NAMES[1], arrival(3, 4, 5), 1.0))
    assert not groups(core.tick(29.0))
    group = entered(core.tick(31.0))
    assert group.members == (LEADER, NAMES[1]) and core.failures["late"] == 1
    core.on_exchanged(group.id, "d", 32.0)
    actions = core.on_digest(NAMES[1], Digest(group.id, "d", 0), 32.0)
    commits = {a.peer: a.body for a in actions if isinstance(a, rounds.Send)}
    assert set(commits) == {NAMES[1], NAMES[2]}
    left_out = core_of(NAMES[2])
    out = left_out.on_commit(LEADER, commits[NAMES[2]], 33.0)  # type: ignore[arg-type]
    assert isinstance(out[-1], rounds.Dropped) and left_out.is_out


def test_a_late_member_with_keys_is_fenced_and_its_keys_are_taken_from_others() -> None:
    core = core_of(LEADER)
    core.on_ready(arrival(0, 1), 0.0)
    core.on_arrive(NAMES[1], arrival(2, 3), 1.0)
    assert rounds.Fence(NAMES[2], "late") in core.tick(31.0)
    assert core.tick(31.5) == []
    group = entered(core.on_arrive(NAMES[1], arrival(2, 3, 4, 5), 32.0))
    assert NAMES[2] not in group.members


def test_a_member_whose_report_cannot_be_is_not_waited_for() -> None:
    core = core_of(LEADER)
    core.on_ready(arrival(0, 1), 0.0)
    core.on_malformed(NAMES[2], 0.5)
    assert rounds.Fence(NAMES[2], "late") in core.on_arrive(NAMES[1], arrival(2, 3), 1.0)
    group = entered(core.on_arrive(NAMES[1], arrival(2, 3, 4, 5), 2.0))
    assert NAMES[2] not in group.members


def test_a_leader_whose_group_cannot_be_is_passed_over() -> None:
    second, third = core_of(NAMES[1]), core_of(NAMES[2])
    second.on_ready(arrival(*range(5)), 0.0)
    third.on_ready(arrival(5), 0.0)
    (report,) = third.on_malformed(LEADER, 1.0)
    assert isinstance(report, rounds.Send) and (report.peer, report.kind) == (NAMES[1], Kind.ARRIVE)
    second.on_malformed(LEADER, 1.0)
    group = entered(second.on_arrive(NAMES[2], report.body, 1.1))  # type: ignore[arg-type]
    assert group.members == NAMES[1:3] and group.leader == NAMES[1]


def test_a_stranger_that_reports_what_cannot_be_changes_nothing() -> None:
    core = core_of(LEADER)
    core.on_ready(arrival(*range(6)), 0.0)
    assert core.on_malformed("stranger", 1.0) == []
    core.on_arrive(NAMES[1], arrival(), 1.0)
    assert len(entered(core.on_arrive(NAMES[2], arrival(), 1.0)).members) == 3


def test_a_leader_without_a_quorum_leaves_nobody_out_and_counts_that_it_is_alone() -> None:
    core = core_of(LEADER)
    core.on_ready(arrival(*range(6)), 0.0)
    core.on_peer_lost(NAMES[1], 0.0)
    core.tick(20.0)
    assert core.failures["alone"] == 0
    assert rounds.AskGone((NAMES[1],)) in core.tick(31.0)
    assert core.failures["alone"] == 1 and not core.failures["late"]
    group = entered(core.on_arrive(NAMES[2], arrival(), 32.0))
    assert group.members == (LEADER, NAMES[2])


# -- who is blamed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["late", "schema"])
def test_the_member_blamed_by_most_of_the_others_is_fenced(reason: str) -> None:
    """Because its pieces do not come, or because nobody can decode them."""
    core, group = exchanging()
    slow = NAMES[3]
    assert core.on_exchange_failed(group.id, reason, (slow,), 60.0) == []
    assert core.on_failed(NAMES[1], Failure(group.id, reason, (slow,)), 60.5) == []
    assert rounds.Fence(slow, "late") in core.tick(62.0)


@pytest.mark.parametrize("accuser", [LEADER, NAMES[1]])
def test_one_accuser_is_not_believed_at_once_and_the_leader_never_alone(accuser: str) -> None:
    core, group = exchanging()

    def accuse(group: Group, now: float) -> list[rounds.Action]:
        if accuser == LEADER:
            core.on_exchange_failed(group.id, "late", (NAMES[3],), now)
        else:
            core.on_failed(accuser, Failure(group.id, "late", (NAMES[3],)), now)
        return core.tick(now + 2.0)

    assert not any(isinstance(action, rounds.Fence) for action in accuse(group, 60.0))
    actions: list[rounds.Action] = []
    for name in NAMES[1:]:
        actions = core.on_arrive(name, arrival(), 62.5)
    again = accuse(entered(actions), 190.0)
    assert (rounds.Fence(NAMES[3], "late") in again) == (accuser != LEADER)


def test_nobody_is_left_out_whom_the_quorum_needs() -> None:
    core, group = exchanging(2)
    for _ in range(3):
        core.on_exchange_failed(group.id, "late", (NAMES[1],), 60.0)
        assert not any(isinstance(a, rounds.Fence) for a in core.tick(62.0))
        core.on_arrive(NAMES[1], arrival(), 80.0)
        group = entered(core.tick(80.0)) if core.group is None else core.group


def test_a_leader_that_all_wait_for_lets_the_next_one_lead() -> None:
    core, group = exchanging()
    for name in NAMES[1:3]:
        core.on_failed(name, Failure(group.id, "late", (LEADER,)), 60.0)
    actions = core.tick(62.0)
    words = [a.body for a in actions if isinstance(a, rounds.Send) and a.peer == NAMES[1]]
    assert Failure(group.id, "late", (LEADER,)) in words
    assert core.leader == NAMES[1]
    other = core_of(NAMES[1], NAMES)
    other.on_failed(LEADER, Failure(group.id, "late", (LEADER,)), 62.1)
    assert other.is_leader


def test_a_member_passes_over_a_leader_it_waited_for_in_vain() -> None:
    """With a slow line the leader hears of it long after the others."""
    _, group = exchanging()
    other = core_of(NAMES[1], NAMES)
    other.on_ready(arrival(), 0.0)
    other.on_group(LEADER, group, 0.0)
    other.on_exchange_failed(group.id, "late", (LEADER,), 60.0)
    assert other.is_leader
    actions: list[rounds.Action] = []
    for name in NAMES[2:]:
        actions += other.on_arrive(name, arrival(*range(6)) if name == NAMES[2] else arrival(), 61.0)
    assert LEADER not in entered(actions).members


def test_keys_of_a_member_that_only_the_leader_has_lost_are_replayed() -> None:
    core = core_of(LEADER, NAMES[:3])
    core.on_ready(arrival(0, 1, 2), 0.0)
    core.on_peer_lost(NAMES[2], 0.0)
    core.on_arrive(NAMES[1], arrival(3, 4), 0.0)
    assert not any(isinstance(action, rounds.Fence) for action in core.tick(1.0))
    actions = core.tick(4.0)
    assert rounds.Fence(NAMES[2], "disconnected") in actions
    assert any(isinstance(action, rounds.AskMissing) for action in actions)


# -- keys --------------------------------------------------------------------------------------------------


def test_of_two_holders_the_smaller_ledger_goes_and_never_the_leaders() -> None:
    arrivals = {"a": arrival(0, 1), "b": arrival(1, 2, 3), "c": arrival(4, 5)}
    assert cover(KEYS, arrivals, "c").doubled == ("a",)
    assert cover(KEYS, arrivals, "a").doubled == ("b",)
    same = {"a": arrival(0, 1), "b": arrival(1, 2), "c": arrival(4, 5)}
    assert cover(KEYS, same, "c").doubled == ("b",)
    assert cover(KEYS, {"a": arrival(0), "b": Arrival(0, PLAN, ((9, 9),), 1)}, "a").doubled == ("b",)


def test_a_fenced_member_is_waited_for_until_its_ledger_is_empty() -> None:
    core = core_of(LEADER, NAMES[:2])
    core.on_ready(arrival(0, 1, 2, 3, 4, 5), 0.0)
    assert rounds.Fence(NAMES[1], "key") in core.on_arrive(NAMES[1], arrival(5), 0.0)
    assert core.on_arrive(NAMES[1], arrival(5), 0.5) == []
    assert rounds.Fence(NAMES[1], "key") in core.on_arrive(NAMES[1], arrival(5), 5.0)
    assert entered(core.on_arrive(NAMES[1], arrival(), 6.0)).members == (LEADER, NAMES[1])


def test_at_the_fenced_member_nothing_is_reported_before_it_is_ready_again() -> None:
    core = core_of(NAMES[1])
    assert core.on_ready(arrival(0), 0.0)
    assert core.fence(PLAN, 1.0) == []
    assert core.tick(10.0) == []
    (sent,) = core.on_ready(arrival(), 11.0)
    assert isinstance(sent, rounds.Send) and isinstance(sent.body, Arrival) and sent.body.keys == ()


def test_lost_keys_are_named_by_the_group_and_accepted_by_who_does_not_hold_them() -> None:
    core = core_of(LEADER, NAMES[:2])
    core.on_ready(arrival(0, 1, 2), 0.0)
    actions = core.on_arrive(NAMES[1], arrival(3, 4, lost=(2, 5)), 0.0)
    (group,) = groups(actions)
    assert group.lost == ((0, 5),)
    member = core_of(NAMES[1], NAMES[:2])
    member.on_ready(arrival(3, 4, lost=(2, 5)), 0.0)
    assert entered(member.on_group(LEADER, group, 0.1)) is group
    holder = core_of(NAMES[1], NAMES[:2])
    holder.on_ready(arrival(3, 4), 0.0)
    refusal = holder.on_group(LEADER, replace(group, lost=((0, 4),)), 0.1)
    assert rounds.Send(LEADER, Kind.FAILED, Failure(group.id, "key")) in refusal


def test_keys_that_nobody_has_are_asked_for_after_two_seconds_and_every_five() -> None:
    core = core_of(LEADER, NAMES[:1])
    core.on_ready(arrival(0, 1, 2, 3), 10.0)
    asked = [t for t in range(10, 24) for a in core.tick(float(t)) if isinstance(a, rounds.AskMissing)]
    assert asked == [12, 17, 22]
    assert entered(core.on_ready(arrival(*range(6)), 24.0)).members == (LEADER,)


# -- followers ---------------------------------------------------------------------------------------------


def test_followers_that_are_close_enough_and_there_are_listed_in_the_commit() -> None:
    core = core_of(LEADER, NAMES[:1])
    for name, version, at in (("near", 0, 5.0), ("ahead", 1, 5.0), ("stale", 0, -20.0), ("dead", 0, 5.0)):
        core.on_peer_up(name, 0.0)
        core.on_follow(name, version, "", at)
    core.on_peer_lost("dead", 5.0)
    group = entered(core.on_ready(arrival(*range(6)), 6.0))
    actions = core.on_exchanged(group.id, "d", 6.0)
    (applied,) = [a for a in actions if isinstance(a, rounds.Apply)]
    assert applied.commit.followers == ("near",) and applied.commit.roster == (LEADER,)
    assert rounds.Send("near", Kind.COMMIT, applied.commit) in actions


def test_a_follower_is_waited_for_only_so_long_and_is_a_member_of_weight_zero_if_it_comes() -> None:
    core = core_of(LEADER, NAMES[:1], followers=("late", "early"))
    core.on_arrive("early", arrival(), 0.0)
    assert core.on_ready(arrival(*range(6)), 10.0) == []
    assert core.tick(10.0 + LIMITS.gate_s - 0.1) == []
    group = entered(core.tick(10.0 + LIMITS.gate_s))
    assert group.members == (LEADER, "early") and group.weights == (6, 0)
    core.on_exchanged(group.id, "d", 16.0)
    actions = core.on_digest("early", Digest(group.id, "d", 0), 16.0)
    commit = next(a.commit for a in actions if isinstance(a, rounds.Apply))
    assert commit.roster == (LEADER, "early") and commit.followers == ()
    assert rounds.Send("late", Kind.COMMIT, commit) in actions


def test_a_follower_reports_to_the_leader_has_no_vote_and_may_not_bring_keys() -> None:
    follower = core_of("x", NAMES[:1], followers=("x",))
    assert follower.leader == LEADER and not follower.is_leader
    (sent,) = follower.on_ready(arrival(), 0.0)
    assert isinstance(sent, rounds.Send) and sent.peer == LEADER
    follower.on_peer_lost(LEADER, 1.0)
    assert follower.leader == "" and follower.tick(100.0) == []
    core = core_of(LEADER, NAMES[:1], followers=("x",))
    for claim in (arrival(3), replace(arrival(), weight=1), replace(arrival(), owed=1)):
        assert core.on_arrive("x", claim, 0.0) == []
    assert core.failures["weight"] == 3


def test_a_member_that_follows_or_starts_anew_leads_nothing_and_has_no_vote() -> None:
    core = core_of(NAMES[1], NAMES[:2])
    core.on_ready(arrival(*range(6)), 0.0)
    assert core.leader == LEADER
    assert entered(core.on_follow(LEADER, 0, "", 1.0)).members == (NAMES[1],)
    core = core_of(NAMES[1], NAMES[:2])
    core.on_ready(arrival(*range(6)), 0.0)
    assert entered(core.on_resigned(LEADER, 1.0)).members == (NAMES[1],)


def test_a_member_that_follows_from_ahead_may_have_voted_for_this_step() -> None:
    core = core_of(NAMES[1], NAMES[:2])
    core.on_ready(arrival(*range(6)), 0.0)
    assert not groups(core.on_follow(LEADER, 1, "other", 1.0))
    assert core.is_leader and core.group is None
