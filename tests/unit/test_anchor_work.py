"""One pass of an anchor on a tiny run: priors, what the memory takes, and what coding does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from peers.anchor_work import AnchorWork
from peers.compute import model_config
from peers.config import PeerConfig
from peers.run_files import RunFiles, stage_name
from peers.traffic import Traffic
from swarm.anchor.config import BiasConfig, SpectralConfig
from swarm.anchor.factor import exact_factors
from swarm.anchor.gradients import dense_gradients
from swarm.anchor.passes import AnchorModel
from swarm.anchor.prior import SpectralPrior
from swarm.anchor.registry import build_corrector
from swarm.batch import Batch
from swarm.manifest import RunManifest
from swarm.model.stage import build_stage
from tests.kit.tiny import make_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    options = {"stages": 2, "replicas": 1, "steps": 20, "layers": 2, "calibration_microbatches": 4}
    make_run(folder, {**options, "codec": "basis", "mask_ratio": 90.0})
    return folder / "run"


async def nobody() -> list[str]:
    return []


def world(run_dir: Path, **changes: Any) -> tuple[AnchorWork, AnchorModel, list[Batch]]:
    manifest = RunManifest.load(run_dir / "manifest.yaml").model_copy(update=changes)
    files = RunFiles(manifest, run_dir, None, nobody, Traffic(None, None))
    model = AnchorModel(
        [
            build_stage(
                model_config(manifest),
                manifest.model.cuts,
                stage,
                dtype=torch.float32,
                device="cpu",
                tensors=files.artifacts / stage_name(stage),
                freeze=frozenset(),
            )
            for stage in range(manifest.model.stages)
        ]
    )
    dataset = files.dataset()
    work = AnchorWork(PeerConfig(run_dir=run_dir, stage=None), manifest, model, files)
    return work, model, [dataset.batch([sample]) for sample in range(3)]


def test_without_a_corrector_a_pass_yields_priors_and_what_coding_does(run_dir: Path) -> None:
    work, _, batches = world(run_dir)
    first, second = (work.run(batches, version, None) for version in (5, 10))
    assert len(first.boundaries) == 1 and first.gradients is None and first.gain is None
    assert first.coding is not None and second.coding is not None
    # The second is coded by what the first fitted, to these very samples.
    assert second.coding.forward_errors[0] < first.coding.forward_errors[0]
    assert 0 < first.coding.cosine < second.coding.cosine <= 1


def test_the_memory_takes_the_clean_gradient_and_the_last_prior_is_judged(run_dir: Path) -> None:
    work, model, batches = world(run_dir, corrector=SpectralConfig())
    found = work.run(batches, 5, None)
    assert found.gradients is not None and found.gain is None
    expected = dense_gradients(model.models, batches)
    for one, other in zip(found.gradients, expected, strict=True):
        assert one.keys() == other.keys()
        for name, gradient in one.items():
            torch.testing.assert_close(gradient, other[name], atol=1e-7, rtol=1e-4)
    correctors = [
        build_corrector(
            SpectralConfig(alpha=0.0, rank=2, tau=0.0),
            prior=SpectralPrior(stage, 0, 5, {n: exact_factors(g, 2).factors for n, g in clean.items()}),
            shapes={name: tuple(gradient.shape) for name, gradient in clean.items()},
        )
        for stage, clean in enumerate(expected)
    ]
    gain = work.run(batches, 10, correctors).gain
    assert gain is not None and 0 < gain[0] < gain[1] <= 1, "the prior knows these samples"


def test_a_memory_of_the_codings_bias_takes_dense_less_coded(run_dir: Path) -> None:
    work, model, batches = world(run_dir, corrector=BiasConfig())
    found = work.run(batches, 5, None)
    assert found.gradients is not None and found.coding is not None
    dense = dense_gradients(model.models, batches)
    inner = whole = bias = 0.0
    for taken, exact in zip(found.gradients, dense, strict=True):
        for name, gradient in taken.items():
            coded = exact[name] - gradient
            inner += float((coded * exact[name]).sum())
            whole += float(exact[name].square().sum())
            bias += float(coded.square().sum())
    assert found.coding.cosine == pytest.approx(inner / (whole * bias) ** 0.5, abs=1e-4)
    assert found.coding.cosine < 1


def test_a_run_of_one_stage_has_no_boundary_and_its_memory_is_fed_all_the_same(tmp_path: Path) -> None:
    options = {"stages": 1, "replicas": 1, "steps": 20, "layers": 2, "calibration_microbatches": 4}
    make_run(tmp_path, {**options, "codec": "basis", "mask_ratio": 90.0})
    work, _, batches = world(tmp_path / "run", corrector=SpectralConfig())
    found = work.run(batches, 5, None)
    assert found.boundaries == () and found.coding is None
    assert found.gradients is not None and found.gradients[0]
