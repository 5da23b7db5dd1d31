from __future__ import annotations

import io
import json
import os
import signal
from collections import deque
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

import peers.local
from peers.cli import main
from peers.commands.swarm_table import SwarmTable
from peers.config import UserError
from peers.local import LocalSwarm, SwarmOutcome
from peers.zygote import Exit, Zygote


class FakeZygote:
    """Peers that exist only as pipes. script: what each peer writes, and then its exit code or None."""

    def __init__(self, script: dict[str, tuple[list[dict[str, Any]], int | None]]) -> None:
        self.script = script
        self.signals: list[tuple[int, int]] = []
        self.pids: dict[str, int] = {}
        self.codes: dict[int, int | None] = {}
        self._exits: deque[Exit] = deque()
        self._notice, self._writing = os.pipe()  # readable while there are exits, like the real one's socket

    def fileno(self) -> int:
        return self._notice

    def spawn(self, request: dict[str, Any], log: Path) -> tuple[int, int]:
        name = log.parent.name
        pid = self.pids[name] = 1000 + len(self.pids)
        messages, code = self.script[name]
        reading, writing = os.pipe()
        os.write(writing, b"".join(json.dumps(message).encode() + b"\n" for message in messages))
        os.set_blocking(reading, False)
        os.close(writing)
        if code is not None:
            self.end(pid, code)
        return pid, reading

    def end(self, pid: int, code: int) -> None:
        self._exits.append(Exit(pid, code))
        os.write(self._writing, b"x")

    def exits(self) -> list[Exit]:
        found = list(self._exits)
        if found:
            os.read(self._notice, len(found))
        self._exits.clear()
        return found

    def signal(self, pid: int, number: int) -> None:
        self.signals.append((pid, number))
        self.end(pid, 0 if number == signal.SIGINT else -number)


def status(step: int, *, finished: bool, loss: float | None = None) -> dict[str, Any]:
    return {"status": {"state": "online", "step": step, "loss": loss, "is_finished": finished}}


def make_swarm(tmp_path: Path, script: dict[str, Any]) -> tuple[LocalSwarm, FakeZygote]:
    zygote = FakeZygote({"seed": ([{"ready": {"addresses": ["/a"], "stages": 2}}], None), **script})
    return LocalSwarm(cast("Zygote", zygote), tmp_path, stages=2, total_steps=3), zygote


def train(swarm: LocalSwarm) -> SwarmOutcome:
    assert swarm.start_seed(lambda _: None) == "/a"
    swarm.start_stage_peers("/a", "0" * 40, replicas=1, threads=1)
    return swarm.train(lambda _: None)


def test_training_ends_when_every_living_peer_has_finished(tmp_path: Path) -> None:
    swarm, zygote = make_swarm(
        tmp_path,
        {
            "stage-0-0": ([status(3, finished=True)], None),
            "stage-1-0": ([status(2, finished=False, loss=2.5), status(3, finished=True, loss=2.0)], None),
        },
    )
    outcome = train(swarm)
    assert (outcome.has_finished, outcome.losses) == (True, {2: 2.5, 3: 2.0})
    swarm.stop(lambda _: None)
    asked = [pid for pid, number in zygote.signals if number == signal.SIGINT]
    assert asked[-1] == zygote.pids["seed"]  # the noticeboard goes last
    assert not any(peer.is_alive for peer in swarm.peers.values())


def test_stage_without_peers_ends_the_run_with_the_peers_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers.local, "EMPTY_STAGE_S", 0.0)
    swarm, _ = make_swarm(
        tmp_path,
        {
            "stage-0-0": ([status(1, finished=False)], None),
            "stage-1-0": ([{"note": "error: the disk is full"}], -signal.SIGKILL),
        },
    )
    outcome = train(swarm)
    assert not outcome.has_finished
    assert "stage 1 has no peer left" in outcome.reason
    assert "killed (SIGKILL)" in outcome.reason
    assert "the disk is full" in outcome.reason
    swarm.stop(lambda _: None)


def test_interrupt_ends_the_watch(tmp_path: Path) -> None:
    swarm, _ = make_swarm(
        tmp_path,
        {"stage-0-0": ([status(1, finished=False)], None), "stage-1-0": ([status(1, finished=False)], None)},
    )
    swarm.start_seed(lambda _: None)
    swarm.start_stage_peers("/a", "0" * 40, replicas=1, threads=1)
    swarm.interrupts = 1
    outcome = swarm.train(lambda _: None)
    assert (outcome.was_interrupted, outcome.has_finished) == (True, False)
    swarm.stop(lambda _: None)


def test_seed_that_fails_says_why(tmp_path: Path) -> None:
    swarm, _ = make_swarm(tmp_path, {"seed": ([{"note": "error: port 1 is taken"}], 2)})
    with pytest.raises(UserError, match="port 1 is taken"):
        swarm.start_seed(lambda _: None)


def test_table_shows_every_peer_and_its_end(tmp_path: Path) -> None:
    swarm, _ = make_swarm(
        tmp_path,
        {
            "stage-0-0": ([status(3, finished=True)], None),
            "stage-1-0": ([status(3, finished=True, loss=2.0)], 1),
        },
    )
    train(swarm)
    swarm.poll()
    console = Console(file=io.StringIO(), force_terminal=True, width=120, highlight=False)
    with SwarmTable(console, cast("Any", None)) as table:
        table.show(swarm)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for part in ("seed", "stage-0-0", "finished", "failed (1)", "step 3/3", "loss 2.0000", "1 of 2 peers"):
        assert part in text
    swarm.stop(lambda _: None)


def test_leftovers_of_an_earlier_run_are_not_deleted_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "manifest.yaml").touch()
    (tmp_path / "peers").mkdir()
    assert main(["local", str(tmp_path)]) == 2
    assert "--fresh" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--replicas", "--peer-threads"])
def test_impossible_counts_are_refused(tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["local", str(tmp_path / "run"), flag, "0"]) == 2
    assert f"{flag} 0" in capsys.readouterr().err
