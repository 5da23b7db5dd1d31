"""A whole swarm on one machine: real peers, one process each, over loopback, watched from here.

The peers are forked by a `Zygote` and talk to each other like volunteers; what they report comes back through
one pipe each, as JSON lines. This process computes nothing while they train.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import TypeAdapter

from peers.config import PeerConfig, UserError
from peers.reporting import JsonReporter
from peers.zygote import Exit, Zygote

SEED_NAME = "seed"
LISTEN = ("/ip4/127.0.0.1/tcp/0",)
START_DEADLINE_S = 60.0
"""From forking a peer to its first address."""
TRAINER_GRACE_S = 6.5
SEED_GRACE_S = 2.5
"""From the first signal to SIGKILL."""
_KILL_S = 1.0
EMPTY_STAGE_S = 5.0
"""A stage without a living peer for this long ends the run: there is nobody who could bring it back."""
_SERVE_AFTER_S = 24 * 3600.0
"""Peers keep serving until they are told to leave, so that none leaves while another still needs it."""
_POLL_S = 0.25
_KEPT_NOTES = 6

_CONFIG: TypeAdapter[PeerConfig] = TypeAdapter(PeerConfig)


def encode_config(config: PeerConfig) -> dict[str, Any]:
    """A peer's settings as plain JSON values."""
    encoded: dict[str, Any] = _CONFIG.dump_python(config, mode="json")
    return encoded


def decode_config(value: dict[str, Any]) -> PeerConfig:
    """Inverse of `encode_config`."""
    return _CONFIG.validate_python(value)


def peer_entry(request: dict[str, Any], descriptor: int) -> int:
    """What the zygote's children run: one peer. Mistakes of the user become a note and exit code 2."""
    from peers.cli import EXIT_USAGE, user_message
    from peers.peer import run_peer

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    reporter = JsonReporter(descriptor)
    try:
        return run_peer(decode_config(request["config"]), reporter)
    except Exception as error:
        message = user_message(error)
        reporter.note(f"error: {message or f'{type(error).__name__}: {error}'}")
        if message is None:
            raise
        print(f"error: {message}", flush=True)
        return EXIT_USAGE


@dataclass(slots=True)
class PeerView:
    """What this process knows of one peer. exit_code is None while it lives."""

    name: str
    stage: int | None
    pid: int
    pipe: int
    log: Path
    status: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    addresses: tuple[str, ...] = ()
    last_note: str = ""
    exit_code: int | None = None
    waiting: bytes = b""

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self.exit_code is None

    @property
    def is_finished(self) -> bool:
        """Whether it has applied, and kept, the run's last step."""
        return bool(self.status.get("is_finished"))

    @property
    def state(self) -> str:
        """One word or two for the table."""
        if self.exit_code is not None:
            if self.exit_code < 0:
                with suppress(ValueError):
                    return f"killed ({signal.Signals(-self.exit_code).name})"
            return "left" if self.exit_code == 0 else f"failed ({self.exit_code})"
        if self.status.get("is_finished"):
            return "finished"
        return str(self.status.get("state", "starting"))


@dataclass(frozen=True, slots=True)
class SwarmOutcome:
    """How training went. seconds: from the last peer coming online to the last step; losses by step (1-based).

    has_finished: every stage has a peer that applied the last step.
    """

    has_finished: bool
    was_interrupted: bool
    reason: str
    seconds: float
    losses: dict[int, float]


OnChange = Callable[["LocalSwarm"], None]
"""Called a few times a second while the swarm runs, to draw it."""


class LocalSwarm:
    """Starts peers, watches them, ends them. Use inside `with interruptible(swarm)`."""

    def __init__(self, zygote: Zygote, run_dir: Path, stages: int, total_steps: int) -> None:
        self.zygote = zygote
        self.run_dir = run_dir
        self.stages = stages
        self.total_steps = total_steps
        self.peers: dict[str, PeerView] = {}
        self.notes: deque[str] = deque(maxlen=_KEPT_NOTES)
        self.on_note: Callable[[str], None] = lambda _: None
        self.interrupts = 0
        self.losses: dict[int, float] = {}
        self.caps_mbps: tuple[float | None, float | None] = (None, None)
        """What each stage peer may upload and download, in Mbit/s."""

    @property
    def trainers(self) -> list[PeerView]:
        """Every peer that holds a stage, dead ones included."""
        return [peer for peer in self.peers.values() if peer.stage is not None]

    def folder(self, name: str) -> Path:
        """A peer's own folder."""
        return self.run_dir / "peers" / name

    def start_peer(self, name: str, config: PeerConfig) -> PeerView:
        """Fork one peer. Raises ZygoteError."""
        log = self.folder(name) / "peer.log"
        pid, pipe = self.zygote.spawn({"config": encode_config(config)}, log)
        stage = config.stage if isinstance(config.stage, int) else None
        peer = self.peers[name] = PeerView(name, stage, pid, pipe, log)
        return peer

    def start_seed(self, on_change: OnChange) -> str:
        """Start the seed and wait for its address. Raises UserError with its last words if it fails."""
        seed = self.start_peer(
            SEED_NAME,
            PeerConfig(
                stage=None,
                run_dir=self.run_dir,
                listen=LISTEN,
                identity=self.folder(SEED_NAME) / "identity.key",
                threads=1,
            ),
        )
        deadline = time.monotonic() + START_DEADLINE_S
        while not seed.addresses:
            self.poll()
            on_change(self)
            if not seed.is_alive or time.monotonic() > deadline:
                raise UserError(
                    f"the seed did not start: {seed.last_note or seed.state}; its log is {seed.log}"
                )
            if self.interrupts:
                raise KeyboardInterrupt
        return seed.addresses[0]

    def start_anchors(self, address: str, run_id: str, keys: Sequence[Path], threads: int) -> None:
        """Start one anchor for each key, which the run names."""
        for number, key in enumerate(keys):
            name = f"anchor-{number}"
            self.start_peer(
                name,
                PeerConfig(
                    stage=None,
                    is_anchor=True,
                    initial_peers=(address,),
                    run=run_id,
                    run_dir=self.run_dir,
                    listen=LISTEN,
                    identity=key,
                    threads=threads,
                    checkpoint_dir=self.folder(name) / "checkpoints",
                ),
            )

    def start_stage_peers(self, address: str, run_id: str, replicas: int, threads: int) -> None:
        """Start `replicas` peers of every stage, each with an identity and a folder of its own."""
        for replica in range(replicas):
            for stage in range(self.stages):
                name = f"stage-{stage}-{replica}"
                self.start_peer(
                    name,
                    PeerConfig(
                        stage=stage,
                        initial_peers=(address,),
                        run=run_id,
                        run_dir=self.run_dir,
                        listen=LISTEN,
                        identity=self.folder(name) / "identity.key",
                        threads=threads,
                        max_upload_mbps=self.caps_mbps[0],
                        max_download_mbps=self.caps_mbps[1],
                        checkpoint_dir=self.folder(name) / "checkpoints",
                        serve_after_s=_SERVE_AFTER_S,
                    ),
                )

    def train(self, on_change: OnChange) -> SwarmOutcome:
        """Watch until the last step is done everywhere, a stage is empty, or Ctrl+C."""
        online_at: float | None = None
        empty_since: dict[int, float] = {}
        while True:
            self.poll()
            on_change(self)
            now = time.monotonic()
            if online_at is None and all(
                peer.status.get("state") == "online" or not peer.is_alive for peer in self.trainers
            ):
                online_at = now
            seconds = now - (online_at if online_at is not None else now)
            if self.interrupts:
                return SwarmOutcome(False, True, "interrupted", seconds, self.losses)
            alive = [peer for peer in self.trainers if peer.is_alive]
            done = {peer.stage for peer in self.trainers if peer.is_finished}
            if len(done) == self.stages and all(peer.is_finished for peer in alive):
                return SwarmOutcome(True, False, "done", seconds, self.losses)
            for stage in range(self.stages):
                if stage in done or any(peer.stage == stage for peer in alive):
                    empty_since.pop(stage, None)
                elif now - empty_since.setdefault(stage, now) > EMPTY_STAGE_S:
                    reason = f"stage {stage} has no peer left: {self._last_words(stage)}"
                    return SwarmOutcome(False, False, reason, seconds, self.losses)

    def poll(self, wait_s: float = _POLL_S) -> None:
        """Take in what peers and zygote have to say, waiting up to `wait_s` for the first of it."""
        pipes = {peer.pipe: peer for peer in self.peers.values() if peer.pipe >= 0}
        with suppress(InterruptedError):
            sources: list[Any] = [self.zygote, *pipes]
            ready, _, _ = select.select(sources, [], [], wait_s)
            for source in ready:
                if isinstance(source, int):
                    self._read(pipes[source])
        self._note_exits(self.zygote.exits())

    def stop(self, on_change: OnChange) -> None:
        """Ask every peer to leave, the seed last; kill what has not left in time. Takes at most ten seconds."""
        # The others say goodbye on the noticeboard, which the seed keeps.
        others = [peer for peer in self.peers.values() if peer.name != SEED_NAME]
        self._end(others, TRAINER_GRACE_S, on_change)
        self._end([peer for peer in self.peers.values() if peer.name == SEED_NAME], SEED_GRACE_S, on_change)

    def kill(self) -> None:
        """SIGKILL to everybody still there."""
        for peer in self.peers.values():
            if peer.is_alive:
                self.zygote.signal(peer.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the pipes."""
        for peer in self.peers.values():
            if peer.pipe >= 0:
                os.close(peer.pipe)
                peer.pipe = -1

    def _end(self, peers: list[PeerView], grace_s: float, on_change: OnChange) -> None:
        for number, patience_s in ((signal.SIGINT, grace_s), (signal.SIGKILL, _KILL_S)):
            for peer in peers:
                if peer.is_alive:
                    self.zygote.signal(peer.pid, number)
            deadline = time.monotonic() + patience_s
            while any(peer.is_alive for peer in peers) and time.monotonic() < deadline:
                self.poll(0.05)
                on_change(self)

    def _read(self, peer: PeerView) -> None:
        """Parse whatever lines a peer has written."""
        with suppress(BlockingIOError):
            while True:
                data = os.read(peer.pipe, 1 << 16)
                if not data:
                    os.close(peer.pipe)
                    peer.pipe = -1
                    return
                *lines, peer.waiting = (peer.waiting + data).split(b"\n")
                for line in lines:
                    self._take(peer, json.loads(line))

    def _take(self, peer: PeerView, message: dict[str, Any]) -> None:
        if "status" in message:
            peer.status = message["status"]
            step, loss = peer.status.get("step"), peer.status.get("loss")
            if peer.stage == self.stages - 1 and isinstance(step, int) and isinstance(loss, float):
                self.losses[step] = loss
        elif "summary" in message:
            peer.summary = message["summary"]
        elif "ready" in message:
            peer.addresses = tuple(message["ready"]["addresses"])
        elif "note" in message:
            peer.last_note = str(message["note"])
            self._note(f"{peer.name}: {peer.last_note}")

    def _note_exits(self, exits: list[Exit]) -> None:
        by_pid = {peer.pid: peer for peer in self.peers.values()}
        for exit_ in exits:
            peer = by_pid[exit_.pid]
            if peer.pipe >= 0:
                self._read(peer)
            peer.exit_code = exit_.code
            if exit_.code != 0:
                self._note(f"{peer.name} (process {peer.pid}) {peer.state}; its log is {peer.log}")

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.on_note(text)

    def _last_words(self, stage: int) -> str:
        return "; ".join(
            f"{peer.name} {peer.state}, last said {peer.last_note!r}, log {peer.log}"
            for peer in self.trainers
            if peer.stage == stage
        )


@contextmanager
def interruptible(swarm: LocalSwarm) -> Iterator[None]:
    """Count Ctrl+C and SIGTERM instead of raising; the second one kills every child and this process."""

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        swarm.interrupts += 1
        if swarm.interrupts > 1:
            swarm.kill()
            time.sleep(0.3)  # the zygote needs a turn to deliver the signals
            os._exit(130)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
