"""Runs whose replicas average something else than the gradient: they learn, stay equal, take in and lose members."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peers.compute import stage_trainable
from peers.limits import LIMITS
from swarm.gradient.averaging import build_averaging
from swarm.gradient.outer_config import Overlap
from swarm.gradient.split import Split
from swarm.manifest import RunManifest
from tests.kit.evaluation import final_loss, snapshot, unequal_tensors
from tests.kit.ledger import audit
from tests.kit.swarm import Member, Swarm, wait_for

pytestmark = pytest.mark.e2e

COMPRESSORS: dict[str, dict[str, Any]] = {
    "powersgd": {"averaging": "powersgd", "averaging_rank": 2},
    "topk": {"averaging": "topk", "averaging_ratio": 0.05},
    "sign": {"averaging": "sign"},
    "scape": {
        "averaging": "scape",
        "averaging_ratio": 0.1,
        "averaging_options": ("dense_steps=2",),
        "optimizer": "adams",
    },
    "diloco": {"averaging": "int8", "outer": "diloco", "outer_every": 4},
    "streaming": {
        "averaging": "powersgd",
        "averaging_rank": 2,
        "outer": "streaming_diloco",
        "outer_every": 4,
        "outer_options": ("fragments=2",),
    },
    "overlap": {"averaging": "powersgd", "averaging_rank": 2, "outer_overlap": 1},
    "streaming-overlap": {
        "averaging": "int8",
        "outer": "streaming_diloco",
        "outer_every": 4,
        "outer_options": ("fragments=2",),
        "outer_overlap": 2,
    },
    "sparta": {
        "averaging": "fp16",
        "outer": "sparta",
        "outer_every": 4,
        "outer_options": ("fragments=4",),
        "outer_overlap": 1,
    },
    "gasloc": {"averaging": "int8", "outer": "gasloc", "outer_every": 2, "outer_options": ("consensus=4",)},
}


def newest_common(swarm: Swarm, names: list[str], stage: int) -> int:
    """The newest version of which all of these have a snapshot."""
    found = [
        {
            int(path.stem.rpartition("-")[2])
            for path in (swarm.folder / name).rglob(f"*-stage-{stage}-version-*.safetensors")
        }
        for name in names
    ]
    return max(set.intersection(*found), default=0)


def unequal_shared(files: list[Path | None]) -> list[str]:
    """Names of tensors that replicas share, and in which their snapshots differ."""
    found = [file for file in files if file is not None]
    assert len(found) == len(files)
    return unequal_tensors(found, shared_only=True)


def has_worked(member: Member) -> bool:
    """Whether a step was committed with the peer in its roster and microbatches in its ledger."""
    return any(line["keys"] and line["peer"] in line["roster"] for line in member.ledger())


SLOW = ("topk", "sign", "streaming", "powersgd", "sparta", "diloco", "gasloc")
"""Further cases: the first five are like others here, the last two are in the other test."""


@pytest.mark.parametrize(
    "name", [pytest.param("powersgd", marks=pytest.mark.slow), "scape", "diloco", "overlap", "gasloc"]
)
def test_a_joiner_and_those_who_outlive_a_member_hold_the_same_bits(swarm: Swarm, name: str) -> None:
    """What members share beside the weights comes with the snapshot and the updates; a round that a death ended
    changed nothing of it.
    """
    swarm.make_run(
        stages=2, replicas=2, steps=1_000_000, samples_per_step=16, snapshot_every=5, **COMPRESSORS[name]
    )
    swarm.seed()
    for each in ("0-0", "0-1", "1-0", "1-1"):
        swarm.join(int(each[0]), each)
    wait_for(lambda: swarm.members["1-0"].step >= 7, 120.0, "a snapshot", swarm)
    swarm.join(1, "1-2", serve_after_s=600.0)
    wait_for(lambda: has_worked(swarm.members["1-2"]), 120.0, "the joiner to work", swarm)
    swarm.kill("1-1")
    died_at = swarm.members["1-0"].step
    left = ["1-0", "1-2"]
    wait_for(lambda: newest_common(swarm, left, 1) > died_at + 2, 120.0, "a snapshot after the death", swarm)
    swarm.kill_all()
    for stage, names in ((0, ["0-0", "0-1"]), (1, left)):
        version = newest_common(swarm, names, stage)
        files = [snapshot(swarm.folder / each, stage, version) for each in names]
        assert unequal_shared(files) == [], (stage, version)
    ledgers = {each: swarm.members[each].ledger() for each in swarm.members if each != "seed"}
    newest = {
        stage: max(line["step"] for lines in ledgers.values() for line in lines if line["stage"] == stage)
        for stage in range(2)
    }
    # The end came between two members' lines of one step: the newest of each stage says nothing.
    found = audit(
        {
            each: [line for line in lines if line["step"] < newest[line["stage"]] - 1]
            for each, lines in ledgers.items()
        },
        stages=2,
        killed=["1-1"],
    )
    assert found.is_exact, found.problems()
    assert not found.lost


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in COMPRESSORS]
)
def test_a_compressed_run_learns_and_moves_what_its_compressor_says(swarm: Swarm, name: str) -> None:
    steps, names = 24, ["0-0", "0-1", "1-0", "1-1"]
    run_dir = swarm.make_run(
        stages=2,
        replicas=2,
        steps=steps,
        samples_per_step=16,
        snapshot_every=steps,
        learning_rate=3e-3,
        warmup_steps=2,
        **COMPRESSORS[name],
    )
    swarm.seed()
    for each in names:
        swarm.join(int(each[0]), each)
    assert swarm.wait_exits(names, 240.0) == dict.fromkeys(names, 0), swarm.report()
    files = [snapshot(swarm.folder, stage, steps) for stage in range(2)]
    after = final_loss(run_dir, [file for file in files if file is not None])
    assert first_loss(swarm, names[2:]) > after + 0.3
    if "outer_overlap" in COMPRESSORS[name]:
        for each in names:
            found = swarm.members[each].last("summary")["averages_overlapped"]
            assert found["arrived"] >= steps // 4 and found["arrived"] > 2 * found.get("again", 0), found
    for stage in range(2):
        replicas = [snapshot(swarm.folder / f"{stage}-{number}", stage, steps) for number in range(2)]
        assert unequal_shared(replicas) == []
    for stage in range(2):
        payload, frames = moved(run_dir, stage, steps)
        counted = sum(
            swarm.members[f"{stage}-{number}"].last("summary")["bytes"]["up"][kind]
            for number in range(2)
            for kind in ("part", "average")
        )
        again = max(
            swarm.members[f"{stage}-{number}"].last("summary")["averages_overlapped"].get("again", 0)
            for number in range(2)
        )  # averages that moved twice, of at least a quarter as many as there are steps
        assert payload <= counted <= payload + HEADER_BYTES * frames + again * (payload // (steps // 4))


def first_loss(swarm: Swarm, names: list[str]) -> float:
    """Mean token loss of a run's first step, by the ledgers of the last stage."""
    sums = [swarm.members[name].ledger()[0]["loss"] for name in names]
    return float(sum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums))


HEADER_BYTES = 400
"""Most that a frame of a round has beside its payload."""


def moved(run_dir: Path, stage: int, steps: int) -> tuple[int, int]:
    """Payload bytes and frames that two replicas send each other in a run's rounds, by the compressor's own sizes."""
    manifest = RunManifest.load(run_dir / "manifest.yaml")
    compressor = build_averaging(
        manifest.averaging, stage_trainable(manifest, stage), manifest.total_steps, manifest.seed
    )
    nbytes = frames = 0
    overlap = Overlap(manifest.averaging.outer.overlap, steps)
    for step in filter(lambda start: start is not None, map(overlap.settled, range(steps))):
        for phase in compressor.phases(step):
            split = Split(phase.elements, 2, LIMITS.averaging_chunk_elements)
            # Each chunk goes to its reducer once, and once back.
            nbytes += 2 * sum(phase.codec.nbytes(split.size(chunk)) for chunk in range(split.chunks))
            frames += 2 * split.chunks
    return nbytes, frames
