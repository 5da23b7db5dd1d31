"""Hidden states predicted from token ids: a linear map of the features of `tokens`, of bounded rank.

    B = (S + ridge * mean(diag S) I)^-1 Phi' H          S = Phi' Phi, all centred
    predict_in = B R V_r,  predict_out = V_r' R^-1      V_r: leading eigenvectors of R B' S B R

The second line keeps the rank r that loses least of the prediction in the metric R of `fit`, that is least loss
(reduced-rank regression; Izenman, "Reduced-rank regression for the multivariate linear model", 1975).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from swarm.activation.base import CodecKey
from swarm.activation.compact import check_matrix, matrix_of, to_int8
from swarm.activation.config import BasisConfig, Prediction, prediction_rank
from swarm.activation.tokens import BLOCKS, TokenTable, previous, running_mean

_CHUNK = 2048


def fit_prediction(
    states: Tensor, features: Tensor, metric: Tensor, inverse: Tensor, config: BasisConfig
) -> dict[str, Tensor]:
    """`predict_in` [c F, r] and `predict_out` [r, H], as `to_int8` has them.

    states: [n, H]; features: [n, c F], of the same tokens; metric, inverse: float64 [H, H], R and R^-1.
    """
    count, hidden_size = states.shape
    state_mean, feature_mean = states.mean(dim=0), features.mean(dim=0)
    gram = torch.zeros(features.shape[1], features.shape[1], dtype=torch.float64)
    cross = torch.zeros(features.shape[1], hidden_size, dtype=torch.float64)
    for start in range(0, count, _CHUNK):  # in fp32, summed in fp64
        part = (features[start : start + _CHUNK] - feature_mean).float()
        gram += part.T @ part
        cross += part.T @ (states[start : start + _CHUNK] - state_mean).float()
    ridge = (config.prediction_ridge * gram.diagonal().mean()).clamp_min(torch.finfo(torch.float64).tiny)
    regular = gram + ridge * torch.eye(gram.shape[0], dtype=torch.float64)
    weights = torch.cholesky_solve(cross, torch.linalg.cholesky(regular)) @ metric
    _, directions = torch.linalg.eigh(weights.T @ (gram @ weights))
    kept = directions.flip(1)[:, : min(prediction_rank(config, hidden_size), features.shape[1])]
    return {**to_int8("predict_in", weights @ kept), **to_int8("predict_out", kept.T @ inverse)}


class TokenPredictor:
    """What token ids predict at one boundary. prior: with `predict_in` [c F, r] and `predict_out` [r, H].

    Raises ValueError for arrays that are missing, not finite, or do not fit the table or the hidden size.
    """

    def __init__(
        self,
        prediction: Prediction,
        table: TokenTable,
        prior: Mapping[str, Tensor],
        *,
        hidden_size: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        missing = {"predict_in", "predict_out"} - set(prior)
        if missing:
            raise ValueError(
                f"lacks {sorted(missing)}, which prediction {prediction!r} needs; it was fitted without prediction"
            )
        blocks = BLOCKS[prediction]
        rank = int(prior["predict_out"].shape[0])
        hint = "it was fitted with another token table, prediction or model"
        check_matrix(prior, "predict_in", (blocks * table.features, rank), hint)
        check_matrix(prior, "predict_out", (rank, hidden_size), hint)
        first, last = matrix_of(prior, "predict_in"), matrix_of(prior, "predict_out")
        self._prediction, self._table, self._rank, self._dtype = prediction, table, rank, dtype
        # The blocks side by side: one product for the distinct tokens of a microbatch serves all of them.
        beside = first.view(blocks, table.features, rank).transpose(0, 1).reshape(table.features, -1)
        self._first = beside.to(device=device, dtype=dtype).contiguous()
        self._last = last.to(device=device, dtype=dtype).contiguous()

    def __call__(self, key: CodecKey, chosen: Tensor) -> Tensor:
        """Prediction [n, H] in the compute dtype, without its mean, of the tokens with flat indices int64 [n].

        Raises ValueError for a key without token ids.
        """
        if key.token_ids is None:
            raise ValueError("hidden states are predicted from token ids, and the key has none")
        device = self._first.device
        distinct, places = torch.unique(key.token_ids.to(device), return_inverse=True)
        projected = self._table.embed(distinct).to(self._dtype) @ self._first
        if self._prediction == "token":
            return (projected @ self._last).index_select(0, places.reshape(-1).index_select(0, chosen))
        # Means and shifts commute with the map, so they are taken of its r columns, not of the features.
        spread = projected.index_select(0, places.reshape(-1)).view(*key.shape, 3 * self._rank)
        own, before, so_far = torch.split(spread, self._rank, dim=2)
        starts = key.document_starts.to(device)
        total = running_mean(so_far, starts).add_(own).add_(previous(before, starts))
        return total.flatten(0, 1).index_select(0, chosen).to(self._dtype) @ self._last
