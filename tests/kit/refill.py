"""A stage of one peer dies and stands empty until a stranger comes."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.kit.faults import SIGKILLED, FaultBench
from tests.kit.swarm import Host, wait_for

STAGES, EMPTY, STEPS, KILL_STEP = 3, 1, 24, 6


def refill(host: Host, folder: Path, empty_s: float) -> dict[str, Any]:
    """Kill the only peer of the middle stage, wait, start another that has nothing; judge like a fault's case.

    seconds_lost: from the newcomer's start to the next commit of its stage. Nothing but the seed's initial state
    is left of the stage, so the loss starts again from there and must fall.
    """
    bench = FaultBench(host, folder, deadline_s=120.0)
    bench.make_run(stages=STAGES, replicas=1, steps=STEPS, layers=6)
    began = time.monotonic()
    victim, newcomer = f"{EMPTY}-0", f"{EMPTY}-new"
    shutil.rmtree(folder / "refill", ignore_errors=True)
    swarm = bench.start("refill", {victim: f"after_backward:step={KILL_STEP}"})
    problems: list[str] = []
    try:
        wait_for(lambda: swarm.code(victim) is not None, 90.0, "the death", swarm)
        empty_until = time.monotonic() + empty_s
        wait_for(lambda: time.monotonic() > empty_until, empty_s + 5.0, "the stage to stand empty", swarm)
        others = [name for name in swarm.members if name not in (victim, "seed")]
        if gone := [name for name in others if swarm.code(name) is not None]:
            problems.append(f"{gone} did not wait for the empty stage")
        came_at = time.time()
        swarm.join(
            EMPTY,
            newcomer,
            run_dir=bench.run_dir,
            checkpoint_dir=swarm.folder / newcomer / "checkpoints",
            serve_after_s=600.0,
        )
        try:
            swarm.wait_finished([*others, newcomer], bench.deadline_s)
        except TimeoutError as error:
            problems.append(str(error)[:2000])
        outcome = bench.collect(swarm, time.monotonic() - began)
    finally:
        swarm.kill_all()
    audit = outcome.audit
    problems += audit.problems()
    if outcome.codes[victim] != SIGKILLED:
        problems.append(f"{victim} ended with {outcome.codes[victim]}")
    if missing := {(t, s) for t in range(STEPS) for s in range(STAGES)} - set(audit.committed_at):
        problems.append(f"never committed (step, stage): {sorted(missing)[:8]}")
    losses = audit.losses
    after = [losses[step] for step in sorted(losses) if step > KILL_STEP]
    if len(after) < 6 or not fmean(after[-3:]) < fmean(after[:3]):
        problems.append(f"the loss did not go on falling: {[round(loss, 3) for loss in losses.values()]}")
    entered = [at for (_, stage), at in audit.committed_at.items() if stage == EMPTY and at > came_at]
    return {
        "case": "refill:stage-1",
        "shape": f"{STAGES}x1",
        "victim": victim,
        "step": outcome.words.get(victim, {}).get("step"),
        "loss": outcome.loss,
        "loss_difference": None,
        "losses": [round(loss, 4) for loss in losses.values()],
        "lost": len(audit.lost),
        "replayed": 0,
        "share": 0,
        "seconds_lost": round(min(entered) - came_at, 3) if entered else float("inf"),
        "empty_s": empty_s,
        "seconds": round(outcome.seconds, 1),
        "problems": problems,
    }
