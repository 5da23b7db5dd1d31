"""What `local` shows: one live table of all peers, and the figures at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from peers.commands.inspect import boundary_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from peers.local import LocalSwarm, SwarmOutcome
    from swarm.manifest import RunManifest

_REDRAW_S = 0.5
_PLAIN_S = 15.0
_STALL_S = 60.0


class SwarmTable:
    """The live table; without a terminal, a line at every step of the last stage and every note."""

    def __init__(self, console: Console, manifest: RunManifest) -> None:
        self._console = console
        self._manifest = manifest
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._drawn_at = float("-inf")
        self._step = -1
        self._stepped_at = time.monotonic()

    def __enter__(self) -> Self:
        """Start drawing."""
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last table on the screen."""
        if self._console.is_terminal:
            self._live.stop()

    def note(self, text: str) -> None:
        """A peer's note: printed as it comes where there is no table to show it in."""
        if not self._console.is_terminal:
            self._console.print(text, markup=False)

    def show(self, swarm: LocalSwarm) -> None:
        """Draw, if it is time to."""
        now = time.monotonic()
        step = max((int(peer.status.get("step") or 0) for peer in swarm.trainers), default=0)
        is_news = step != self._step
        if is_news:
            self._step, self._stepped_at = step, now
        if self._console.is_terminal:
            if now - self._drawn_at >= _REDRAW_S:
                self._drawn_at = now
                self._live.update(self._render(swarm), refresh=True)
            return
        if is_news or now - self._drawn_at >= _PLAIN_S:
            self._drawn_at = now
            self._console.print(self._headline(swarm), markup=False)

    def _headline(self, swarm: LocalSwarm) -> str:
        alive = [peer for peer in swarm.trainers if peer.is_alive]
        loss = swarm.losses.get(max(swarm.losses)) if swarm.losses else None
        speed = max((float(peer.status.get("tokens_per_s") or 0) for peer in alive), default=0.0)
        text = f"step {max(0, self._step)}/{swarm.total_steps}"
        if loss is not None:
            text += f"  loss {loss:.4f}"
        if speed:
            text += f"  {speed:,.0f} tokens/s"
        text += f"  {len(alive)} of {len(swarm.trainers)} peers"
        if (still_s := time.monotonic() - self._stepped_at) >= _STALL_S:
            text += f"  no step for {still_s:.0f} s"
        if swarm.interrupts:
            text += "  ending (again Ctrl+C: at once)"
        return text

    def _render(self, swarm: LocalSwarm) -> RenderableType:
        table = Table("peer", "process", "state", "step", "done", "up Mbit/s", "down Mbit/s", "MB", box=None)
        for column in table.columns[3:]:
            column.justify = "right"
        for peer in swarm.peers.values():
            status = peer.status
            step, done = (
                ("-", "-") if peer.stage is None else (status.get("step"), status.get("microbatches_done"))
            )
            table.add_row(
                peer.name,
                str(peer.pid),
                Text(peer.state, style="" if peer.is_alive or peer.exit_code == 0 else "red"),
                _shown(step, "{}"),
                _shown(done, "{}"),
                _shown(status.get("upload_mbps"), "{:.1f}"),
                _shown(status.get("download_mbps"), "{:.1f}"),
                _shown((status.get("rss_bytes") or 0) / 1e6 or None, "{:,.0f}"),
            )
        notes = [Text(note, style="dim", no_wrap=True, overflow="ellipsis") for note in swarm.notes]
        return Group(table, Text(self._headline(swarm), style="bold"), *notes)


def _shown(value: object, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


def training_figures(
    manifest: RunManifest, swarm: LocalSwarm, outcome: SwarmOutcome, artifacts: Path
) -> dict[str, Any]:
    """Speed and bytes of a finished swarm, for the summary.

    Bytes per token and boundary are what the peers counted; replayed microbatches are counted again in both
    bytes and tokens. Where nothing was counted (one stage), there are none.
    """
    last = [peer.summary or peer.status for peer in swarm.trainers]
    tokens = manifest.total_steps * manifest.samples_per_step * manifest.data.sequence_length
    figures: dict[str, Any] = {
        "run_id": manifest.run_id,
        "model": manifest.model.name,
        "codec": manifest.codec.model_dump(mode="json"),
        "stages": manifest.model.stages,
        "peers": len(swarm.trainers),
        "peers_lost": sum(1 for peer in swarm.trainers if not peer.is_finished),
        "steps": manifest.total_steps,
        "tokens": tokens,
        "tokens_per_s": tokens / outcome.seconds if outcome.seconds else None,
        "train_losses": {str(step): loss for step, loss in sorted(outcome.losses.items())},
        "microbatches_replayed": sum(int(status.get("microbatches_replayed") or 0) for status in last),
        "rounds_failed": sum(int(status.get("rounds_failed") or 0) for status in last),
        "bytes_up": _sum_kinds(last),
        "peak_peer_rss_bytes": max((int(status.get("rss_bytes") or 0) for status in last), default=0),
    }
    counted = {
        name: sum(int(status.get("codec_bytes", {}).get(name, 0)) for status in last)
        for name in ("forward", "dense_positions", "ids", "gradient", "tokens")
    }
    if counted["tokens"]:
        per_token = {name: value / counted["tokens"] for name, value in counted.items()}
        forward = per_token["forward"] + per_token["dense_positions"] + per_token["ids"]
        uncoded = 2 * manifest.model.hidden_size
        figures |= {
            "bytes_per_token_forward": forward,
            "bytes_per_token_backward": per_token["gradient"],
            "bytes_per_token": {
                "forward_coded": per_token["forward"],
                "forward_dense_positions": per_token["dense_positions"],
                "forward_ids": per_token["ids"],
                "backward": per_token["gradient"],
                "uncoded_bf16": uncoded,
            },
            "compression_ratio": 2 * uncoded / (forward + per_token["gradient"]),
        }
    elif (cost := boundary_bytes(manifest, artifacts)) is not None:
        figures |= {
            "bytes_per_token_forward": cost.forward,
            "bytes_per_token_backward": cost.backward,
            "compression_ratio": cost.ratio,
        }
    return figures


def _sum_kinds(statuses: list[dict[str, Any]]) -> dict[str, int]:
    """Bytes sent by kind, over all peers."""
    totals: dict[str, int] = {}
    for status in statuses:
        for kind, count in status.get("bytes", {}).get("up", {}).items():
            totals[kind] = totals.get(kind, 0) + int(count)
    return totals


def print_summary(console: Console, summary: Mapping[str, Any]) -> None:
    """The result for people."""
    table = Table(show_header=False, box=None)
    table.add_column()
    table.add_column(justify="right")

    def row(label: str, key: str, pattern: str) -> None:
        if summary.get(key) is not None:
            table.add_row(label, pattern.format(summary[key]))

    row("held-out loss before", "loss_before", "{:.4f}")
    row("held-out loss after", "loss_after", "{:.4f}")
    row("after plain training without a codec", "dense_loss_after", "{:.4f}")
    row("share of plain training's gain", "share_of_dense_gain", "{:.1%}")
    row("tokens/s", "tokens_per_s", "{:,.0f}")
    row("bytes per token and boundary, forward", "bytes_per_token_forward", "{:.1f}")
    split = summary.get("bytes_per_token")
    if split:
        table.add_row("  coded", f"{split['forward_coded']:.1f}")
        table.add_row("  dense positions", f"{split['forward_dense_positions']:.1f}")
        table.add_row("  token ids", f"{split['forward_ids']:.1f}")
    row("bytes per token and boundary, backward", "bytes_per_token_backward", "{:.1f}")
    row("compression against bf16", "compression_ratio", "{:.2f}x")
    row("microbatches replayed", "microbatches_replayed", "{}")
    row("peers lost", "peers_lost", "{}")
    for phase, value in summary.get("seconds", {}).items():
        table.add_row(f"seconds: {phase}", f"{value:.1f}")
    console.print(table)
    for prompt, text in summary.get("texts", {}).items():
        console.print(f"{prompt!r} -> {text!r}", markup=False)
    console.print(f"checkpoint: {summary['checkpoint']}", markup=False)
