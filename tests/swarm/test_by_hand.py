"""A swarm by hand, as the README says: init, seed, one join per stage, status, export, eval, Ctrl+C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.swarm import ROOT, wait_for
from tests.kit.tiny import write_model, write_texts

pytestmark = pytest.mark.e2e


class Terminals:
    """Commands of `swarm-peer`, each as if in a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def open(self, name: str, arguments: str) -> None:
        """Start a command; its output goes to a file."""
        with (self.folder / f"{name}.out").open("wb") as output:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", "peers.cli", *arguments.split()],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self.folder,
            )

    def output(self, name: str) -> str:
        """What a command has printed."""
        return (self.folder / f"{name}.out").read_text(encoding="utf-8")

    def run(self, name: str, arguments: str, deadline_s: float = 120.0) -> str:
        """Run a command to its end, which must be good."""
        self.open(name, arguments)
        assert self.running.pop(name).wait(deadline_s) == 0, self.output(name)
        return self.output(name)

    def interrupt(self, name: str, deadline_s: float = 20.0) -> int:
        """Ctrl+C; returns the exit code."""
        self.running[name].send_signal(signal.SIGINT)
        return self.running.pop(name).wait(deadline_s)

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    terminals = Terminals(tmp_path)
    yield terminals
    terminals.close()


@pytest.mark.slow
def test_volunteers_train_by_hand(terminals: Terminals, tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    model = write_model(tmp_path / "model", texts)
    terminals.run(
        "init",
        f"init {tmp_path}/run --model {model} --data {texts} --stages 2 --replicas 1 --steps 6 --samples-per-step 4 "
        f"--sequence-length 32 --codec mask --mask-ratio 50 --snapshot-every 3",
    )
    terminals.open("seed", f"seed {tmp_path}/run --listen /ip4/127.0.0.1/tcp/0")
    join_line = r"swarm-peer (join --stage (\d) --initial-peers (\S+))"
    wait_for(
        lambda: len(re.findall(join_line, terminals.output("seed"))) == 2, 120.0, "the seed's join lines"
    )
    lines = re.findall(join_line, terminals.output("seed"))
    address = lines[0][2]
    for line, stage, _ in lines:
        terminals.open(
            f"join-{stage}",
            f"{line} --data-dir {tmp_path}/volunteer-{stage} --listen /ip4/127.0.0.1/tcp/0 --threads 1",
        )
    for stage in "01":
        wait_for(lambda s=stage: "finished" in terminals.output(f"join-{s}"), 180.0, "training to end")

    table = json.loads(terminals.run("status", f"status --initial-peers {address} --json"))
    stages = [peer for peer in json.dumps(table).split("peer_id") if '"stage": ' in peer]
    assert len(stages) >= 2, table

    terminals.run("export", f"export {tmp_path}/checkpoint --initial-peers {address}")
    terminals.run(
        "eval",
        f"eval {tmp_path}/checkpoint --run-dir {tmp_path}/run --max-samples 8 --json {tmp_path}/eval.json",
    )
    assert 0 < json.loads((tmp_path / "eval.json").read_text())["loss"] < 7

    for name in ("join-0", "join-1", "seed"):
        assert terminals.interrupt(name) == 0, terminals.output(name)
        assert "Traceback" not in terminals.output(name)
    assert re.search(r"step\s+6/6", terminals.output("join-0")), terminals.output("join-0")


def test_metrics_and_status_are_served_over_http(terminals: Terminals, tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts", files=8)
    model = write_model(tmp_path / "model", texts)
    terminals.run(
        "init",
        f"init {tmp_path}/run --model {model} --data {texts} --stages 2 --sequence-length 32 --codec dense",
    )
    terminals.open("seed", f"seed {tmp_path}/run --listen /ip4/127.0.0.1/tcp/0 --log-level info")
    wait_for(lambda: "--initial-peers" in terminals.output("seed"), 60.0, "the seed")
    found = re.search(r"http://127\.0\.0\.1:\d+", terminals.output("seed"))
    assert found, terminals.output("seed")
    with urllib.request.urlopen(f"{found[0]}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    assert 'swarm_peer_state{swarm_peer_state="online"} 1.0' in text
    with urllib.request.urlopen(f"{found[0]}/status", timeout=5) as answer:
        assert json.load(answer)["role"] == "seed"
    assert terminals.interrupt("seed") == 0
