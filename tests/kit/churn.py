"""A swarm whose members die and are replaced all the time, and what that did to it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import psutil

from peers.config import ComputeMode
from peers.injector import ON_SIGNAL
from tests.kit.evaluation import snapshot, unequal_tensors
from tests.kit.ledger import Audit, LedgerTail, audit, last_words
from tests.kit.swarm import Host, Swarm, wait_for

MAX_STALL_S = 10.0
LEAST_NOISE = 1e-3
WINDOW = 10
"""Steps over which a loss curve is smoothed; what is left is its noise."""
ENDLESS_STEPS = 1_000_000
_LOOK_S = 0.25
_RSS_EVERY_S = 5.0
_RSS_SETTLED_S = 60.0
_START_S = 90.0


@dataclass(slots=True)
class Soak:
    """One swarm's time under observation. seconds: from its first commit to the end.

    stalls: longest time between two commits, per stage. members: (seconds since the first commit, share of the
    places held by living voting peers). rss: (seconds, bytes) by peer, of those that lived to the end.
    kills: (seconds, peer) in order.
    """

    seconds: float = 0.0
    steps: int = 0
    audit: Audit = field(default_factory=Audit)
    stalls: dict[int, float] = field(default_factory=dict)
    members: list[tuple[float, float]] = field(default_factory=list)
    rss: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    kills: list[tuple[float, str]] = field(default_factory=list)
    joined: dict[str, float] = field(default_factory=dict)
    unequal: list[str] = field(default_factory=list)
    failed: dict[str, int | None] = field(default_factory=dict)
    report: str = ""

    @property
    def steps_per_s(self) -> float:
        """Committed steps per second."""
        return self.steps / self.seconds if self.seconds else 0.0

    @property
    def mean_share(self) -> float:
        """Mean share of the places that were held."""
        return fmean(share for _, share in self.members) if self.members else 0.0

    def rss_slopes(self) -> dict[str, float]:
        """MB per minute of every survivor that was watched for two minutes and more after it settled."""
        found = {}
        for name, points in self.rss.items():
            settled = [point for point in points if point[0] - points[0][0] >= _RSS_SETTLED_S]
            if settled and settled[-1][0] - settled[0][0] >= 2 * _RSS_SETTLED_S:
                found[name] = 60 * _slope(settled) / 1e6
        return found


class Churn:
    """Runs soaks on one prepared run."""

    def __init__(
        self,
        host: Host,
        folder: Path,
        *,
        stages: int = 3,
        replicas: int = 3,
        compute: ComputeMode | None = None,
        seed: int = 0,
    ) -> None:
        self.host, self.folder = host, folder
        self.stages, self.replicas = stages, replicas
        self.compute = compute or ComputeMode()
        self._random = random.Random(seed)
        self.run_dir = folder / "run"

    def make_run(self, **options: Any) -> None:
        """Make the run unless it is there."""
        if not (self.run_dir / "manifest.yaml").exists():
            chosen = {
                "stages": self.stages,
                "replicas": self.replicas,
                "steps": ENDLESS_STEPS,
                "layers": 2 * self.stages,
                "samples_per_step": 24,
                "codec_values": "fp32",
                "snapshot_every": 20,
                **options,
            }
            Swarm(self.host, self.folder).make_run(deadline_s=300.0, **chosen)

    def soak(
        self,
        name: str,
        seconds: float,
        kill_every_s: float | None = None,
        *,
        least_replaced: int | None = None,
    ) -> Soak:
        """Train for so long after the first commit. kill_every_s: kill -9 a random member that often.

        least_replaced: for machines that are busy with other things: a death waits until everybody is back from
        the one before, and the soak goes on, for three times as long at most, until so many have come back.
        """
        folder = self.folder / name
        folder.mkdir(parents=True)
        swarm = Swarm(self.host, folder, self.run_dir)
        watch = _Watch(self, swarm)
        try:
            swarm.seed()
            for replica in range(self.replicas):
                for stage in range(self.stages):
                    watch.add(stage, f"{stage}-{replica}")
            wait_for(watch.has_begun, _START_S, "the first step", swarm)
            watch.run(seconds, kill_every_s, self._random, least_replaced)
            return watch.end()
        finally:
            swarm.kill_all()


class _Watch:
    """Looks at one swarm four times a second."""

    def __init__(self, churn: Churn, swarm: Swarm) -> None:
        self._churn, self._swarm = churn, swarm
        self._tails: dict[str, LedgerTail] = {}
        self._rosters: dict[int, tuple[int, tuple[str, ...]]] = {}
        self._ids: dict[str, str] = {}
        self._last_commit: dict[int, float] = {}
        self._next_rss = 0.0
        self._extra = 0
        self._began = 0.0
        self.soak = Soak(stalls=dict.fromkeys(range(churn.stages), 0.0))

    def add(self, stage: int, name: str) -> None:
        """Start a peer with an identity of its own."""
        folder = self._swarm.folder / name
        self._swarm.join(
            stage,
            name,
            run_dir=self._churn.run_dir,
            checkpoint_dir=folder / "checkpoints",
            compute=self._churn.compute,
            kill_at=ON_SIGNAL,
            serve_after_s=600.0,
        )
        self._tails[name] = LedgerTail(folder / "ledger.jsonl")

    def has_begun(self) -> bool:
        """Whether every stage has committed a step."""
        self._read()
        return len(self._last_commit) == self._churn.stages

    def run(
        self, seconds: float, kill_every_s: float | None, randomly: random.Random, least_replaced: int | None
    ) -> None:
        """Watch, and kill."""
        self._began = time.monotonic()
        self._last_commit = dict.fromkeys(self._last_commit, self._began)
        next_kill = self._began + kill_every_s if kill_every_s else float("inf")
        is_patient = least_replaced is not None
        while True:
            now = time.monotonic()
            self._read()
            self._look(now - self._began)
            replaced = sum(place is not None for place in replacements(self.soak))
            is_over = now - self._began >= seconds * (3 if replaced < (least_replaced or 0) else 1)
            if is_over:
                break
            is_whole = self.soak.members[-1][1] == 1.0
            if now >= next_kill and kill_every_s and (is_whole or not is_patient):
                next_kill = (now if is_patient else next_kill) + kill_every_s
                self._kill(now - self._began, randomly)
            time.sleep(_LOOK_S)
        self.soak.seconds = time.monotonic() - self._began

    def end(self) -> Soak:
        """End everybody at once, and read what they wrote."""
        self._read()
        soak, swarm = self.soak, self._swarm
        soak.report = swarm.report()
        alive = [name for name in self._tails if swarm.code(name) is None]
        killed = {name for _, name in soak.kills}
        soak.failed = {n: swarm.code(n) for n in self._tails if n not in alive and n not in killed}
        swarm.kill_all()
        self._read()
        words = {
            name: {**said, "stage": swarm.members[name].stage}
            for name in self._tails
            if (said := last_words(swarm.members[name].log)) is not None
        }
        # The end may come between two members' lines of one step: the newest step of a stage says nothing.
        ledgers = {
            name: [line for line in tail.read() if line["step"] < self._rosters[line["stage"]][0]]
            for name, tail in self._tails.items()
        }
        soak.audit = audit(ledgers, words, self._churn.stages)
        soak.steps = len({step for step, stage in soak.audit.committed_at if stage == 0})
        soak.rss = {name: points for name, points in soak.rss.items() if name in alive}
        self._compare(alive)
        return soak

    def _compare(self, alive: list[str]) -> None:
        """Replicas that are left: their newest common snapshot must be equal bit for bit."""
        for stage in range(self._churn.stages):
            folders = [self._swarm.folder / n for n in alive if self._swarm.members[n].stage == stage]
            versions = [
                {int(path.stem.rpartition("-")[2]) for path in folder.rglob("*-version-*.safetensors")}
                for folder in folders
            ]
            if common := set.intersection(*versions) if versions else set():
                files = [snapshot(folder, stage, max(common)) for folder in folders]
                differ = unequal_tensors([path for path in files if path is not None])
                self.soak.unequal += [f"stage {stage} version {max(common)}: {name}" for name in differ]

    def _read(self) -> None:
        now = time.monotonic()
        for name, tail in self._tails.items():
            for line in tail.fresh():
                stage = line["stage"]
                self._ids[name] = line["peer"]
                if name not in self.soak.joined and self._began:
                    self.soak.joined[name] = now - self._began
                if line["step"] > self._rosters.get(stage, (-1, ()))[0]:
                    self._rosters[stage] = (line["step"], tuple(line["roster"]))
                    if self._began:
                        gap = now - self._last_commit[stage]
                        self.soak.stalls[stage] = max(self.soak.stalls[stage], gap)
                    self._last_commit[stage] = now

    def _look(self, at: float) -> None:
        """Who is a member, and how much memory everybody has."""
        held = 0
        for stage in range(self._churn.stages):
            held += len(self._members(stage))
            waiting = time.monotonic() - self._last_commit[stage]
            self.soak.stalls[stage] = max(self.soak.stalls[stage], waiting)
        self.soak.members.append((at, held / (self._churn.stages * self._churn.replicas)))
        if at >= self._next_rss:
            self._next_rss = at + _RSS_EVERY_S
            for name in self._tails:
                if self._swarm.code(name) is None and psutil.pid_exists(self._swarm.members[name].pid):
                    size = psutil.Process(self._swarm.members[name].pid).memory_info().rss
                    self.soak.rss.setdefault(name, []).append((at, size))

    def _members(self, stage: int) -> list[str]:
        """Living peers of a stage that its newest roster names."""
        _, roster = self._rosters[stage]
        return [
            name
            for name, peer in self._ids.items()
            if peer in roster and self._swarm.members[name].stage == stage and self._swarm.code(name) is None
        ]

    def _kill(self, at: float, randomly: random.Random) -> None:
        """A random member dies, wherever it is; a new peer takes its place. The last of a stage is spared."""
        members = [self._members(stage) for stage in range(self._churn.stages)]
        candidates = sorted(name for names in members if len(names) > 1 for name in names)
        if not candidates:
            return
        victim = randomly.choice(candidates)
        os.kill(self._swarm.members[victim].pid, signal.SIGUSR1)
        self.soak.kills.append((at, victim))
        self._extra += 1
        stage = self._swarm.members[victim].stage
        assert stage is not None
        self.add(stage, f"{stage}-new{self._extra}")


def noise(losses: dict[int, float]) -> float:
    """Standard deviation of a loss curve around its smoothed self, without the fast fall at the beginning."""
    steps = sorted(losses)[WINDOW:]
    rest = [losses[s] - fmean(losses[t] for t in range(s - WINDOW, s + 1) if t in losses) for s in steps]
    return pstdev(rest) if len(rest) > 1 else 0.0


def compare(
    churned: Soak, calm: Soak, *, has_loss: bool = True, most_stall_s: float = MAX_STALL_S
) -> dict[str, Any]:
    """The figures of both and what is wrong; `problems` is empty if the swarm bore it."""
    problems = churned.audit.problems()
    problems += [f"replicas differ: {name}" for name in churned.unequal[:4]]
    for stage, stall in churned.stalls.items():
        if stall > most_stall_s:
            problems.append(f"stage {stage} stood for {stall:.1f} s")
    if churned.failed:
        problems.append(f"peers that nobody killed ended: {churned.failed}")
    common = sorted(set(churned.audit.losses) & set(calm.audit.losses))
    gaps = sorted(abs(churned.audit.losses[step] - calm.audit.losses[step]) for step in common)
    # Sums in another order: without microbatches lost the curves are equal but for rounding.
    band = max(LEAST_NOISE, noise({step: calm.audit.losses[step] for step in common}))
    if has_loss and gaps and gaps[int(0.95 * (len(gaps) - 1))] > band:
        problems.append(f"losses differ by {gaps[int(0.95 * (len(gaps) - 1))]:.4f}, the noise is {band:.4f}")
    slopes = churned.rss_slopes()
    expected = calm.steps_per_s * churned.mean_share
    times = [
        churned.joined[n] - at for (at, _), n in zip(churned.kills, replacements(churned), strict=False) if n
    ]
    return {
        "minutes": round(churned.seconds / 60, 2),
        "kills": len(churned.kills),
        "steps": churned.steps,
        "steps_calm": calm.steps,
        "longest_stall_s": {stage: round(stall, 2) for stage, stall in churned.stalls.items()},
        "longest_stall_calm_s": {stage: round(stall, 2) for stage, stall in calm.stalls.items()},
        "keys_lost": len(churned.audit.lost),
        "keys_doubled": len(churned.audit.doubled),
        "keys_missing": len(churned.audit.missing),
        "loss_gap_p95": gaps[int(0.95 * (len(gaps) - 1))] if has_loss and gaps else None,
        "loss_noise": band if has_loss else None,
        "steps_compared": len(common),
        "mean_share_of_members": round(churned.mean_share, 4),
        "steps_per_s": round(churned.steps_per_s, 3),
        "steps_per_s_calm": round(calm.steps_per_s, 3),
        "throughput_share": round(churned.steps_per_s / expected, 4) if expected else None,
        "joining_s_median": round(sorted(times)[len(times) // 2], 2) if times else None,
        "joining_s_worst": round(max(times), 2) if times else None,
        "rss_mb_per_minute": {name: round(slope, 3) for name, slope in slopes.items()},
        "problems": problems,
    }


def replacements(soak: Soak) -> list[str | None]:
    """For every kill the peer that came for it, None if it had not worked by the end."""
    by_stage: defaultdict[str, list[str]] = defaultdict(list)
    for name in soak.joined:
        by_stage[name.partition("-new")[2]].append(name)
    return [next(iter(by_stage.get(str(number), [])), None) for number in range(1, len(soak.kills) + 1)]


def _slope(points: list[tuple[float, int]]) -> float:
    """Least squares: units per second."""
    mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    over = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / over if over else 0.0
