"""The shell of a stage's rounds: what it does between two attempts, and with frames that came too early."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peers import rounds
from peers.averaging import Averaging
from peers.corrections import Corrections
from peers.engine import Engine
from peers.frames import Frame, FrameError, Kind
from peers.questions import Questions
from peers.round_messages import Arrival, Commit, Group, compact
from peers.round_work import StepSizes
from swarm.anchor.config import NoCorrectorConfig
from swarm.gradient.chunk import FloatChunk
from swarm.gradient.outer_config import Overlap
from swarm.gradient.plain import PlainCompressor
from swarm.gradient.robust import RobustConfig
from swarm.model.trainable import TrainableSet
from swarm.plan import Plan, Slot

ME, OTHER = "a" * 8, "b" * 8
PLAN = Plan(
    step=0,
    attempt=0,
    group="",
    rows_per_microbatch=1,
    slots=(Slot(number=0, samples=(0, 1)),),
    prior_versions=(),
    prior_hashes=(),
)
KEYS = compact(PLAN.keys())


class Owner:
    """Remembers what the rounds ask of it."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def freeze(self, is_frozen: bool) -> None:
        """See RoundsOwner."""
        self.done.append(("freeze", is_frozen))

    def on_attempt(self) -> None:
        """See RoundsOwner."""
        self.done.append(("attempt", True))

    def own_tokens(self) -> int:
        """See RoundsOwner."""
        return 2

    def seal(self, step: int) -> None:
        """See RoundsOwner."""
        self.done.append(("seal", step))

    def check_commit(self, commit: Commit) -> None:
        """See RoundsOwner. No plan is a good one here."""
        raise FrameError("plan", "not a plan")


def averaging(tasks: asyncio.TaskGroup, owner: Owner, stage: int = 0) -> Averaging:
    core = rounds.RoundCore(run_id="run", run_seed=0, stage=stage, me=ME, make_plan=lambda *_: (b"", ()))
    core.begin(0, (ME, OTHER))
    core.on_plan(PLAN.digest(), frozenset(KEYS), 0.0)
    return Averaging(
        core=core,
        compute=SimpleNamespace(
            trainable=SimpleNamespace(numel=8),
            outer=None,
            overlap=Overlap(0, 100),
            compressor=PlainCompressor(8, FloatChunk("fp32"), False),
        ),
        engine=Engine(),
        links=SimpleNamespace(me=ME, get=lambda peer: None),  # type: ignore[arg-type]
        questions=Questions(),
        tasks=tasks,
        updates=None,  # type: ignore[arg-type]
        run_id="run",
        robust=RobustConfig(),
        sizes=StepSizes(microbatch=4, step=8),
        owner=owner,  # type: ignore[arg-type]
        corrections=Corrections(NoCorrectorConfig(), stage, TrainableSet.of({}), "cpu"),
    )


def run(scenario: Any) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            before = asyncio.all_tasks()
            await scenario(tasks)
            for task in asyncio.all_tasks() - before:
                task.cancel()

    asyncio.run(main())


def test_nothing_is_released_from_one_attempt_straight_into_the_next() -> None:
    """A replay that was held back would reach the accumulator of a group that does not know of it."""

    async def scenario(tasks: asyncio.TaskGroup) -> None:
        owner = Owner()
        shell = averaging(tasks, owner)
        shell.run([rounds.Freeze(True)])
        shell.run([rounds.CancelExchange(), rounds.Freeze(False), rounds.Freeze(True)])
        assert owner.done == [("freeze", True), ("freeze", True)]
        shell.run([rounds.Freeze(False)])
        assert owner.done[-1] == ("freeze", False)

    run(scenario)


def test_a_ballot_on_an_average_is_no_new_average() -> None:
    """Replays taken since the average was made are not part of it, and not of what its ledger says."""

    async def scenario(tasks: asyncio.TaskGroup) -> None:
        owner = Owner()
        shell = averaging(tasks, owner)
        arrival = Arrival(0, PLAN.digest(), KEYS, 2)
        ledgers = ("", arrival.ledger_hash)
        shell.on_ready(arrival)
        group = Group("g", 0, 1, OTHER, (OTHER, ME), (0, 2), ledgers, PLAN.digest(), lineage="")
        shell.run(shell.core.on_group(OTHER, group, 1.0))
        assert owner.done == [("freeze", True), ("attempt", True)]
        shell.run(shell.core.on_exchanged("g", "d" * 64, 1.5))
        shell.run(shell.core.on_peer_lost(OTHER, 2.0))
        shell.run(shell.core.on_gone(OTHER, 2.1))
        shell.on_ready(arrival)
        assert [what for what in owner.done if what[0] != "freeze"] == [("attempt", True), ("seal", 0)]
        assert owner.done[-2:] == [("freeze", True), ("seal", 0)]

    run(scenario)


def test_a_report_is_taken_back_before_its_group_and_not_after() -> None:
    async def scenario(tasks: asyncio.TaskGroup) -> None:
        shell = averaging(tasks, Owner())
        arrival = Arrival(0, PLAN.digest(), KEYS, 2)
        shell.on_ready(arrival)
        shell.on_unready(PLAN.digest())
        group = Group(
            "g", 0, 1, OTHER, (OTHER, ME), (0, 2), ("", arrival.ledger_hash), PLAN.digest(), lineage=""
        )
        shell.run(shell.core.on_group(OTHER, group, 1.0))
        assert shell.core.phase.value == "gathering"
        shell.on_ready(arrival)
        shell.run(shell.core.on_group(OTHER, group, 2.0))
        assert shell.core.phase.value == "exchanging"
        shell.on_unready(PLAN.digest())
        assert shell.core.phase.value == "exchanging"

    run(scenario)


def test_an_early_frame_that_does_not_fit_its_group_stops_nothing() -> None:
    async def scenario(tasks: asyncio.TaskGroup) -> None:
        shell = averaging(tasks, Owner())
        part = Frame(Kind.PART, {"group": "g", "chunk": 0}, [memoryview(bytes(3))])
        shell.on_frame(OTHER, part)
        group = Group("g", 0, 1, OTHER, (OTHER, ME), (1, 2), ("", ""), PLAN.digest())
        shell.run([rounds.Exchange(group, 1.0)])
        assert shell._exchange is not None

    run(scenario)


def test_a_weight_beyond_the_work_behind_it_is_refused() -> None:
    """And whoever reports one leads no group of the step."""

    async def scenario(tasks: asyncio.TaskGroup) -> None:
        shell = averaging(tasks, Owner())
        for weight, is_fine in ((4 * len(KEYS), True), (4 * len(KEYS) + 1, False), (-1, False)):
            frame = Frame(Kind.ARRIVE, Arrival(0, PLAN.digest(), KEYS, weight).header())
            if is_fine:
                shell.on_frame(OTHER, frame)
                assert shell.core.leader == OTHER
            else:
                with pytest.raises(FrameError):
                    shell.on_frame(OTHER, frame)
                assert shell.core.leader == ME

    run(scenario)


@pytest.mark.parametrize("step", [0, 1])
def test_a_commit_with_a_bad_plan_is_refused_also_for_the_step_before(step: int) -> None:
    async def scenario(tasks: asyncio.TaskGroup) -> None:
        shell = averaging(tasks, Owner())
        shell.core.begin(step, (ME, OTHER))
        commit = Commit("g", 0, 1, "d", OTHER, (OTHER, ME), plan=b"x", sources=(ME,) * 9)
        with pytest.raises(FrameError):
            shell.on_frame(OTHER, Frame(Kind.COMMIT, commit.header()))

    run(scenario)


def test_a_sketch_of_earlier_weights_is_forgotten() -> None:
    async def scenario(tasks: asyncio.TaskGroup) -> None:
        shell = averaging(tasks, Owner())
        shell.sketch = torch.zeros(1).numpy().tobytes().hex()
        shell.begin(3, (ME,), "line", ())
        assert shell.sketch == ""

    run(scenario)
