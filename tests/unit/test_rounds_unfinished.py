"""Single rules of the rounds: what an average whose leader is gone, and another lineage, mean to a member."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peers import rounds
from peers.frames import Kind
from peers.round_ballots import unfinished
from peers.round_messages import Arrival, Commit, Digest, Failure, Group, Held, next_lineage
from peers.rounds import RoundCore
from tests.kit.round_core import (
    HELD,
    LEADER,
    NAMES,
    PLAN,
    arrival,
    core_of,
    entered,
    exchanging,
    groups,
)


def commit_of(core: RoundCore, **changes: object) -> Commit:
    values = {"group": "g", "step": 0, "attempt": 1, "digest": "d", "leader": NAMES[1], "roster": NAMES[1:3]}
    return Commit(**(values | changes))  # type: ignore[arg-type]


# -- an average whose leader is gone -------------------------------------------------------------------------


def held_by(leader: str, members: tuple[str, ...], **changes: object) -> Held:
    values = {
        "group": "g",
        "digest": "d",
        "attempt": 1,
        "ballot": "g",
        "voters": members,
        "leader": leader,
        "members": members,
        "weight": 6,
    }
    return Held(**(values | changes))  # type: ignore[arg-type]


def test_what_may_have_been_committed_is_finished_and_what_cannot_have_been_is_not() -> None:
    held = held_by("a", ("a", "b", "c"))
    assert unfinished({"b": held, "c": held}) == held
    assert unfinished({"b": held, "d": None}) == held
    assert unfinished({"b": held, "c": None}) is None
    finishing = replace(held, ballot="later", attempt=2, voters=("b", "c"))
    assert unfinished({"b": finishing, "c": held}) == finishing
    assert unfinished({"b": finishing, "c": None}) == finishing


def test_the_next_leader_finishes_with_the_roster_of_the_first() -> None:
    core = core_of(NAMES[1], NAMES[:3])
    core.on_ready(arrival(0, 1, 2), 0.0)
    first = Group("g", 0, 1, LEADER, NAMES[:3], (0, 3, 3), ("h", core._own().ledger_hash, "h"), PLAN)
    assert entered(core.on_group(LEADER, first, 0.0)) is first
    core.on_exchanged("g", "d", 1.0)
    core.on_peer_lost(LEADER, 2.0)
    held = held_by(LEADER, NAMES[:3])
    (group,) = groups(core.on_arrive(NAMES[2], arrival(3, 4, 5, held=held), 3.0))
    assert group.held is not None and group.held.group == "g" and group.attempt == 2
    actions = core.on_digest(NAMES[2], Digest(group.id, "d", 0), 4.0)
    commit = next(a.commit for a in actions if isinstance(a, rounds.Apply))
    assert (commit.group, commit.leader, commit.roster) == ("g", LEADER, NAMES[:3])


def test_an_average_that_has_travelled_is_finished_by_members_that_owe_it() -> None:
    """Each checks what the group says that it owes, also where nothing is exchanged any more."""
    reports = {
        NAMES[1]: replace(arrival(0, 1, 2), owed=2, settled=HELD),
        NAMES[2]: replace(arrival(3, 4, 5), owed=3, settled=HELD),
    }
    ledgers = ("h", *(report.ledger_hash for report in reports.values()))
    first = Group("g", 0, 1, LEADER, NAMES[:3], (0, 3, 3), ledgers, PLAN, owed=(0, 2, 3), settled=HELD)
    successor, member = core_of(NAMES[1]), core_of(NAMES[2])
    for core in (successor, member):
        core.on_ready(reports[core.me], 0.0)
        assert entered(core.on_group(LEADER, first, 0.0)) is first
        core.on_exchanged("g", HELD, 1.0)
    for core in (member, successor):
        core.on_peer_lost(LEADER, 2.0)
    (group,) = groups(successor.on_arrive(NAMES[2], member._own(), 3.0))
    assert group.held is not None and not group.settled
    actions = member.on_group(NAMES[1], group, 3.0)
    assert rounds.Send(NAMES[1], Kind.DIGEST, Digest(group.id, HELD, 0)) in actions


def test_one_of_two_that_lacks_the_last_leader_waits_for_a_witness() -> None:
    core = core_of(NAMES[1], NAMES[:2])
    core.on_ready(arrival(*range(6)), 0.0)
    actions = core.on_peer_lost(LEADER, 1.0)
    assert rounds.AskGone((LEADER,)) in actions and core.group is None
    assert entered(core.on_gone(LEADER, 2.0)).members == (NAMES[1],)


# -- lineages that meet ------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["gathering", "exchanging"])
def test_the_lower_of_two_lineages_gives_way_and_the_higher_one_tells(phase: str) -> None:
    low, high = core_of(LEADER, NAMES[:1]), core_of(LEADER, NAMES[:1])
    low.lineage, high.lineage = "1", "2"
    if phase == "exchanging":
        low.on_ready(arrival(*range(6)), 0.0)
        high.on_ready(arrival(*range(6)), 0.0)
    (told,) = high.on_arrive("x", replace(arrival(), lineage="1"), 1.0)
    assert isinstance(told, rounds.Send) and isinstance(told.body, Arrival) and told.body.lineage == "2"
    actions = low.on_arrive("x", told.body, 1.0)
    assert actions[-1] == rounds.Diverged("x", 0, "2")
    assert low.is_out and low.tick(100.0) == []
    low.begin(0, NAMES[:1], "2")
    assert not low.is_out


def test_a_member_one_step_ahead_is_asked_for_its_commit_and_is_no_divergence() -> None:
    core = core_of(NAMES[2])
    core.on_ready(arrival(), 0.0)
    ahead = Arrival(1, "q", (), 0, lineage=next_lineage("", "g", "d"))
    (asked,) = core.on_arrive(NAMES[1], ahead, 1.0)
    assert isinstance(asked, rounds.Send) and asked.kind is Kind.ARRIVE
    assert core.on_arrive(NAMES[1], ahead, 1.5) == [] and not core.is_out
    assert isinstance(core.on_commit(NAMES[1], commit_of(core), 2.0)[-1], rounds.OutOfStep)


def test_a_member_two_steps_ahead_cannot_help_with_a_commit() -> None:
    core = core_of(NAMES[2])
    assert core.on_arrive(NAMES[1], Arrival(2, "q", (), 0, lineage="z"), 1.0)[-1] == rounds.Diverged(
        NAMES[1], 2, "z"
    )


def test_a_commit_of_another_lineage_is_never_applied() -> None:
    core = core_of(NAMES[1], NAMES[:3])
    out = core.on_commit(NAMES[2], commit_of(core, lineage="other"), 1.0)[-1]
    assert isinstance(out, rounds.Diverged) and out.step == 1


def test_whoever_is_out_says_so_to_all() -> None:
    core = core_of(NAMES[2])
    actions = core.on_commit(NAMES[1], commit_of(core, roster=NAMES[1:2]), 1.0)
    told = {a.peer: a.body for a in actions if isinstance(a, rounds.Send)}
    assert set(told) == set(NAMES[:2]) and told[LEADER] == Failure("", "other", (NAMES[2],), 1)
    other = core_of(NAMES[1])
    other.on_failed(NAMES[2], Failure("", "other", (NAMES[2],), 1), 1.0)
    assert NAMES[2] not in other.present


def test_the_plan_of_a_commit_that_was_repeated_by_a_later_leader_is_taken_over() -> None:
    core = core_of(NAMES[1], NAMES[1:2])
    group = entered(core.on_ready(arrival(*range(6)), 0.0))
    actions = core.on_exchanged(group.id, "d", 0.0)
    commit = next(a.commit for a in actions if isinstance(a, rounds.Apply))
    core.on_applied(commit, 1.0)
    later = replace(commit, attempt=commit.attempt + 1, plan=b"another")
    assert core.on_commit(NAMES[2], later, 2.0) == [rounds.Replan(later)]
    assert core.on_commit(NAMES[2], later, 3.0) == []
    assert core.on_commit(NAMES[2], commit, 3.0) == [rounds.Send(NAMES[2], Kind.COMMIT, later)]


def test_begin_forgets_everything_of_the_rounds_and_not_who_is_lost() -> None:
    core, _ = exchanging()
    core.on_peer_lost(NAMES[3], 1.0)
    core.begin(5, NAMES, "lineage")
    assert (core.step, core.lineage, core.attempt, core.group) == (5, "lineage", 0, None)
    assert core.phase is rounds.Phase.GATHERING and NAMES[3] not in core.present and LEADER in core.present
