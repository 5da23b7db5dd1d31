"""What one volunteer chooses for their own peer. The run's choices stand in the manifest."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


class UserError(Exception):
    """A mistake of the person at the keyboard, or something they can mend: one clear message, exit code 2."""


@dataclass(frozen=True, slots=True)
class ComputeMode:
    """How a stage computes: for real, or by an exact wait (benchmarks of transport and scheduling)."""

    microseconds_per_token: float | None = None

    @classmethod
    def parse(cls, text: str) -> ComputeMode:
        """`real` or `calibrated:MICROSECONDS_PER_TOKEN`. Raises UserError."""
        if text == "real":
            return cls()
        match = re.fullmatch(r"calibrated:(\d+(?:\.\d+)?)", text)
        if match is None:
            raise UserError(
                f"--compute {text!r} is unknown: use 'real' or 'calibrated:MICROSECONDS_PER_TOKEN'"
            )
        return cls(float(match[1]))

    @property
    def is_real(self) -> bool:
        """Whether the model is really computed."""
        return self.microseconds_per_token is None


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """Settings of one peer process (`join`, `seed`, and every peer of `local`).

    stage: the stage to hold, `auto` for the one with the fewest peers; None for a seed, which holds none and
    serves the run's files, and for an anchor.
    anchor_span: first and last stage that an anchor holds; None: all.
    run: id of the run; None takes the run of the first initial peer that answers.
    run_dir: a run's folder, when this peer already has (some of) its files; else files go to data_dir.
    max_upload_mbps, max_download_mbps: caps of everything this peer sends and receives, in Mbit/s at the
        network interface; None: no cap.
    kill_at: where this process kills itself (`peers.injector`); only tests and benchmarks set it.
    """

    stage: int | Literal["auto"] | None
    is_anchor: bool = False
    anchor_span: tuple[int, int] | None = None
    initial_peers: tuple[str, ...] = ()
    run: str | None = None
    run_dir: Path | None = None
    data_dir: Path = Path("~/.cache/swarm-peer")
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    identity: Path | None = None
    device: str = "cpu"
    threads: int | None = None
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    checkpoint_dir: Path | None = None
    keep_checkpoints: int = 2
    compute: ComputeMode = field(default_factory=ComputeMode)
    max_upload_mbps: float | None = None
    max_download_mbps: float | None = None
    serve_after_s: float = 600.0
    join_deadline_s: float | None = None
    trace_ledger: Path | None = None
    kill_at: str | None = None
    is_quiet: bool = False
