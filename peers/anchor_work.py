"""What an anchor computes in one pass: boundaries' priors, clean weight gradients, and what coding does to them.

Runs on the compute thread. The codecs that it measures are those of the priors it has published last (at first the
run's initial ones): they are in force while the next ones are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torch import Tensor

from peers.config import PeerConfig
from peers.prepare import codec_of
from peers.run_files import RunFiles
from swarm.activation.base import BoundaryCodec
from swarm.activation.config import BasisConfig
from swarm.activation.fit import fit_basis_prior
from swarm.activation.registry import needs_prior, needs_tokens
from swarm.anchor.boundary_prior import BoundaryPrior, encode_boundary_prior
from swarm.anchor.corrector import Corrector
from swarm.anchor.gradients import (
    CodingFigures,
    WeightGradients,
    coded_gradients,
    coding_figures,
    corrector_gain,
    dense_gradients,
    without,
)
from swarm.anchor.memory import coding_bias
from swarm.anchor.passes import AnchorModel
from swarm.anchor.registry import needs_prior as corrector_needs_prior
from swarm.anchor.registry import remembers_bias
from swarm.batch import Batch
from swarm.manifest import RunManifest

MEASURED_ELEMENTS = 200_000_000
"""Weights whose dense and coded gradients are compared in a pass, at most: 0.8 GB for each of the two."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """boundaries: files of the boundaries' priors, in order; none if the codec has none. gradients: what the memory
    takes (clean gradients, or the coding's bias), by stage; None without a corrector. coding: of one microbatch. gain:
    cosine of that microbatch's coded gradient with the clean one of all others, as it is and corrected by the last
    prior.
    """

    boundaries: tuple[bytes, ...]
    gradients: tuple[Mapping[str, Tensor], ...] | None
    coding: CodingFigures | None
    gain: tuple[float, float] | None


class AnchorWork:
    """Passes of one anchor. model: of all stages."""

    def __init__(
        self, config: PeerConfig, manifest: RunManifest, model: AnchorModel, files: RunFiles
    ) -> None:
        self._config, self._manifest, self._model, self._files = config, manifest, model, files
        self._codecs: list[BoundaryCodec] = []

    def run(
        self, batches: Sequence[Batch], version: int, correctors: Sequence[Corrector] | None
    ) -> PassResult:
        """A pass through the weights of a version. correctors: of the last priors, one per stage.

        Raises ValueError if a prior cannot be fitted.
        """
        codec, corrector, model = self._manifest.codec, self._manifest.corrector, self._model
        if not self._codecs:
            self._codecs = [self._codec(b, None) for b in range(model.stages - 1)]
        boundaries: list[bytes] = []
        fitted: list[dict[str, Tensor]] = []
        clean: list[dict[str, Tensor]] | None = None
        with ExitStack() as stack:
            gradients = None
            if corrector_needs_prior(corrector):
                gradients = stack.enter_context(WeightGradients(model.models))
            if isinstance(codec, BasisConfig) and model.stages > 1:  # one stage has no boundary to code at
                samples = model.boundary_samples(
                    batches, codec.calibration_tokens, seed=version, gradients=gradients
                )
                features = None
                if needs_tokens(codec):  # the same tokens at every boundary
                    features = samples[0].tokens.features(self._files.tokens("cpu"), codec.prediction)
                fitted = [
                    fit_basis_prior(found.hidden, found.gradient, found.offsets, codec, features)
                    for found in samples
                ]
                clean = gradients.sums if gradients is not None else None
                del samples
        if gradients is not None and clean is None:
            clean = dense_gradients(model.models, batches)
        for boundary, arrays in enumerate(fitted):
            # Version 0: the plan that puts it in force counts.
            boundaries.append(encode_boundary_prior(BoundaryPrior(boundary, 0, version, arrays)))
        coding, gain, memorised = self._measure(batches, version, clean, correctors)
        if fitted:
            self._codecs = [self._codec(boundary, arrays) for boundary, arrays in enumerate(fitted)]
        return PassResult(
            tuple(boundaries), tuple(memorised) if memorised is not None else None, coding, gain
        )

    def _measure(
        self,
        batches: Sequence[Batch],
        version: int,
        clean: list[dict[str, Tensor]] | None,
        correctors: Sequence[Corrector] | None,
    ) -> tuple[CodingFigures | None, tuple[float, float] | None, list[dict[str, Tensor]] | None]:
        """Figures of the coding, whether the corrector helps, and what the memory takes."""
        models = self._model.models
        if not self._codecs:  # one stage: nothing is coded
            if clean is not None and remembers_bias(self._manifest.corrector):
                clean = [coding_bias(exact, exact) for exact in clean]
            return None, None, clean
        if clean is not None and remembers_bias(self._manifest.corrector):
            coded, errors = coded_gradients(models, batches, self._codecs, version)
            bias = [coding_bias(exact, other) for exact, other in zip(clean, coded, strict=True)]
            return coding_figures(clean, coded, errors), None, bias
        first = batches[:1]
        dense = dense_gradients(models, first, MEASURED_ELEMENTS)
        coded, errors = coded_gradients(models, first, self._codecs, version, MEASURED_ELEMENTS)
        coding = coding_figures(dense, coded, errors)
        total = sum(batch.loss_tokens for batch in batches)
        share = first[0].loss_tokens / max(1, total)
        is_whole = clean is not None and all(set(a) == set(b) for a, b in zip(clean, dense, strict=True))
        gain = None
        if clean is not None and correctors is not None and is_whole and 0 < share < 1:
            gain = corrector_gain(correctors, coded, without(clean, dense, share), version)
        return coding, gain, clean

    def _codec(self, boundary: int, arrays: dict[str, Tensor] | None) -> BoundaryCodec:
        """The codec of a boundary under a prior; None stands for the run's initial one."""
        if arrays is None and needs_prior(self._manifest.codec):
            arrays = self._files.prior(boundary)
        return codec_of(self._config, self._files, boundary, arrays)
