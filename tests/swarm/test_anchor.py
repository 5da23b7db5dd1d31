"""An anchor beside a swarm: it pulls snapshots, fits priors, and nobody waits for it or misses it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from peers.commands.grant import grant_anchors
from peers.config import PeerConfig
from tests.kit.swarm import LOOPBACK, Member, Swarm, wait_for
from tests.swarm.test_priors import NAMES, STAGES, begin, key, priors, still_trains

pytestmark = pytest.mark.e2e


def version_in_force(swarm: Swarm, name: str, boundary: int) -> int:
    return int(priors(swarm, name)["in_force"].get(str(boundary), {}).get("version") or 0)


def passes(member: Member) -> int:
    return int(((member.last("status") or {}).get("anchor") or {}).get("passes") or 0)


def test_swarm_takes_an_anchors_priors_outlives_it_and_takes_another_anchors(
    swarm: Swarm, tmp_path: Path
) -> None:
    first, first_id = key(tmp_path, "first")
    second, second_id = key(tmp_path, "second")
    begin(swarm, (first_id, second_id), steps=5000, snapshot_every=5)
    anchor = swarm.join(None, "anchor", is_anchor=True, identity=first)

    def all_use(version: int) -> bool:
        return all(
            version_in_force(swarm, name, boundary) >= version
            for boundary in range(STAGES - 1)
            for name in NAMES
            if int(name[0]) in (boundary, boundary + 1)
        )

    wait_for(lambda: all_use(1), 90.0, "the first priors", swarm)
    wait_for(lambda: passes(anchor) >= 2 and all_use(2), 90.0, "the second priors", swarm)
    swarm.kill("anchor")
    still_trains(swarm)
    wait_for(
        lambda: all(any("no newer ones come" in note for note in swarm.members[n].notes) for n in NAMES),
        180.0,
        "the age of the priors to be said",
        swarm,
    )
    wait_for(lambda: all(priors(swarm, name)["is_old"] for name in NAMES), 120.0, "status to say so", swarm)
    in_force = [version_in_force(swarm, name, 0) for name in NAMES if name[0] in "01"]
    other = swarm.join(None, "other", is_anchor=True, identity=second)
    wait_for(lambda: passes(other) >= 1 and all_use(max(in_force) + 1), 90.0, "the other's priors", swarm)
    still_trains(swarm)
    swarm.signal("other", signal.SIGTERM)
    assert swarm.wait_exits(["other"], 20.0) == {"other": 0}, swarm.report()


def test_anchor_leaves_when_the_run_has_ended(swarm: Swarm, tmp_path: Path) -> None:
    path, peer_id = key(tmp_path, "anchor")
    begin(swarm, (peer_id,), steps=30, serve_after_s=600.0)
    member = swarm.join(None, "anchor", is_anchor=True, identity=path)
    assert swarm.wait_exits(["anchor"], 90.0) == {"anchor": 0}, swarm.report()
    assert any("the run is finished" in note for note in member.notes)
    swarm.kill_all()


@pytest.mark.slow
def test_anchor_that_is_granted_while_the_run_trains_is_used_and_ends_when_it_is_revoked(
    swarm: Swarm, tmp_path: Path
) -> None:
    path, peer_id = key(tmp_path, "anchor")
    run_dir = begin(swarm, (), steps=5000)
    swarm.join(None, "too-early", is_anchor=True, identity=path)
    assert swarm.wait_exits(["too-early"], 60.0) == {"too-early": 2}, swarm.report()
    grant_anchors(run_dir, [peer_id], [])
    said = f"the owner has granted anchors: {peer_id[-8:]}"
    wait_for(lambda: all(said in swarm.members[name].notes for name in NAMES), 60.0, "the grant", swarm)
    swarm.kill("seed")  # the peers pass the grant on, and a newcomer finds it
    swarm.address = swarm.members["0-0"].last("ready")["addresses"][0]
    anchor = swarm.join(None, "anchor", is_anchor=True, identity=path)
    near = [name for name in NAMES if name[0] in "01"]
    wait_for(
        lambda: passes(anchor) >= 1 and all(version_in_force(swarm, name, 0) >= 1 for name in near),
        90.0,
        "the granted anchor's prior",
        swarm,
    )
    still_trains(swarm)
    again = PeerConfig(stage=None, run_dir=run_dir, initial_peers=(swarm.address,), listen=LOOPBACK)
    swarm.start("seed-again", again)
    grant_anchors(run_dir, [], [peer_id])
    assert swarm.wait_exits(["anchor"], 60.0) == {"anchor": 2}, swarm.report()
    assert any("has revoked" in note for note in anchor.notes)
    still_trains(swarm)
    # What it made stays in force until others replace it, and serves newcomers too.
    swarm.kill("1-1")
    newcomer = swarm.join(1, "newcomer")
    wait_for(lambda: (newcomer.last("status") or {}).get("microbatches_done", 0) > 0, 90.0, "its work", swarm)
    assert version_in_force(swarm, "newcomer", 0) >= 1


def test_peer_that_the_owner_has_not_named_is_told_so(swarm: Swarm, tmp_path: Path) -> None:
    swarm.make_run(stages=STAGES, replicas=1, steps=3, codec="basis", mask_ratio=50.0)
    swarm.seed()
    path, peer_id = key(tmp_path, "anchor")
    member = swarm.join(None, "anchor", is_anchor=True, identity=path)
    assert swarm.wait_exits(["anchor"], 60.0) == {"anchor": 2}, swarm.report()
    assert [n for n in member.notes if n.startswith("error: ") and peer_id in n and "--grant-anchor" in n]
