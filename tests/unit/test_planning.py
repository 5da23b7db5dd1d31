"""Plans of a run whose corrector has priors: which parts they name, and which plans are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.frames import FrameError
from peers.planning import PlanBook, PriorRef, initial_refs, make_plan, prior_refs
from peers.prior_parts import PriorPart, parts_of
from swarm.anchor.config import NoCorrectorConfig, SpectralConfig
from swarm.manifest import RunManifest
from tests.kit.members import stage_run

HASH = "a" * 64


@pytest.fixture
def manifest(tmp_path: Path) -> RunManifest:
    """Three stages, a codec without priors, a corrector with them."""
    plain = stage_run(tmp_path)
    model = plain.model.model_copy(update={"cuts": (1, 2)})
    return plain.model_copy(update={"model": model, "corrector": SpectralConfig()})


def test_parts_are_the_boundaries_then_the_stages_of_a_corrector_with_priors(manifest: RunManifest) -> None:
    boundaries = tuple(PriorPart("boundary", b) for b in range(2))
    assert parts_of(manifest) == boundaries + tuple(PriorPart("corrector", s) for s in range(3))
    for corrector in (NoCorrectorConfig(), SpectralConfig(alpha=1.0)):
        assert parts_of(manifest.model_copy(update={"corrector": corrector})) == boundaries
    assert [part.stages for part in parts_of(manifest)] == [(0, 1), (1, 2), (0,), (1,), (2,)]
    assert len({part.name for part in parts_of(manifest)}) == 5


def test_a_plan_names_a_prior_for_every_part(manifest: RunManifest) -> None:
    book = PlanBook(manifest)
    first, _ = make_plan(manifest, 0, 0, "", ("source",))
    assert prior_refs(first) == initial_refs(manifest) == (PriorRef(),) * 5
    assert book.parse(first.to_bytes(), 0) == first
    refs = (*initial_refs(manifest)[:4], PriorRef(1, HASH))
    later, _ = make_plan(manifest, 0, 0, "", ("source",), refs)
    assert book.parse(later.to_bytes(), 0) == later and later.digest() != first.digest()


def test_plans_that_name_other_parts_are_refused(manifest: RunManifest) -> None:
    book, initial = PlanBook(manifest), initial_refs(manifest)
    with pytest.raises(FrameError, match="4 priors"):
        book.parse(make_plan(manifest, 0, 0, "", ("source",), initial[:4])[0].to_bytes(), 0)
    with pytest.raises(FrameError, match="codec that has none"):
        boundary = (PriorRef(1, HASH), *initial[1:])
        book.parse(make_plan(manifest, 0, 0, "", ("source",), boundary)[0].to_bytes(), 0)
