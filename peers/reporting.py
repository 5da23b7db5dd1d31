"""What a peer tells the person who runs it: readable lines, one live status line, a summary.

A peer reports through a `Reporter` and never prints by itself, so the same peer serves a terminal, a log
file, and the table of `swarm-peer local`, which reads JSON lines from a pipe. Methods may be called from any
thread, never block for long, and never raise because the reader has gone.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

PLAIN_INTERVAL_S = 10.0
"""Without a terminal, seconds between two status lines while the step does not change."""

_JSON_BACKLOG_BYTES = 1 << 20
"""Unread bytes a JsonReporter keeps for a slow reader before it drops status lines."""


class Reporter(Protocol):
    """What a running peer calls."""

    def note(self, text: str) -> None:
        """One readable line: an event worth knowing."""

    def ready(self, addresses: Sequence[str], stages: int) -> None:
        """Called once, when the peer can be reached: its full multiaddrs (with /p2p/...), best first.

        stages: number of stages of the run. A seed's terminal shows the join lines.
        """

    def status(self, status: Mapping[str, Any]) -> None:
        """The peer's status (the mapping that /status serves), about once a second."""

    def summary(self, summary: Mapping[str, Any]) -> None:
        """The last status, once, when the peer ends; `exit_reason` says why."""


def join_lines(addresses: Sequence[str], stages: int) -> list[str]:
    """The commands with which volunteers join each stage through a peer with these addresses."""
    peers = " ".join(addresses)
    return [f"swarm-peer join --stage {stage} --initial-peers {peers}" for stage in range(stages)]


def _number(value: object, pattern: str = "{:,.0f}") -> str:
    """A number for people, "-" where there is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "-"
    return pattern.format(value)


def status_line(status: Mapping[str, Any]) -> str:
    """One line: step, loss, tokens/s, up and down Mbit/s, neighbours. A seed has only its traffic."""
    parts = [str(status.get("state", "?"))]
    if status.get("stage") is not None:
        parts.append(f"stage {status['stage']}")
    if (anchor := status.get("anchor")) is not None:
        parts.append(f"anchor  {anchor['passes']} passes, priors of version {anchor['version'] or '-'}")
        if anchor.get("coded_cosine") is not None:
            parts.append(f"coded gradient's cosine {anchor['coded_cosine']:.3f}")
    is_seed = status.get("role") in ("seed", "anchor")  # neither has a step, nor a link to any peer
    if status.get("total_steps") is not None and not is_seed:
        parts.append(f"step {_number(status.get('step'), '{}')}/{status['total_steps']}")
    if status.get("loss") is not None and not is_seed:
        parts.append(f"loss {_number(status['loss'], '{:.4f}')}")
    if status.get("stage") is not None:
        parts.append(f"{_number(status.get('tokens_per_s'))} tokens/s")
    corrector = (status.get("priors") or {}).get("corrector") or {}
    if corrector.get("cosine") is not None:
        parts.append(f"corrected to cosine {corrector['cosine']:.3f} (eta {corrector['eta']:.3f})")
    if (priors := status.get("priors") or {}).get("is_old"):
        ages = [ref["age"] for ref in priors["in_force"].values() if ref["age"] is not None]
        parts.append(f"priors {max(ages, default=0)} steps old")
    up = _number(status.get("upload_mbps"), "{:.1f}")
    down = _number(status.get("download_mbps"), "{:.1f}")
    parts.append(f"up {up} down {down} Mbit/s")
    if not is_seed:  # it has no link to any peer
        neighbours = status.get("neighbours")
        if isinstance(neighbours, (list, tuple, dict)):
            neighbours = len(neighbours)
        parts.append(f"{_number(neighbours)} neighbours")
    return "  ".join(parts)


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """The readable end of a peer: what it did and why it ended."""
    moved = summary.get("bytes", {})
    up = sum(moved.get("up", {}).values()) / 1e6
    down = sum(moved.get("down", {}).values()) / 1e6
    lines = [f"ended: {summary.get('exit_reason') or 'no reason given'}"]
    if summary.get("stage") is not None:
        lines.append(
            f"step {_number(summary.get('step'), '{}')} of {_number(summary.get('total_steps'), '{}')}, "
            f"{_number(summary.get('tokens_done'))} tokens, "
            f"{_number(summary.get('microbatches_done'))} microbatches "
            f"({_number(summary.get('microbatches_replayed'))} replayed, "
            f"{_number(summary.get('microbatches_duplicate'))} duplicate), "
            f"{_number(summary.get('rounds_failed'))} failed rounds"
        )
    lines.append(f"sent {up:,.1f} MB, received {down:,.1f} MB")
    return lines


class SilentReporter:
    """Reports nothing; keeps the last status and the summary for whoever asks."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.addresses: tuple[str, ...] = ()
        self.last_status: dict[str, Any] = {}
        self.last_summary: dict[str, Any] = {}

    def note(self, text: str) -> None:
        """Keep the line."""
        self.notes.append(text)

    def ready(self, addresses: Sequence[str], stages: int) -> None:
        """Keep the addresses."""
        self.addresses = tuple(addresses)

    def status(self, status: Mapping[str, Any]) -> None:
        """Keep the status."""
        self.last_status = dict(status)

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Keep the summary."""
        self.last_summary = dict(summary)


class JsonReporter:
    """Writes JSON lines to a file descriptor: {"note": ...}, {"ready": ...}, {"status": ...}, {"summary": ...}.

    The descriptor is made non-blocking. What a slow reader has not taken waits here; status lines are dropped
    while anything waits, so a reader that stopped reading costs no memory and no time.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._waiting = bytearray()
        self._is_gone = False
        self._lock = threading.Lock()

    def note(self, text: str) -> None:
        """Write {"note": text}."""
        self._write({"note": text})

    def ready(self, addresses: Sequence[str], stages: int) -> None:
        """Write {"ready": {"addresses": [...], "stages": n}}."""
        self._write({"ready": {"addresses": list(addresses), "stages": stages}})

    def status(self, status: Mapping[str, Any]) -> None:
        """Write {"status": status}, unless the reader is behind."""
        self._write({"status": dict(status)}, may_drop=True)

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Write {"summary": summary}, waiting up to two seconds for a reader that is behind."""
        self._write({"summary": dict(summary)})
        deadline = time.monotonic() + 2.0
        while self._waiting and not self._is_gone and time.monotonic() < deadline:
            time.sleep(0.02)
            with self._lock:
                self._flush()

    def _write(self, value: dict[str, Any], *, may_drop: bool = False) -> None:
        data = json.dumps(value, default=str).encode() + b"\n"
        with self._lock:
            self._flush()
            if self._waiting and (may_drop or len(self._waiting) > _JSON_BACKLOG_BYTES):
                return
            self._waiting += data
            self._flush()

    def _flush(self) -> None:
        """Hand over as much as the pipe takes. A line that was begun is always completed first."""
        try:
            while self._waiting and not self._is_gone:
                del self._waiting[: os.write(self._descriptor, self._waiting)]
        except BlockingIOError:
            return
        except OSError:
            self._is_gone = True
            self._waiting.clear()


class TerminalReporter:
    """For people: notes as lines, the status as one line that is rewritten, the summary at the end.

    Without a terminal the status is a line at every new step, and at least every ten seconds, and notes and
    status lines begin with the time. Use as a context manager, so that the live line is given back to the
    terminal whatever happens.
    """

    def __init__(
        self, *, is_seed: bool = False, is_quiet: bool = False, console: Console | None = None
    ) -> None:
        from rich.console import Console as RichConsole

        self._console = console if console is not None else RichConsole(highlight=False, soft_wrap=True)
        self._is_seed = is_seed
        self._is_quiet = is_quiet
        self._live: Live | None = None
        self._last_step: object = None
        self._last_printed = float("-inf")
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        """The reporter itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give the terminal back."""
        self.close()

    def close(self) -> None:
        """End the live line. Harmless when repeated."""
        with self._lock:
            if self._live is not None:
                self._live.stop()
                self._live = None

    def note(self, text: str) -> None:
        """Print the line above the live line."""
        if not self._is_quiet:
            self._print(self._dated(text))

    def ready(self, addresses: Sequence[str], stages: int) -> None:
        """A seed prints how to join each stage; a peer its address."""
        if not self._is_seed:
            if addresses:
                self.note(f"reachable at {addresses[0]}")
            return
        self._print("Volunteers join with one of these (any number of peers per stage):")
        for line in join_lines(addresses, stages):
            self._print(f"  {line}")
        self._print("Ctrl+C ends the seed.")

    def status(self, status: Mapping[str, Any]) -> None:
        """Rewrite the live line, or print one now and then."""
        if self._is_quiet:
            return
        line = status_line(status)
        with self._lock:
            if self._console.is_terminal:
                self._show(line)
                return
            now = time.monotonic()
            if status.get("step") != self._last_step or now - self._last_printed >= PLAIN_INTERVAL_S:
                self._last_step, self._last_printed = status.get("step"), now
                self._print(self._dated(line))

    def summary(self, summary: Mapping[str, Any]) -> None:
        """End the live line and print what was done."""
        self.close()
        for line in summary_lines(summary):
            self._print(line)

    def _show(self, line: str) -> None:
        from rich.live import Live as RichLive
        from rich.text import Text

        text = Text(line, no_wrap=True, overflow="ellipsis")
        if self._live is None:
            # No refresh thread: the line changes once a second, when a status comes.
            self._live = RichLive(text, console=self._console, auto_refresh=False)
            self._live.start(refresh=True)
        else:
            self._live.update(text, refresh=True)

    def _dated(self, text: str) -> str:
        return text if self._console.is_terminal else f"{time.strftime('%H:%M:%S')} {text}"

    def _print(self, text: str) -> None:
        with self._lock:
            self._console.print(text, markup=False)
