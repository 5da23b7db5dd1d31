"""An anchor's part of a pass that it makes with others: its own stages, computed on the compute thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from torch import Tensor

from peers.anchor_figures import AnchorFigures
from peers.anchor_memory import AnchorMemory
from peers.anchor_offers import AnchorOffers
from peers.anchor_stages import AnchorStages
from peers.engine import Engine, JobPriority
from peers.prior_parts import PriorPart
from peers.run_files import RunFiles
from swarm.activation.config import BasisConfig
from swarm.activation.fit import fit_basis_prior
from swarm.activation.registry import needs_tokens
from swarm.anchor.boundary_prior import BoundaryPrior, encode_boundary_prior
from swarm.anchor.gradients import WeightGradients
from swarm.anchor.span import SpanPass
from swarm.manifest import RunManifest


class SpanWork:
    """See `peers.anchor_circuit.PassWork`. memory: of clean weight gradients, if the run's corrector needs one."""

    def __init__(
        self,
        *,
        manifest: RunManifest,
        stages: AnchorStages,
        engine: Engine,
        files: RunFiles,
        offers: AnchorOffers,
        memory: AnchorMemory | None,
        figures: AnchorFigures,
        note: Callable[[str], None],
    ) -> None:
        self.microbatches = manifest.anchors.microbatches
        self._manifest, self._stages, self._engine, self._files = manifest, stages, engine, files
        self._offers, self._memory, self._figures, self._note = offers, memory, figures, note
        self._pass: SpanPass
        self._version, self._leg = 0, stages.span
        self._collecting = ExitStack()
        self._gradients: WeightGradients | None = None
        self._began_s = self._fetched_s = 0.0

    def close(self) -> None:
        """Let go of what an abandoned pass has collected."""
        self._collecting.close()
        self._gradients = None

    async def load(self, version: int, first: int, last: int) -> None:
        """See PassWork."""
        self._began_s = time.monotonic()
        self._version, self._leg = version, (first, last)
        batches = await self._stages.load(version, first, last)
        codec = self._manifest.codec

        def begin() -> SpanPass:
            self.close()
            models = self._stages.models(first, last)
            if self._memory is not None:
                self._gradients = self._collecting.enter_context(WeightGradients(models))
            return SpanPass(
                models,
                batches,
                codec.calibration_tokens if isinstance(codec, BasisConfig) else 1,
                is_last=last == self._manifest.model.stages - 1,
                seed=version,
                gradients=self._gradients,
            )

        self._pass = await self._engine.submit(JobPriority.ROUND, begin)
        self._fetched_s = time.monotonic()

    def shape(self, index: int) -> tuple[int, int, int]:
        """See PassWork."""
        return self._pass.shape(index)

    async def forward(self, index: int, incoming: Tensor | None) -> Tensor | None:
        """See PassWork."""
        return await self._engine.submit(JobPriority.FORWARD, self._pass.forward, index, incoming)

    async def backward(self, index: int, gradient: Tensor | None) -> Tensor | None:
        """See PassWork."""
        return await self._engine.submit(JobPriority.BACKWARD, self._pass.backward, index, gradient)

    async def finish(self) -> None:
        """See PassWork."""
        version, (first, _) = self._version, self._leg
        gradients = self._gradients
        priors = await self._engine.submit(JobPriority.ROUND, self._fit)
        for boundary, data in enumerate(priors, start=first):
            await self._offers.offer(version, PriorPart("boundary", boundary), data)
        if self._memory is not None and gradients is not None:
            await self._memory.ingest(version, dict(enumerate(gradients.sums, start=first)))
        figures = self._figures
        figures.passes, figures.version = figures.passes + 1, version
        figures.fetch_s, figures.fit_s = (
            self._fetched_s - self._began_s,
            time.monotonic() - self._fetched_s,
        )
        figures.fetched_bytes, figures.prior_bytes = self._stages.fetched_bytes, sum(map(len, priors))
        self._note(
            f"priors of version {version}: {figures.prior_bytes / 1e6:.1f} MB, fetched in {figures.fetch_s:.1f} s, "
            f"passed and fitted in {figures.fit_s:.1f} s"
        )

    def _fit(self) -> list[bytes]:
        """Files of the priors of the boundaries behind this anchor's stages, in order; none if the codec has none."""
        codec, (first, _) = self._manifest.codec, self._leg
        self._collecting.close()
        if not isinstance(codec, BasisConfig):
            return []
        samples = self._pass.samples()
        features = None
        if samples and needs_tokens(codec):  # the same tokens at every boundary
            features = samples[0].tokens.features(self._files.tokens("cpu"), codec.prediction)
        priors = []
        for boundary, found in enumerate(samples, start=first):
            arrays = fit_basis_prior(found.hidden, found.gradient, found.offsets, codec, features)
            # Version 0: the plan that puts it in force counts.
            priors.append(encode_boundary_prior(BoundaryPrior(boundary, 0, self._version, arrays)))
        return priors
