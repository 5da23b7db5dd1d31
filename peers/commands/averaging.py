"""From the options of `init` and `local` to what the run's rounds average, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from peers.compute import stage_trainable, trainable_of
from peers.config import UserError
from peers.limits import LIMITS
from swarm.gradient.averaging import AveragingConfig
from swarm.gradient.compressor import round_bytes
from swarm.gradient.config import check_combination, compressor_config
from swarm.gradient.registry import build_compressor
from swarm.gradient.robust import RobustConfig
from swarm.manifest import RunManifest
from swarm.optim import OptimizerConfig

if TYPE_CHECKING:
    from peers.commands.init import RunOptions


def averaging_config(options: RunOptions, optimizer: OptimizerConfig) -> AveragingConfig:
    """What the rounds of the options average. Raises UserError, also for what an optimizer should not apply."""
    given: dict[str, Any] = {}
    for text in options.averaging_options:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError(f"--averaging-options {text!r}: expected NAME=VALUE, as in momentum=0.9")
        try:
            given[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"--averaging-options {text!r}: {value!r} is no value") from error
    for name, chosen in (("ratio", options.averaging_ratio), ("rank", options.averaging_rank)):
        if chosen is not None:
            if name in given:
                raise UserError(f"--averaging-{name} and --averaging-options {name}=... name one thing twice")
            given[name] = chosen
    try:
        compressor = compressor_config(options.averaging, **given)
    except ValidationError as error:
        raise UserError(f"--averaging {options.averaging}: {_first(error)}") from error
    try:
        check_combination(compressor, optimizer)
    except ValueError as error:
        raise UserError(f"--averaging {options.averaging}, --optimizer {optimizer.name}: {error}") from error
    try:
        robust = RobustConfig(norm_bound=options.norm_bound, centered_clip=options.centered_clip)
    except ValidationError as error:
        raise UserError(f"--norm-bound, --centered-clip: {_first(error)}") from error
    return AveragingConfig(compressor=compressor, robust=robust)


def check_stages(averaging: AveragingConfig, config: Any, cuts: Sequence[int], freeze: Sequence[str]) -> None:
    """Raise UserError if the compressor cannot be built for a stage. config: the model's, of transformers."""
    for stage in range(len(cuts) + 1):
        try:
            build_compressor(averaging.compressor, trainable_of(config, cuts, stage, freeze), 0)
        except ValueError as error:
            raise UserError(f"--averaging: stage {stage}: {error}") from error


def averaging_note(manifest: RunManifest, link_mbps: float) -> str:
    """What a round moves: of the stage that moves most, what one of two replicas sends, and how long its line takes."""
    sizes: list[tuple[int, int, int]] = []
    for stage in range(manifest.model.stages):
        trainable = stage_trainable(manifest, stage)
        compressor = build_compressor(manifest.averaging.compressor, trainable, manifest.seed)
        # A late step: the first ones of some compressors are larger.
        phases = compressor.phases(manifest.total_steps)
        sizes.append((round_bytes(phases, 2, LIMITS.averaging_chunk_elements), stage, trainable.numel))
    nbytes, stage, numel = max(sizes)
    if not numel:
        return "averaging: nothing is trained"
    return (
        f"averaging: a round sends {nbytes / 1e6:.2f} MB of stage {stage} from each of two replicas "
        f"({2 * numel / nbytes:.1f}x less than bf16, {4 * numel / nbytes:.1f}x less than fp32), "
        f"{8 * nbytes / (link_mbps * 1e6):.2f} s at {link_mbps:g} Mbit/s (--averaging)"
    )


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    place: Sequence[Any] = [part for part in first["loc"] if isinstance(part, str)]
    return f"{'.'.join(place[-1:])} {first.get('input')!r}: {first['msg']}"
