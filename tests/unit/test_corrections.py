"""The correctors that a peer holds: which priors it takes, what it does with a step, and how options become one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from peers.anchor_figures import AnchorFigures
from peers.commands.corrector import (
    HEAD_BYTES,
    check_prior_size,
    corrector_config,
    corrector_notes,
    prior_bytes,
)
from peers.commands.init import RunOptions
from peers.compute import model_config, take_step
from peers.config import UserError
from peers.corrections import Corrections
from peers.corrector_metrics import CorrectorMetrics
from peers.reporting import status_line
from swarm.anchor.config import AdditiveConfig, NoCorrectorConfig, OneSidedConfig, SpectralConfig
from swarm.anchor.factor import Factors, exact_factors
from swarm.anchor.memory import target_matrices
from swarm.anchor.prior import SpectralPrior, save_spectral_prior
from swarm.anchor.prior_file import PriorFileError
from swarm.anchor.registry import build_corrector
from swarm.manifest import AnchorSection
from tests.kit.members import stage_compute, stage_run

SHA = "a" * 64
CONFIG = SpectralConfig(rank=4, max_staleness=10)


def factors_of(compute: Any) -> dict[str, Factors]:
    shapes = dict(zip(compute.trainable.names, compute.trainable.shapes, strict=True))
    generator = torch.Generator().manual_seed(3)
    return {
        name: exact_factors(torch.randn(shape, generator=generator), 4).factors
        for name, shape in target_matrices(shapes).items()
    }


@pytest.fixture
def compute(tmp_path: Path) -> Any:
    return stage_compute(stage_run(tmp_path), tmp_path)


def held(compute: Any, tmp_path: Path, stage: int = 0, **change: Tensor) -> Corrections:
    """Corrections that hold a prior of step 2, some of the first matrix's arrays changed."""
    factors = factors_of(compute)
    first = next(iter(factors))
    arrays = {part: getattr(factors[first], part) for part in ("left", "values", "right")}
    factors[first] = Factors(**{**arrays, **change})
    save_spectral_prior(SpectralPrior(stage, 1, 2, factors), tmp_path / "prior", "fp32")
    corrections = Corrections(CONFIG, 0, compute.trainable, "cpu")
    corrections.add(SHA, corrections.load(tmp_path / "prior"))
    return corrections


def test_a_step_is_corrected_before_it_is_clipped_and_the_average_stays(compute: Any, tmp_path: Path) -> None:
    corrections = held(compute, tmp_path)
    average = torch.randn(compute.trainable.numel, generator=torch.Generator().manual_seed(1))
    before = average.clone()
    norm = take_step(compute, average, 3, None, corrections.of(SHA))
    assert torch.equal(average, before), "the average is kept for those who catch up"

    expected = average.clone()
    shapes = dict(zip(compute.trainable.names, compute.trainable.shapes, strict=True))
    prior = SpectralPrior(0, 1, 2, factors_of(compute))
    report = build_corrector(CONFIG, prior=prior, shapes=shapes)(compute.trainable.views(expected), 3)
    assert norm == pytest.approx(float(expected.norm()), rel=1e-5)
    assert norm < float(average.norm())
    status = corrections.status()
    assert status["corrected"] == report.corrected == len(prior.factors)
    assert status["eta"] == pytest.approx(report.eta) and status["cosine"] == pytest.approx(report.cosine)
    assert len(status["singular_values"]) == 5
    assert status["counters"] == {"corrected": report.corrected}


def test_without_a_named_prior_a_step_is_not_corrected_and_counted_if_the_plan_names_one(
    compute: Any, tmp_path: Path
) -> None:
    corrections = held(compute, tmp_path)
    assert corrections.of("") is None and corrections.counters["withheld"] == 0
    corrections.expected = SHA
    assert corrections.of("") is None and corrections.counters["withheld"] == 1
    assert corrections.holds(SHA) and corrections.holds("") and not corrections.holds("b" * 64)
    corrections.retain(())
    assert not corrections.holds(SHA)
    with pytest.raises(KeyError):
        corrections.of(SHA)


def test_an_old_prior_changes_nothing_and_is_counted(compute: Any, tmp_path: Path) -> None:
    corrections = held(compute, tmp_path)
    average = torch.randn(compute.trainable.numel)
    norm = take_step(compute, average, 13, None, corrections.of(SHA))
    assert norm == pytest.approx(float(average.norm()))
    assert corrections.counters["passed_stale"] == len(factors_of(compute))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"left": float("nan")}, ValueError, "non_finite"),
        ({"values": float("inf")}, ValueError, "non_finite"),
        ({"values": -1.0}, ValueError, "no_basis"),
        ({"right": 7.0}, ValueError, "no_basis"),
    ],
)
def test_factors_that_no_matrix_has_are_refused(
    compute: Any, tmp_path: Path, change: dict[str, float], error: type[Exception], message: str
) -> None:
    first = next(iter(factors_of(compute).values()))
    arrays = {part: torch.full_like(getattr(first, part), value) for part, value in change.items()}
    with pytest.raises(error, match=message):
        held(compute, tmp_path, **arrays)


def test_a_prior_of_another_shape_or_stage_is_refused(compute: Any, tmp_path: Path) -> None:
    with pytest.raises(PriorFileError, match="expected"):
        held(compute, tmp_path, left=torch.zeros(3, 4))
    with pytest.raises(PriorFileError, match="stage 5"):
        held(compute, tmp_path, stage=5)
    none = Corrections(NoCorrectorConfig(), 0, compute.trainable, "cpu")
    with pytest.raises(PriorFileError, match="corrects nothing"):
        none.load(tmp_path / "prior")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, NoCorrectorConfig()),
        ({"corrector": "spectral"}, SpectralConfig()),
        (
            {
                "corrector": "spectral",
                "corrector_alpha": 0.5,
                "corrector_rank": 0,
                "corrector_tau_relative": True,
            },
            SpectralConfig(alpha=0.5, rank=None, tau_is_relative=True),
        ),
        (
            {"corrector": "one_sided", "corrector_side": "left", "corrector_beta": 0.5},
            OneSidedConfig(side="left", ema_beta=0.5),
        ),
        ({"corrector": "additive", "corrector_max_staleness": 80}, AdditiveConfig(max_staleness=80)),
    ],
)
def test_options_become_a_corrector(options: dict[str, Any], expected: object) -> None:
    assert corrector_config(RunOptions(**options)) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corrector_alpha": 0.3}, "--corrector-alpha needs --corrector"),
        ({"corrector_max_staleness": 3}, "--corrector-max-staleness needs --corrector"),
        (
            {"corrector": "additive", "corrector_tau": 0.1},
            "--corrector-tau belongs to --corrector spectral and",
        ),
        (
            {"corrector": "spectral", "corrector_side": "left"},
            "--corrector-side belongs to --corrector one_sided",
        ),
        ({"corrector": "spectral", "corrector_alpha": 1.5}, "--corrector-alpha 1.5: Input should be less"),
        ({"corrector": "spectral", "corrector_beta": 1.0}, "--corrector-beta 1.0"),
        ({"corrector": "svd"}, "'spectral'"),
    ],
)
def test_senseless_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        corrector_config(RunOptions(**options))
    assert message in str(caught.value)


def test_notes_tell_an_owner_what_a_corrector_needs_and_costs(compute: Any, tmp_path: Path) -> None:
    plain = stage_run(tmp_path)
    assert corrector_notes(plain) == []
    off = plain.model_copy(update={"corrector": SpectralConfig(alpha=1.0)})
    assert [note[:5] for note in corrector_notes(off)] == ["note:"]
    manifest = plain.model_copy(update={"corrector": SpectralConfig(rank=4)})
    notes = corrector_notes(manifest)
    assert any(note.startswith("warning: corrector spectral needs the priors of an anchor") for note in notes)
    assert any("counts for nothing after 30" in note for note in notes)
    assert sum("MB" in note for note in notes) == 1
    factors = factors_of(compute).values()
    assert prior_bytes(manifest) == sum(
        2 * (each.left.numel() + each.right.numel()) + 4 * each.values.numel() for each in factors
    )
    anchored = AnchorSection(peers=("Qm" + "a" * 44,))
    often = manifest.model_copy(update={"anchors": anchored, "snapshot_every": 10})
    assert all(note.startswith("note: the corrector's prior of a stage") for note in corrector_notes(often))


def test_a_rank_whose_prior_nobody_would_take_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stage_run(tmp_path).model
    config, wanted = model_config(stage_run(tmp_path)), SpectralConfig(rank=None)
    check_prior_size(NoCorrectorConfig(), config, model.cuts)
    check_prior_size(wanted, config, model.cuts)
    monkeypatch.setattr("dht.records.MAX_PRIOR_BYTES", HEAD_BYTES)
    with pytest.raises(UserError, match=r"--corrector-rank 0: .* smaller rank"):
        check_prior_size(wanted, config, model.cuts)


def test_metrics_follow_the_figures(compute: Any, tmp_path: Path) -> None:
    corrections = held(compute, tmp_path)
    registry = CollectorRegistry()
    metrics = CorrectorMetrics(registry)
    metrics.take(corrections.status(), 0, 3)
    assert registry.get_sample_value("swarm_peer_corrector_matrices_total", {"outcome": "stale"}) == 0
    average = torch.randn(compute.trainable.numel)
    for step in (3, 13):
        take_step(compute, average, step, None, corrections.of(SHA))
        metrics.take(corrections.status(), 1, step + 1)
    matrices = len(factors_of(compute))
    for outcome, count in (("corrected", matrices), ("stale", matrices), ("no_basis", 0)):
        found = registry.get_sample_value("swarm_peer_corrector_matrices_total", {"outcome": outcome})
        assert found == count
    assert registry.get_sample_value("swarm_peer_corrector_prior_age_steps") == 12
    assert registry.get_sample_value("swarm_peer_corrector_weight") == 0.0
    lowest, highest = (
        registry.get_sample_value("swarm_peer_corrector_singular_value", {"quantile": q}) for q in ("0", "1")
    )
    assert lowest is not None and highest is not None and 0 < lowest < highest
    figures = AnchorFigures(coded_cosine=0.5, forward_errors=(0.1, 0.2), prior_bytes=70, corrector_bytes=90)
    metrics.take_anchor(dataclasses.asdict(figures))
    for kind, nbytes in (("boundary", 70), ("corrector", 90)):
        assert registry.get_sample_value("swarm_peer_anchor_prior_bytes", {"kind": kind}) == nbytes
    second = {"boundary": "1", "direction": "forward"}
    assert registry.get_sample_value("swarm_peer_anchor_codec_error", second) == 0.2


def test_status_line_tells_what_the_corrector_does() -> None:
    status = {"state": "online", "stage": 1, "priors": {"corrector": {"cosine": 0.98765, "eta": 0.1}}}
    assert "corrected to cosine 0.988 (eta 0.100)" in status_line(status)
    assert "corrected" not in status_line({**status, "priors": {"corrector": {"counters": {}}}})
    anchor = {**dataclasses.asdict(AnchorFigures()), "coded_cosine": 0.75}
    assert "coded gradient's cosine 0.750" in status_line(
        {"state": "online", "role": "anchor", "anchor": anchor}
    )
