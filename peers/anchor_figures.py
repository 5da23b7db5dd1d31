"""What an anchor reports of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class AnchorFigures:
    """What an anchor has done. version: of its last pass; seconds: of its last fetch, pass and fit, factorisation.

    coded_cosine: of the coded with the dense weight gradient of one microbatch of the last pass. forward_errors,
    gradient_errors: by boundary, relative squared error of the codec on it. raw_cosine, corrected_cosine: of that
    coded gradient, as it is and corrected by the last prior, with the clean one of the pass's other microbatches: the
    corrector helps where the second is the larger. corrector_version: of the newest gradient in the memory.
    corrector_skipped: passes that were not factored. gradients_refused: of single matrices. fetched_bytes: of
    snapshots, in all. abandoned: passes with other anchors that ended early.
    """

    passes: int = 0
    failed: int = 0
    version: int | None = None
    fetch_s: float = 0.0
    fit_s: float = 0.0
    prior_bytes: int = 0
    fetched_bytes: int = 0
    abandoned: int = 0
    coded_cosine: float | None = None
    forward_errors: tuple[float, ...] = ()
    gradient_errors: tuple[float, ...] = ()
    raw_cosine: float | None = None
    corrected_cosine: float | None = None
    corrector_version: int | None = None
    factor_s: float = 0.0
    corrector_bytes: int = 0
    corrector_skipped: int = 0
    gradients_refused: int = 0
