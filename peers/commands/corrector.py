"""From the options of `init` and `local` to the run's corrector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from peers.config import UserError
from swarm.anchor.config import (
    CorrectorConfig,
    NoCorrectorConfig,
    OneSidedConfig,
    PriorCorrectorConfig,
    SpectralConfig,
)
from swarm.manifest import RunManifest

if TYPE_CHECKING:
    from peers.commands.init import RunOptions

ALL_TRIPLETS = 0
"""Rank on the command line that stands for all singular triplets."""
HEAD_BYTES = 2**20
"""Most that a prior's names, shapes and seal take."""


def corrector_config(options: RunOptions) -> NoCorrectorConfig | PriorCorrectorConfig:
    """The corrector of the options. Raises UserError, also for options that belong to another corrector."""
    given: dict[str, Any] = {
        name: value
        for name, value in {
            "alpha": options.corrector_alpha,
            "rank": options.corrector_rank,
            "ema_beta": options.corrector_beta,
            "max_staleness": options.corrector_max_staleness,
            "tau": options.corrector_tau,
            "tau_is_relative": options.corrector_tau_relative or None,
            "side": options.corrector_side,
        }.items()
        if value is not None
    }
    option = {"ema_beta": "beta", "max_staleness": "max-staleness", "tau_is_relative": "tau-relative"}
    if options.corrector == "none":
        if given:
            name = next(iter(given))
            raise UserError(f"--corrector-{option.get(name, name)} needs --corrector: none corrects nothing")
        return NoCorrectorConfig()
    if given.get("rank") == ALL_TRIPLETS:
        given["rank"] = None
    filters = {"tau": (SpectralConfig, OneSidedConfig), "tau_is_relative": (SpectralConfig, OneSidedConfig)}
    try:
        config: Any = TypeAdapter(CorrectorConfig).validate_python({"name": options.corrector})
        for name in given:
            wanted = {**filters, "side": (OneSidedConfig,)}.get(name)
            if wanted is not None and not isinstance(config, wanted):
                whose = " and ".join(each.model_fields["name"].default for each in wanted)
                raise UserError(f"--corrector-{option.get(name, name)} belongs to --corrector {whose}")
        checked: NoCorrectorConfig | PriorCorrectorConfig = type(config).model_validate(
            {"name": options.corrector, **given}
        )
        return checked
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][-1]) if first["loc"] else ""
        raise UserError(
            f"--corrector-{option.get(name, name)} {first.get('input')!r}: {first['msg']}"
        ) from error


def corrector_notes(manifest: RunManifest) -> list[str]:
    """What the owner of a run with a corrector should know."""
    config = manifest.corrector
    if isinstance(config, NoCorrectorConfig):
        return []
    if config.alpha == 1.0:
        return ["note: --corrector-alpha 1 keeps all of the gradient: the corrector does nothing"]
    notes = []
    if not manifest.anchors.peers:
        notes.append(
            f"warning: corrector {config.name} needs the priors of an anchor, and this run names none: gradients stay "
            f"as they are until you grant one (`swarm-peer init RUN_DIR --grant-anchor PEER_ID`)"
        )
    first = min((*manifest.early_snapshots, manifest.snapshot_every))
    if config.max_staleness < first:
        notes.append(
            f"warning: a corrector's prior counts for nothing after {config.max_staleness} steps, and the first "
            f"snapshot for an anchor comes after {first}"
        )
    elif config.max_staleness < 2 * manifest.snapshot_every:
        notes.append(
            f"note: a prior comes every {manifest.snapshot_every} steps and is in use until it is up to "
            f"{2 * manifest.snapshot_every - 1} steps old; it fades from step {config.max_staleness // 2} on and "
            f"counts for nothing after {config.max_staleness} (--corrector-max-staleness)"
        )
    notes.append(
        f"note: the corrector's prior of a stage has up to {prior_bytes(manifest) / 1e6:.1f} MB, which each of its "
        f"replicas fetches at most every {manifest.snapshot_every} steps (--corrector-rank)"
    )
    return notes


def prior_bytes(manifest: RunManifest) -> int:
    """Bytes of the largest stage's prior, as anchors publish it: U and V in bf16, singular values in fp32."""
    from peers.compute import model_config

    rank = None if isinstance(manifest.corrector, NoCorrectorConfig) else manifest.corrector.rank
    return _prior_bytes(rank, model_config(manifest), manifest.model.cuts)


def check_prior_size(
    corrector: NoCorrectorConfig | PriorCorrectorConfig, config: Any, cuts: Sequence[int]
) -> None:
    """Raise UserError if a stage's prior would be larger than anybody takes. config: of the model; cuts: its cuts."""
    if isinstance(corrector, NoCorrectorConfig):
        return
    from dht.records import MAX_PRIOR_BYTES

    nbytes = _prior_bytes(corrector.rank, config, cuts) + HEAD_BYTES
    if nbytes > MAX_PRIOR_BYTES:
        raise UserError(
            f"--corrector-rank {corrector.rank or ALL_TRIPLETS}: the corrector's prior of a stage would have "
            f"{nbytes / 1e6:.0f} MB, of at most {MAX_PRIOR_BYTES / 1e6:.0f}: choose a smaller rank or more stages"
        )


def _prior_bytes(rank: int | None, config: Any, cuts: Sequence[int]) -> int:
    from swarm.anchor.factor import factor_rank
    from swarm.anchor.memory import target_matrices
    from swarm.model.stage import stage_tensor_names

    stages = [
        target_matrices(stage_tensor_names(config, cuts, stage)).values() for stage in range(len(cuts) + 1)
    ]
    return max(sum((2 * sum(shape) + 4) * factor_rank(shape, rank) for shape in shapes) for shapes in stages)
