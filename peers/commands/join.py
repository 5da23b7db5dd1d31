"""`swarm-peer join`: hold one stage of a run and train."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from peers.commands.options import CommandOptions
from peers.config import ComputeMode, PeerConfig, UserError

DESCRIPTION = """\
Hold one stage of a run and train. The run's manifest, data and weights come from the initial peers; what is
fetched is verified against the owner's signature and kept for the next time.

Examples:
  swarm-peer join --stage 2 --initial-peers /ip4/203.0.113.5/tcp/31337/p2p/Qm...
  swarm-peer join --stage 0 --initial-peers ADDRESS_A ADDRESS_B --threads 4 --identity ~/.swarm-peer/key
  swarm-peer join --anchor --stage all --initial-peers ADDRESS --identity anchor.key
  swarm-peer join --anchor --stage 0-3 --initial-peers ADDRESS --identity anchor.key      (another takes the rest)
  swarm-peer join --stage 1 --initial-peers ADDRESS --announce /ip4/198.51.100.7/tcp/4001 --listen /ip4/0.0.0.0/tcp/4001

Ctrl+C hands back the work and leaves; a second Ctrl+C leaves at once.
"""

LEAST_MBPS = 0.5
"""Below this a round of the smallest model does not end within its deadline."""

LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class PeerOptions(CommandOptions):
    """Options of every command that runs one peer."""

    initial_peers: tuple[str, ...] = ()
    """Full addresses of peers of the run (multiaddrs ending in /p2p/PEER_ID); one that answers is enough."""

    data_dir: Path = Path("~/.cache/swarm-peer")
    """Folder for the files of runs that are fetched."""

    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """TCP multiaddrs to listen on; port 0 takes any free port."""

    announce: tuple[str, ...] = ()
    """TCP multiaddrs told to others instead of what is found out (behind port forwarding or Docker)."""

    metrics_host: str = "127.0.0.1"
    """Address on which /metrics (Prometheus) and /status (JSON) are served."""

    metrics_port: int = 0
    """TCP port of /metrics and /status; 0 takes any free port."""

    join_deadline_s: float | None = None
    """Seconds for which initial peers that do not answer (yet) are dialled again; without it, they are dialled
    once, for at most 15 s."""

    max_upload_mbps: float | None = None
    """Most this peer sends, in Mbit/s as your network interface counts them; without it, no cap. Give about 90%
    of what a speed test shows: a line that is never full keeps pings short, here and for everybody else on it."""

    max_download_mbps: float | None = None
    """Most this peer receives, in Mbit/s; without it, no cap. Its neighbours are told to send no faster."""

    quiet: bool = False
    """Print only addresses, errors and the summary."""

    log_level: LogLevel = "warning"
    """Log lines on stderr from this level on."""


@dataclass(frozen=True, kw_only=True)
class JoinOptions(PeerOptions):
    """Hold one stage of a run and train, or be one of its anchors."""

    stage: str
    """The stage to hold, counted from 0; `auto` takes the one with the fewest peers. With --anchor `all`, one, or
    several such as 0-3: anchors that hold all stages together make the priors together."""

    anchor: bool = False
    """Be an anchor instead: pass microbatches unmasked through snapshots of the stages and publish the priors that
    make the codec better. The run's owner must have named this peer's id (`swarm-peer identity`)."""

    run: str | None = None
    """Id of the run; without it, the run of the initial peer that answers."""

    run_dir: Path | None = None
    """A run's folder made by init, if this machine has one: its files need not be fetched."""

    identity: Path | None = None
    """File of this peer's key, created if missing; without it, a new identity at every start."""

    device: str = "cpu"
    """Where the stage is computed: cpu, cuda, cuda:1."""

    threads: int | None = None
    """Torch threads; without it, one per core."""

    checkpoint_dir: Path | None = None
    """Folder for checkpoints; without it, inside the run's folder under --data-dir."""

    keep_checkpoints: int = 2
    """Newest checkpoints kept."""

    compute: str = "real"
    """'real', or 'calibrated:MICROSECONDS_PER_TOKEN' to wait instead of computing (benchmarks)."""

    serve_after_s: float = 600.0
    """Seconds for which the final weights are served after the run's last step."""

    trace_ledger: Path | None = None
    """File for one JSON line per microbatch that enters an accumulator (tests)."""


def parse_stage(text: str) -> int | Literal["auto"]:
    """The stage of --stage. Raises UserError for ranges and anything that is no count."""
    if text == "auto":
        return "auto"
    if text == "all":
        raise UserError("--stage all is for anchors: add --anchor, or give one stage")
    if re.fullmatch(r"\d+-\d+", text):
        raise UserError(
            f"--stage {text}: a stage peer holds one stage: give one number, or `auto` for the stage with the "
            f"fewest peers"
        )
    if not re.fullmatch(r"\d{1,4}", text):
        raise UserError(f"--stage {text!r} is no stage: give a number counted from 0, or `auto`")
    return int(text)


def parse_span(text: str) -> tuple[int, int] | None:
    """The first and last stage of an anchor's --stage; None for all. Raises UserError."""
    if text == "all":
        return None
    match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", text)
    if match is None:
        raise UserError(f"--anchor --stage {text}: an anchor holds one stage (2), several (0-3), or all")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise UserError(
            f"--anchor --stage {text}: the last stage comes before the first: give {last}-{first}"
        )
    return first, last


def peer_config(options: JoinOptions) -> PeerConfig:
    """The peer's settings. Raises UserError for a value no peer can run with."""
    stage = None if options.anchor else parse_stage(options.stage)
    span = parse_span(options.stage) if options.anchor else None
    if not options.initial_peers:
        raise UserError(
            "--initial-peers is missing: give the address that `swarm-peer seed` printed, or that of any peer "
            "of the run"
        )
    check_common(options)
    if options.threads is not None and options.threads < 1:
        raise UserError(f"--threads {options.threads}: at least 1 is needed")
    if options.keep_checkpoints < 1:
        raise UserError(f"--keep-checkpoints {options.keep_checkpoints}: at least 1 is needed")
    if options.serve_after_s < 0:
        raise UserError(f"--serve-after-s {options.serve_after_s}: must not be negative")
    if options.run is not None and not re.fullmatch(r"[0-9a-f]{40}", options.run):
        raise UserError(f"--run {options.run!r} is no run id: 40 hexadecimal digits, as `init` printed them")
    return PeerConfig(
        stage=stage,
        is_anchor=options.anchor,
        anchor_span=span,
        initial_peers=options.initial_peers,
        run=options.run,
        run_dir=expanded(options.run_dir),
        data_dir=options.data_dir.expanduser(),
        listen=options.listen,
        announce=options.announce,
        identity=expanded(options.identity),
        device=options.device,
        threads=options.threads,
        metrics_host=options.metrics_host,
        metrics_port=options.metrics_port,
        checkpoint_dir=expanded(options.checkpoint_dir),
        keep_checkpoints=options.keep_checkpoints,
        compute=ComputeMode.parse(options.compute),
        serve_after_s=options.serve_after_s,
        join_deadline_s=options.join_deadline_s,
        max_upload_mbps=options.max_upload_mbps,
        max_download_mbps=options.max_download_mbps,
        trace_ledger=expanded(options.trace_ledger),
        is_quiet=options.quiet,
    )


def check_common(options: PeerOptions) -> None:
    """Raise UserError for values that seed and join refuse alike."""
    if not 0 <= options.metrics_port <= 65_535:
        raise UserError(f"--metrics-port {options.metrics_port} is no TCP port: 0 to 65535")
    if options.join_deadline_s is not None and options.join_deadline_s <= 0:
        raise UserError(f"--join-deadline-s {options.join_deadline_s}: must be positive")
    if not options.listen:
        raise UserError("--listen is empty: give at least one multiaddr, such as /ip4/0.0.0.0/tcp/0")
    check_caps(options.max_upload_mbps, options.max_download_mbps)


def check_caps(max_upload_mbps: float | None, max_download_mbps: float | None) -> None:
    """Raise UserError for a cap under which no peer can take part."""
    for name, mbps in (("upload", max_upload_mbps), ("download", max_download_mbps)):
        if mbps is not None and not LEAST_MBPS <= mbps < float("inf"):
            raise UserError(
                f"--max-{name}-mbps {mbps:g}: at least {LEAST_MBPS:g} Mbit/s are needed to keep up with a swarm; give "
                f"more, or leave the option out for no cap"
            )


def expanded(path: Path | None) -> Path | None:
    """The path with ~ replaced."""
    return None if path is None else path.expanduser()


def set_log_level(level: LogLevel) -> None:
    """Log to stderr from `level` on."""
    import logging

    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )


def run(options: JoinOptions) -> int:
    """Run the peer in this thread until the run ends or Ctrl+C; returns its exit code."""
    from peers.reporting import TerminalReporter

    config = peer_config(options)
    set_log_level(options.log_level)
    with TerminalReporter(is_quiet=options.quiet) as reporter:
        reporter.note(f"joining as {'an anchor' if config.is_anchor else f'stage {config.stage}'} ...")
        from peers.peer import run_peer

        return run_peer(config, reporter)
