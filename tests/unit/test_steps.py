"""What a peer reports of its step, and when it takes a report back or says nothing at all."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

import peers.steps
from peers.frames import Frame, FrameError, Kind
from peers.planning import StalePlanError
from peers.recovery import Recovery
from peers.round_messages import Arrival, Commit
from peers.steps import Steps
from peers.transfer import TransferError
from peers.work_messages import Fence
from swarm.plan import Plan, Slot

ME = "me"
PLAN = Plan(
    step=3,
    attempt=1,
    group="",
    rows_per_microbatch=1,
    slots=(Slot(number=0, samples=(0, 1)),),
    prior_versions=(),
    prior_hashes=(),
)
FIRST, SECOND = PLAN.keys()


class Link:
    """Remembers the kinds of frames that were posted."""

    def __init__(self, stage: int = 1) -> None:
        self.peer, self.hello, self.sent = "other", SimpleNamespace(stage=stage), []  # type: ignore[var-annotated]

    def post(self, kind: Kind, header: dict[str, Any]) -> None:
        """See peers.link."""
        self.sent.append((kind, header))


class World:
    """A peer of stage 1 in the middle of step 3, whose slots have ended."""

    def __init__(self, tasks: Any = None) -> None:
        self.reported: list[Arrival] = []
        self.unready: list[str] = []
        self.gossiped: list[Kind] = []
        self.is_settled = True
        self.assigned: list[int] = []
        self.failures = 0
        self.steps = Steps(
            manifest=SimpleNamespace(total_steps=9),  # type: ignore[arg-type]
            stage=1,
            links=SimpleNamespace(me=ME, gossip=lambda kind, header: self.gossiped.append(kind)),  # type: ignore[arg-type]
            files=self,  # type: ignore[arg-type]
            tasks=tasks,
            is_voting=lambda: True,
        )
        core = SimpleNamespace(plan=PLAN, version=3, ledger={FIRST: 5}, lost=frozenset(), is_settled=True)
        self.core = core
        self.steps.worker = SimpleNamespace(  # type: ignore[assignment]
            core=core, assign=lambda plan, slot, is_replay: self.assigned.append(slot)
        )
        self.steps.averaging = SimpleNamespace(  # type: ignore[assignment]
            core=SimpleNamespace(lineage="line", leader="other", present=[ME]),
            sketch="",
            work=SimpleNamespace(weight=lambda step, tokens: tokens),
            on_ready=self.reported.append,
            on_unready=self.unready.append,
        )
        self.steps.recovery = SimpleNamespace(lost=set(), fenced=set(), clear=lambda: None)  # type: ignore[assignment]
        self.steps.is_in = True
        self.steps.plans.add(PLAN)
        self.steps.ends.add(PLAN.digest(), 0)

    async def ensure_samples(self, samples: object) -> None:
        """RunFiles: nobody has them at first."""
        self.failures += 1
        if self.failures < 3:
            raise TransferError("nobody has the data")


def test_a_key_that_came_after_all_is_not_reported_as_lost() -> None:
    world = World()
    world.steps.recovery.lost.update({(0, 0), (0, 1)})
    world.steps.check_ready()
    assert [(a.keys, a.lost) for a in world.reported] == [(((0, 0),), ((0, 1),))]


def test_a_report_is_taken_back_when_more_work_comes() -> None:
    world = World()
    world.core.is_settled = False
    world.steps.check_ready()
    assert world.unready == [PLAN.digest()]
    assert not world.reported


@pytest.mark.parametrize(
    ("seconds_ago", "fenced", "expected"),
    [(1.0, set(), [ME, "lacks"]), (1.0, {ME}, ["lacks"]), (60.0, set(), [ME]), (60.0, {ME}, ["lacks"])],
)
def test_sources_keep_their_slots_until_records_must_have_told_of_their_priors(
    seconds_ago: float, fenced: set[str], expected: list[str]
) -> None:
    world, given = World(), []
    world.steps.stage, world.steps._adopted_at = 0, time.monotonic() - seconds_ago
    world.steps.averaging.core.leader = ME
    world.steps.averaging.core.present = [ME, "lacks"]
    world.steps.recovery = SimpleNamespace(fenced=fenced, look=lambda: None)  # type: ignore[assignment]
    world.steps.assignments = SimpleNamespace(reassign=lambda plan, able: given.append(able))  # type: ignore[assignment]
    world.steps._priors = SimpleNamespace(  # type: ignore[assignment]
        able_sources=lambda sources, hashes: [each for each in sources if each != "lacks"] or sources
    )
    world.steps.reassign()
    assert given == [expected]


def test_a_peer_that_takes_no_part_repeats_no_old_plans() -> None:
    world, link = World(), Link()
    world.steps.repeat(link)  # type: ignore[arg-type]
    assert [kind for kind, _ in link.sent] == [Kind.PLAN, Kind.STEP_END]
    world.steps.is_in, link.sent = False, []
    world.steps.repeat(link)  # type: ignore[arg-type]
    assert link.sent == []


def test_a_plan_of_a_neighbour_that_is_behind_is_no_offence(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()

    def parse(data: bytes, version: int) -> Plan:
        raise (StalePlanError if data == b"old" else FrameError)("plan", "far")

    monkeypatch.setattr(world.steps.plans, "parse", parse)
    world.steps.on_plan_frame(Frame(Kind.PLAN, {"plan": b"old"}))
    with pytest.raises(FrameError):
        world.steps.on_plan_frame(Frame(Kind.PLAN, {"plan": b"new"}))


def test_work_far_ahead_is_left_to_others() -> None:
    """The peer that sends it is right: it is this one that does not know yet that it is behind."""
    world, link = World(), Link(stage=0)
    key = FIRST.model_copy(update={"step": 5})
    world.steps.on_forward(link, Frame(Kind.FORWARD, {"key": key.pack()}))  # type: ignore[arg-type]
    assert [kind for kind, _ in link.sent] == [Kind.BUSY]
    with pytest.raises(FrameError):
        key = FIRST.model_copy(update={"step": 5000})
        world.steps.on_forward(link, Frame(Kind.FORWARD, {"key": key.pack()}))  # type: ignore[arg-type]


def test_a_source_whose_data_nobody_has_just_now_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(peers.steps, "LIMITS", SimpleNamespace(data_again_s=0.01))
    asyncio.run(world.steps._fetch_and_run(PLAN, 0, False))
    assert (world.assigned, world.failures) == ([0], 3)


def test_a_step_that_does_not_end_asks_for_what_passed_this_peer_by() -> None:
    world = World()
    world.steps.ends.forget(3)
    world.steps.tick(world.steps._nudged_at + 1.0)
    assert world.gossiped == [Kind.STEP_END]  # of the world's making
    world.steps.tick(world.steps._nudged_at + 1000.0)
    assert world.gossiped[1:] == [Kind.QUERY]


def test_a_commit_after_the_last_step_needs_no_plan_and_others_of_stage_0_do() -> None:
    world = World()
    world.steps.stage = 0
    world.steps.check_commit(Commit("g", 8, 1, "d", ME, (ME,)))
    with pytest.raises(FrameError):
        world.steps.check_commit(Commit("g", 7, 1, "d", ME, (ME,)))


def test_a_fence_of_another_plan_comes_too_late() -> None:
    fenced: list[str] = []
    recovery = Recovery(
        stage=0,
        links=SimpleNamespace(me=ME),  # type: ignore[arg-type]
        questions=None,  # type: ignore[arg-type]
        worker=SimpleNamespace(core=SimpleNamespace(plan=PLAN)),  # type: ignore[arg-type]
        averaging=SimpleNamespace(core=SimpleNamespace(roster=("other", ME))),  # type: ignore[arg-type]
        tasks=None,  # type: ignore[arg-type]
        note=fenced.append,
        on_change=lambda: None,
    )
    link: Any = Link(stage=0)
    assert not recovery.on_fence(link, Fence("0" * 64, "third", "key"), is_in=True)
    assert not recovery.fenced
    assert recovery.on_fence(link, Fence(PLAN.digest(), "third", "key"), is_in=True)
    assert recovery.fenced == {"third"}
