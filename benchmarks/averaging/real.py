"""Chosen rows through a real swarm: what the simulated replicas say must be what peers on libp2p find.

Two stages of the rows' replicas on loopback, with the same texts, rows per step, optimizer and averages; dense
boundaries. A run keeps held-out rows of its own, so losses are compared with the swarm's own row of gradients as they
are, and the gap with the simulated one. Bytes are counted by the peers' links.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.averaging.rows import AveragingRow
from benchmarks.quality.domains import DOMAINS, domain_source

STAGES = 2
SWARM_ROWS: Mapping[str, Mapping[str, Any]] = {
    "fp32": {"averaging": "fp32"},
    "int8": {"averaging": "int8"},
    "powersgd-4": {"averaging": "powersgd", "averaging_rank": 4},
    "diloco-10": {"averaging": "fp16", "outer": "diloco", "outer_every": 10},
}
"""Rows, and what `init` takes for them."""
MINUTES = 60.0


def run_real(name: str, config: AveragingRow, cache: Path, host: Any) -> dict[str, Any]:
    """Train a row with real peers; returns its figures.

    cache: of texts. host: what forks peers (`tests.kit.swarm.Host`). Raises RuntimeError if a peer fails, or if the run
    averages something else than the row.
    """
    from swarm.manifest import RunManifest
    from tests.kit.evaluation import final_loss, snapshot, unequal_tensors
    from tests.kit.swarm import Swarm

    folder = Path(tempfile.mkdtemp(prefix="swarm-peer-averaging-"))
    names = [f"{stage}-{replica}" for stage in range(STAGES) for replica in range(config.replicas)]
    try:
        swarm = Swarm(host, folder)
        try:
            run_dir = _make(swarm, name, config, cache)
            made = RunManifest.load(run_dir / "manifest.yaml").averaging
            if made != config.averaging_config():
                raise RuntimeError(f"the run's averages are not those of row {name}: {made}")
            swarm.seed()
            began = time.monotonic()
            for each in names:
                stage, folder_of = int(each.partition("-")[0]), folder / each / "checkpoints"
                swarm.join(stage, each, run_dir=run_dir, checkpoint_dir=folder_of)
            codes = swarm.wait_exits(names, 60 * MINUTES)
            if any(codes.values()):
                raise RuntimeError(f"exit codes {codes}\n{swarm.report()}")
            seconds = time.monotonic() - began
            files = [_files(swarm, stage, config) for stage in range(STAGES)]
            has_outer = made.outer.name != "every_step"
            if differing := [name for held in files for name in unequal_tensors(held, shared_only=has_outer)]:
                raise RuntimeError(f"replicas differ in {differing[:4]}")
            newest = [path for stage in range(STAGES) if (path := snapshot(folder, stage, config.steps))]
            return {
                "loss": final_loss(run_dir, newest, 2 * config.eval_rows),
                "sent": sum(
                    max(_sent(swarm, f"{s}-{r}") for r in range(config.replicas)) for s in range(STAGES)
                ),
                "seconds": round(seconds, 1),
            }
        finally:
            swarm.kill_all()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _files(swarm: Any, stage: int, config: AveragingRow) -> list[Path]:
    """The last snapshots that a stage's members keep."""
    from tests.kit.evaluation import snapshot

    found = [snapshot(swarm.folder / f"{stage}-{r}", stage, config.steps) for r in range(config.replicas)]
    return [path for path in found if path is not None]


def _sent(swarm: Any, name: str) -> int:
    """Bytes of averages, with their headers, that a peer has sent."""
    up = swarm.members[name].last("summary")["bytes"]["up"]
    return int(up.get("part", 0)) + int(up.get("average", 0))


def _make(swarm: Any, name: str, config: AveragingRow, cache: Path) -> Path:
    data = config.domain
    if data in DOMAINS:
        data = str(domain_source(data, cache))
    optimizer = config.optimizer_config()
    made: Path = swarm.make_run(
        deadline_s=30 * MINUTES,
        model=config.model,
        data=data,
        stages=STAGES,
        replicas=config.replicas,
        steps=config.steps,
        max_tokens=config.max_tokens,
        sequence_length=config.sequence_length,
        samples_per_step=config.replicas * config.rows_per_replica,
        rows_per_microbatch=1,
        learning_rate=config.learning_rate,
        warmup_steps=optimizer.warmup_steps,
        freeze=("embedding", "head"),
        codec="dense",
        compute="fp32",  # as the simulated rows
        snapshot_every=config.steps,
        **SWARM_ROWS[name],
    )
    return made
