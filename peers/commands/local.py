"""`swarm-peer local`: a whole swarm on this machine, then evaluation."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from peers.commands.init import RunOptions, check_sources, check_target, create_run
from peers.commands.join import check_caps
from peers.config import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from peers.commands.init import Progress
    from peers.commands.swarm_table import SwarmTable
    from peers.local import LocalSwarm, SwarmOutcome
    from peers.zygote import Zygote
    from swarm.manifest import RunManifest

DESCRIPTION = """\
A whole swarm on this machine: makes the run (unless RUN_DIR holds one), starts a seed and --replicas peers of
every stage, each a process of its own that talks to the others over loopback as it would over the internet,
shows them in one table, and, when training has ended, writes RUN_DIR/checkpoint and evaluates it.

--compare-dense also trains the uncut model on the same samples in this process, without any codec, to tell
what the codec costs.

Examples:
  swarm-peer local demo-run --model smollm2-135m --data stdlib --stages 4 --replicas 2 --steps 24
  swarm-peer local demo-run --fresh                                  (train the same run again)
  swarm-peer local demo-run --compare-dense --summary summary.json --steps 24 --sequence-length 256

Ctrl+C ends every peer within ten seconds; a second Ctrl+C at once. Logs: RUN_DIR/peers/*/peer.log.
"""


ANCHOR_KEYS = "anchors"
"""Folder of the anchors' keys in RUN_DIR."""


@dataclass(frozen=True, kw_only=True)
class LocalOptions(RunOptions):
    """A whole swarm on this machine. If RUN_DIR holds a run, its options must not contradict it."""

    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """The run's folder; made if it does not exist."""

    anchors: int = 0
    """Anchors beside the stage peers, each with all stages; a run that exists has the anchors it was made with."""

    peer_threads: int | None = None
    """Torch threads of each peer; without it, cores shared out among the peers, at least 1."""

    max_upload_mbps: float | None = None
    """Most each peer sends, in Mbit/s; without it, no cap. Shows how a run would do over lines like yours."""

    max_download_mbps: float | None = None
    """Most each peer receives, in Mbit/s; without it, no cap."""

    fresh: bool = False
    """Delete what an earlier local run left in RUN_DIR (peers/ and checkpoint/)."""

    summary: Path | None = None
    """File for the result, as JSON."""

    compare_dense: bool = False
    """Also train the uncut model without a codec, and compare."""

    eval_samples: int = 64
    """Held-out rows evaluated at most; 0 skips evaluation."""

    prompt: tuple[str, ...] = ()
    """Texts that the trained model continues greedily at the end."""


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Note how long a phase takes."""
    started = time.monotonic()
    try:
        yield
    finally:
        seconds[phase] = round(time.monotonic() - started, 2)


def check_options(options: LocalOptions) -> None:
    """Raise UserError for what can be seen before anything slow is done."""
    run_dir = options.run_dir.expanduser()
    if options.replicas < 1:
        raise UserError(f"--replicas {options.replicas}: at least 1 is needed")
    if options.peer_threads is not None and options.peer_threads < 1:
        raise UserError(f"--peer-threads {options.peer_threads}: at least 1 is needed")
    check_caps(options.max_upload_mbps, options.max_download_mbps)
    if options.anchors < 0:
        raise UserError(f"--anchors {options.anchors}: must not be negative")
    if options.anchors and options.anchor_peers:
        raise UserError("--anchors makes the anchors' keys itself: leave --anchor-peers out")
    if options.eval_samples < 0:
        raise UserError(f"--eval-samples {options.eval_samples}: must not be negative")
    if not (run_dir / "manifest.yaml").exists():
        check_target(run_dir)
        check_sources(options)
    leftovers = [name for name in ("peers", "checkpoint") if (run_dir / name).exists()]
    if leftovers and not options.fresh:
        raise UserError(
            f"{run_dir} holds {' and '.join(leftovers)} of an earlier local run: give --fresh to delete them and "
            f"train again"
        )


def run_options_without_effect(options: LocalOptions, manifest: RunManifest) -> list[str]:
    """Options of the run that were given although the run exists already, and are not in the manifest to compare.

    An option counts as given if it is not the default. Raises UserError for one that contradicts the manifest.
    """
    in_manifest: dict[str, Any] = {
        "stages": manifest.model.stages,
        "steps": manifest.total_steps,
        "samples_per_step": manifest.samples_per_step,
        "rows_per_microbatch": manifest.rows_per_microbatch,
        "sequence_length": manifest.data.sequence_length,
        "codec": manifest.codec.name,
        "mask_ratio": getattr(manifest.codec, "mask_ratio", None),
        "corrector": manifest.corrector.name,
        "learning_rate": manifest.optimizer.learning_rate,
        "compute": manifest.compute,
        "seed": manifest.seed,
    }
    given = [
        field.name
        for field in dataclasses.fields(RunOptions)
        if field.name not in {"config", "threads"} and getattr(options, field.name) != field.default
    ]
    wrong = [
        f"--{name.replace('_', '-')} {getattr(options, name)} (the run has {in_manifest[name]})"
        for name in given
        if name in in_manifest and getattr(options, name) != in_manifest[name]
    ]
    if "replicas" in given and options.replicas < manifest.min_replicas:
        wrong.append(f"--replicas {options.replicas} (the run needs {manifest.min_replicas})")
    if wrong:
        raise UserError(
            f"{options.run_dir} holds a run made with other options: {', '.join(wrong)}; leave them out, or give "
            f"another folder"
        )
    return [name for name in given if name not in in_manifest and name != "replicas"]


def run(options: LocalOptions) -> int:
    """Make, train, export, evaluate. Returns 0, 1 when training did not end, 130 when interrupted."""
    check_options(options)
    zygote = fork_zygote()
    try:
        return _run(options, zygote)
    finally:
        zygote.close()


def create_with_anchors(options: LocalOptions, run_dir: Path, progress: Progress) -> RunManifest:
    """Make the run; its anchors' keys are made first, since the manifest names them, and kept in its folder."""
    from dht.identity import Identity

    with tempfile.TemporaryDirectory(prefix="swarm-peer-keys-") as folder:
        peers: list[str] = []
        for number in range(options.anchors):
            identity = Identity.load_or_create(Path(folder) / f"anchor-{number}.key")
            peers.append(identity.peer_id)
            identity.close()
        manifest = create_run(dataclasses.replace(options, anchor_peers=tuple(peers)), run_dir, progress)
        if peers:
            shutil.copytree(folder, run_dir / ANCHOR_KEYS, ignore=shutil.ignore_patterns("*.lock"))
            (run_dir / ANCHOR_KEYS).chmod(0o700)
    return manifest


def fork_zygote() -> Zygote:
    """Import what peers need, then fork the process that will fork them."""
    # numpy's BLAS starts threads when it is imported, and a process with threads must not be forked.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from peers.commands.evaluate import quiet_transformers

    quiet_transformers()
    import transformers.models.llama.modeling_llama  # noqa: F401  (what all families' modules import in turn)

    import peers.peer  # noqa: F401  (shared by all peers)
    from peers.local import peer_entry
    from peers.zygote import Zygote

    return Zygote.start(peer_entry)


def _run(options: LocalOptions, zygote: Zygote) -> int:
    import torch
    from rich.console import Console

    from peers.commands.init import print_run
    from peers.commands.progress import phases
    from peers.commands.swarm_table import SwarmTable
    from peers.local import LocalSwarm
    from swarm.manifest import RunManifest

    console = Console(highlight=False, soft_wrap=True)
    run_dir = options.run_dir.expanduser().resolve()
    seconds: dict[str, float] = {}
    torch.set_num_threads(options.threads or os.cpu_count() or 1)
    if (run_dir / "manifest.yaml").exists():
        manifest = RunManifest.load(run_dir / "manifest.yaml")
        ignored = run_options_without_effect(options, manifest)
        console.print(
            f"training the run {manifest.name!r} that {run_dir} holds, as it was made", markup=False
        )
        if ignored:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in ignored)
            console.print(f"without effect on a run that exists: {names}", markup=False)
        for name in ("peers", "checkpoint"):
            shutil.rmtree(run_dir / name, ignore_errors=True)
    else:
        with timed(seconds, "init"), phases(console) as progress:
            manifest = create_with_anchors(options, run_dir, progress)
        print_run(console, manifest, run_dir)
    keys = sorted((run_dir / ANCHOR_KEYS).glob("*.key"))
    if options.anchors > len(keys):
        raise UserError(
            f"--anchors {options.anchors}: {run_dir} holds the keys of {len(keys)} anchors; a run's anchors are named "
            f"when it is made"
        )

    replicas = max(options.replicas, manifest.min_replicas)
    threads = options.peer_threads or max(1, (os.cpu_count() or 1) // (replicas * manifest.model.stages))
    swarm = LocalSwarm(zygote, run_dir, manifest.model.stages, manifest.total_steps)
    swarm.caps_mbps = (options.max_upload_mbps, options.max_download_mbps)
    with SwarmTable(console, manifest) as table:
        outcome = _train(swarm, manifest, replicas, threads, keys[: options.anchors], table, seconds)
    if outcome.was_interrupted:
        console.print("interrupted: every peer has ended")
        return 130
    if not outcome.has_finished:
        print(f"swarm-peer: training did not end: {outcome.reason}", file=sys.stderr)
        return 1
    _conclude(options, manifest, run_dir, swarm, outcome, seconds, console)
    return 0


def _train(
    swarm: LocalSwarm,
    manifest: RunManifest,
    replicas: int,
    threads: int,
    anchor_keys: list[Path],
    table: SwarmTable,
    seconds: dict[str, float],
) -> SwarmOutcome:
    """Start everybody, watch, end everybody."""
    from peers.local import SwarmOutcome, interruptible

    swarm.on_note = table.note
    with interruptible(swarm):
        try:
            with timed(seconds, "start"):
                address = swarm.start_seed(table.show)
                swarm.start_stage_peers(address, manifest.run_id, replicas, threads)
                swarm.start_anchors(address, manifest.run_id, anchor_keys, threads)
            with timed(seconds, "swarm"):
                outcome = swarm.train(table.show)
        except KeyboardInterrupt:
            outcome = SwarmOutcome(False, True, "interrupted", 0.0, {})
        finally:
            with timed(seconds, "stop"):
                swarm.stop(table.show)
                swarm.close()
    seconds["training"] = round(outcome.seconds, 2)
    return outcome


def _conclude(
    options: LocalOptions,
    manifest: RunManifest,
    run_dir: Path,
    swarm: LocalSwarm,
    outcome: SwarmOutcome,
    seconds: dict[str, float],
    console: Console,
) -> None:
    """Export, evaluate, compare, summarise."""
    import json

    from peers.commands.assembly import assemble_checkpoint, choose_version, find_checkpoints
    from peers.commands.compare import evaluate_run
    from peers.commands.progress import phases
    from peers.commands.swarm_table import print_summary, training_figures

    checkpoint = run_dir / "checkpoint"
    artifacts = run_dir / "artifacts"
    summary: dict[str, Any] = training_figures(manifest, swarm, outcome, artifacts)
    with phases(console) as progress:
        with timed(seconds, "export"):
            progress("export checkpoint", 0, 1)
            found = find_checkpoints([run_dir / "peers"], manifest)
            version = choose_version(found, manifest.model.stages, str(manifest.total_steps))
            files = [found[version][stage] for stage in range(manifest.model.stages)]
            assemble_checkpoint(manifest, artifacts, files, checkpoint)
        summary["checkpoint"] = str(checkpoint)
        if options.eval_samples:
            summary |= evaluate_run(
                manifest,
                run_dir,
                checkpoint,
                max_samples=options.eval_samples,
                compare_dense=options.compare_dense,
                prompts=options.prompt,
                seconds=seconds,
                progress=progress,
            )
    summary["seconds"] = seconds
    print_summary(console, summary)
    if options.summary is not None:
        options.summary.parent.mkdir(parents=True, exist_ok=True)
        options.summary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
