"""Build a run's folder: stage files, packed data, priors, tokenizer, manifest."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from peers.commands.averaging import averaging_config, check_stages
from peers.commands.corrector import check_prior_size, corrector_config
from peers.commands.evaluate import quiet_transformers
from peers.commands.init import DEFAULT_PREDICTION, RunOptions, check_target
from peers.config import UserError
from peers.limits import PROTOCOL_VERSION
from swarm.activation.calibrate import cast_parameters_, collect_boundary_samples
from swarm.activation.config import BasisConfig, DenseConfig, MaskConfig
from swarm.activation.fit import fit_basis_prior, fit_mean_prior
from swarm.activation.registry import needs_prior, needs_tokens
from swarm.activation.tokens import TOKENS_FILE, TokenTable, make_token_table
from swarm.anchor.config import NoCorrectorConfig, PriorCorrectorConfig
from swarm.anchor.registry import needs_prior as corrector_needs_prior
from swarm.data.config import DataConfig
from swarm.data.dataset import PackedDataset
from swarm.data.order import samples_from_far_end
from swarm.data.pack import PackProgress, pack
from swarm.gradient.averaging import AveragingConfig
from swarm.gradient.config import SPARSE_NAMES
from swarm.manifest import AnchorSection, Artifact, ModelSection, RunManifest, create_owner_key
from swarm.model.cut import check_cuts, equal_cost_cuts
from swarm.model.export import split_checkpoint
from swarm.model.formats import compute_dtype
from swarm.model.plan import require_pipeline_plan
from swarm.model.source import load_pretrained
from swarm.optim import OptimizerConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peers.commands.init import Progress

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MANIFEST_FILE = "manifest.yaml"
OWNER_KEY_FILE = "owner.key"
ARTIFACTS = "artifacts"

AnyCodec = DenseConfig | MaskConfig | BasisConfig
AnyCorrector = NoCorrectorConfig | PriorCorrectorConfig


def prior_name(boundary: int) -> str:
    """Artifact name of a boundary's prior."""
    return f"prior-{boundary}.safetensors"


def codec_config(options: RunOptions) -> AnyCodec:
    """The codec of the options. Raises UserError, also for options that belong to another codec."""
    ratio = {} if options.mask_ratio is None else {"mask_ratio": options.mask_ratio}
    values = options.codec_values
    if options.codec != "mask" and (options.mask_fill != "zero" or options.mask_rescale != "none"):
        raise UserError("--mask-fill and --mask-rescale belong to --codec mask")
    if options.codec != "basis" and options.prediction is not None:
        raise UserError("--prediction belongs to --codec basis")
    try:
        if options.codec == "basis":
            if values is not None:
                raise UserError(
                    "--codec-values belongs to --codec mask and dense; basis sends 1 to 8 bits per coordinate"
                )
            return BasisConfig(
                calibration_microbatches=options.calibration_microbatches,
                prediction=options.prediction or DEFAULT_PREDICTION,
                **ratio,
            )
        if options.codec == "mask":
            return MaskConfig(
                values=values or "bf16", fill=options.mask_fill, rescale=options.mask_rescale, **ratio
            )
        if ratio:
            raise UserError("--mask-ratio belongs to --codec basis and mask; dense sends everything")
        if values == "int8":
            raise UserError("--codec-values int8 belongs to --codec mask; dense sends bf16 or fp32")
        return DenseConfig(values=values or "bf16")
    except ValidationError as error:
        raise _refused(error) from error


def optimizer_config(options: RunOptions) -> OptimizerConfig:
    """The optimizer of the options. Raises UserError."""
    try:
        return OptimizerConfig(
            name=options.optimizer,
            learning_rate=options.learning_rate,
            schedule=options.schedule,
            warmup_steps=options.warmup_steps,
            weight_decay=options.weight_decay,
            momentum=options.momentum,
            clip_norm=options.clip_norm,
            # A zero of a sparse average says that nothing is known, not that the gradient is zero.
            skip_zeros=options.optimizer == "adams" and options.averaging in SPARSE_NAMES,
        )
    except ValidationError as error:
        raise _refused(error) from error


def anchor_section(options: RunOptions, codec: AnyCodec, corrector: AnyCorrector) -> AnchorSection:
    """The run's anchors. Raises UserError."""
    if options.anchor_peers and not isinstance(codec, BasisConfig) and not corrector_needs_prior(corrector):
        raise UserError(
            f"--anchor-peers: codec {codec.name} has no priors, and no --corrector needs any; use --codec basis"
        )
    if options.priors == "leaders" and (
        not isinstance(codec, BasisConfig) or corrector_needs_prior(corrector)
    ):
        raise UserError("--priors leaders: peers that train make only priors of codec basis: use anchors")
    if options.priors == "leaders" and options.anchor_peers:
        raise UserError("--priors leaders needs no anchors: leave --anchor-peers out")
    try:
        return AnchorSection(
            peers=options.anchor_peers,
            microbatches=options.anchor_microbatches,
            source=options.priors,
            every=options.prior_every,
        )
    except ValidationError as error:
        raise _refused(error) from error


def data_config(options: RunOptions) -> DataConfig:
    """The data recipe of the options. Raises UserError."""
    try:
        return DataConfig(
            source=options.data,
            kind=options.data_kind,
            text_field=options.text_field,
            split=options.split,
            subset=options.subset,
            heldout_percent=options.heldout_percent,
            max_documents=options.max_documents,
            max_tokens=options.max_tokens,
            sequence_length=options.sequence_length,
            seed=options.seed,
        )
    except ValidationError as error:
        raise _refused(error) from error


def build_run(options: RunOptions, run_dir: Path, progress: Progress | None = None) -> RunManifest:
    """See `peers.commands.init.create_run`."""
    quiet_transformers()
    show: Progress = progress if progress is not None else lambda *_: None
    codec, optimizer, data = codec_config(options), optimizer_config(options), data_config(options)
    corrector, averaging = corrector_config(options), averaging_config(options, optimizer)
    anchors = anchor_section(options, codec, corrector)
    _check_counts(options)
    check_target(run_dir)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    partial = run_dir.with_name(run_dir.name + ".partial")
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    try:
        partial.mkdir()
    except FileExistsError as error:
        raise UserError(
            f"{partial} exists: another init is making this run, or one was killed; in that case remove it"
        ) from error
    try:
        manifest = _build(
            options, run_dir.name, partial, codec, averaging, optimizer, corrector, data, anchors, show
        )
        if run_dir.exists():
            run_dir.rmdir()  # empty: check_target saw to it, and rmdir refuses anything else
        partial.rename(run_dir)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return manifest


def _build(
    options: RunOptions,
    folder_name: str,
    target: Path,
    codec: AnyCodec,
    averaging: AveragingConfig,
    optimizer: OptimizerConfig,
    corrector: AnyCorrector,
    data: DataConfig,
    anchors: AnchorSection,
    show: Progress,
) -> RunManifest:
    artifacts = target / ARTIFACTS
    artifacts.mkdir()
    show("load model", 0, 1)
    model, tokenizer = load_pretrained(options.model)
    if tokenizer is None:
        raise UserError(f"model {options.model!r} has no tokenizer: put its tokenizer files into its folder")
    config = model.config
    require_pipeline_plan(config)
    cuts = _cuts(options, config)
    _check_model(options, codec, config)
    check_prior_size(corrector, config, cuts)
    check_stages(averaging, config, cuts, options.freeze)
    section = ModelSection(
        name=options.model,
        config=_plain(config.to_dict()),
        cuts=cuts,
        freeze=tuple(sorted(set(options.freeze))),
    )

    show("cut into stages", 0, 1)
    split_checkpoint(model, cuts, artifacts, _weights_dtype(options, model))
    tokenizer.save_pretrained(str(artifacts / "tokenizer"))

    show("pack data", 0, options.max_tokens)

    def packed(state: PackProgress) -> None:
        show("pack data", state.tokens, options.max_tokens)

    index = pack(data, tokenizer, artifacts, packed)
    if needs_prior(codec) and cuts:
        samples = samples_from_far_end(
            options.seed, index.train_samples, options.calibration_microbatches * options.rows_per_microbatch
        )
        dataset = PackedDataset(artifacts, index)
        rows = options.rows_per_microbatch
        batches = [dataset.batch(samples[i : i + rows]) for i in range(0, len(samples), rows)]
        tokens = None
        if isinstance(codec, BasisConfig) and needs_tokens(codec):
            embedding = model.get_input_embeddings().weight
            arrays = make_token_table(embedding, dataset.token_counts(), codec.prediction)
            save_file(arrays, str(artifacts / TOKENS_FILE))
            tokens = TokenTable(arrays)
        _fit_priors(
            model, cuts, batches, compute_dtype(options.compute, "cpu"), codec, tokens, artifacts, show
        )

    files = sorted(path for path in artifacts.rglob("*") if path.is_file())
    described = []
    for number, path in enumerate(files):
        show("hash and sign", number, len(files))
        path.chmod(0o644)  # everybody may have these, so a seed may run as another user (Docker)
        described.append(Artifact.of(path, path.relative_to(artifacts).as_posix()))
    key = create_owner_key(target / OWNER_KEY_FILE)
    try:
        manifest = RunManifest(
            protocol=PROTOCOL_VERSION,
            name=options.name if options.name is not None else folder_name[:64],
            owner_public_key="0" * 64,
            seed=options.seed,
            model=section,
            data=index,
            rows_per_microbatch=options.rows_per_microbatch,
            samples_per_step=options.samples_per_step,
            total_steps=options.steps,
            compute=options.compute,
            codec=codec,
            averaging=averaging,
            optimizer=optimizer,
            corrector=corrector,
            min_replicas=options.replicas,
            snapshot_every=options.snapshot_every,
            anchors=anchors,
            artifacts=tuple(described),
        ).signed(key)
    except ValidationError as error:
        raise _refused(error) from error
    manifest.save(target / MANIFEST_FILE)
    show("hash and sign", len(files), len(files))
    return manifest


def _fit_priors(
    model: Any,
    cuts: Sequence[int],
    batches: Sequence[Any],
    dtype: torch.dtype,
    codec: AnyCodec,
    table: TokenTable | None,
    artifacts: Path,
    show: Progress,
) -> None:
    """Calibrate every boundary and write its prior. Converts the model to the compute dtype in place."""
    cast_parameters_(model, dtype)
    tokens = codec.calibration_tokens if isinstance(codec, BasisConfig) else BasisConfig().calibration_tokens
    show("calibrate codec", 0, len(batches))
    boundaries = collect_boundary_samples(
        model,
        cuts,
        batches,
        dtype,
        max_tokens=tokens,
        progress=lambda done, total: show("calibrate codec", done, total),
    )
    features = None
    if table is not None and isinstance(codec, BasisConfig):  # the same tokens at every boundary
        features = boundaries[0].tokens.features(table, codec.prediction)
    for boundary, samples in enumerate(boundaries):
        show("fit codec", boundary, len(boundaries))
        try:
            prior = (
                fit_basis_prior(samples.hidden, samples.gradient, samples.offsets, codec, features)
                if isinstance(codec, BasisConfig)
                else fit_mean_prior(samples.hidden, samples.offsets)
            )
        except ValueError as error:
            raise UserError(f"the codec cannot be fitted at boundary {boundary}: {error}") from error
        save_file(prior, str(artifacts / prior_name(boundary)))


def _cuts(options: RunOptions, config: Any) -> tuple[int, ...]:
    """The options' own cuts, or those of equal cost. Raises UserError."""
    try:
        if not options.cuts:
            return equal_cost_cuts(config, options.stages, options.sequence_length)
        cuts = check_cuts(options.cuts, int(config.num_hidden_layers))
    except ValueError as error:
        raise UserError(str(error)) from error
    if len(cuts) + 1 != options.stages:
        raise UserError(
            f"--cuts {' '.join(map(str, cuts))} makes {len(cuts) + 1} stages, but --stages says {options.stages}"
        )
    return cuts


def _check_model(options: RunOptions, codec: AnyCodec, config: Any) -> None:
    """Raise UserError for options that do not fit the model, before anything slow is done."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and options.sequence_length > limit:
        raise UserError(f"--sequence-length {options.sequence_length} exceeds the model's {limit} positions")


def _check_counts(options: RunOptions) -> None:
    """Raise UserError for counts that make no run."""
    for name in ("stages", "replicas", "steps", "samples_per_step", "rows_per_microbatch", "snapshot_every"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)}: at least 1 is needed")
    if options.threads is not None and options.threads < 1:
        raise UserError(f"--threads {options.threads}: at least 1 is needed")
    if options.samples_per_step < options.rows_per_microbatch:
        raise UserError(
            f"--samples-per-step {options.samples_per_step} is less than one microbatch of "
            f"--rows-per-microbatch {options.rows_per_microbatch}"
        )
    if not 0 <= options.seed < 2**31:
        raise UserError(f"--seed {options.seed}: must lie in 0..2147483647")
    if options.name is not None and not 1 <= len(options.name) <= 64:
        raise UserError(f"--name has {len(options.name)} characters: 1 to 64 are allowed")


def _weights_dtype(options: RunOptions, model: Any) -> torch.dtype:
    """Number format of the stage files: bf16 models stay bf16; fp16 needs fp32 to lose nothing."""
    if options.weights != "auto":
        return DTYPES[options.weights]
    return torch.bfloat16 if next(model.parameters()).dtype == torch.bfloat16 else torch.float32


def _plain(value: Any) -> Any:
    """A configuration as JSON has it: the manifest is compared byte for byte, whoever parsed it."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


def _refused(error: ValidationError) -> UserError:
    """A configuration model's refusal in the words of the command line."""
    first = error.errors()[0]
    name = "-".join(str(part) for part in first["loc"]).replace("_", "-")
    return UserError(f"{'--' + name + ' ' if name else ''}{first.get('input')!r}: {first['msg']}")
