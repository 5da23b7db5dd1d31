"""From the options of `init` and `local` to what the run's rounds average, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from peers.commands.explain import averaging_bytes
from peers.compute import trainable_of
from peers.config import UserError
from swarm.gradient.averaging import AveragingConfig, build_averaging
from swarm.gradient.config import PlainConfig, check_combination, compressor_config
from swarm.gradient.outer_config import OUTERS, EveryStepConfig, LocalStepsConfig, OuterConfig, interval
from swarm.gradient.robust import RobustConfig
from swarm.manifest import RunManifest
from swarm.optim import OptimizerConfig

if TYPE_CHECKING:
    from peers.commands.init import RunOptions

OUTER_EVERY = 20
"""Steps from one average to the next, where the options do not say."""


def averaging_config(options: RunOptions, optimizer: OptimizerConfig) -> AveragingConfig:
    """What the rounds of the options average. Raises UserError, also for what an optimizer should not apply."""
    given = _named_values("--averaging-options", options.averaging_options)
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
    outer = _outer_config(options)
    try:
        return AveragingConfig(compressor=compressor, outer=outer, robust=robust)
    except ValidationError as error:
        raise UserError(
            f"--averaging {options.averaging}, --outer {options.outer}: {_first(error)}"
        ) from error


def _outer_config(options: RunOptions) -> OuterConfig:
    given = _named_values("--outer-options", options.outer_options)
    if options.outer_overlap:
        given["overlap"] = options.outer_overlap
    if options.outer == "every_step":
        if options.outer_options or options.outer_every is not None:
            raise UserError(
                "--outer-every and --outer-options need --outer local_sgd, diloco, streaming_diloco, sparta or gasloc"
            )
        if options.outer_overlap > 1:
            raise UserError(
                f"--outer-overlap {options.outer_overlap}: gradients of every step may travel during one more step (1)"
            )
        return EveryStepConfig(overlap=options.outer_overlap)
    every = options.outer_every if options.outer_every is not None else min(OUTER_EVERY, options.steps)
    if every > options.steps:
        raise UserError(
            f"--outer-every {every}: the run has {options.steps} steps, so nothing would be averaged"
        )
    try:
        return OUTERS.validate_python({"name": options.outer, "every": every, **given})
    except ValidationError as error:
        raise UserError(f"--outer {options.outer}: {_first(error)}") from error


def _named_values(option: str, texts: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE texts, the values as YAML. Raises UserError naming the option."""
    given: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError(f"{option} {text!r}: expected NAME=VALUE, as in momentum=0.9")
        try:
            given[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"{option} {text!r}: {value!r} is no value") from error
    return given


def check_stages(averaging: AveragingConfig, config: Any, cuts: Sequence[int], freeze: Sequence[str]) -> None:
    """Raise UserError if the compressor cannot be built for a stage. config: the model's, of transformers."""
    for stage in range(len(cuts) + 1):
        try:
            build_averaging(averaging, trainable_of(config, cuts, stage, freeze), 1, 0)
        except ValueError as error:
            raise UserError(f"--averaging: stage {stage}: {error}") from error


def averaging_note(manifest: RunManifest, link_mbps: float) -> str:
    """What rounds move: of the stage that moves most, what one of two replicas sends, in the mean over the steps, and
    how long its line takes for it.
    """
    every = interval(manifest.averaging.outer)
    sizes: list[tuple[int, int, int, int]] = []
    for stage in range(manifest.model.stages):
        numel, mean, most = averaging_bytes(manifest, stage)
        sizes.append((mean, most, stage, numel))
    nbytes, most, stage, numel = max(sizes)
    if not numel or not nbytes:
        return "averaging: nothing is trained"
    when = "a round" if every == 1 else f"a step, in the mean over {every} (at most {most / 1e6:.2f} MB),"
    return (
        f"averaging: {when} sends {nbytes / 1e6:.2f} MB of stage {stage} from each of two replicas "
        f"({2 * numel / nbytes:.1f}x less than bf16, {4 * numel / nbytes:.1f}x less than fp32), "
        f"{8 * nbytes / (link_mbps * 1e6):.2f} s at {link_mbps:g} Mbit/s (--averaging)"
    )


def averaging_warnings(manifest: RunManifest) -> list[str]:
    """Where a run's averages are known to learn less than they could (docs/averaging.md, "What each costs in loss")."""
    found, outer = [], manifest.averaging.outer
    if isinstance(outer, LocalStepsConfig) and outer.momentum:
        averages = manifest.total_steps // outer.every
        wanted = round(2 / (1 - outer.momentum))  # until so many the first differences still push on
        if averages < wanted:
            times = outer.learning_rate / (1 - outer.momentum)
            lower = "--outer-options momentum=0.5, or " if outer.momentum > 0.5 else ""
            found.append(
                f"warning: {averages} averages are few for an outer momentum of {outer.momentum:g}: along one "
                f"difference outer steps add up to {times:.1f} times it, over {wanted} averages; try "
                f"{lower}--outer local_sgd"
            )
    compressor = manifest.averaging.compressor
    signs = (
        isinstance(compressor, PlainConfig) and compressor.codec.name == "sign" and compressor.error_feedback
    )
    if signs and manifest.optimizer.name == "adamw":
        found.append(
            "warning: signs with error feedback and AdamW learned less than without it, in short runs: try "
            "--averaging-options error_feedback=false, or --optimizer sgd"
        )
    return found


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    place: Sequence[Any] = [part for part in first["loc"] if isinstance(part, str)]
    return f"{'.'.join(place[-1:])} {first.get('input')!r}: {first['msg']}"
