"""Real peers train to the same weights as the reference, which uses the uncut model and torch's optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from peers.commands.inspect import run_codecs
from swarm.activation.tokens import TOKENS_FILE
from swarm.data.dataset import PackedDataset
from swarm.data.order import samples_of_step
from swarm.manifest import RunManifest
from swarm.reference import ReferenceTrainer
from tests.kit.swarm import Swarm

pytestmark = pytest.mark.e2e
STAGES, STEPS, TOLERANCE = 3, 5, 1e-5


@pytest.mark.parametrize(
    ("family", "codec", "replicas", "optimizer"),
    [  # every two of them together at least once
        ("llama", "dense", 1, "sgd"),
        ("llama", "mask", 2, "adamw"),
        ("llama", "mask", 1, "adamw"),
        ("qwen2", "dense", 2, "adamw"),
        ("qwen2", "mask", 1, "sgd"),
        ("qwen2", "mask", 2, "sgd"),
    ],
)
def test_peers_train_like_the_reference(
    swarm: Swarm, family: str, codec: str, replicas: int, optimizer: str
) -> None:
    run_dir = swarm.make_run(
        family=family,
        stages=STAGES,
        replicas=replicas,
        steps=STEPS,
        codec=codec,
        mask_ratio=50.0 if codec == "mask" else None,
        codec_values="fp32",
        optimizer=optimizer,
        learning_rate=0.1 if optimizer == "sgd" else 1e-4,
        warmup_steps=1,
    )
    swarm.seed()
    names = [f"{stage}-{replica}" for stage in range(STAGES) for replica in range(replicas)]
    for name in names:
        swarm.join(int(name[0]), name)
    codes = swarm.wait_exits(names, 120.0)
    assert codes == dict.fromkeys(names, 0), swarm.report()

    manifest = RunManifest.load(run_dir / "manifest.yaml")
    trained, initial, losses = reference(manifest, run_dir, swarm.folder / "model")
    stages = [[trained_weights(swarm.folder / f"{s}-{r}") for r in range(replicas)] for s in range(STAGES)]
    found = {name: tensor for stage in stages for name, tensor in stage[0].items()}
    assert set(found) == set(trained)
    moved = sum(float((trained[name] - initial[name]).norm()) for name in trained)
    assert moved > 1e-3, "the reference did not train, so equality would mean nothing"
    for name, tensor in trained.items():
        if optimizer == "sgd":
            torch.testing.assert_close(found[name], tensor, atol=TOLERANCE, rtol=TOLERANCE, msg=name)
        else:
            error = float((found[name] - tensor).norm() / tensor.norm())
            assert error <= TOLERANCE, f"{name}: {error:.2e}"
    for replica_weights in stages:
        for name, tensor in replica_weights[-1].items():
            assert torch.equal(tensor, replica_weights[0][name]), f"replicas differ in {name}"
    if replicas == 1:
        reported = swarm.members["2-0"].last("summary")["loss"]
        assert reported == pytest.approx(losses[-1], abs=1e-4)


def test_averages_that_travel_are_applied_a_step_late_as_by_the_reference(swarm: Swarm) -> None:
    run_dir = swarm.make_run(
        stages=2, replicas=2, steps=STEPS + 2, optimizer="sgd", learning_rate=0.1, outer_overlap=1
    )
    swarm.seed()
    names = [f"{stage}-{replica}" for stage in range(2) for replica in range(2)]
    for name in names:
        swarm.join(int(name[0]), name)
    assert swarm.wait_exits(names, 120.0) == dict.fromkeys(names, 0), swarm.report()
    manifest = RunManifest.load(run_dir / "manifest.yaml")
    trained, initial, _ = reference(manifest, run_dir, swarm.folder / "model")
    prompt, _, _ = reference(manifest, run_dir, swarm.folder / "model", overlap=0)
    stages = [[trained_weights(swarm.folder / f"{s}-{r}", STEPS + 2) for r in range(2)] for s in range(2)]
    found = {name: tensor for stage in stages for name, tensor in stage[0].items()}
    assert set(found) == set(trained)
    assert sum(float((trained[name] - initial[name]).norm()) for name in trained) > 1e-3
    late = sum(float((trained[name] - prompt[name]).norm()) for name in trained)
    for name, tensor in trained.items():
        torch.testing.assert_close(found[name], tensor, atol=TOLERANCE, rtol=TOLERANCE, msg=name)
    assert late > 1e-3, "a delay changes nothing here, so equality would not show one"
    for first, second in stages:
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_peers_that_predict_from_token_ids_train_like_the_reference(swarm: Swarm) -> None:
    """Codec basis: both ends have the ids, the run's token table and the prior of its boundary."""
    run_dir = swarm.make_run(
        stages=2,
        replicas=1,
        steps=STEPS,
        codec="basis",
        mask_ratio=50.0,
        prediction="context",
        optimizer="sgd",
        learning_rate=0.1,
    )
    swarm.seed()
    for stage in range(2):
        swarm.join(stage, f"{stage}-0")
    names = ["0-0", "1-0"]
    assert swarm.wait_exits(names, 120.0) == dict.fromkeys(names, 0), swarm.report()
    assert all(list((swarm.folder / name).glob(f"data/*/artifacts/{TOKENS_FILE}")) for name in names)
    manifest = RunManifest.load(run_dir / "manifest.yaml")
    trained, initial, losses = reference(manifest, run_dir, swarm.folder / "model")
    found = {name: tensor for peer in names for name, tensor in trained_weights(swarm.folder / peer).items()}
    assert set(found) == set(trained)
    moved = torch.cat([(trained[name] - initial[name]).flatten() for name in trained])
    assert float(moved.norm()) > 1e-2
    # Rounding may move a coordinate over the edge of a level, which no tolerance of single values allows for.
    errors = torch.cat([(found[name] - trained[name]).flatten() for name in trained])
    assert float(errors.norm() / moved.norm()) < 0.02
    assert swarm.members["1-0"].last("summary")["loss"] == pytest.approx(losses[-1], abs=1e-3)


def trained_weights(folder: Path, version: int = STEPS) -> dict[str, Tensor]:
    """The weights in a peer's checkpoint of a version."""
    (path,) = folder.glob(f"data/*/checkpoints/*/*version-{version:08d}.safetensors")
    with safe_open(path, framework="pt") as file:
        names = [name for name in file.keys() if name.startswith("weight.")]  # noqa: SIM118
        return {name.removeprefix("weight."): file.get_tensor(name) for name in names}


def reference(
    manifest: RunManifest,
    run_dir: Path,
    model_dir: Path,
    corrector: Callable[[dict[str, Tensor], int], object] | None = None,
    overlap: int | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Weights after the run's steps by the oracle, weights before, and the loss of every step."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    trainer = ReferenceTrainer(
        model,
        manifest.model.cuts,
        run_codecs(manifest, run_dir / "artifacts"),
        manifest.optimizer,
        manifest.total_steps,
        reference_loss_tokens=manifest.reference_loss_tokens,
        corrector=corrector,
        overlap=manifest.averaging.outer.overlap if overlap is None else overlap,
    )
    initial = {name: master.detach().clone() for name, master in trainer.masters.items()}
    for stage in range(manifest.model.stages):
        for name, tensor in load_file(run_dir / "artifacts" / f"stage-{stage}.safetensors").items():
            assert torch.equal(initial[name], tensor.float()), f"the run begins with another {name}"
    dataset = PackedDataset(run_dir / "artifacts", manifest.data)
    losses = []
    for step in range(manifest.total_steps):
        samples = samples_of_step(manifest.seed, manifest.data.train_samples, manifest.samples_per_step, step)
        rows = manifest.rows_per_microbatch
        batches = [dataset.batch(samples[i : i + rows]) for i in range(0, len(samples), rows)]
        losses.append(trainer.step(batches, step))
    return {name: master.detach() for name, master in trainer.masters.items()}, initial, losses
