"""Volunteers who come while the run is under way: each becomes a member that votes and works."""

from __future__ import annotations

from itertools import combinations

import pytest

from tests.kit.evaluation import snapshot, unequal_tensors
from tests.kit.ledger import audit
from tests.kit.swarm import Member, Swarm, wait_for

pytestmark = pytest.mark.e2e
STAGES = 3


def has_worked(member: Member) -> bool:
    """Whether a step was committed with the peer in its roster and microbatches in its ledger."""
    return any(line["keys"] and line["peer"] in line["roster"] for line in member.ledger())


def newest_common_snapshots(swarm: Swarm, names: list[str]) -> dict[str, int]:
    """Versions of snapshots that all of these have."""
    found = [
        {int(p.stem.rpartition("-")[2]) for p in (swarm.folder / name).rglob("*-version-*.safetensors")}
        for name in names
    ]
    return {"version": max(set.intersection(*found), default=0)}


@pytest.mark.parametrize(
    "stages_joined",
    [
        pytest.param((1, 1, 1), id="one stage"),
        pytest.param((0, 1, 2), id="every stage", marks=pytest.mark.slow),
    ],
)
def test_three_joiners_at_once_become_voting_members(swarm: Swarm, stages_joined: tuple[int, ...]) -> None:
    swarm.make_run(
        stages=STAGES,
        replicas=1,
        steps=1_000_000,
        samples_per_step=32,
        codec_values="fp32",
        snapshot_every=10,
    )
    swarm.seed()
    for stage in range(STAGES):
        swarm.join(stage, f"{stage}")
    wait_for(lambda: swarm.members["1"].step >= 12, 90.0, "a snapshot", swarm)
    joiners = [
        swarm.join(stage, f"joiner-{number}", serve_after_s=600.0)
        for number, stage in enumerate(stages_joined)
    ]
    wait_for(lambda: all(has_worked(joiner) for joiner in joiners), 180.0, "all three to work", swarm)
    trainers = [name for name in swarm.members if name != "seed"]
    assert [name for name in trainers if swarm.code(name) is not None] == []

    groups = [
        names
        for stage in range(STAGES)
        if len(names := [name for name in trainers if swarm.members[name].stage == stage]) > 1
    ]
    before = {tuple(names): newest_common_snapshots(swarm, names)["version"] for names in groups}
    for names in groups:
        wait_for(
            lambda n=names: newest_common_snapshots(swarm, n)["version"] > max(before[tuple(n)], 0),
            60.0,
            "a snapshot of all replicas",
            swarm,
        )
    swarm.kill_all()
    for names in groups:
        version = newest_common_snapshots(swarm, names)["version"]
        for pair in combinations(names, 2):
            stage = swarm.members[pair[0]].stage
            assert stage is not None
            files = [snapshot(swarm.folder / name, stage, version) for name in pair]
            assert unequal_tensors([file for file in files if file is not None]) == [], (pair, version)
    newest = {s: max(line["step"] for line in swarm.members[f"{s}"].ledger()) for s in range(STAGES)}
    # The end came between two members' lines of one step: the newest of each stage says nothing.
    ledgers = {
        name: [line for line in swarm.members[name].ledger() if line["step"] < newest[line["stage"]] - 1]
        for name in trainers
    }
    found = audit(ledgers, stages=STAGES)
    assert found.is_exact, found.problems()
    assert not found.lost
