"""`swarm-peer export`: stages -> an ordinary transformers checkpoint."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from peers.commands.options import CommandOptions
from peers.config import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from peers.commands.init import Progress
    from peers.commands.observe import Observer
    from swarm.manifest import RunManifest

DESCRIPTION = """\
Gather one snapshot of all stages and write an ordinary transformers checkpoint with its tokenizer, which
AutoModelForCausalLM.from_pretrained loads. Input and output embeddings are untied in it.

Examples:
  swarm-peer export ./my-model --initial-peers /ip4/203.0.113.5/tcp/31337/p2p/Qm...
  swarm-peer export ./at-step-20 --initial-peers ADDRESS --step 20
  swarm-peer export ./my-model --run-dir my-run --from-checkpoints my-run/peers
"""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(CommandOptions):
    """Write a checkpoint."""

    out_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT_DIR")]
    """Folder of the checkpoint to make; must not exist."""

    initial_peers: tuple[str, ...] = ()
    """Full addresses of peers of the run (multiaddrs ending in /p2p/PEER_ID); one that answers is enough."""

    run: str | None = None
    """Id of the run; without it, the run of the initial peer that answers."""

    step: str = "latest"
    """Number of steps applied to the weights, or 'latest': the newest snapshot that every stage serves."""

    from_checkpoints: tuple[Path, ...] = ()
    """Folders with checkpoints of the stages on this machine, instead of fetching; needs --run-dir."""

    run_dir: Path | None = None
    """The run's folder, if this machine has it."""

    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Number format of the weights; auto is that of the initial model."""

    data_dir: Path = Path("~/.cache/swarm-peer")
    """Folder for what is fetched."""


def _from_disk(options: ExportOptions) -> tuple[RunManifest, int]:
    """Assemble from local checkpoints."""
    from peers.commands.assembly import assemble_checkpoint, choose_version, find_checkpoints
    from peers.commands.build import DTYPES
    from swarm.manifest import RunManifest

    if options.run_dir is None:
        raise UserError("--from-checkpoints needs --run-dir, the run's folder with its manifest")
    run_dir = options.run_dir.expanduser()
    manifest = RunManifest.load(run_dir / "manifest.yaml")
    found = find_checkpoints([path.expanduser() for path in options.from_checkpoints], manifest)
    version = choose_version(found, manifest.model.stages, options.step)
    files = [found[version][stage] for stage in range(manifest.model.stages)]
    assemble_checkpoint(
        manifest, run_dir / "artifacts", files, options.out_dir.expanduser(), DTYPES.get(options.dtype)
    )
    return manifest, version


async def _from_swarm(options: ExportOptions, progress: Progress) -> tuple[RunManifest, int]:
    """Fetch one snapshot of every stage and assemble."""
    import asyncio

    from peers.commands.assembly import assemble_checkpoint, choose_version
    from peers.commands.build import DTYPES
    from peers.commands.observe import observe
    from peers.transfer import fetch_snapshot

    progress("find the run", 0, 1)
    async with observe(options.initial_peers, options.run) as observer:
        manifest = observer.manifest
        holders: dict[int, dict[int, list[str]]] = {}
        for peer, record in observer.board.view().items():
            if record.stage is not None and record.state != "offline":
                for version in record.versions:
                    holders.setdefault(version, {}).setdefault(record.stage, []).append(peer)
        version = choose_version(holders, manifest.model.stages, options.step)
        folder = options.data_dir.expanduser() / manifest.run_id
        artifacts = options.run_dir.expanduser() / "artifacts" if options.run_dir else folder / "artifacts"
        await _fetch_artifacts(observer, artifacts, progress)
        files = []
        for stage in range(manifest.model.stages):
            name = f"fetch stage {stage}"
            target = folder / "snapshots" / f"version-{version}-stage-{stage}.safetensors"
            progress(name, 0, None)
            await fetch_snapshot(
                observer.p2p,
                holders[version][stage],
                manifest.run_id,
                version,
                stage,
                target,
                progress=lambda done, total, name=name: progress(name, done, total),  # type: ignore[misc]
            )
            files.append([target])
    progress("assemble", 0, 1)
    out_dir = options.out_dir.expanduser()
    await asyncio.to_thread(
        assemble_checkpoint, manifest, artifacts, files, out_dir, DTYPES.get(options.dtype)
    )
    for [target] in files:
        target.unlink(missing_ok=True)
    return manifest, version


async def _fetch_artifacts(observer: Observer, artifacts: Path, progress: Progress) -> None:
    """The tokenizer, and the initial stages if they hold frozen tensors or decide the number format."""
    from peers.commands.assembly import needs_stage_file
    from peers.transfer import fetch_artifact

    manifest = observer.manifest
    wanted = [artifact for artifact in manifest.artifacts if artifact.name.startswith("tokenizer/")]
    if needs_stage_file(manifest):
        wanted += [artifact for artifact in manifest.artifacts if artifact.name.startswith("stage-")]
    holders = [*observer.holders, *observer.board.view()]
    for number, artifact in enumerate(wanted):
        progress("fetch tokenizer and frozen parts", number, len(wanted))
        await fetch_artifact(observer.p2p, holders, artifact, manifest.run_id, artifacts / artifact.name)


def next_command(out_dir: Path, run_dir: Path | None) -> str:
    """A command that shows what the checkpoint is worth: its loss where the held-out rows are at hand."""
    words = ["swarm-peer", "eval", str(out_dir)]
    words += ["--prompt", "import os"] if run_dir is None else ["--run-dir", str(run_dir)]
    return shlex.join(words)


def _say(console: Console, manifest: RunManifest, version: int, out_dir: Path, run_dir: Path | None) -> None:
    console.print(
        f"{out_dir}: run {manifest.name!r} after {version} of {manifest.total_steps} steps\n"
        f"next: {next_command(out_dir, run_dir)}",
        markup=False,
    )


def run(options: ExportOptions) -> int:
    """Write the checkpoint."""
    import asyncio

    import uvloop
    from rich.console import Console

    from peers.commands.assembly import check_out_dir
    from peers.commands.evaluate import quiet_transformers
    from peers.commands.progress import phases

    console = Console(highlight=False, soft_wrap=True)
    check_out_dir(options.out_dir.expanduser())
    quiet_transformers()
    if options.from_checkpoints:
        manifest, version = _from_disk(options)
    else:
        with phases(console) as progress, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            manifest, version = runner.run(_from_swarm(options, progress))
    _say(console, manifest, version, options.out_dir, options.run_dir)
    return 0
