"""`swarm-peer seed`: the first node of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from peers.commands.join import PeerOptions, check_common, expanded, set_log_level
from peers.config import PeerConfig, UserError

DESCRIPTION = """\
First node of a run: serves its manifest, data and initial weights, and keeps the noticeboard on which peers
find each other. Holds no stage and computes nothing. Prints the line with which volunteers join each stage,
and keeps running until Ctrl+C. Training goes on without it once peers know each other, but nobody new can join
through its address.

Examples:
  swarm-peer seed my-run
  swarm-peer seed my-run --listen /ip4/0.0.0.0/tcp/31337 --announce /ip4/203.0.113.5/tcp/31337
  swarm-peer seed my-run --initial-peers ADDRESS --identity second-seed.key     (one more seed)
"""


@dataclass(frozen=True, kw_only=True)
class SeedOptions(PeerOptions):
    """Serve a run."""

    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """The run's folder, made by init."""

    identity: Path | None = None
    """File of the seed's key, created if missing; without it, seed.key in the run's folder, so that the
    join lines stay valid when the seed is started again."""


def peer_config(options: SeedOptions) -> PeerConfig:
    """The seed's settings. Raises UserError if the folder is no run."""
    run_dir = options.run_dir.expanduser()
    if not (run_dir / "manifest.yaml").is_file():
        raise UserError(
            f"{run_dir} is no run: it has no manifest.yaml; make one with: swarm-peer init {run_dir} ..."
        )
    check_common(options)
    return PeerConfig(
        stage=None,
        initial_peers=options.initial_peers,
        run_dir=run_dir,
        data_dir=options.data_dir.expanduser(),
        listen=options.listen,
        announce=options.announce,
        identity=expanded(options.identity) or run_dir / "seed.key",
        metrics_host=options.metrics_host,
        metrics_port=options.metrics_port,
        join_deadline_s=options.join_deadline_s,
        max_upload_mbps=options.max_upload_mbps,
        max_download_mbps=options.max_download_mbps,
        is_quiet=options.quiet,
    )


def run(options: SeedOptions) -> int:
    """Serve in this thread until Ctrl+C; returns the exit code."""
    from peers.reporting import TerminalReporter

    config = peer_config(options)
    set_log_level(options.log_level)
    with TerminalReporter(is_seed=True, is_quiet=options.quiet) as reporter:
        from peers.peer import run_peer

        return run_peer(config, reporter)
