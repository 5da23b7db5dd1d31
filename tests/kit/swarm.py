"""A swarm of real peers under a test's control: start, watch, kill, read what they wrote."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from peers.config import ComputeMode, PeerConfig
from tests.kit.ledger import read_lines

ROOT = Path(__file__).resolve().parents[2]
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
EVERYWHERE = ("/ip4/0.0.0.0/tcp/0",)


class Host:
    """The process that forks peers (`tests.kit.host`)."""

    def __init__(self) -> None:
        # Peers that are killed leave their folders behind; the next start would sweep them, here they go at once.
        self._temporary = tempfile.mkdtemp(prefix="sp-")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": self._temporary,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kit.host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        self.codes: dict[int, int] = {}
        assert self._read() == {"ready": True}

    def spawn(self, request: dict[str, Any], log: Path) -> int:
        """Fork a child; returns its pid."""
        return int(self._call({"do": "spawn", "request": request, "log": str(log)})["pid"])

    def code(self, pid: int) -> int | None:
        """A child's exit code, None while it runs."""
        self.codes.update({int(p): int(code) for p, code in self._call({"do": "exits"})["exits"]})
        return self.codes.get(pid)

    def close(self) -> None:
        """End everything that still runs."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _call(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the host of the test peers has died; its output is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass
class Member:
    """One peer of a swarm under test."""

    name: str
    pid: int
    folder: Path
    stage: int | None
    messages: list[dict[str, Any]] = field(default_factory=list)
    _offset: int = 0

    def read(self) -> None:
        """Take in the status lines written since."""
        path = self.folder / "status.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        self.messages += [json.loads(line) for line in complete.splitlines()]

    def last(self, kind: str) -> Any:
        """The newest message of a kind (note, ready, status, summary), None if there is none."""
        self.read()
        return next((message[kind] for message in reversed(self.messages) if kind in message), None)

    @property
    def notes(self) -> list[str]:
        """Every note so far."""
        self.read()
        return [message["note"] for message in self.messages if "note" in message]

    @property
    def step(self) -> int:
        """Steps this peer has applied, as it last said."""
        status = self.last("summary") or self.last("status") or {}
        return int(status.get("step") or 0)

    @property
    def is_finished(self) -> bool:
        """Whether it has applied, and kept, the run's last step."""
        return bool((self.last("summary") or self.last("status") or {}).get("is_finished"))

    @property
    def log(self) -> str:
        """Its log so far."""
        path = self.folder / "log.txt"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def ledger(self) -> list[dict[str, Any]]:
        """Its committed ledger."""
        return read_lines(self.folder / "ledger.jsonl")


class Swarm:
    """Peers of one run."""

    def __init__(self, host: Host, folder: Path, run_dir: Path | None = None) -> None:
        """run_dir: a run made before, which this swarm's peers read; without it, `make_run` makes one."""
        self.host, self.folder = host, folder
        self.run_dir = run_dir if run_dir is not None else folder / "run"
        self.members: dict[str, Member] = {}
        self.address = ""

    def make_run(self, deadline_s: float = 90.0, **options: Any) -> Path:
        """Make a tiny run (see `tests.kit.tiny.make_run`)."""
        log = self.folder / "init.log"
        pid = self.host.spawn({"what": "run", "folder": str(self.folder), "options": options}, log)
        wait_for(lambda: self.host.code(pid) is not None, deadline_s, "the run to be made")
        assert self.host.code(pid) == 0, log.read_text()
        return self.run_dir

    def seed(self, netns: str | None = None) -> Member:
        """Start the seed, in this network namespace if one is given; its address is `address`."""
        config = PeerConfig(stage=None, run_dir=self.run_dir, listen=EVERYWHERE if netns else LOOPBACK)
        member = self.start("seed", config, netns)
        wait_for(lambda: bool(member.last("ready")) or self.code("seed") is not None, 60.0, "the seed", self)
        if member.last("ready") is None:
            raise RuntimeError(f"the seed did not start\n{self.report()}")
        addresses = member.last("ready")["addresses"]
        self.address = next((a for a in addresses if "/127.0.0.1/" not in a), addresses[0])
        return member

    def join(
        self, stage: int | None, name: str, netns: str | None = None, *, lie: str = "", **settings: Any
    ) -> Member:
        """Start a stage peer that knows nothing but the seed's address. netns: its network namespace. lie: what is
        wrong with what it contributes (`tests.kit.spoiled`).
        """
        folder = self.folder / name
        values: dict[str, Any] = {
            "stage": stage,
            "initial_peers": (self.address,),
            "data_dir": folder / "data",
            "listen": EVERYWHERE if netns else LOOPBACK,
            "threads": 1,
            "serve_after_s": 1.0,
            "trace_ledger": folder / "ledger.jsonl",
            "compute": ComputeMode(),
        }
        return self.start(name, PeerConfig(**{**values, **settings}), netns, lie)

    def start(self, name: str, config: PeerConfig, netns: str | None = None, lie: str = "") -> Member:
        """Start any peer. netns: the network namespace it runs in, from its first socket on. lie: see `join`."""
        from peers.local import encode_config

        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        request = {"what": "peer", "config": encode_config(config), "status": str(folder / "status.jsonl")}
        request |= {"netns": netns, "lie": lie}
        pid = self.host.spawn(request, folder / "log.txt")
        member = self.members[name] = Member(name, pid, folder, config.stage)
        return member

    def kill(self, name: str) -> None:
        """kill -9."""
        os.kill(self.members[name].pid, signal.SIGKILL)

    def signal(self, name: str, number: int) -> None:
        """Send a signal."""
        os.kill(self.members[name].pid, number)

    def code(self, name: str) -> int | None:
        """Exit code, None while the peer runs."""
        return self.host.code(self.members[name].pid)

    def wait_exits(self, names: list[str], deadline_s: float) -> dict[str, int | None]:
        """Wait until these have ended; returns their exit codes."""
        wait_for(
            lambda: all(self.code(name) is not None for name in names), deadline_s, "the run to end", self
        )
        return {name: self.code(name) for name in names}

    def wait_finished(self, names: list[str], deadline_s: float) -> None:
        """Wait until each of these has finished the run or has ended."""

        def is_over() -> bool:
            return all(self.members[name].is_finished or self.code(name) is not None for name in names)

        wait_for(is_over, deadline_s, "the run to be finished", self)

    def kill_all(self) -> None:
        """kill -9 to everybody who still runs: for swarms whose end is not what is tested."""
        for name in self.members:
            if self.code(name) is None:
                with suppress(ProcessLookupError):  # it has just left
                    self.kill(name)
        wait_for(lambda: all(self.code(name) is not None for name in self.members), 15.0, "the killed to end")

    def report(self) -> str:
        """What every member said last, for a failing test."""
        lines = []
        for member in self.members.values():
            lines.append(f"--- {member.name} (exit {self.code(member.name)}, step {member.step})")
            lines += member.notes[-4:]
            lines += member.log.splitlines()[-12:]
        return "\n".join(lines)

    def close(self) -> None:
        """End all peers; by force those that do not go."""
        for member in self.members.values():
            if self.code(member.name) is None:
                with suppress(ProcessLookupError):  # it has just left
                    os.kill(member.pid, signal.SIGTERM)
        try:
            wait_for(lambda: all(self.code(n) is not None for n in self.members), 30.0, "the peers to leave")
        except TimeoutError:
            for name in self.members:
                if self.code(name) is None:
                    self.kill(name)
            raise


def wait_for(condition: Callable[[], bool], deadline_s: float, what: str, swarm: Swarm | None = None) -> None:
    """Wait for a condition. Raises TimeoutError with what the swarm said."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {deadline_s:.0f} s for {what}\n{swarm.report() if swarm else ''}")
        time.sleep(0.05)


def children_of(pid: int) -> list[int]:
    """Pids of a process's descendants."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
