"""What earlier lives of a peer left of priors."""

from __future__ import annotations

import time
from pathlib import Path

from peers.prior_files import prior_path
from peers.prior_parts import PriorPart
from peers.prior_sweep import SWEEP_AGE_S, sweep_priors


def test_old_priors_and_their_beginnings_go_and_nothing_else_does(tmp_path: Path) -> None:
    prior = prior_path(tmp_path, PriorPart("corrector", 3), "a" * 64)
    old = [
        prior,
        prior.with_suffix(".new"),
        prior.with_name(prior.name + ".partial"),
        prior.with_name(prior.name + ".0123abcd.partial"),
    ]
    others = [
        tmp_path / name for name in ("boundary-0.safetensors", "corrector-3-notes", "model.safetensors")
    ]
    for path in (*old, *others):
        path.write_bytes(b"x")
    assert sweep_priors(tmp_path) == 0, "young ones may be another peer's"
    assert sweep_priors(tmp_path, time.time() + SWEEP_AGE_S + 60) == len(old)
    assert sorted(tmp_path.iterdir()) == sorted(others)
    assert sweep_priors(tmp_path / "nowhere") == 0
