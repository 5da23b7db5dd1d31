"""What `init` does with a run that exists."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rich.console import Console

from peers.commands.explain import explain
from peers.commands.grant import grant_anchors
from peers.commands.init import InitOptions
from peers.config import UserError
from swarm.manifest import RunManifest


def explain_run(options: InitOptions, run_dir: Path, console: Console) -> int:
    """Print what an existing run moves. Raises UserError for options that a run has fixed."""
    only_with_new(options, {"explain", "link_mbps", "stage_us_per_token"}, "--explain tells of it as it is")
    try:
        manifest = RunManifest.load(run_dir / "manifest.yaml")
    except (OSError, ValueError) as error:
        raise UserError(f"{run_dir} holds no readable run: {error}") from error
    explain(console, manifest, run_dir / "artifacts", options.link_mbps, options.stage_us_per_token)
    return 0


def only_with_new(options: InitOptions, allowed: set[str], instead: str) -> None:
    """Raise UserError if an option is given that an existing run has fixed. instead: what is possible."""
    for field in dataclasses.fields(options):
        if (
            field.name not in {"run_dir", "config"} | allowed
            and getattr(options, field.name) != field.default
        ):
            option = field.name.replace("_", "-")
            raise UserError(f"--{option} is fixed once a run exists: {instead}")


def grant(options: InitOptions, run_dir: Path) -> int:
    """Change the anchors of an existing run. Raises UserError."""
    only_with_new(options, {"grant_anchor", "revoke_anchor"}, "--grant-anchor changes its anchors alone")
    anchors = grant_anchors(run_dir, options.grant_anchor, options.revoke_anchor)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"anchors of the run in {run_dir}, the first counts most:", markup=False)
    for peer in anchors:
        console.print(f"  {peer}", markup=False)
    console.print("a seed that serves this folder passes this on within seconds", markup=False)
    return 0
