"""Swarms whose peers sit behind lines: joiners that are slow, a line that collapses, a cable that is pulled."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.testbed import Host as Line
from benchmarks.testbed import Network
from peers.config import ComputeMode
from peers.limits import LIMITS
from tests.kit.ledger import audit
from tests.kit.swarm import Host, Member, Swarm, wait_for

NEAR = 0
"""The host whose peers have no line between them."""
T11_LINE = Line(2.0, 2.0, 300.0)
T11_LOSS, T11_CAP_MBPS = 0.03, 1.0
DEAD_SLOW_MBPS = 0.05
LEEWAY_S = 10.0
"""Added to every figure in seconds that is checked: the machine has other things to do."""


@dataclass(slots=True)
class Swarmed:
    """A swarm on a network. homes: the host of every peer that is not at `NEAR`."""

    network: Network
    swarm: Swarm
    compute: ComputeMode
    problems: list[str] = field(default_factory=list)

    def join(self, stage: int, name: str, host: int = NEAR, **settings: Any) -> Member:
        """Start a stage peer on a host."""
        settings = {"compute": self.compute, **settings}
        return self.swarm.join(stage, name, self.network.namespace(host), **settings)

    def start(self, stages: int, replicas: int, homes: Mapping[str, int], **settings: Any) -> list[str]:
        """Start the seed and `STAGE.REPLICA` of each; returns their names. settings: of those who are not near."""
        self.swarm.seed(self.network.namespace(NEAR))
        names = [f"{stage}.{replica}" for stage in range(stages) for replica in range(replicas)]
        # Those who are far away first: the run starts as soon as enough are there.
        for name in sorted(names, key=lambda name: name not in homes):
            more = settings if name in homes else {}
            member = self.join(int(name[0]), name, homes.get(name, NEAR), **more)
            if name in homes:
                self.until(lambda m=member: any("online" in note for note in m.notes), f"{name} to be there")
        return names

    def until(self, condition: Callable[[], bool], what: str, deadline_s: float = 120.0) -> None:
        """Wait. Raises TimeoutError."""
        wait_for(condition, deadline_s, what, self.swarm)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """A peer's ledger."""
        return self.swarm.members[name].ledger()

    def newest(self, name: str) -> int:
        """The last step a peer has committed, -1 for none."""
        return self.lines(name)[-1]["step"] if self.lines(name) else -1

    def reach(self, names: Sequence[str], step: int, deadline_s: float = 120.0) -> None:
        """Wait until all of these have committed a step."""
        self.until(lambda: all(self.newest(name) >= step for name in names), f"step {step}", deadline_s)

    def is_at_work(self, name: str, after: int) -> bool:
        """Whether a peer has voted, with work of its own, in a step after this one."""
        return any(
            line["step"] > after and line["peer"] in line["roster"] and line["keys"]
            for line in self.lines(name)
        )

    def seconds(self, name: str, after: int = -1, before: int = 1 << 30) -> list[float]:
        """Between each two commits of a peer, of the steps in (after, before)."""
        found = [line for line in self.lines(name) if after < line["step"] < before]
        return [two["at"] - one["at"] for one, two in pairwise(found)]

    def check(self, is_so: bool, problem: str) -> None:
        """Note a problem unless something is so."""
        if not is_so:
            self.problems.append(problem)

    def check_ledger(self, names: Sequence[str], stages: int) -> None:
        """Every microbatch of the steps that all stages have behind them was trained once."""
        # The end came between two members' lines of one step: the newest of each stage says nothing.
        least = min(max(self.newest(n) for n in names if n[0] == str(stage)) for stage in range(stages))
        found = audit(
            {n: [line for line in self.lines(n) if line["step"] < least - 1] for n in names}, stages=stages
        )
        self.problems += found.problems()
        self.check(not found.lost, f"lost: {sorted(found.lost)[:8]}")

    def result(self, **figures: Any) -> dict[str, Any]:
        """Figures and problems; with problems also what everybody said last."""
        report = {"report": self.swarm.report()} if self.problems else {}
        return {**figures, "problems": self.problems, **report}


@contextmanager
def swarmed(
    host: Host, folder: Path, lines: Sequence[Line], compute: ComputeMode, **options: Any
) -> Iterator[Swarmed]:
    """A run on a network with these hosts, beside `NEAR`; all peers are killed at the end. Raises TestbedError."""
    with Network([Line(), *lines]) as network:
        swarm = Swarm(host, folder)
        swarm.make_run(**{"stages": 2, "steps": 1_000_000, "averaging": "fp16", **options})
        try:
            yield Swarmed(network, swarm, compute)
        finally:
            swarm.kill_all()


def slow_joiners(
    host: Host, folder: Path, fast: Line, slow: Line, *, hidden: int = 128, cap_mbps: float | None = None
) -> dict[str, Any]:
    """Two peers join a swarm of 1 s steps, both with the run's files: one can keep up, one cannot and is told so.

    cap_mbps: the slow one's own --max-download-mbps.
    """
    options = {"layers": 4, "hidden": hidden, "replicas": 2, "snapshot_every": 20}
    with swarmed(host, folder, [fast, slow], ComputeMode(5000.0), **options) as bed:
        names = bed.start(2, 2, {})
        bed.reach(names, 5)
        began, witness = time.monotonic(), names[-1]
        before = bed.newest(witness)
        good = bed.join(1, "fast", 1, run_dir=bed.swarm.run_dir)
        bad = bed.join(1, "slow", 2, run_dir=bed.swarm.run_dir, max_download_mbps=cap_mbps)
        bed.until(lambda: bed.is_at_work("fast", before), "the fast one to vote")
        joined_s = time.monotonic() - began
        bed.until(lambda: bed.swarm.code("slow") is not None, "the slow one to be told", 200.0)
        told_s, after = time.monotonic() - began, bed.newest(witness)
        bed.reach(names, after + 3)
        text = next((note for note in bad.notes if note.startswith("error:")), "")
        waits = bed.seconds(witness, before)
        usual_s = median(waits)
        bed.check(bed.swarm.code("slow") == 2, f"exit code {bed.swarm.code('slow')} of the slow one")
        for figure in ("cannot keep up", "An update has", " MB", "takes", " s here", "Mbit/s", "for a step"):
            bed.check(figure in text, f"{figure!r} is not in {text!r}")
        bed.check(not any(bad.pid and line["peer"] == _id(bad) for line in bed.lines("slow")), "it voted")
        most_s = usual_s + LIMITS.gate_s + LEEWAY_S
        bed.check(max(waits) < most_s, f"a step took {max(waits):.1f} s, usual are {usual_s:.1f} s")
        return bed.result(
            fast=str(fast),
            slow=str(slow) if cap_mbps is None else f"cap {cap_mbps} Mbit/s",
            joined_s=joined_s,
            fast_notes=good.notes[-1],
            told_s=told_s,
            told=text,
            steps_meanwhile=after - before,
            usual_step_s=usual_s,
            longest_step_s=max(waits),
        )


def collapsing_line(host: Host, folder: Path, *, steps: int = 2, soak_s: float = 0.0) -> dict[str, Any]:
    """A replica with a T11 line and an upload cap; then its line gets far too slow, and the others go on without it.

    steps: with the clean line, and again with its losses. soak_s: how long the others are watched after that.
    """
    options = {"layers": 4, "hidden": 64, "replicas": 3}
    clean = Line(T11_LINE.up_mbps, T11_LINE.down_mbps, T11_LINE.delay_ms)
    with swarmed(host, folder, [clean], ComputeMode(2000.0), **options) as bed:
        far = "1.2"
        names = bed.start(2, 3, {far: 1}, max_upload_mbps=T11_CAP_MBPS, run_dir=bed.swarm.run_dir)
        near = [name for name in names if name != far]
        witness, member = "1.0", bed.swarm.members[far]
        me = _id(member)
        rates = []
        for step in (0, steps):
            if step:
                bed.network.lose(1, T11_LOSS)
            rates.append(upload_rate(bed, member, names, max(0, bed.newest(witness)) + steps))
        with_it = bed.newest(witness)
        bed.network.shape(1, DEAD_SLOW_MBPS, DEAD_SLOW_MBPS)
        bed.until(
            lambda: any(me not in line["roster"] for line in bed.lines(witness)[1:]),
            "a step without the slow one",
            200.0,
        )
        without = next(line["step"] for line in bed.lines(witness)[1:] if me not in line["roster"])
        rss = {name: _rss(bed.swarm.members[name]) for name in near}
        bed.reach(near, without + 6)
        end = time.monotonic() + soak_s
        while time.monotonic() < end:
            time.sleep(1.0)
        last = bed.newest(witness)
        waits = bed.seconds(witness, without)
        grown = max(_rss(bed.swarm.members[name]) - rss[name] for name in near)
        late = max(bed.seconds(witness, with_it - 1, without + 1))
        again = [
            line["step"] for line in bed.lines(witness) if line["step"] > without and me in line["roster"]
        ]
        for what, rate in zip(("the clean line", "the line with losses"), rates, strict=True):
            bed.check(rate <= 1.05 * T11_CAP_MBPS, f"{rate:.2f} Mbit/s up on {what}, cap {T11_CAP_MBPS}")
        bed.check(median(waits) < 5.0, f"{median(waits):.1f} s for a step without the slow one")
        bed.check(not again, f"the slow one was back in steps {again}")
        bed.check(grown < 32.0, f"resident memory grew by {grown:.0f} MB")
        bed.check_ledger(names, 2)
        return bed.result(
            upload_mbps=rates,
            cap_mbps=T11_CAP_MBPS,
            step_s_with_it=bed.seconds(witness, 0, with_it),
            left_out_s=late,
            step_s_without_it=median(waits),
            steps_without_it=last - without,
            grown_mb=grown,
            it_says=member.notes[-3:],
        )


def upload_rate(bed: Swarmed, member: Member, names: Sequence[str], until: int) -> float:
    """Mbit/s that a peer's host sends, until all have committed a step."""
    began, before = time.monotonic(), sent_bytes(member.pid)
    bed.reach(names, until, 200.0)
    return (sent_bytes(member.pid) - before) * 8e-6 / (time.monotonic() - began)


def pulled_cable(host: Host, folder: Path, *, away_s: float = 20.0, far: str = "1.2") -> dict[str, Any]:
    """A replica's cable is pulled and put back: the others go on without it, it catches up, and works again."""
    options = {"layers": 2, "replicas": 3, "samples_per_step": 16, "snapshot_every": 10}
    with swarmed(host, folder, [Line()], ComputeMode(1500.0), **options) as bed:
        names = bed.start(2, 3, {far: 1})
        near = [name for name in names if name != far]
        bed.reach(names, 4)
        began = time.monotonic()
        bed.network.cut(1)
        bed.until(lambda: time.monotonic() - began >= away_s, "time")
        bed.network.mend(1)
        mended = max(bed.newest(name) for name in near)
        alone = bed.newest(far)
        bed.until(lambda: all(bed.is_at_work(name, mended) for name in names), "all to work again")
        back_s = time.monotonic() - began - away_s
        bed.reach(names, mended + 12)
        bed.swarm.kill_all()
        losses = [note for name in near for note in bed.swarm.members[name].notes if "silent" in note]
        bed.check(len(losses) >= len(near), f"{len(losses)} of {len(near)} noticed its silence")
        bed.check(mended > alone, f"the others did not get beyond step {mended} without it")
        bed.check(any("caught up" in note for note in bed.swarm.members[far].notes), "it did not catch up")
        bed.check_ledger(names, 2)
        return bed.result(
            away_s=away_s,
            steps_without_it=mended - alone,
            back_s=back_s,
            longest_step_s=max(bed.seconds(near[0])),
        )


def partition(host: Host, folder: Path, *, away_s: float = 15.0) -> dict[str, Any]:
    """Two halves of a swarm of 2 x 4 do not see each other for a while: one lineage comes out of it."""
    options = {"layers": 2, "replicas": 4, "samples_per_step": 16, "snapshot_every": 10}
    homes = {"0.2": 1, "0.3": 1, "1.2": 1, "1.3": 1}
    with swarmed(host, folder, [Line()], ComputeMode(1500.0), **options) as bed:
        names = bed.start(2, 4, homes)
        bed.reach(names, 4)
        began = time.monotonic()
        bed.network.cut(1)
        bed.until(lambda: time.monotonic() - began >= away_s, "time")
        bed.network.mend(1)
        mended = max(bed.newest(name) for name in names)
        bed.until(lambda: all(bed.is_at_work(name, mended) for name in names), "all to work again")
        back_s = time.monotonic() - began - away_s
        bed.reach(names, mended + 5)
        bed.swarm.kill_all()
        bed.check_ledger(names, 2)
        return bed.result(away_s=away_s, back_s=back_s, longest_step_s=max(bed.seconds(names[0])))


def sent_bytes(pid: int) -> int:
    """Bytes that have left the host of a process, headers included."""
    for line in Path(f"/proc/{pid}/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "eth0":
            return int(figures.split()[8])
    return 0


def _id(member: Member) -> str:
    return str((member.last("status") or {}).get("peer_id", ""))


def _rss(member: Member) -> float:
    try:
        return psutil.Process(member.pid).memory_info().rss / 1e6
    except psutil.NoSuchProcess:
        return math.nan
