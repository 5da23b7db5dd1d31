"""Does a peer forget what failed? Rounds of which every second one times out, and what they leave in memory.

A swarm of real peers in this process, over real p2pd links on loopback: two replicas of the only stage. In the
first attempt of every step one of them, in turn, withholds its parts until the deadline; the second attempt goes
through. (Of three members the one that withholds would be left out from then on: two cannot tell who is to
blame.) Prints one JSON object; exits with 1 if the memory grows faster than the limit, or if tasks, exchanges or
early frames are left over.

    python -m benchmarks.round_leak [--rounds 2000] [--warm-up 200] [--deadline 0.15] [--limit-mib 1.0]
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import logging
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
import torch
import uvloop

import peers.averaging
from peers.butterfly import Butterfly
from peers.exchange import Exchange
from peers.frames import Frame
from peers.round_messages import Group
from tests.hostile.world import Peer, World, rss, until

REPLICAS = ("0a", "0b")
MIB = 2**20
SAMPLE_EVERY = 20
"""Rounds between two looks at the memory."""
LOOKS = 25
"""At what is left over; between them the peers work on."""


class Withholding(Exchange):
    """An exchange in which one member gives nothing in every odd attempt, which has a short deadline."""

    deadline_s = 0.15

    def __init__(self, group: Group, *arguments: Any, **options: Any) -> None:
        is_doomed = group.attempt % 2 == 1
        if is_doomed:
            options["deadline_s"] = self.deadline_s
        super().__init__(group, *arguments, **options)
        if is_doomed and group.step % len(group.members) == self._me:
            for butterfly in self.butterflies:
                butterfly._send_parts = self._withhold  # type: ignore[method-assign]

    async def _withhold(self, member: int) -> None:
        await asyncio.Event().wait()


ROUNDS = ("Exchange.", "Butterfly.", "Withholding.", "RoundWork.", "Averaging.", "Engine.")
"""Whose coroutines make a round."""


@dataclass
class Report:
    """What was seen. memory: (rounds so far, bytes in RAM). left: what is still there that should not be."""

    rounds: int = 0
    failed: int = 0
    steps: int = 0
    seconds: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)
    memory: list[tuple[int, int]] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)

    def slope_mib_per_1000(self, warm_up: int) -> float:
        """Growth after the warm-up, by least squares."""
        points = np.array([point for point in self.memory if point[0] >= warm_up], dtype=np.float64)
        if len(points) < 3:
            return 0.0
        return float(np.polyfit(points[:, 0], points[:, 1] / MIB, 1)[0] * 1000)


def census() -> Counter[str]:
    """Live objects that a round makes."""
    found: Counter[str] = Counter(tasks=0, exchanges=0, frames=0, tensors=0)
    for task in asyncio.all_tasks():
        name = getattr(task.get_coro(), "__qualname__", "")
        found["tasks"] += name.startswith(ROUNDS)
    for thing in gc.get_objects():
        kind = type(thing)  # not isinstance: some modules' objects say something aloud when they are asked
        found["exchanges"] += issubclass(kind, Exchange | Butterfly)
        found["frames"] += kind is Frame
        found["tensors"] += kind is torch.Tensor
    return found


def held_bytes() -> int:
    """Bytes in RAM, without what was freed and the allocator keeps for later."""
    gc.collect()
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    return rss()


def rounds_of(peer: Peer) -> tuple[int, Counter[str]]:
    """Rounds that were committed here, and those that failed, by reason."""
    averaging = peer.trainer.averaging
    return int(averaging.outcomes["committed"]), Counter(averaging.core.failures)


async def leftovers(peers: list[Peer]) -> dict[str, int]:
    """What the peers hold while no exchange is under way: the median of a few looks.

    Not the least of them: a look between two microbatches finds a third of the tensors gone, or none.
    """
    seen: list[dict[str, int]] = []
    for _ in range(200):
        idle = [peer for peer in peers if peer.trainer.averaging._exchange is None]
        if len(idle) == len(peers):
            gc.collect()
            counts = census()
            counts["early"] = sum(len(peer.trainer.averaging._early) for peer in peers)
            seen.append(dict(counts))
            if len(seen) == LOOKS:
                break
        await asyncio.sleep(0.01)
    return {name: median_low(counts.get(name, 0) for counts in seen) for name in seen[0]} if seen else {}


async def measure(folder: Path, rounds: int, deadline_s: float, warm_up: int) -> Report:
    """Run until the replicas have seen so many rounds."""
    Withholding.deadline_s = deadline_s
    peers.averaging.Exchange = Withholding  # type: ignore[misc]
    report, began = Report(), time.monotonic()
    world = World(folder, replicas=len(REPLICAS), steps=100_000, snapshot_every=20, samples_per_step=2)
    await world.start(REPLICAS, microseconds_per_token=1.0, is_recording=False)
    watched = [world.peers[name] for name in REPLICAS]
    baseline: dict[str, int] = {}
    try:
        await until(
            lambda: all(len(peer.trainer.averaging.core.roster) == len(REPLICAS) for peer in watched), 120
        )
        committed_before, failed_before = rounds_of(watched[0])
        while report.rounds < rounds:
            await asyncio.sleep(0.05)
            for peer in world.peers.values():
                if peer.task.done():
                    cause = None if peer.task.cancelled() else peer.task.exception()
                    raise RuntimeError(f"a peer has ended: {peer.notes.notes[-2:]}") from cause
            committed, failures = rounds_of(watched[0])
            report.steps = committed - committed_before
            report.reasons = dict(failures - failed_before)
            report.failed = sum(report.reasons.values())
            report.rounds = report.steps + report.failed
            if not report.memory or report.rounds >= report.memory[-1][0] + SAMPLE_EVERY:
                report.memory.append((report.rounds, held_bytes()))
            if not baseline and report.rounds >= min(warm_up, rounds // 4):
                baseline = await leftovers(watched)
        after = await leftovers(watched)
        report.left = {name: after[name] - baseline.get(name, 0) for name in after}
    finally:
        peers.averaging.Exchange = Exchange  # type: ignore[misc]
        report.seconds = time.monotonic() - began
        await world.close()
    return report


def verdict(report: Report, warm_up: int, limit_mib: float) -> list[str]:
    """What is wrong; empty if nothing is."""
    wrong = []
    slope = report.slope_mib_per_1000(warm_up)
    if slope >= limit_mib:
        wrong.append(f"memory grows by {slope:.2f} MiB per 1000 rounds (limit {limit_mib})")
    if report.failed < report.rounds // 3:
        wrong.append(f"only {report.failed} of {report.rounds} rounds failed: this measured something else")
    wrong += [f"{count} {name} are left over" for name, count in report.left.items() if count > 8]
    return wrong


def run(rounds: int, warm_up: int, deadline_s: float, folder: Path) -> Report:
    """One measurement in a loop of its own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measure(folder, rounds, deadline_s, warm_up))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2000, help="rounds in all, failed ones included")
    parser.add_argument("--warm-up", type=int, default=200, help="rounds before memory is compared")
    parser.add_argument("--deadline", type=float, default=0.15, help="seconds of one attempt")
    parser.add_argument("--limit-mib", type=float, default=1.0, help="MiB per 1000 rounds that are too much")
    arguments = parser.parse_args()
    logging.getLogger("swarm_peer").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="sp-") as folder:
        tempfile.tempdir = folder  # p2pd's sockets go along
        report = run(arguments.rounds, arguments.warm_up, arguments.deadline, Path(folder))
        tempfile.tempdir = None
    wrong = verdict(report, arguments.warm_up, arguments.limit_mib)
    print(
        json.dumps(
            {
                "rounds": report.rounds,
                "failed": report.failed,
                "steps": report.steps,
                "reasons": report.reasons,
                "seconds": round(report.seconds, 1),
                "slope_mib_per_1000_rounds": round(report.slope_mib_per_1000(arguments.warm_up), 3),
                "rss_mib": [
                    round(nbytes / MIB, 1) for _, nbytes in report.memory[:: max(1, len(report.memory) // 20)]
                ],
                "left": report.left,
                "wrong": wrong,
            },
            indent=2,
        )
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
