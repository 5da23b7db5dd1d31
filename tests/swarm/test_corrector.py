"""Peers that correct their averaged gradients by the priors of anchors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peers.prior_parts import PriorPart
from swarm.anchor.prior import decode_spectral_prior
from swarm.anchor.registry import build_corrector
from swarm.manifest import RunManifest
from tests.kit.ledger import audit
from tests.kit.puppet_anchor import PuppetAnchor
from tests.kit.swarm import Swarm, wait_for
from tests.swarm.test_equality import TOLERANCE, reference, trained_weights
from tests.swarm.test_priors import key, priors

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def slow(*values: str) -> Any:
    """One of the further cases."""
    return pytest.param(*values, marks=pytest.mark.slow)


STAGES, REPLICAS = 2, 2
NAMES = [f"{stage}-{replica}" for stage in range(STAGES) for replica in range(REPLICAS)]


def corrector(swarm: Swarm, name: str) -> dict[str, Any]:
    return priors(swarm, name).get("corrector") or {"counters": {}}


def corrects(swarm: Swarm, stage: int, sha256: str) -> Callable[[], bool]:
    """Whether every peer of the stage has applied a step under this prior."""
    return lambda: all(
        swarm.members[name].ledger()[-1:] and swarm.members[name].ledger()[-1]["corrector"] == sha256
        for name in NAMES
        if int(name[0]) == stage
    )


@pytest.mark.parametrize("variant", ["spectral", slow("one_sided"), slow("additive")])
def test_peers_correct_like_the_reference(swarm: Swarm, tmp_path: Path, variant: str) -> None:
    anchor, anchor_id = key(tmp_path, "anchor")
    steps = 40
    run_dir = swarm.make_run(
        stages=STAGES,
        replicas=REPLICAS,
        steps=steps,
        codec="mask",
        mask_ratio=50.0,
        codec_values="fp32",
        compute="fp32",
        averaging="fp32",
        optimizer="sgd",
        learning_rate=0.1,
        corrector=variant,
        corrector_rank=16,
        corrector_max_staleness=1000,
        anchor_peers=(anchor_id,),
    )
    swarm.seed()
    data: dict[str, tuple[int, bytes]] = {}
    with PuppetAnchor(anchor, swarm.address, run_dir, tmp_path / "a") as a:
        for stage in range(STAGES):
            prior = a.corrector(stage, 1)
            data[a.offer(PriorPart("corrector", stage), 1, prior)] = (stage, prior)
        matrices = [a.matrices(stage) for stage in range(STAGES)]
        for each in NAMES:
            swarm.join(int(each[0]), each)
        codes = swarm.wait_exits(NAMES, 120.0)
    assert codes == dict.fromkeys(NAMES, 0), swarm.report()

    used: list[dict[int, str]] = [{} for _ in range(STAGES)]
    for each in NAMES:
        for line in swarm.members[each].ledger():
            assert used[line["stage"]].setdefault(line["step"], line["corrector"]) == line["corrector"]
    counts = [sum(bool(sha256) for sha256 in by_step.values()) for by_step in used]
    assert all(0 < count < steps for count in counts), f"corrected steps: {counts}"

    manifest = RunManifest.load(run_dir / "manifest.yaml")
    made = {}
    for sha256, (stage, prior) in data.items():
        decoded = decode_spectral_prior(prior, matrices[stage], 16)
        made[sha256] = build_corrector(manifest.corrector, prior=decoded, shapes=dict(matrices[stage]))

    def correct(gradients: dict[str, Tensor], step: int) -> None:
        for stage in range(STAGES):
            if used[stage][step]:
                report = made[used[stage][step]](gradients, step)
                assert report.corrected == len(matrices[stage])

    model = swarm.folder / "model"
    trained, _, _ = reference(manifest, run_dir, model, correct)
    plain, _, _ = reference(manifest, run_dir, model)
    apart = sum(float((trained[name] - plain[name]).norm()) for name in trained)
    assert apart > 1e-2, "the corrector changed nothing, so equality would mean nothing"
    for stage in range(STAGES):
        replicas = [trained_weights(swarm.folder / f"{stage}-{r}", steps) for r in range(REPLICAS)]
        for name, tensor in replicas[0].items():
            torch.testing.assert_close(tensor, trained[name], atol=TOLERANCE, rtol=TOLERANCE, msg=name)
            assert torch.equal(tensor, replicas[1][name]), f"replicas differ in {name}"


@pytest.mark.slow
def test_wrong_priors_are_refused_and_a_joiner_corrects_as_the_others_did(
    swarm: Swarm, tmp_path: Path
) -> None:
    anchor, anchor_id = key(tmp_path, "anchor")
    stranger, stranger_id = key(tmp_path, "stranger")
    run_dir = swarm.make_run(
        stages=STAGES,
        replicas=REPLICAS,
        steps=3000,
        codec="mask",
        mask_ratio=50.0,
        compute="fp32",
        corrector="spectral",
        corrector_rank=8,
        corrector_max_staleness=200,
        anchor_peers=(anchor_id,),
        snapshot_every=50,
    )
    swarm.seed()
    for name in NAMES:
        swarm.join(int(name[0]), name)
    wait_for(lambda: all(swarm.members[name].step >= 2 for name in NAMES), 60.0, "two steps", swarm)
    own, other = PriorPart("corrector", 1), PriorPart("corrector", 0)
    near = [name for name in NAMES if name[0] == "1"]
    with (
        PuppetAnchor(anchor, swarm.address, run_dir, tmp_path / "a") as a,
        PuppetAnchor(stranger, swarm.address, run_dir, tmp_path / "c") as c,
    ):
        c.offer(own, 1, c.corrector(1, 1, seed=7))
        shape = next(iter(a.matrices(1).values()))
        a.offer(own, 2, a.corrector(1, 2, left=torch.full((shape[0], 8), float("nan"))))

        def counted(what: str, count: int = 1) -> Callable[[], bool]:
            return lambda: all(priors(swarm, name)["counters"].get(what) == count for name in near)

        wait_for(counted("refused_arrays"), 60.0, "the NaN to be found", swarm)
        a.offer(own, 3, a.corrector(1, 3, left=torch.zeros(3, 8)))
        wait_for(counted("refused_file"), 60.0, "the wrong shape to be found", swarm)
        a.offer(own, 4, a.corrector(0, 4))  # another stage's
        wait_for(counted("refused_file", 2), 60.0, "the other stage's to be found", swarm)
        wait_for(
            lambda: all(priors(swarm, name)["offers"].get("stranger") == 1 for name in NAMES),
            30.0,
            "the stranger to be counted",
            swarm,
        )
        assert all(
            len([note for note in swarm.members[name].notes if stranger_id[-8:] in note]) == 1
            for name in NAMES
        ), "said once"
        assert not any(line["corrector"] for name in NAMES for line in swarm.members[name].ledger())

        step = max(swarm.members[name].step for name in NAMES)
        good = a.offer(own, step, a.corrector(1, step))
        wait_for(corrects(swarm, 1, good), 60.0, "the good prior in use", swarm)
        a.offer(other, step, a.corrector(0, step))
        wait_for(lambda: "prior_step" in corrector(swarm, "1-0"), 30.0, "figures of the correction", swarm)
        figures = corrector(swarm, "1-0")
        assert figures["prior_step"] == step and figures["corrected"] == len(a.matrices(1)), figures
        assert 0 < figures["eta"] < 1 and 0 < figures["cosine"] <= 1 and figures["passed"] == {}

    # The anchor is gone. A joiner takes a snapshot and the updates since, each corrected as the others did.
    swarm.kill("1-1")
    newcomer = swarm.join(1, "newcomer")
    wait_for(lambda: (newcomer.last("status") or {}).get("microbatches_done", 0) > 0, 90.0, "its work", swarm)
    wait_for(lambda: len(newcomer.ledger()) > 5, 60.0, "its steps", swarm)
    assert newcomer.ledger()[-1]["corrector"] == good
    assert not any("drifted" in note for note in newcomer.notes), newcomer.notes
    # Without an anchor the prior fades out, and training goes on.
    wait_for(
        lambda: corrector(swarm, "1-0")["counters"].get("passed_stale", 0) > 0,
        300.0,
        "the prior to be outdated",
        swarm,
    )
    assert corrector(swarm, "1-0")["weight"] == 0.0
    audited = audit({name: swarm.members[name].ledger() for name in [*NAMES, "newcomer"]}, stages=STAGES)
    assert not audited.doubled and not audited.lost, audited.problems()


@pytest.mark.slow
def test_a_real_anchor_remembers_through_its_death_and_the_swarm_goes_on_without_it(
    swarm: Swarm, tmp_path: Path
) -> None:
    anchor, anchor_id = key(tmp_path, "anchor")
    swarm.make_run(
        stages=STAGES,
        replicas=REPLICAS,
        steps=5000,
        codec="basis",
        mask_ratio=50.0,
        compute="fp32",
        corrector="spectral",
        corrector_rank=8,
        corrector_max_staleness=200,
        anchor_peers=(anchor_id,),
        anchor_microbatches=4,
        snapshot_every=30,
        learning_rate=1e-3,
    )
    swarm.seed()
    for name in NAMES:
        swarm.join(int(name[0]), name)
    member = swarm.join(None, "anchor", is_anchor=True, identity=anchor)

    def figures() -> dict[str, Any]:
        return (member.last("status") or {}).get("anchor") or {}

    def corrected() -> bool:
        return all((corrector(swarm, name).get("corrected") or 0) > 0 for name in NAMES)

    wait_for(corrected, 120.0, "corrected steps", swarm)
    wait_for(lambda: figures().get("corrected_cosine") is not None, 90.0, "the anchor's figures", swarm)
    found = figures()
    assert 0 < found["coded_cosine"] <= 1 and -1 <= found["corrected_cosine"] <= 1
    assert len(found["forward_errors"]) == len(found["gradient_errors"]) == STAGES - 1
    assert found["corrector_bytes"] > 0 and found["gradients_refused"] == 0
    for name in NAMES:
        assert priors(swarm, name)["counters"].keys() == {"fetched"}, swarm.report()
        assert corrector(swarm, name)["passed"] == {}

    swarm.kill("anchor")
    goal = max(swarm.members[name].step for name in NAMES) + 20
    wait_for(lambda: all(swarm.members[name].step >= goal for name in NAMES), 60.0, "more steps", swarm)
    again = swarm.join(None, "anchor", is_anchor=True, identity=anchor)
    wait_for(
        lambda: sum(note.startswith("going on with the memory") for note in again.notes) == STAGES,
        60.0,
        "the memory",
        swarm,
    )
    audited = audit({name: swarm.members[name].ledger() for name in NAMES}, stages=STAGES)
    assert not audited.doubled and not audited.lost, audited.problems()
    for stage in range(STAGES):
        by_step: dict[int, set[str]] = {}
        for name in NAMES:
            for line in swarm.members[name].ledger():
                if line["stage"] == stage:
                    by_step.setdefault(line["step"], set()).add(line["corrector"])
        assert all(len(used) == 1 for used in by_step.values()), "replicas corrected by different priors"
