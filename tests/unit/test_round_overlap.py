"""Averages that travel while the next steps run: applied one step (or more) later, and otherwise the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.engine import Engine
from peers.exchange import ExchangeError
from peers.frames import FrameError
from peers.round_messages import Commit, Group, Held
from peers.updates import UpdateError, apply_update, read_update, write_update
from swarm.gradient.averaging import AveragingConfig
from swarm.gradient.config import compressor_config
from swarm.gradient.outer_config import OUTERS, Overlap
from swarm.manifest import RunManifest
from swarm.optim import StageOptimizer
from tests.kit.members import running_engine, stage_compute, stage_run
from tests.kit.replicas import Replicas, weights_of

STEPS = 7
COUNTS = [(5, 3), (4, 0), (2, 6), (1, 1), (0, 7), (3, 3), (8, 2)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine() as engine:
        yield engine


def make_run(folder: Path, outer: dict[str, Any], compressor: str = "fp32") -> RunManifest:
    averaging = AveragingConfig(compressor=compressor_config(compressor), outer=OUTERS.validate_python(outer))
    return stage_run(folder, averaging=averaging, total_steps=STEPS, layers=2)


EVERY_STEP = {"name": "every_step", "overlap": 1}


@given(steps=st.integers(0, 5), total=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_every_step_is_settled_once_or_waits_for_the_end(steps: int, total: int) -> None:
    overlap = Overlap(steps, total)
    settled = [found for step in range(total) if (found := overlap.settled(step)) is not None]
    waiting = [step for step in range(total) if overlap.waits(step)]
    assert sorted(settled + waiting) == list(range(total)) and settled[-1] == total - 1
    for step in range(total):
        assert overlap.travels(step) == (steps > 0 and step in settled and step != total - 1)
        if overlap.travels(step):
            assert overlap.settled(step + steps) == step


def test_gradients_are_applied_a_step_late_and_the_last_two_together(engine: Engine, tmp_path: Path) -> None:
    """Against an optimizer and a delay written out here."""
    manifest = make_run(tmp_path, EVERY_STEP)
    replicas = Replicas(manifest, tmp_path, engine)
    compute: Any = replicas.computes[replicas.names[0]]
    shapes = [torch.Size(shape) for shape in compute.trainable.shapes]
    oracle = StageOptimizer(manifest.optimizer, weights_of(compute), shapes, 2)

    def mean(step: int) -> torch.Tensor:
        sums = (
            count * replicas.gradient(name, step)
            for name, count in zip(replicas.names, COUNTS[step], strict=True)
        )
        return sum(sums, torch.zeros(()))

    for step in range(STEPS):
        asyncio.run(replicas.step(step, COUNTS[step]))
        if step == STEPS - 1:
            tokens = sum(COUNTS[-1]) + sum(COUNTS[-2])
            oracle.apply((mean(STEPS - 2) + mean(STEPS - 1)) / tokens, step, STEPS)
        elif step:
            oracle.apply(mean(step - 1) / sum(COUNTS[step - 1]), step, STEPS)
        for weights in replicas.weights():
            torch.testing.assert_close(weights, oracle.master, rtol=1e-4, atol=1e-5)
    assert replicas.travelled == list(range(STEPS - 2))
    assert torch.equal(*replicas.weights())


@pytest.mark.parametrize("name", ["diloco", "streaming_diloco", "sparta"])
def test_differences_are_applied_later_and_meet_what_was_trained_meanwhile(
    engine: Engine, tmp_path: Path, name: str
) -> None:
    """Against optimizers and outer steps written out here: two steps of overlap, averages every three."""
    fragments = {"fragments": 2, "every": 6} if name != "diloco" else {"every": 3}
    manifest = make_run(tmp_path, {"name": name, "overlap": 2, **fragments})
    replicas = Replicas(manifest, tmp_path, engine)
    outer: Any = replicas.computes[replicas.names[0]].outer
    compute: Any = replicas.computes[replicas.names[0]]
    shared = weights_of(compute)
    rate, mu, keep = (1.0, 0.0, 0.0) if name == "sparta" else (0.7, 0.9, 0.5)
    momentum = torch.zeros_like(shared)
    shapes = [torch.Size(shape) for shape in compute.trainable.shapes]
    oracles = [StageOptimizer(manifest.optimizer, shared.clone(), shapes, 2) for _ in replicas.names]
    owed: tuple[int, torch.Tensor, list[torch.Tensor]] | None = None
    recent: list[tuple[int, ...]] = []
    for step, tokens in enumerate(COUNTS):
        asyncio.run(replicas.step(step, tokens))
        recent.append(tokens)
        for member, oracle, count in zip(replicas.names, oracles, tokens, strict=True):
            if count:
                oracle.apply(replicas.gradient(member, step), step, STEPS)
        is_last = step == STEPS - 1
        if (owed is not None and owed[0] == step) or is_last:
            now = step if is_last else step - 2
            every = fragments["every"]
            sums = [sum(each[i] for each in recent[: now + 1][-every:]) for i in range(2)]
            taken = [oracle.master.clone() for oracle in oracles] if is_last or owed is None else owed[2]
            mask = torch.zeros(shared.numel(), dtype=torch.bool)
            for number in outer.due(now):
                part = torch.ones(outer.fragments[number].trainable.numel, dtype=torch.bool)
                outer.fragments[number].scatter(part, mask)
            difference = sum(w * (shared - t) for w, t in zip(sums, taken, strict=True)) / sum(sums)
            difference = torch.where(mask, difference, torch.zeros(()))
            momentum = torch.where(mask, mu * momentum + difference, momentum)
            new = torch.where(mask, shared - rate * (mu * momentum + difference), shared)
            for oracle, start in zip(oracles, taken, strict=True):
                if is_last:
                    merged = new
                elif name == "sparta":
                    merged = oracle.master + new - start
                else:
                    merged = (1 - keep) * new + keep * oracle.master
                oracle.master.copy_(torch.where(mask, merged, oracle.master))
            shared, owed = new, None
        if (step + 1) % 3 == 0 and step + 2 < STEPS - 1:
            owed = (step + 2, momentum, [oracle.master.clone() for oracle in oracles])
        for member, oracle in zip(replicas.names, oracles, strict=True):
            torch.testing.assert_close(
                weights_of(replicas.computes[member]), oracle.master, rtol=1e-4, atol=1e-5
            )
    assert replicas.travelled == [2] and torch.equal(*replicas.weights())


@pytest.mark.parametrize("compressor", ["fp16", "powersgd", "topk"])
@pytest.mark.parametrize(
    "outer",
    [
        EVERY_STEP,
        {"name": "streaming_diloco", "every": 2, "fragments": 2, "overlap": 1},
        {"name": "sparta", "every": 2, "fragments": 2, "overlap": 1},
    ],
)
def test_a_joiner_needs_a_snapshot_and_the_updates_only(
    engine: Engine, tmp_path: Path, outer: dict[str, Any], compressor: str
) -> None:
    if outer["name"] == "sparta" and compressor == "powersgd":
        with pytest.raises(ValueError, match="slices are none"):
            make_run(tmp_path, outer, compressor)
        return
    manifest = make_run(tmp_path, outer, compressor)
    replicas = Replicas(manifest, tmp_path, engine)
    joiner, late = stage_compute(manifest, tmp_path), stage_compute(manifest, tmp_path)
    for step in range(STEPS):
        if step == 4:  # an average is on its way
            late.load_state(replicas.computes[replicas.names[1]].state())
        asyncio.run(replicas.step(step, (3, 5)))
        write_update(tmp_path / "update", replicas.updates[step])
        update = read_update(tmp_path / "update")
        update.check_content()
        for follower in (joiner, late) if step >= 4 else (joiner,):
            apply_update(follower, update)
            assert follower.sketch() == replicas.computes[replicas.names[0]].sketch()
            if update.way == "exchanged" and follower.outer is not None:
                assert torch.equal(weights_of(follower), follower.outer.globals)
    expected = replicas.computes[replicas.names[0]].state()
    for follower in (joiner, late):
        state = follower.state()
        shared = [key for key in state if outer["name"] == "every_step" or not key.startswith("optimizer.")]
        assert all(torch.equal(state[key], expected[key]) for key in shared)


@pytest.mark.parametrize("outer", [EVERY_STEP, {"name": "diloco", "every": 2, "overlap": 1}])
def test_what_did_not_arrive_is_exchanged_again_and_nothing_is_lost(
    engine: Engine, tmp_path: Path, outer: dict[str, Any]
) -> None:
    """Also through attempts that fail. Compressors whose bits do not depend on a seed give the same weights."""
    manifest = make_run(tmp_path, outer, "powersgd")
    calm, troubled = (Replicas(manifest, tmp_path, engine) for _ in range(2))
    for step in range(STEPS):
        asyncio.run(calm.step(step, COUNTS[step]))
        asyncio.run(troubled.step(step, COUNTS[step], attempts=2, is_lost=step % 2 == 1))
    assert len(troubled.travelled) < len(calm.travelled)
    assert any(meetings for meetings in troubled.meetings[:-2])
    assert not any(meetings for meetings in calm.meetings[:-1])
    for name in calm.names:
        assert torch.equal(weights_of(calm.computes[name]), weights_of(troubled.computes[name]))
        assert calm.computes[name].compressor.digest() == troubled.computes[name].compressor.digest()


def test_a_member_that_joined_since_owes_nothing(engine: Engine, tmp_path: Path) -> None:
    """What the others owe is exchanged in the open, with it as a reducer."""
    manifest = make_run(tmp_path, EVERY_STEP)
    replicas = Replicas(manifest, tmp_path, engine)
    for step in range(3):
        asyncio.run(replicas.step(step, (3, 5)))
    fresh = replicas.names[1]
    state = replicas.computes[replicas.names[0]].state()
    replicas.computes[fresh].load_state(state)
    replicas.works[fresh].restart()
    before = weights_of(replicas.computes[fresh])
    asyncio.run(replicas.step(3, (2, 4)))
    assert replicas.meetings[3] == {replicas.names}
    assert torch.equal(*replicas.weights()) and not torch.equal(before, replicas.weights()[0])
    asyncio.run(replicas.step(4, (2, 4)))
    assert replicas.meetings[4] == set()


@pytest.mark.parametrize("outer", [EVERY_STEP, {"name": "diloco", "every": 2, "overlap": 1}])
def test_a_member_owes_what_it_weighed_and_no_more(
    engine: Engine, tmp_path: Path, outer: dict[str, Any]
) -> None:
    """By the committed group; one that is not known here is bounded by the run's sizes."""
    replicas = Replicas(make_run(tmp_path, outer), tmp_path, engine)
    weights = [asyncio.run(replicas.step(step, tokens)) for step, tokens in enumerate(COUNTS[:2])]
    work, (one, other) = replicas.works["member-0"], replicas.names
    assert [work.most_owed_by(name, 2, None) for name in (one, other, "stranger")] == [*weights[1], 0]
    assert work.most_owed_by(one, 0, None) == work.most_owed_by(one, STEPS - 1, None) == 0
    assert work.most_owed_by(one, 4, None) == (work.most_owed if work.settled(4) is not None else 0)
    group = Group("g", 3, 0, one, replicas.names, (7, 9), ("", ""), "")
    assert [work.most_owed_by(name, 4, group) for name in (one, other)] == [7, 9]


def test_what_is_replayed_after_an_attempt_is_no_part_of_what_it_owes(engine: Engine, tmp_path: Path) -> None:
    """An attempt may be committed by a later leader, when the ledger has grown for the next one."""
    replicas = Replicas(make_run(tmp_path, EVERY_STEP), tmp_path, engine)
    group = Group("g", 0, 0, "member-0", replicas.names, (3, 5), ("", ""), "")
    for name, tokens in zip(replicas.names, group.weights, strict=True):
        replicas.accumulate(name, 0, tokens)
    made = asyncio.run(replicas.attempt(group, group.weights))
    replicas.accumulate("member-0", 0, 8)
    work = replicas.works["member-0"]
    asyncio.run(work.apply(made[0], Commit("g", 0, 0, made[0].digest, "member-0", replicas.names, weight=8)))
    assert work._owed is not None and work._owed.weight == 3
    torch.testing.assert_close(work._owed.vector, replicas.gradient("member-0", 0))


def test_what_is_replayed_after_an_attempt_is_no_part_of_a_local_step(engine: Engine, tmp_path: Path) -> None:
    calm, grown = (
        Replicas(make_run(tmp_path, {"name": "diloco", "every": 4}), tmp_path, engine) for _ in range(2)
    )
    group = Group("g", 0, 0, "member-0", calm.names, (3, 5), ("", ""), "")
    for replicas in (calm, grown):
        for name, tokens in zip(replicas.names, group.weights, strict=True):
            replicas.accumulate(name, 0, tokens)
        made = asyncio.run(replicas.attempt(group, group.weights))
        if replicas is grown:
            replicas.accumulate("member-0", 0, 8)
        commit = Commit("g", 0, 0, made[0].digest, "member-0", replicas.names, weight=8)
        asyncio.run(replicas.works["member-0"].apply(made[0], commit))
    assert torch.equal(*(weights_of(replicas.computes["member-0"]) for replicas in (calm, grown)))


@pytest.mark.parametrize("outer", [EVERY_STEP, {"name": "diloco", "every": 2}])
def test_a_group_whose_members_weigh_more_than_a_step_can_is_refused(
    engine: Engine, tmp_path: Path, outer: dict[str, Any]
) -> None:
    """A leader could name any weight for its own part: each member knows only its own, and that of all."""
    replicas = Replicas(make_run(tmp_path, outer), tmp_path, engine)
    for step, tokens in enumerate(COUNTS[:3]):
        asyncio.run(replicas.step(step, tokens))
    work, names = replicas.works["member-1"], replicas.names
    most = work.most_weight_of_all(3)

    def group(*weights: int, owed: tuple[int, ...] = ()) -> Group:
        return Group("g", 3, 0, names[0], names, weights, ("", ""), "", owed=owed)

    work.check_group(group(most - 5, 5), None)
    with pytest.raises(FrameError, match="for a step of at most"):
        work.check_group(group(most - 4, 5), None)
    held = Held("h", "d", 0, "h", names, names[1], names, weight=8, lost=())
    work.check_group(replace(group(most, most), held=held), None)
    can_owe = [work.most_owed_by(name, 3, None) for name in names]
    work.check_group(group(1, 1, owed=tuple(can_owe)), None)
    with pytest.raises(FrameError, match="owes"):
        work.check_group(group(1, 1, owed=(can_owe[0] + 1, can_owe[1])), None)


def test_local_steps_weigh_what_their_groups_had(engine: Engine, tmp_path: Path) -> None:
    replicas = Replicas(make_run(tmp_path, {"name": "diloco", "every": 4}), tmp_path, engine)
    for step, tokens in enumerate(COUNTS[:3]):
        asyncio.run(replicas.step(step, tokens))
    work, sizes = replicas.works["member-1"], replicas.works["member-1"]._sizes
    earlier = [sum(column) for column in zip(*COUNTS[:3], strict=True)]
    for name, weighed in zip(replicas.names, earlier, strict=True):
        assert work.most_weight(3, 1, name, None) == sizes.microbatch + weighed
    # Of somebody with another history, or groups that this member does not know, nothing is known.
    assert work.most_weight(3, 1, "", None) == sizes.microbatch + 3 * sizes.step
    work.restart()
    assert work.most_weight(3, 1, replicas.names[0], None) == sizes.microbatch + 3 * sizes.step


def test_an_average_that_is_not_here_fails_the_attempt(engine: Engine, tmp_path: Path) -> None:
    replicas = Replicas(make_run(tmp_path, EVERY_STEP), tmp_path, engine)
    asyncio.run(replicas.step(0, (3, 5)))
    group = Group("g", 1, 0, "member-0", replicas.names, (1, 1), ("", ""), "", owed=(3, 5), settled="a" * 64)
    with pytest.raises(ExchangeError, match="is not here"):
        asyncio.run(replicas.works["member-1"].average(group, None, "", 1))


def test_an_update_of_an_average_before_there_was_one_is_refused(engine: Engine, tmp_path: Path) -> None:
    replicas = Replicas(make_run(tmp_path / "plain", {"name": "every_step"}), tmp_path / "plain", engine)
    asyncio.run(replicas.step(0, (3, 5)))
    late = stage_compute(make_run(tmp_path, EVERY_STEP), tmp_path)
    with pytest.raises(UpdateError, match="before there was one"):
        apply_update(late, replicas.updates[0])
