"""One swarm, one sudden death, and whether it cost anything but time."""

from __future__ import annotations

import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from dht.identity import Identity
from peers.injector import ON_SIGNAL
from swarm.manifest import RunManifest
from swarm.plan import seeded_order
from tests.kit.evaluation import final_loss, snapshot, unequal_tensors
from tests.kit.ledger import Audit, Key, audit, last_words, skipped_steps
from tests.kit.swarm import Host, Swarm, wait_for

LOSS_TOLERANCE = 1e-3
MOST_TOLERATED = 0.25
"""However many local steps were skipped: an average that was lost costs 0.3, and has to be found."""
KILL_STEP = 2
"""The first step whose duration is known before and after: step 0 also holds the start."""
SIGKILLED = -9

LEADER_POINTS = ("before_group", "after_first_commit", "before_commit")
"""Only the leader of a round comes to these."""
POINTS_OF: dict[str, tuple[str, ...]] = {
    "source": ("after_forward_sent", "after_backward", "after_step_end", "mid_exchange"),
    "first": ("after_accepted", "after_forward_sent", "after_backward", "after_gradient", "after_step_end"),
    "last": ("after_accepted", "after_backward", "after_gradient", "after_step_end"),
}
"""Points a peer can come to besides a leader's: a source, a stage with one beyond it, the last stage."""


@dataclass(frozen=True, slots=True)
class Case:
    """Who dies where. victim: source, lead (the lead source), stage-N, leader-N (of stage N's round), seed.

    point: of `peers.injector`; ON_SIGNAL for no point in particular; of the seed, "outside".
    """

    point: str
    victim: str

    def __str__(self) -> str:
        """POINT:VICTIM."""
        return f"{self.point}:{self.victim}"


def cases(stages: int, points: tuple[str, ...] | None = None) -> Iterator[Case]:
    """Every point and victim that exist together, and the seed's death."""
    for victim in (
        "source",
        "lead",
        *(f"{kind}-{s}" for s in range(1, stages) for kind in ("stage", "leader")),
    ):
        stage = stage_of(victim)
        kind = "source" if stage == 0 else "last" if stage == stages - 1 else "first"
        chosen = (*POINTS_OF[kind], "mid_exchange") if kind != "source" else POINTS_OF[kind]
        if victim == "lead" or victim.startswith("leader"):
            chosen += LEADER_POINTS
        yield from (Case(point, victim) for point in chosen if points is None or point in points)
    if points is None:
        yield from (
            Case(ON_SIGNAL, victim) for victim in ("source", *(f"stage-{s}" for s in range(1, stages)))
        )
        yield Case("outside", "seed")


def stage_of(victim: str) -> int:
    """The stage a victim holds; -1 for the seed."""
    if victim == "seed":
        return -1
    return int(victim.rpartition("-")[2]) if "-" in victim else 0


class Crew:
    """Peers whose identities are made before the swarm starts, so that it is known who will lead which round."""

    def __init__(self, folder: Path, stages: int, replicas: int, run_seed: int) -> None:
        self.folder, self.run_seed = folder, run_seed
        self.names = {s: [f"{s}-{r}" for r in range(replicas)] for s in range(stages)}
        self.ids = {name: Identity.load_or_create(self.key(name)).peer_id for name in self.everybody}

    @property
    def everybody(self) -> list[str]:
        """All names, replica by replica, so that stages fill evenly."""
        return [name for replica in zip(*self.names.values(), strict=True) for name in replica]

    def key(self, name: str) -> Path:
        """A peer's identity file."""
        return self.folder / f"{name}.key"

    def order(self, stage: int, step: int) -> list[str]:
        """The stage's peers in the order in which they may lead the step's round."""
        by_id = {self.ids[name]: name for name in self.names[stage]}
        return [by_id[peer] for peer in seeded_order(list(by_id), self.run_seed, stage, step)]

    def victim(self, name: str, step: int) -> str:
        """The peer that a victim's name means in a step."""
        order = self.order(stage_of(name), step)
        return order[0] if name.startswith("lead") else order[-1]


@dataclass(slots=True)
class Outcome:
    """How one swarm's run went, by peer name. loss: held-out, at the end, fp32. codes: None if it still ran."""

    finished: set[str]
    codes: dict[str, int | None]
    ledgers: dict[str, list[dict[str, Any]]]
    figures: dict[str, dict[str, Any]]
    words: dict[str, dict[str, Any]]
    audit: Audit
    seconds: float
    loss: float = math.nan
    unequal: list[str] = field(default_factory=list)
    report: str = ""

    @property
    def step_seconds(self) -> dict[int, float]:
        """Seconds between the first commits of stage 0, by the later one's step."""
        at = {step: when for (step, stage), when in self.audit.committed_at.items() if stage == 0}
        return {step: at[step] - at[step - 1] for step in sorted(at) if step - 1 in at}


class FaultBench:
    """Runs cases on one prepared run, with one crew, against one undisturbed run."""

    def __init__(
        self,
        host: Host,
        folder: Path,
        run_dir: Path | None = None,
        *,
        deadline_s: float = 120.0,
        tolerance: float = LOSS_TOLERANCE,
        per_skipped_step: float = 0.0,
    ) -> None:
        """run_dir: a run that exists; without it, `make_run` comes first. tolerance: by how much a death may change
        the held-out loss. per_skipped_step: by how much more for each local step that `skipped_steps` finds.
        """
        self.host, self.folder, self.deadline_s = host, folder, deadline_s
        self.tolerance, self.per_skipped_step = tolerance, per_skipped_step
        self.run_dir = run_dir if run_dir is not None else folder / "run"

    def make_run(self, **options: Any) -> None:
        """Make the run unless it is there."""
        if not (self.run_dir / "manifest.yaml").exists():
            Swarm(self.host, self.folder).make_run(
                deadline_s=600.0,
                **{
                    "layers": 4,
                    "samples_per_step": 16,
                    "steps": 6,
                    "codec_values": "fp32",
                    "learning_rate": 3e-3,
                    "heldout_percent": 20,
                    **options,
                },
            )

    @cached_property
    def manifest(self) -> RunManifest:
        """The run's."""
        return RunManifest.load(self.run_dir / "manifest.yaml")

    @cached_property
    def crew(self) -> Crew:
        """The peers of every case; identities stay, so the same peers lead the same rounds."""
        folder = self.folder / "identities"
        folder.mkdir(parents=True, exist_ok=True)
        return Crew(folder, self.manifest.model.stages, self.manifest.min_replicas, self.manifest.seed)

    @cached_property
    def reference(self) -> Outcome:
        """The undisturbed run."""
        outcome = self.run_again_unless_started("undisturbed")
        problems = [*outcome.audit.problems(), *outcome.unequal]
        if problems or outcome.finished != set(self.crew.everybody):
            raise RuntimeError(f"the undisturbed run failed: {problems}\n{outcome.report}")
        return outcome

    def start(self, name: str, kill_at: Mapping[str, str] | None = None, **settings: Any) -> Swarm:
        """Start a swarm in a folder of its own. kill_at: by peer."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        swarm = Swarm(self.host, folder, self.run_dir)
        swarm.seed()
        for peer in self.crew.everybody:
            self.join(swarm, peer, kill_at=(kill_at or {}).get(peer), **settings)
        return swarm

    def join(self, swarm: Swarm, peer: str, **settings: Any) -> None:
        """Start one peer of the crew, or start it again: its identity and its folder stay."""
        values = {
            "run_dir": self.run_dir,
            "checkpoint_dir": swarm.folder / peer / "checkpoints",
            "identity": self.crew.key(peer),
            "serve_after_s": 600.0,
        }
        swarm.join(int(peer.partition("-")[0]), peer, **{**values, **settings})

    def run(
        self,
        name: str,
        kill_at: Mapping[str, str] | None = None,
        during: Callable[[Swarm], None] | None = None,
    ) -> Outcome:
        """One whole run. during: called once everybody has been started."""
        began = time.monotonic()
        swarm = self.start(name, kill_at)
        try:
            if during is not None:
                during(swarm)
            report = ""
            try:
                wait_for(lambda: is_over(swarm), self.deadline_s, "the run to be finished", swarm)
            except TimeoutError as error:
                report = str(error)
            outcome = self.collect(swarm, time.monotonic() - began)
            outcome.report = report or swarm.report()
            return outcome
        finally:
            swarm.kill_all()

    def run_again_unless_started(self, *arguments: Any) -> Outcome:
        """`run`, once more if a peer could not join at the start: what is tested begins with the first step."""
        outcome = self.run(*arguments)
        if any(outcome.ledgers.values()) or not any(outcome.codes.values()):
            return outcome
        return self.run(*arguments)

    def collect(self, swarm: Swarm, seconds: float) -> Outcome:
        """Read what everybody left."""
        trainers = [name for name in swarm.members if name != "seed"]
        ledgers = {name: swarm.members[name].ledger() for name in trainers}
        words = {}
        for name in trainers:
            if (said := last_words(swarm.members[name].log)) is not None:
                words[name] = {**said, "stage": swarm.members[name].stage}
        stages, version = self.manifest.model.stages, self.manifest.total_steps
        has_outer = self.manifest.averaging.outer.name != "every_step"
        outcome = Outcome(
            finished={name for name in trainers if swarm.members[name].is_finished},
            codes={name: swarm.code(name) for name in trainers},
            ledgers=ledgers,
            figures={name: swarm.members[name].last("status") or {} for name in trainers},
            words=words,
            audit=audit(ledgers, words, stages),
            seconds=seconds,
        )
        files: list[Path] = []
        for stage in range(stages):
            found = [
                path
                for name in trainers
                if swarm.members[name].stage == stage
                and (path := snapshot(swarm.folder / name, stage, version)) is not None
            ]
            if found:
                differ = unequal_tensors(found, shared_only=has_outer)
                outcome.unequal += [f"stage {stage}: {tensor}" for tensor in differ]
                files.append(found[0])
        if len(files) == stages:
            outcome.loss = final_loss(self.run_dir, files)
        return outcome

    def run_case(self, case: Case, step: int = KILL_STEP) -> dict[str, Any]:
        """Run a case and judge it. Returns plain JSON values; `problems` is empty if it passed."""
        name = str(case).replace(":", "-")
        victim = "seed" if case.victim == "seed" else self.crew.victim(case.victim, step)
        if case.point in (ON_SIGNAL, "outside"):
            number = signal.SIGUSR1 if case.point == ON_SIGNAL else signal.SIGKILL
            kill_at = {victim: ON_SIGNAL} if case.point == ON_SIGNAL else {}
            outcome = self.run_again_unless_started(
                name, kill_at, lambda swarm: self._kill_in(swarm, victim, number, step)
            )
        else:
            # A round's leader is one in its own step only; any other peer may see no work in one step.
            when = f"step={step}" if case.victim.startswith("lead") else f"from={step}"
            kill_at = {victim: f"{case.point}:{when}"}
            outcome = self.run_again_unless_started(name, kill_at)
            if victim in outcome.finished:  # it got no work in that step; any other peer may have
                outcome = self.run_again_unless_started(f"{name}-again", kill_at)
        every = getattr(self.manifest.averaging.outer, "every", 1)
        skipped = skipped_steps(outcome.ledgers, every) + skipped_steps(self.reference.ledgers, every)
        most = max(self.tolerance, MOST_TOLERATED)
        tolerance = min(self.tolerance + skipped * self.per_skipped_step, most)
        result = judge(case, victim, outcome, self.reference, self.manifest, tolerance)
        if not result["problems"]:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        else:
            (self.folder / name / "report.txt").write_text(outcome.report, encoding="utf-8")
            result["folder"] = str(self.folder / name)
        return result

    def _kill_in(self, swarm: Swarm, victim: str, number: int, step: int) -> None:
        """Signal a peer as soon as the step before has been committed."""

        def has_come() -> bool:
            return is_over(swarm) or any(line["step"] >= step - 1 for line in swarm.members["0-0"].ledger())

        wait_for(has_come, self.deadline_s, f"step {step}", swarm)
        if swarm.code(victim) is None:
            swarm.signal(victim, number)
            wait_for(lambda: swarm.code(victim) is not None, 30.0, f"the end of {victim}", swarm)


def is_over(swarm: Swarm) -> bool:
    """Whether everybody has finished the run or was killed, or somebody has failed."""
    trainers = [name for name in swarm.members if name != "seed"]
    codes = {name: swarm.code(name) for name in trainers}
    if any(code not in (None, 0, SIGKILLED) for code in codes.values()):
        return True
    return all(code is not None or swarm.members[name].is_finished for name, code in codes.items())


def judge(
    case: Case,
    victim: str,
    outcome: Outcome,
    reference: Outcome,
    manifest: RunManifest,
    tolerance: float = LOSS_TOLERANCE,
) -> dict[str, Any]:
    """What a death cost, and everything that is wrong about it. tolerance: of the held-out loss."""
    stages, steps = manifest.model.stages, manifest.total_steps
    survivors = [name for name in outcome.codes if name != victim]
    problems = outcome.audit.problems()
    words = outcome.words.get(victim, {})
    if victim != "seed":
        if outcome.codes[victim] != SIGKILLED or words.get("killed_at") != case.point:
            problems.append(f"{victim} did not die at {case.point}: exit code {outcome.codes[victim]}")
        words = {"step": steps, **words}
    if failed := {name: outcome.codes[name] for name in survivors if name not in outcome.finished}:
        problems.append(f"survivors that did not finish, with their exit codes: {failed}")
    committed = {(line["step"], line["stage"]) for lines in outcome.ledgers.values() for line in lines}
    if absent := {(t, s) for t in range(steps) for s in range(stages)} - committed:
        problems.append(f"never committed (step, stage): {sorted(absent)[:8]}")
    if outcome.audit.lost:
        problems.append(f"lost though only one peer died: {sorted(outcome.audit.lost)[:8]}")
    if outcome.unequal:
        problems.append(f"replicas differ in {outcome.unequal[:4]}")
    difference = abs(outcome.loss - reference.loss)
    if not difference <= tolerance:
        problems.append(f"held-out loss {outcome.loss:.6f}, undisturbed {reference.loss:.6f}")
    replayed, share = replayed_work(outcome, victim, survivors, manifest)
    if replayed > share:
        problems.append(f"{replayed} microbatches computed again; {share} were the dead peer's")
    usual = median(seconds for step, seconds in reference.step_seconds.items() if step > 0)
    after = [
        seconds for step, seconds in outcome.step_seconds.items() if step >= words.get("step", KILL_STEP)
    ]
    return {
        "case": str(case),
        "shape": f"{stages}x{manifest.min_replicas}",
        "victim": victim,
        "step": words.get("step"),
        "loss": outcome.loss,
        "loss_difference": difference,
        "replayed": replayed,
        "share": share,
        "seconds_lost": round(max(0.0, sum(seconds - usual for seconds in after)), 3),
        "rounds_failed": sum(s.get("rounds_failed", 0) for s in outcome.figures.values()),
        "seconds": round(outcome.seconds, 1),
        "problems": problems,
    }


def replayed_work(
    outcome: Outcome, victim: str, survivors: list[str], manifest: RunManifest
) -> tuple[int, int]:
    """Microbatches computed more than once because of the death, and how many the dead peer had of its step.

    More than once: by the dead peer and by a survivor, or by survivors beyond what their ledgers hold.
    """
    wasted = sum(
        max(0, outcome.figures[name].get("microbatches_done", 0) - len(_keys(outcome, [name])))
        for name in survivors
    )
    if victim == "seed":
        return wasted, 0
    words = outcome.words.get(victim, {})
    stage, step = int(victim.partition("-")[0]), words.get("step", -1)
    dead = {(step, stage, slot, number) for slot, number in words.get("ledger", [])}
    share = int(words.get("held", 0))
    if stage == 0:  # a source's share is its slot, begun or not
        per_step = math.ceil(manifest.samples_per_step / manifest.rows_per_microbatch)
        share = max(share, math.ceil(per_step / manifest.min_replicas))
    return len(dead & _keys(outcome, survivors)) + wasted, share


def _keys(outcome: Outcome, names: list[str]) -> set[Key]:
    return {
        (line["step"], line["stage"], slot, number)
        for name in names
        for line in outcome.ledgers[name]
        for slot, number in line["keys"]
    }
