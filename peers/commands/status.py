"""`swarm-peer status`: the swarm as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from peers.commands.options import CommandOptions

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dht.records import PeerRecord
    from swarm.manifest import RunManifest

DESCRIPTION = """\
The swarm as its peers describe themselves on the noticeboard, in signed records at most 30 s old. Takes part
in nothing.

Examples:
  swarm-peer status --initial-peers /ip4/203.0.113.5/tcp/31337/p2p/Qm...
  swarm-peer status --initial-peers ADDRESS --watch
  swarm-peer status --initial-peers ADDRESS --json | jq .peers

Prior age: how many steps the weights lie back to which a peer's codec (or corrector) was fitted. Below the table
anchors that hold all stages say what coding does to the gradient, and whether the corrector helps.
"""

WATCH_S = 3.0


@dataclass(frozen=True, kw_only=True)
class StatusOptions(CommandOptions):
    """Look at a swarm."""

    initial_peers: tuple[str, ...] = ()
    """Full addresses of peers of the run (multiaddrs ending in /p2p/PEER_ID); one that answers is enough."""

    run: str | None = None
    """Id of the run; without it, the run of the initial peer that answers."""

    json: bool = False
    """Print JSON instead of a table (one object per line with --watch)."""

    watch: bool = False
    """Keep printing until Ctrl+C."""


def describe(manifest: RunManifest, peers: Mapping[str, PeerRecord]) -> dict[str, Any]:
    """The swarm as JSON values: the run, its peers by stage, and what each stage has."""
    rows = sorted(peers.values(), key=lambda peer: (-1 if peer.stage is None else peer.stage, peer.peer_id))
    return {
        "run_id": manifest.run_id,
        "run_name": manifest.name,
        "model": manifest.model.name,
        "total_steps": manifest.total_steps,
        "step": max((peer.step for peer in rows), default=0),
        "min_replicas": manifest.min_replicas,
        "stages": [
            {
                "stage": stage,
                "peers": sum(peer.stage == stage for peer in rows),
                "online": sum(peer.stage == stage and peer.state == "online" for peer in rows),
            }
            for stage in range(manifest.model.stages)
        ],
        "peers": [peer.model_dump(mode="json", exclude={"public_key", "protocol"}) for peer in rows],
    }


def holding(peer: Mapping[str, Any]) -> str:
    """What a peer holds: its stage, or its role, with an anchor's stages."""
    if peer["stage"] is not None:
        return str(peer["stage"])
    first, last = peer.get("stages") or (None, None)
    return str(peer["role"]) if first is None else f"{peer['role']} {first}-{last}"


def render(swarm: Mapping[str, Any]) -> RenderableType:
    """The table for people."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(
        "peer", "stage", "state", "step", "loss", "tokens/s", "up Mbit/s", "down Mbit/s", "prior age"
    )
    for column in table.columns[3:]:
        column.justify = "right"

    def number(value: float | None, pattern: str) -> str:
        return "-" if value is None else pattern.format(value)

    for peer in swarm["peers"]:
        table.add_row(
            peer["peer_id"][-8:],
            holding(peer),
            peer["state"],
            "-" if peer["stage"] is None else str(peer["step"]),
            number(peer["loss"], "{:.4f}"),
            number(peer["tokens_per_s"], "{:,.0f}"),
            number(peer["upload_mbps"], "{:.1f}"),
            number(peer["download_mbps"], "{:.1f}"),
            number(peer["prior_age"], "{} steps"),
        )
    short = [stage for stage in swarm["stages"] if stage["online"] < swarm["min_replicas"]]
    lines = [
        f"run {swarm['run_name']!r} ({swarm['run_id']}), model {swarm['model']}, "
        f"step {swarm['step']} of {swarm['total_steps']}"
    ]
    if swarm["step"] >= swarm["total_steps"]:
        lines.append("finished")
    elif swarm["step"] > 0:
        empty = [str(stage["stage"]) for stage in swarm["stages"] if not stage["online"]]
        lines.append(
            f"training waits: stage {', '.join(empty)} has no peer left (`swarm-peer join --stage {empty[0]}`)"
            if empty
            else "training: newcomers are welcome (`swarm-peer join --stage auto`)"
        )
    elif short:
        missing = ", ".join(f"stage {s['stage']} ({s['online']} of {swarm['min_replicas']})" for s in short)
        lines.append(f"peers wanted: {missing}")
    measured = [line for peer in swarm["peers"] if (line := measurements(peer))]
    return Group(*(Text(line) for line in lines), table, *(Text(line) for line in measured))


def measurements(peer: Mapping[str, Any]) -> str:
    """What an anchor measured in its last pass, in words; "" of a peer that measures nothing."""
    said = []
    if peer["coded_cosine"] is not None:
        said.append(f"coded gradients have a cosine of {peer['coded_cosine']:.3f} with dense ones")
    if peer["raw_cosine"] is not None and peer["corrected_cosine"] is not None:
        gain = peer["corrected_cosine"] - peer["raw_cosine"]
        effect = "helps" if gain > 0.001 else "harms" if gain < -0.001 else "changes nothing"
        said.append(
            f"the corrector {effect}: {peer['raw_cosine']:.3f} with a clean gradient before, "
            f"{peer['corrected_cosine']:.3f} after"
        )
    return f"anchor {peer['peer_id'][-8:]}: {'; '.join(said)}" if said else ""


async def _show(options: StatusOptions) -> None:
    import asyncio
    import json

    from rich.console import Console

    from peers.commands.observe import observe

    console = Console(highlight=False)
    async with observe(options.initial_peers, options.run) as observer:
        while True:
            swarm = describe(observer.manifest, observer.board.view())
            if options.json:
                print(json.dumps(swarm), flush=True)
            else:
                if options.watch and console.is_terminal:
                    console.clear()
                console.print(render(swarm))
            if not options.watch:
                return
            await asyncio.sleep(WATCH_S)
            await observer.board.refresh()


def run(options: StatusOptions) -> int:
    """Print the swarm."""
    import asyncio

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_show(options))
    return 0
