"""Mistakes of a volunteer: one clear message, exit code 2, within the deadline, nothing left behind."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import psutil
import pytest

from dht.identity import Identity
from peers.config import ComputeMode
from swarm.manifest import RunManifest, create_owner_key, load_owner_key
from tests.kit.swarm import LOOPBACK, Member, Swarm, children_of, wait_for

pytestmark = pytest.mark.e2e


def expect_refusal(swarm: Swarm, member: Member, *words: str, deadline_s: float = 60.0) -> str:
    """The peer ends with code 2 and one message holding these words; returns the message."""
    code = swarm.wait_exits([member.name], deadline_s)[member.name]
    errors = [note for note in member.notes if note.startswith("error: ")]
    assert code == 2, swarm.report()
    assert len(errors) == 1, errors
    assert "Traceback" not in member.log
    missing = [word for word in words if word not in errors[0]]
    assert not missing, f"{missing} not in: {errors[0]}"
    return errors[0]


@pytest.fixture
def waiting_swarm(swarm: Swarm) -> Swarm:
    """A run that has not started: a seed and nobody else."""
    swarm.make_run(stages=2, replicas=1, steps=3)
    swarm.seed()
    return swarm


def test_a_stage_outside_the_run_is_refused(waiting_swarm: Swarm) -> None:
    expect_refusal(waiting_swarm, waiting_swarm.join(7, "a"), "--stage 7", "0 to 1")


def test_an_unreachable_seed_is_reported_with_every_cause(waiting_swarm: Swarm) -> None:
    peer_id = waiting_swarm.address.rpartition("/")[2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"/ip4/127.0.0.1/tcp/{free.getsockname()[1]}/p2p/{peer_id}"
    member = waiting_swarm.join(0, "a", initial_peers=(closed, "/ip4/127.0.0.1/nonsense"))
    expect_refusal(waiting_swarm, member, closed, "refused", "/ip4/127.0.0.1/nonsense", "malformed")


def test_one_good_address_among_bad_ones_suffices(waiting_swarm: Swarm) -> None:
    bad = "/ip4/127.0.0.1/tcp/1/p2p/" + waiting_swarm.address.rpartition("/")[2]
    addresses = (bad, waiting_swarm.address)
    waiting_swarm.join(0, "a", initial_peers=addresses)
    waiting_swarm.join(1, "b", initial_peers=addresses)
    assert waiting_swarm.wait_exits(["a", "b"], 90.0) == {"a": 0, "b": 0}, waiting_swarm.report()
    assert any(bad in note and "refused" in note for note in waiting_swarm.members["a"].notes)


def test_a_wrong_peer_id_is_named_with_the_right_one(waiting_swarm: Swarm, tmp_path: Path) -> None:
    transport, _, actual = waiting_swarm.address.rpartition("/p2p/")
    expected = Identity.load_or_create(tmp_path / "other.key").peer_id
    member = waiting_swarm.join(0, "a", initial_peers=(f"{transport}/p2p/{expected}",))
    expect_refusal(waiting_swarm, member, expected, actual)


def test_a_manifest_of_another_owner_is_refused(waiting_swarm: Swarm) -> None:
    expect_refusal(waiting_swarm, waiting_swarm.join(0, "a", run="0" * 40), "0" * 40)


def test_a_manifest_that_was_changed_after_signing_is_refused(swarm: Swarm) -> None:
    run = swarm.make_run(stages=2, replicas=1, steps=3)
    manifest = RunManifest.load(run / "manifest.yaml")
    manifest.model_copy(update={"total_steps": 1000}).save(run / "manifest.yaml")
    from peers.config import PeerConfig

    member = swarm.start("seed", PeerConfig(stage=None, run_dir=run, listen=LOOPBACK))
    expect_refusal(swarm, member, "not signed by its owner", manifest.run_id)


def test_a_run_of_another_protocol_version_is_refused(swarm: Swarm) -> None:
    run = swarm.make_run(stages=2, replicas=1, steps=3)
    manifest = RunManifest.load(run / "manifest.yaml")
    newer = manifest.model_copy(update={"protocol": 99}).signed(load_owner_key(run / "owner.key"))
    newer.save(run / "manifest.yaml")
    from peers.config import PeerConfig

    member = swarm.start("seed", PeerConfig(stage=None, run_dir=run, listen=LOOPBACK))
    expect_refusal(swarm, member, "protocol version 99", "install")


def test_an_identity_that_is_running_is_refused(waiting_swarm: Swarm, tmp_path: Path) -> None:
    key = tmp_path / "peer.key"
    first = waiting_swarm.join(0, "a", identity=key)
    wait_for(lambda: first.last("ready") is not None, 60.0, "the first peer", waiting_swarm)
    expect_refusal(waiting_swarm, waiting_swarm.join(0, "b", identity=key), str(key), str(first.pid))


def test_a_taken_port_is_named(waiting_swarm: Swarm) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        member = waiting_swarm.join(0, "a", listen=(f"/ip4/127.0.0.1/tcp/{port}",))
        expect_refusal(waiting_swarm, member, str(port))


def test_a_taken_metrics_port_is_named(waiting_swarm: Swarm) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        expect_refusal(waiting_swarm, waiting_swarm.join(0, "a", metrics_port=port), str(port))


def test_a_peer_that_comes_after_the_last_step_is_told_so(swarm: Swarm) -> None:
    swarm.make_run(stages=2, replicas=1, steps=2)
    swarm.seed()
    swarm.join(0, "a", serve_after_s=120.0)
    swarm.join(1, "b", serve_after_s=120.0)
    swarm.wait_finished(["a", "b"], 90.0)
    expect_refusal(swarm, swarm.join(1, "late"), "the run is finished")
    assert swarm.code("a") is None, "the run goes on undisturbed"


def test_a_signal_ends_a_training_peer_cleanly_within_ten_seconds(swarm: Swarm) -> None:
    swarm.make_run(stages=2, replicas=2, steps=10_000)
    swarm.seed()
    for stage in range(2):
        for replica in "ab":
            swarm.join(stage, f"{replica}{stage}")
    leaving, staying = swarm.members["a1"], swarm.members["b1"]
    wait_for(lambda: leaving.step >= 2, 90.0, "two steps", swarm)
    children = children_of(leaving.pid)
    runtime = [Path(c.cmdline()[-1]) for c in map(psutil.Process, children) if "p2pd" in c.name()]
    assert runtime, "a peer has a p2pd"
    swarm.signal("a1", signal.SIGINT)
    assert swarm.wait_exits(["a1"], 20.0) == {"a1": 0}, (
        swarm.report()
    )  # by force it ends after 9.5 s, with 130
    assert leaving.last("summary")["exit_reason"] == "interrupted"
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in children), 3.0, "its p2pd to go")
    step = staying.step
    wait_for(lambda: staying.step > step + 2, 30.0, "the replica that stays to go on alone", swarm)


def test_a_killed_peer_leaves_no_process(waiting_swarm: Swarm) -> None:
    member = waiting_swarm.join(0, "a")
    wait_for(lambda: member.last("ready") is not None, 60.0, "the peer", waiting_swarm)
    children = children_of(member.pid)
    assert children
    waiting_swarm.kill("a")
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in children), 5.0, "its p2pd to go")


def test_a_calibrated_peer_needs_no_weights(swarm: Swarm) -> None:
    swarm.make_run(stages=2, replicas=1, steps=3)
    swarm.seed()
    for stage in range(2):
        swarm.join(stage, f"{stage}", compute=ComputeMode(50.0))
    assert swarm.wait_exits(["0", "1"], 90.0) == {"0": 0, "1": 0}, swarm.report()
    assert not list((swarm.folder / "0" / "data").rglob("stage-*.safetensors"))


def test_an_owner_key_is_never_overwritten(tmp_path: Path) -> None:
    create_owner_key(tmp_path / "owner.key")
    assert (tmp_path / "owner.key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        create_owner_key(tmp_path / "owner.key")
