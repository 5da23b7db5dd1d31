"""What a peer stands on fails or is used twice: its libp2p daemon, its process, its identity, its port."""

from __future__ import annotations

import os
import re
import shutil
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from peers.limits import LIMITS
from peers.links import short
from tests.kit.swarm import Host, Member, Swarm, children_of, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.fault]


def daemon_of(member: Member) -> int | None:
    """Pid of a peer's p2pd, None while there is none."""
    for pid in children_of(member.pid):
        try:
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE and "p2pd" in Path(process.exe()).name:
                return pid
        except psutil.Error:
            continue
    return None


def runtime_of(pid: int) -> Path:
    """The private folder of a daemon's sockets."""
    listen = next(a for a in psutil.Process(pid).cmdline() if a.startswith("-listen=/unix/"))
    return Path(listen.removeprefix("-listen=/unix")).parent


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def metric(member: Member, name: str) -> float:
    """A figure without labels from the peer's /metrics."""
    url = next(note for note in member.notes if "http://" in note).rpartition("http://")[2]
    with urllib.request.urlopen(f"http://{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.split()[0] == name)


@pytest.fixture(scope="module")
def run_dir(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two stages that waits for two replicas of each."""
    return Swarm(host, tmp_path_factory.mktemp("run")).make_run(stages=2, replicas=2, steps=3)


@pytest.fixture
def waiting(host: Host, tmp_path: Path, run_dir: Path) -> Iterator[Swarm]:
    """A swarm of that run: a seed, and nobody else yet."""
    swarm = Swarm(host, tmp_path, run_dir)
    swarm.seed()
    yield swarm
    swarm.close()


def peer_id(member: Member, swarm: Swarm) -> str:
    """Waits until the peer is ready."""
    wait_for(lambda: member.last("ready") is not None, 60.0, f"{member.name} to be ready", swarm)
    return str(member.last("ready")["addresses"][0].rpartition("/")[2])


def wait_linked(member: Member, peer: str, times: int, swarm: Swarm) -> None:
    """Wait until a peer's log says that the link with another has come up so often."""
    up = re.compile(rf"link to {short(peer)} \(stage \d+\) is up")
    wait_for(
        lambda: len(up.findall(member.log)) >= times, 60.0, f"{member.name}'s link with {short(peer)}", swarm
    )


def test_killed_daemon_is_restarted_and_the_stage_trains_on(swarm: Swarm) -> None:
    """Its replica goes on without it; it is back within 30 s, and takes part again once it has caught up."""
    swarm.make_run(stages=2, replicas=2, steps=10_000)
    swarm.seed()
    members = [swarm.join(stage, f"{name}-{stage}") for stage in range(2) for name in ("other", "victim")]
    victim = swarm.members["victim-1"]
    wait_for(lambda: victim.step >= 2, 90.0, "two steps", swarm)
    daemon = daemon_of(victim)
    assert daemon is not None
    runtime = runtime_of(daemon)
    os.kill(daemon, signal.SIGKILL)
    wait_for(lambda: daemon_of(victim) not in (None, daemon), 30.0, "a new daemon", swarm)
    wait_for(lambda: any("is back" in note for note in victim.notes), 30.0, "the peer's return", swarm)
    step = max(member.step for member in members)
    wait_for(lambda: all(m.step > step + 3 for m in members), 60.0, "training to go on", swarm)
    assert metric(victim, "swarm_peer_host_restarts_total") == 1
    wait_for(lambda: metric(victim, "swarm_peer_known_peers") == 5, 30.0, "all to be known", swarm)
    assert 0 <= metric(victim, "swarm_peer_loop_lag_recent_max_seconds") < 30
    first = swarm.members["other-0"]
    for member, work in ((first, "forward"), (first, "backward"), (victim, "forward"), (victim, "round")):
        assert metric(member, f'swarm_peer_compute_seconds_total{{work="{work}"}}') > 0, (member.name, work)
    for member, way in ((first, "forward"), (victim, "gradient"), (victim, "averaging")):
        assert metric(member, f'swarm_peer_compression_ratio{{way="{way}"}}') > 0.4, (member.name, way)

    daemon = daemon_of(victim)
    assert daemon is not None and runtime_of(daemon) == runtime and runtime.exists()
    swarm.signal("victim-1", signal.SIGINT)
    assert swarm.wait_exits(["victim-1"], 20.0) == {"victim-1": 0}, swarm.report()
    wait_for(lambda: not is_running(daemon) and not runtime.exists(), 3.0, "daemon and sockets to go")


def test_frozen_neighbour_is_lost_within_the_heartbeats_limit_and_comes_back(waiting: Swarm) -> None:
    frozen, watcher = waiting.join(1, "frozen"), waiting.join(0, "watcher")
    peer = peer_id(frozen, waiting)
    wait_linked(watcher, peer, 1, waiting)
    waiting.signal("frozen", signal.SIGSTOP)
    lost = f"{short(peer)} of stage 1 is lost (silent for"
    wait_for(
        lambda: any(lost in note for note in watcher.notes),
        LIMITS.heartbeat_missing_s + 10.0,  # a busy machine's
        "the frozen peer to be lost",
        waiting,
    )
    waiting.signal("frozen", signal.SIGCONT)
    wait_linked(watcher, peer, 2, waiting)
    assert "started anew" not in watcher.log, "the same start of it"


def test_copied_identity_ends_the_earlier_start_with_the_reason(waiting: Swarm, tmp_path: Path) -> None:
    keys = [tmp_path / "a.key", tmp_path / "copy.key"]
    first, friend = waiting.join(1, "first", identity=keys[0]), waiting.join(0, "friend")
    peer = peer_id(first, waiting)
    wait_linked(friend, peer, 1, waiting)
    shutil.copy(*keys)  # as on a second machine: neither lock nor counter come along
    second = waiting.join(1, "second", identity=keys[1])
    assert peer_id(second, waiting) == peer
    assert waiting.wait_exits(["first"], 60.0) == {"first": 2}, waiting.report()
    error = next(note for note in first.notes if note.startswith("error: "))
    assert "started again somewhere else" in error and "--identity" in error and str(keys[0]) in error
    wait_linked(friend, peer, 2, waiting)
    assert waiting.code("second") is None


def test_restart_within_two_seconds_and_a_second_peer_of_the_stage_train_to_the_end(
    waiting: Swarm, tmp_path: Path
) -> None:
    """What the killed start left on the noticeboard is void at once: nobody waits for its records to expire."""
    key = tmp_path / "peer.key"
    killed, friend = waiting.join(1, "killed", identity=key), waiting.join(0, "friend")
    peer = peer_id(killed, waiting)
    wait_linked(friend, peer, 1, waiting)
    waiting.kill("killed")
    wait_for(lambda: waiting.code("killed") is not None, 10.0, "the kill", waiting)
    again = waiting.join(1, "again", identity=key)
    assert peer_id(again, waiting) == peer
    wait_linked(friend, peer, 2, waiting)
    waiting.join(1, "duplicate"), waiting.join(0, "other")
    names = ["again", "friend", "duplicate", "other"]
    assert waiting.wait_exits(names, 120.0) == dict.fromkeys(names, 0), waiting.report()
    assert waiting.members["again"].step == 3


def test_two_peers_of_one_host_cannot_share_an_identity_or_a_port(waiting: Swarm, tmp_path: Path) -> None:
    key = tmp_path / "peer.key"
    first = waiting.join(0, "first", identity=key)
    peer_id(first, waiting)
    listen = first.last("ready")["addresses"][0].partition("/p2p/")[0]
    waiting.join(1, "same-key", identity=key)
    waiting.join(1, "same-port", listen=(listen,))
    refused = ["same-key", "same-port"]
    assert waiting.wait_exits(refused, 60.0) == dict.fromkeys(refused, 2), waiting.report()
    for name, words in {
        "same-key": (str(key), f"process {first.pid}", "--identity"),
        "same-port": (f"port {listen.rpartition('/')[2]} is already taken", "--listen"),
    }.items():
        error = next(note for note in waiting.members[name].notes if note.startswith("error: "))
        assert all(word in error for word in words), error
    assert waiting.code("first") is None


def test_second_interrupt_ends_a_peer_at_once_even_if_its_daemon_hangs(waiting: Swarm) -> None:
    member = waiting.join(0, "a")
    peer_id(member, waiting)
    daemon = daemon_of(member)
    assert daemon is not None
    os.kill(daemon, signal.SIGSTOP)  # saying goodbye takes as long as it may
    waiting.signal("a", signal.SIGINT)
    wait_for(lambda: any("leaving" in note for note in member.notes), 20.0, "the goodbye", waiting)
    waiting.signal("a", signal.SIGINT)
    assert waiting.wait_exits(["a"], 9.0) == {"a": 130}, "the orderly end takes 7 s, and its code is 0"
    wait_for(lambda: not is_running(daemon), 3.0, "its daemon to go")


def test_peers_and_their_daemons_end_when_the_processes_that_forked_them_are_killed(
    tmp_path: Path, run_dir: Path
) -> None:
    host = Host()
    try:
        swarm = Swarm(host, tmp_path, run_dir)
        swarm.seed()
        member = swarm.join(0, "a")
        peer_id(member, swarm)
        family = children_of(host._process.pid)
        assert sum(daemon_of(m) in family for m in swarm.members.values()) == 2
        for pid in (host._process.pid, psutil.Process(member.pid).ppid()):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not any(map(is_running, family)), 15.0, "everybody to leave")
    finally:
        host.close()
