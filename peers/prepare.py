"""From a run's files to a stage that can compute: fetch what it needs, build codecs and model."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from peers.compute import Boundaries, StageCompute, build_compute
from peers.config import PeerConfig
from peers.engine import Engine, JobPriority
from peers.run_files import RunFiles, prior_name, stage_name
from swarm.activation.base import BoundaryCodec
from swarm.activation.registry import build_codec, needs_prior, needs_tokens
from swarm.activation.tokens import TOKENS_FILE
from swarm.activation.versions import VersionedCodec
from swarm.manifest import RunManifest
from swarm.model.formats import compute_dtype


def codec_of(
    config: PeerConfig, files: RunFiles, boundary: int, prior: dict[str, Tensor] | None
) -> BoundaryCodec:
    """The codec of a boundary with this prior. Raises ValueError if the prior does not fit the manifest."""
    manifest = files.manifest
    return build_codec(
        manifest.codec,
        hidden_size=manifest.model.hidden_size,
        boundary=boundary,
        run_seed=manifest.seed,
        prior=prior,
        device=config.device,
        dtype=compute_dtype(manifest.compute, config.device),
        tokens=files.tokens(config.device) if needs_tokens(manifest.codec) else None,
    )


async def prepare_stage(
    config: PeerConfig,
    manifest: RunManifest,
    stage: int,
    files: RunFiles,
    engine: Engine,
    note: Callable[[str], None],
) -> tuple[StageCompute, Boundaries]:
    """Fetch the stage's files (a calibrated stage needs no weights) and build it on the compute thread.

    Raises TransferError if nobody has a file, ValueError if one does not fit the manifest.
    """
    names = [stage_name(stage)] if config.compute.is_real else []
    if needs_prior(manifest.codec):
        names += [prior_name(b) for b in (stage - 1, stage) if 0 <= b < manifest.model.stages - 1]
    if needs_tokens(manifest.codec):
        names.append(TOKENS_FILE)
    for name in names:
        artifact = manifest.artifact(name)
        note(f"getting {name} ({artifact.nbytes / 1e6:.1f} MB)")
        await files.ensure(name)

    def codec(boundary: int) -> BoundaryCodec | None:
        if not 0 <= boundary < manifest.model.stages - 1:
            return None
        if not needs_prior(manifest.codec):
            return codec_of(config, files, boundary, None)
        return VersionedCodec(boundary, codec_of(config, files, boundary, files.prior(boundary)))

    def build() -> tuple[StageCompute, Boundaries]:
        boundaries = Boundaries(incoming=codec(stage - 1), outgoing=codec(stage))
        compute = build_compute(
            manifest,
            stage,
            files.artifacts / stage_name(stage),
            boundaries,
            device=config.device,
            microseconds_per_token=config.compute.microseconds_per_token,
        )
        return compute, boundaries

    note(f"loading stage {stage}")
    return await engine.submit(JobPriority.ROUND, build)
