"""Fit a boundary's prior: what `basis` needs to know about hidden states and gradients at one boundary.

The hidden states' basis minimises the expected loss of coding them, not their squared error. With gradients
g = dL/dh, their second moment A = E[g g'] measures to second order what an error in each direction costs
(empirical Fisher information), so states are whitened by R = (A + ridge * mean(diag A) I)^(1/2) before their
principal directions are taken:

    R C R = V diag(lambda) V'      C: covariance of the states
    y = (h - mean) R V             h^ = mean + y V' R^-1

and the leading columns of R V and R^-1 V are the encoder and the decoder. Gradients are coded in the
eigenvectors of A itself. In both bases `allocate` then decides on the bits of every coordinate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.activation.allocate import fit_width_table
from swarm.activation.compact import matrix_of, to_int8
from swarm.activation.config import BasisConfig, code_budget_bits
from swarm.activation.outliers import Outliers
from swarm.activation.prediction import fit_prediction

_USUAL = 256
"""One token in so many, the largest, is left out of mean and covariance."""

_SMALLEST_VARIANCE = 1e-12
"""Floor of eigenvalues relative to the largest: keeps coordinate scales positive for degenerate samples."""


def find_dense_offsets(hidden: Tensor, offsets: Tensor, *, limit: int, factor: float) -> Tensor:
    """Document offsets whose tokens are sent in full: int64 [n], increasing, always with 0.

    hidden: float [n, H]. offsets: int64 [n], each token's distance from its document's start. Of the first
    `limit` offsets those are added whose mean norm exceeds `factor` times the median norm of all tokens:
    models put massive activations there (Sun et al., "Massive activations in large language models", 2024).
    """
    norms = hidden.float().norm(dim=1)
    threshold = factor * norms.median()
    found = [0]
    for offset in range(1, limit):
        chosen = norms[offsets == offset]
        if chosen.numel() and bool(chosen.mean() > threshold):
            found.append(offset)
    return torch.tensor(found, dtype=torch.int64)


def fit_mean_prior(hidden: Tensor, offsets: Tensor) -> dict[str, Tensor]:
    """Prior of codec `mask` with fill "mean": fp32 [H].

    hidden: float [n, H]; offsets: int64 [n]. Document starts are left out, since their massive activations
    would move the mean by as much as an ordinary token's norm.
    """
    ordinary = offsets != 0
    chosen = hidden[ordinary] if bool(ordinary.any()) else hidden
    return {"mean": chosen.double().mean(dim=0).float()}


def fit_basis_prior(
    hidden: Tensor, gradient: Tensor, offsets: Tensor, config: BasisConfig, features: Tensor | None = None
) -> dict[str, Tensor]:
    """Prior of codec `basis` at one boundary.

    From the uncut model: `samples = collect_boundary_samples(model, cuts, batches, dtype)[b]`; with prediction also
    `table = TokenTable(make_token_table(model.get_input_embeddings().weight, counts, config.prediction))`, then
    `features = samples.tokens.features(table, config.prediction)` and `build_codec(..., tokens=table)`.

    hidden, gradient: float [n, H], states and loss gradients of the same tokens, at any scale. offsets: int64 [n],
    distances from the document start. features: float [n, c F], None without prediction. Returns mean fp32 [H], less
    what the features predict on average; scale fp32 [R], widths int32 [C, W], gradient_scale fp32 [R'],
    gradient_widths int32 [C, W]; dense_offsets int64; and as `compact.to_int8` has them encode and decode [H, R],
    gradient_basis [H, R'], with prediction predict_in [c F, r] and predict_out [r, H]. Needs a few H^3 and (c F)^3 of
    float64 work and memory for n * (H + c F) numbers. Raises ValueError for fewer than two ordinary tokens, shapes that
    differ, features without prediction or the reverse, or a sample that is not finite.
    """
    if hidden.shape != gradient.shape or hidden.ndim != 2 or offsets.shape != hidden.shape[:1]:
        raise ValueError(
            f"samples must be hidden [n, H], gradient [n, H] and offsets [n], got {tuple(hidden.shape)}, "
            f"{tuple(gradient.shape)} and {tuple(offsets.shape)}"
        )
    if (features is None) != (config.prediction == "none") or (
        features is not None and features.shape[:1] != hidden.shape[:1]
    ):
        found = None if features is None else tuple(features.shape)
        raise ValueError(
            f"prediction {config.prediction!r} with features {found} of {hidden.shape[0]} samples"
        )
    dense_offsets = find_dense_offsets(
        hidden, offsets, limit=config.dense_offset_limit, factor=config.dense_norm_factor
    )
    ordinary = ~torch.isin(offsets, dense_offsets)
    states = hidden[ordinary].double()
    gradients = gradient[ordinary].double()
    if states.shape[0] < 2:
        raise ValueError(
            f"{states.shape[0]} ordinary tokens cannot fit a basis; raise calibration_microbatches or "
            "lengthen the sequences"
        )
    if not bool(torch.isfinite(states.sum() + gradients.sum())):
        raise ValueError("calibration samples hold a non-finite value; check the model's dtype")
    count = states.shape[0]
    # One massive activation outweighs thousands of tokens in a covariance.
    norms = states.norm(dim=1)
    usual = norms.argsort(stable=True)[: count - count // _USUAL]
    # Gradients of a mean loss enter A with the inverse square of the batch. Anything absolute further down
    # (floors, eigh's own rounding) would then flatten the spectrum, so they are brought to unit rms first.
    gradients = gradients / gradients.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    second_moment = gradients.T @ gradients / count

    metric_values, metric_vectors = torch.linalg.eigh(second_moment)
    ridge = config.fisher_ridge * second_moment.diagonal().mean()
    root = (metric_values.clamp_min(0.0) + ridge).clamp_min(_SMALLEST_VARIANCE).sqrt()
    metric = (metric_vectors * root) @ metric_vectors.T
    inverse = (metric_vectors / root) @ metric_vectors.T

    predictor: dict[str, Tensor] = {}
    if features is not None:
        chosen = features[ordinary]
        predictor = fit_prediction(states[usual], chosen[usual], metric, inverse, config)
        # As the codec does it: with the rounded arrays.
        inner = chosen @ matrix_of(predictor, "predict_in").to(chosen.dtype)
        states = states - (inner @ matrix_of(predictor, "predict_out").to(chosen.dtype)).double()
    mean = states[usual].mean(dim=0)
    states = states - mean
    Outliers(states.shape[1], config.outlier_interval).clip_(states)
    covariance = states[usual].T @ states[usual] / usual.numel()
    variances, directions = torch.linalg.eigh(metric @ covariance @ metric)
    directions = directions.flip(1)
    forward = _direction(
        states, metric @ directions, inverse @ directions, variances.flip(0), config, config.outlier_interval
    )
    gradient_basis = metric_vectors.flip(1)
    backward = _direction(gradients, gradient_basis, gradient_basis, metric_values.flip(0), config, None)
    return {
        "mean": mean.float(),
        **to_int8("encode", forward.encode),
        **to_int8("decode", forward.decode),
        "scale": forward.scale,
        "widths": forward.widths,
        **to_int8("gradient_basis", backward.encode),
        "gradient_scale": backward.scale,
        "gradient_widths": backward.widths,
        "dense_offsets": dense_offsets,
        **predictor,
    }


@dataclass(frozen=True, slots=True)
class _Direction:
    """One direction's half of a prior: encode, decode float64 [H, R]; scale fp32 [R]; widths int32 [C, W]."""

    encode: Tensor
    decode: Tensor
    scale: Tensor
    widths: Tensor


def _direction(
    samples: Tensor,
    encode: Tensor,
    decode: Tensor,
    variances: Tensor,
    config: BasisConfig,
    outlier_interval: int | None,
) -> _Direction:
    """Scales and width table of samples [n, H] in a basis [H, H] with falling variances [H], all float64.

    Columns that no class codes are cut off.
    """
    hidden_size = samples.shape[1]
    scale = _standard_deviations(variances)
    coordinates = (samples @ encode).float()
    budget = code_budget_bits(config.mask_ratio, hidden_size, outlier_interval)
    used = hidden_size
    # Cutting columns off changes the tokens' gains a little, so the table is fitted again without them.
    for _ in range(2):
        table = fit_width_table(
            coordinates[:, :used], scale[:used], classes=config.token_classes, budget_bits=budget
        )
        used = max(table.coordinates, 1)
    return _Direction(
        encode=encode[:, :used],
        decode=decode[:, :used],
        scale=scale[:used].clone(),
        widths=torch.tensor(table.counts, dtype=torch.int32),
    )


def _standard_deviations(variances: Tensor) -> Tensor:
    """Roots of decreasing eigenvalues, floored relative to the largest: fp32, positive."""
    floor = (variances[0] * _SMALLEST_VARIANCE).clamp_min(_SMALLEST_VARIANCE)
    return variances.clamp_min(floor).sqrt().float()
