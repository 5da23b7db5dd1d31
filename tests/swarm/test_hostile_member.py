"""One of the eight replicas of a stage lies in its rounds: the others commit every step, and learn as much.

What it sends is altered in its own process, before it leaves (`tests.kit.spoiled`). Two things happen to it:

- nan, x1000: it stays in the group, and the reducers of all chunks but its own leave its parts out, step after step.
  What it has worked on is in no average, and nobody does it again: the others' mean is of seven.
- shape: the same, and each such frame is one that the protocol does not allow. After a few its links are closed, and
  the rest of the run goes on without it; so its microbatches are done by others.
- weight: whoever leads names the group without it, and takes its microbatches from others; where it leads itself, the
  others pass it over. It may come back as a follower that weighs nothing; microbatches of its own are then taken from
  it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from peers.limits import LIMITS
from swarm.manifest import RunManifest
from tests.kit.evaluation import final_loss, snapshot, unequal_tensors
from tests.kit.faults import Crew
from tests.kit.ledger import Audit, audit
from tests.kit.spoiled import Lie
from tests.kit.swarm import Host, Member, Swarm

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

REPLICAS, STEPS, TOLERANCE = 8, 24, 0.02


@dataclass
class Outcome:
    """loss: held-out, of what the honest members hold. figures: their last status; liar: that of the other one.
    rosters: by step, peer ids. counted: microbatches that the liar's ledger has.
    """

    loss: float
    figures: list[dict[str, Any]]
    liar: dict[str, Any]
    rosters: dict[int, tuple[str, ...]]
    counted: int
    audit: Audit

    def refused(self) -> Counter[str]:
        """Chunks of contributions that honest reducers left out, by reason."""
        return sum((Counter(figures["contributions_refused"]) for figures in self.figures), Counter())


class Bench:
    """One run, and what becomes of it."""

    def __init__(self, host: Host, folder: Path) -> None:
        self.host, self.folder = host, folder
        self.run_dir = Swarm(host, folder).make_run(
            stages=1,
            replicas=REPLICAS,
            layers=2,
            steps=STEPS,
            samples_per_step=16,
            snapshot_every=STEPS,
            learning_rate=3e-3,
            warmup_steps=2,
        )
        self.crew = Crew(folder, 1, REPLICAS, RunManifest.load(self.run_dir / "manifest.yaml").seed)
        # It leads the first step, whose round has the longest deadlines.
        self.liar, *self.honest = self.crew.order(stage=0, step=0)
        self.clean = self.run("clean")

    def run(self, name: str, lie: str = "") -> Outcome:
        """Train; everybody honest has to finish, and to hold the same bits."""
        folder = self.folder / name
        folder.mkdir()
        swarm = Swarm(self.host, folder, self.run_dir)
        try:
            swarm.seed()
            for peer in self.crew.everybody:
                identity, its = self.crew.key(peer), lie if peer == self.liar else ""
                swarm.join(0, peer, lie=its, identity=identity)
            swarm.wait_finished(self.honest, 240.0)
            assert all(swarm.members[peer].is_finished for peer in self.honest), swarm.report()
        finally:
            swarm.kill_all()
        files = [file for peer in self.honest if (file := snapshot(folder / peer, 0, STEPS)) is not None]
        assert len(files) == len(self.honest) and unequal_tensors(files) == []
        ledgers = {peer: member.ledger() for peer, member in swarm.members.items() if peer != "seed"}
        return Outcome(
            final_loss(self.run_dir, files[:1]),
            [figures_of(swarm.members[peer]) for peer in self.honest],
            figures_of(swarm.members[self.liar]),
            {line["step"]: tuple(line["roster"]) for line in ledgers[self.honest[0]]},
            sum(len(line["keys"]) for line in ledgers[self.liar]),
            audit(ledgers, stages=1),
        )


def figures_of(member: Member) -> dict[str, Any]:
    """What a peer said last of itself."""
    return member.last("summary") or member.last("status") or {}


@pytest.fixture(scope="module")
def bench(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield Bench(host, tmp_path_factory.mktemp("hostile"))


def run_with(bench: Bench, lie: Lie) -> Outcome:
    outcome = bench.run(lie, lie)
    print(lie, outcome.loss, bench.clean.loss, outcome.refused(), outcome.liar["contributions_refused_own"])
    assert sorted(outcome.rosters) == list(range(STEPS))
    assert outcome.audit.is_exact and not outcome.audit.lost, outcome.audit.problems()
    assert abs(outcome.loss - bench.clean.loss) <= TOLERANCE * bench.clean.loss
    assert min(figures["step"] for figures in outcome.figures) == STEPS
    return outcome


@pytest.mark.parametrize(("lie", "reason"), [("nan", "not_finite"), ("x1000", "norm")])
def test_values_that_cannot_count_are_left_out_of_every_average(bench: Bench, lie: Lie, reason: str) -> None:
    outcome = run_with(bench, lie)
    liar = outcome.liar["peer_id"]
    together = sum(liar in roster for roster in outcome.rosters.values())
    assert together > STEPS // 2
    # Every step each of the others reduces one chunk; a few may be left out of one or the other round.
    assert outcome.refused()[reason] >= together * (REPLICAS - 1) - 3 * REPLICAS
    assert outcome.liar["contributions_refused_own"] > 0
    # Rows of an embedding get much from one member and little from others now and then: the bound is no proof.
    assert sum(figures["contributions_refused_own"] for figures in outcome.figures) < STEPS


def test_parts_of_another_shape_do_not_count_and_end_the_link(bench: Bench) -> None:
    outcome = run_with(bench, "shape")
    liar = outcome.liar["peer_id"]
    without = [step for step, roster in outcome.rosters.items() if liar not in roster]
    assert without and without[0] < LIMITS.offences and len(without) > STEPS // 2
    assert outcome.refused()["size"] >= REPLICAS - 1
    # Whoever ends its link first decides for all: no group has the liar in it then, and others may have seen fewer.
    refusals = [figures["frames_refused"] for figures in outcome.figures]
    assert max(refusals) >= LIMITS.offences and min(refusals) > 0


def test_less_than_no_tokens_never_count(bench: Bench) -> None:
    outcome = run_with(bench, "weight")
    assert outcome.liar["peer_id"] not in outcome.rosters[0] and not outcome.counted
    assert sum(figures["frames_refused"] for figures in outcome.figures) > 0


def test_a_leader_that_gives_itself_the_weight_of_all_leads_no_round(bench: Bench) -> None:
    outcome = run_with(bench, "greedy")
    assert outcome.liar["peer_id"] not in outcome.rosters[0]
    assert min(figures["frames_refused"] for figures in outcome.figures) > 0
