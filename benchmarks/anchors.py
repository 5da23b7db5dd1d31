"""What the anchor circuit costs the fast circuit: step time, waiting, traffic.

    python benchmarks/anchors.py                            step time with an anchor against without, 60 steps
    python benchmarks/anchors.py --steps 500 --rounds 0     the traffic of 500 steps (about ten minutes)

Real processes on loopback whose stages wait instead of computing (--microseconds-per-token), so that the machine
is free for what is measured; the anchor computes for real. Where step times are compared it does so at idle priority,
since it would be a machine of its own (on a few cores the codecs of all peers and the anchor's fits would wait for
each other). Stage peers pull priors as the run's snapshots make them. Runs with and without the anchor take turns.
Reports, as JSON:

  step_time_ratio     median step with the anchor / without it (medians of all rounds)
  waited_share        seconds in which a plan named a prior that a peer did not hold / seconds trained, worst peer
  prior_share         bytes of priors that fast peers fetched / bytes of FORWARD and GRADIENT that they sent
  prior_share_at_95   the same if the boundary's codes were those of mask ratio 95 (computed)

Exit code 1 if the ratio exceeds 1.05, or a share its limit (0.05 and 0.10).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.kit.swarm import Host, Swarm

MOST_RATIO, MOST_WAITED, MOST_TRAFFIC = 1.05, 0.05, 0.10
WARM_UP_STEPS = 5
"""Links are measured and windows grow in the first steps."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="steps of every run")
    parser.add_argument("--rounds", type=int, default=2, help="pairs of runs; 0: one run with an anchor")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=576, help="width H of the model")
    parser.add_argument("--mask-ratio", type=float, default=90.0)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens per step and replica of a stage")
    parser.add_argument("--microseconds-per-token", type=float, default=60.0, help="of a stage")
    parser.add_argument("--snapshot-every", type=int, default=20)
    parser.add_argument("--deadline", type=float, default=1500.0, help="seconds a run may take")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--folder", type=Path, help="working folder, kept; without it, one that is removed")
    return parser.parse_args()


ROWS, SEQUENCE = 8, 256


def make(host: Host, folder: Path, arguments: argparse.Namespace) -> tuple[Path, Path]:
    """The run that all swarms share; returns its folder and the anchor's key."""
    from dht.identity import Identity
    from tests.kit.swarm import Swarm

    key = folder / "anchor.key"
    identity = Identity.load_or_create(key)
    identity.close()
    run_dir = Swarm(host, folder).make_run(
        deadline_s=600.0,
        data="stdlib",
        max_tokens=2_000_000,
        stages=arguments.stages,
        replicas=arguments.replicas,
        layers=arguments.stages,
        hidden=arguments.hidden,
        steps=arguments.steps,
        samples_per_step=arguments.replicas * arguments.tokens // SEQUENCE,
        rows_per_microbatch=ROWS,
        sequence_length=SEQUENCE,
        codec="basis",
        mask_ratio=arguments.mask_ratio,
        averaging="fp16",
        freeze=("embedding", "head", "norms"),  # calibrated stages serve zeros; these stay what they are
        anchor_peers=(identity.peer_id,),
        anchor_microbatches=4,
        snapshot_every=arguments.snapshot_every,
    )
    return run_dir, key


def train(swarm: Swarm, arguments: argparse.Namespace, key: Path | None) -> dict[str, Any]:
    """One run to its end; with an anchor if there is a key."""
    from peers.config import ComputeMode
    from tests.kit.ledger import audit

    names = [
        f"{stage}-{replica}" for stage in range(arguments.stages) for replica in range(arguments.replicas)
    ]
    swarm.seed()
    if key is not None:
        anchor = swarm.join(None, "anchor", is_anchor=True, identity=key)
        if arguments.rounds:
            give_way(anchor.pid)
    for name in names:
        swarm.join(
            int(name.partition("-")[0]),
            name,
            compute=ComputeMode(arguments.microseconds_per_token),
            checkpoint_dir=swarm.folder / name / "checkpoints",
            serve_after_s=20.0,
        )
    swarm.wait_finished(names, arguments.deadline)
    audited = audit({name: swarm.members[name].ledger() for name in names}, stages=arguments.stages)
    if audited.problems():
        raise SystemExit(f"the ledgers are not exact: {audited.problems()}\n{swarm.report()}")
    at = [audited.committed_at[step, 0] for step in range(WARM_UP_STEPS, arguments.steps)]
    said = [swarm.members[name].last("status") for name in names]
    anchor = swarm.members["anchor"].last("status") if key is not None else None
    return {
        "step_s": [later - earlier for earlier, later in pairwise(at)],
        "seconds": at[-1] - at[0],
        "waited_s": max(status["priors"]["waited_s"] for status in said),
        "prior_bytes": sum(status["priors"]["bytes"] for status in said),
        "boundary_bytes": sum(
            status["bytes"]["up"].get(kind, 0) for status in said for kind in ("forward", "gradient")
        ),
        "priors_fetched": sum(status["priors"]["counters"].get("fetched", 0) for status in said),
        "anchor": anchor and anchor["anchor"],
    }


def give_way(pid: int) -> None:
    """Let a process, and the threads it will start, have only the CPU that nobody else wants."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))


def main() -> int:
    """Run the benchmark."""
    arguments = parse()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from tests.kit.swarm import Host, Swarm

    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="swarm-peer-anchors-"))
    folder.mkdir(parents=True, exist_ok=True)
    host = Host()
    runs: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    try:
        run_dir, key = make(host, folder, arguments)
        for number, has_anchor in enumerate([False, True] * arguments.rounds or [True]):
            swarm = Swarm(host, folder / f"{number}-{'with' if has_anchor else 'without'}", run_dir)
            swarm.folder.mkdir()
            try:
                runs[has_anchor].append(train(swarm, arguments, key if has_anchor else None))
            finally:
                swarm.kill_all()
            last = runs[has_anchor][-1]
            print(
                f"{'with' if has_anchor else 'without'} an anchor: median step {median(last['step_s']):.3f} s, "
                f"waited {last['waited_s']:.2f} s, {last['priors_fetched']} priors fetched, {last['anchor']}",
                flush=True,
            )
    finally:
        host.close()
        if arguments.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    result = summary(runs, arguments)
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if result["problems"] else 0


def summary(runs: dict[bool, list[dict[str, Any]]], arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of all runs together."""
    from swarm.activation.config import token_budget_bytes

    def step_s(chosen: list[dict[str, Any]]) -> float | None:
        return median(step for run in chosen for step in run["step_s"]) if chosen else None

    with_s, without_s = step_s(runs[True]), step_s(runs[False])
    priors = sum(run["prior_bytes"] for run in runs[True])
    boundary = sum(run["boundary_bytes"] for run in runs[True])
    per_token = token_budget_bytes(arguments.mask_ratio, arguments.hidden)
    tokens = len(runs[True]) * arguments.steps * arguments.tokens * arguments.replicas
    saved = 2 * (arguments.stages - 1) * tokens * (per_token - token_budget_bytes(95.0, arguments.hidden))
    result: dict[str, Any] = {
        "stages": arguments.stages,
        "replicas": arguments.replicas,
        "hidden": arguments.hidden,
        "mask_ratio": arguments.mask_ratio,
        "steps": arguments.steps,
        "tokens_per_step_and_replica": arguments.tokens,
        "step_s_with": with_s,
        "step_s_without": without_s,
        "step_time_ratio": with_s / without_s if with_s and without_s else None,
        "waited_share": max(run["waited_s"] / run["seconds"] for run in runs[True]),
        "prior_bytes": priors,
        "boundary_bytes": boundary,
        "prior_share": priors / boundary,
        "prior_share_at_95": priors / (boundary - saved),
        "priors_fetched": sum(run["priors_fetched"] for run in runs[True]),
        "anchor": runs[True][-1]["anchor"],
        "problems": [],
    }
    limits = {"step_time_ratio": MOST_RATIO, "waited_share": MOST_WAITED, "prior_share": MOST_TRAFFIC}
    for name, limit in limits.items():
        if result[name] is not None and result[name] > limit:
            result["problems"].append(f"{name} is {result[name]:.3f}, at most {limit} is allowed")
    return result


if __name__ == "__main__":
    sys.exit(main())
