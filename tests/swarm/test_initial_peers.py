"""The first dial, from the command line: bad addresses among the initial peers, and none that is good."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dht.identity import Identity
from peers.config import PeerConfig
from tests.kit.swarm import ROOT, Host, Swarm, wait_for

pytestmark = pytest.mark.e2e


class Listener:
    """A program that accepts connections and says nothing, or passes them on; counts them."""

    def __init__(self, target: int | None = None) -> None:
        self.count = 0
        self._target = target
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return
            self.count += 1
            self._open.append(caller)
            if self._target is not None:
                other = socket.create_connection(("127.0.0.1", self._target))
                for pair in ((caller, other), (other, caller)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65_536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            target.close()

    def close(self) -> None:
        for each in (self._socket, *self._open):
            each.close()


class Join:
    """`swarm-peer join` as a user types it."""

    def __init__(self, folder: Path, name: str, addresses: list[str], *more: str) -> None:
        self._path = folder / f"{name}.out"
        arguments = ["join", "--stage", "0", "--initial-peers", *addresses, "--data-dir", str(folder / name)]
        with self._path.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "peers.cli", *arguments, "--listen", "/ip4/127.0.0.1/tcp/0", *more],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                cwd=folder,
            )

    @property
    def output(self) -> str:
        return self._path.read_text(encoding="utf-8")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


@pytest.fixture(scope="module")
def seeded(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """A run that waits for its peers, and its seed."""
    swarm = Swarm(host, tmp_path_factory.mktemp("seeded"))
    swarm.make_run(stages=2, replicas=2, steps=3)
    swarm.seed()
    yield swarm
    swarm.close()


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def fresh_peer_id() -> str:
    identity = Identity.load_or_create(None)
    identity.close()
    return identity.peer_id


@pytest.mark.slow
def test_one_good_address_suffices_bad_ones_are_named_and_none_at_all_ends_with_a_table(
    seeded: Swarm, tmp_path: Path
) -> None:
    """Three joins at once: one with a good address, one with none, one whose only address has a wrong peer id."""
    seed_id = seeded.address.rpartition("/")[2]
    seed_port = int(seeded.address.split("/")[4])
    with ExitStack() as stack:
        dead, proxy = Listener(), Listener(seed_port)
        stack.callback(dead.close)
        stack.callback(proxy.close)
        silent = f"/ip4/127.0.0.1/tcp/{dead.port}/p2p/{fresh_peer_id()}"
        # Of nobody else: to a peer that is connected already a dial is no dial.
        refusing = f"/ip4/127.0.0.1/tcp/{closed_port()}/p2p/{fresh_peer_id()}"
        wrong_id = fresh_peer_id()
        wrong = f"/ip4/127.0.0.1/tcp/{proxy.port}/p2p/{wrong_id}"
        joins = {
            "good": Join(tmp_path, "good", [silent, refusing, seeded.address]),
            "bad": Join(tmp_path, "bad", [silent, refusing, "203.0.113.5:31330"]),
            "wrong": Join(tmp_path, "wrong", [wrong], "--join-deadline-s", "60"),
        }
        for join in joins.values():
            stack.callback(join.close)

        good = joins["good"]
        wait_for(lambda: "dialling 3 initial peers" in good.output, 120.0, "the first dial")
        wait_for(lambda: "2 stages" in good.output, 60.0, "the run to be found")
        assert f"warning: {silent}: timeout" in good.output and f"warning: {refusing}: refused" in good.output

        assert joins["wrong"].process.wait(120) == 2
        corrected = f"/ip4/127.0.0.1/tcp/{proxy.port}/p2p/{seed_id}"
        for words in (f"expected peer {wrong_id}", f"but {seed_id} answered", corrected):
            assert words in joins["wrong"].output, joins["wrong"].output
        assert proxy.count <= 3, "dialled once: no waiting would mend it"

        assert joins["bad"].process.wait(120) == 2
        text = joins["bad"].output
        assert "none of the initial peers can be reached" in text and "Traceback" not in text
        causes = re.findall(r"^\s*FAIL (\S+): (\w+): ", text, re.MULTILINE)
        assert causes == [(silent, "timeout"), (refusing, "refused"), ("203.0.113.5:31330", "malformed")], (
            text
        )


def test_seed_that_is_still_starting_is_waited_for_until_the_deadline(seeded: Swarm, tmp_path: Path) -> None:
    key, port = tmp_path / "late.key", closed_port()
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{Identity.load_or_create(key).peer_id}"
    early = seeded.join(0, "early", initial_peers=(address,), join_deadline_s=120.0)
    wait_for(lambda: any("refused" in note for note in early.notes), 60.0, "the first refusal", seeded)
    hopeless = seeded.join(0, "hopeless", initial_peers=(address,), join_deadline_s=3.0)
    assert seeded.wait_exits(["hopeless"], 60.0) == {"hopeless": 2}, seeded.report()
    assert "can be reached within" in hopeless.notes[-1] and address in hopeless.notes[-1]
    listen = (f"/ip4/127.0.0.1/tcp/{port}",)
    seeded.start("late", PeerConfig(stage=None, run_dir=seeded.run_dir, listen=listen, identity=key))
    wait_for(lambda: early.last("ready") is not None, 120.0, "the join", seeded)
    warnings = [note for note in early.notes if note.startswith(f"warning: {address}")]
    assert len(warnings) == 1, "one line per change"
