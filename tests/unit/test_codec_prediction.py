"""Prediction from token ids: features, the fit, the codec with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from swarm.activation import tokens as tokens_module
from swarm.activation.base import CodecKey
from swarm.activation.basis import BasisCodec, document_positions
from swarm.activation.compact import matrix_of
from swarm.activation.config import BasisConfig, Prediction, token_budget_bytes
from swarm.activation.fit import fit_basis_prior
from swarm.activation.prediction import TokenPredictor, fit_prediction
from swarm.activation.registry import payload_bytes
from swarm.activation.tokens import (
    BLOCKS,
    SampledTokens,
    TokenTable,
    feature_columns,
    make_token_table,
    token_features,
)

HIDDEN, VOCABULARY = 48, 90


def embedding() -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(VOCABULARY, HIDDEN, generator=generator) * torch.logspace(0, -1, HIDDEN) + 0.5


def microbatch(rows: int = 4, tokens: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids below 60 and document starts."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 60, (rows, tokens), generator=generator)
    starts = torch.rand(rows, tokens, generator=generator) < 0.06
    starts[:, 0] = True
    return ids, starts


def make_table(prediction: Prediction = "context") -> TokenTable:
    return TokenTable(make_token_table(embedding(), torch.bincount(microbatch()[0].flatten()), prediction))


def slow_features(rows: Tensor, starts: Tensor) -> np.ndarray[Any, Any]:
    """One token after the other: rows fp32 [B, T, F] to [B * T, 3 F]."""
    found = []
    for row, start in zip(rows.double().numpy(), starts.tolist(), strict=True):
        document: list[np.ndarray[Any, Any]] = []
        for vector, is_start in zip(row, start, strict=True):
            if is_start:
                document = []
            before = document[-1] if document else np.zeros_like(vector)
            document.append(vector)
            found.append(np.concatenate([vector, before, np.mean(document, axis=0)]))
    return np.stack(found)


# -- table and features --------------------------------------------------------------------------------


def test_table_rows_are_the_embedding_less_its_mean_and_zero_for_other_tokens() -> None:
    counts = torch.bincount(microbatch()[0].flatten())
    table = make_table()
    present = counts.nonzero().squeeze(1)
    weights = counts[present].double() / counts.sum()
    exact = embedding()[present].double()
    exact -= weights @ exact
    error = (table.embed(present).double() - exact).abs()
    assert bool((error <= exact.abs().amax(dim=1, keepdim=True) / 254 * 1.001).all())
    absent = torch.tensor([i for i in range(VOCABULARY + 50) if i >= len(counts) or not counts[i]])
    assert absent.numel() >= 30 + 50 and not bool(table.embed(absent).any())


def test_table_that_would_be_too_large_is_projected_on_what_occurs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "SMALLEST_FEATURES", 8)
    monkeypatch.setattr(tokens_module, "TABLE_BUDGET_BYTES", 30_000)
    counts = torch.bincount(microbatch()[0].flatten())
    present = counts.nonzero().squeeze(1)
    table = make_table()
    width = table.features
    assert len(present) * width + 4 * (3 * width) ** 2 <= 30_000
    assert len(present) * (width + 1) + 4 * (3 * width + 3) ** 2 > 30_000
    # Weighted principal components: their energy is the sum of the leading eigenvalues, and no basis has more.
    weights = (counts[present].double() / counts.sum()).numpy()
    exact = embedding()[present].double().numpy()
    exact -= weights @ exact
    eigenvalues = np.linalg.eigvalsh(exact.T @ (exact * weights[:, None]))[::-1]
    kept = weights @ (table.embed(present).double().numpy() ** 2).sum(axis=1)
    assert kept == pytest.approx(eigenvalues[:width].sum(), rel=2e-3)


@pytest.mark.parametrize("hidden_size", [64, 576, 2048, 4096, 8192])
@pytest.mark.parametrize("tokens", [500, 50_000, 150_000])
@pytest.mark.parametrize("prediction", ["token", "context"])
def test_columns_fill_the_budget(hidden_size: int, tokens: int, prediction: Prediction) -> None:
    columns = feature_columns(hidden_size, tokens, prediction)

    def nbytes(width: int) -> int:
        return tokens * width + 4 * (BLOCKS[prediction] * width) ** 2

    assert min(256, hidden_size) <= columns <= hidden_size
    assert nbytes(columns) <= 100_000_000 or columns == 256
    assert columns == hidden_size or nbytes(columns + 1) > 100_000_000
    if hidden_size <= 576 and tokens <= 50_000:
        assert columns == hidden_size


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ids": torch.tensor([3, 2], dtype=torch.int32)}, "must increase"),
        ({"ids": torch.tensor([-1, 2], dtype=torch.int32)}, "must increase"),
        ({"ids": torch.tensor([1, 2])}, "ids torch.int64"),
        ({"rows": torch.zeros(3, 4, dtype=torch.int8)}, r"rows \[3, 4\]"),
        ({"rows": torch.zeros(2, 0, dtype=torch.int8)}, "must have columns"),
        ({"scales": torch.tensor([1.0, float("nan")])}, "not finite"),
        ({"scales": None}, "lacks"),
    ],
)
def test_malformed_tables_are_refused(change: dict[str, Any], reason: str) -> None:
    good = {
        "ids": torch.tensor([1, 5], dtype=torch.int32),
        "rows": torch.ones(2, 4, dtype=torch.int8),
        "scales": torch.ones(2),
    }
    assert TokenTable(good).embed(torch.tensor([5, 6, 0])).sum(dim=1).tolist() == [4.0, 0.0, 0.0]
    broken = {name: array for name, array in {**good, **change}.items() if array is not None}
    with pytest.raises(ValueError, match=reason):
        TokenTable(broken)


def test_features_are_those_of_a_loop_over_the_tokens() -> None:
    table, (ids, starts) = make_table(), microbatch(seed=1)
    found = token_features(table, ids, starts, "context").numpy()
    exact = slow_features(table.embed(ids), starts)
    np.testing.assert_allclose(found, exact, atol=2e-5)
    assert torch.equal(token_features(table, ids, starts, "token"), table.embed(ids).flatten(0, 1))


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6), seed=st.integers(0, 1 << 20))
@settings(max_examples=25, deadline=None)
def test_packed_documents_have_the_features_they_have_alone(lengths: list[int], seed: int) -> None:
    table = TABLE
    ids = torch.randint(0, VOCABULARY, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    starts = torch.zeros_like(ids, dtype=torch.bool)
    first = 0
    for length in lengths:
        starts[0, first] = True
        first += length
    together = token_features(table, ids, starts, "context")
    first = 0
    for length in lengths:
        part = slice(first, first + length)
        alone = token_features(table, ids[:, part], starts[:, part], "context")
        torch.testing.assert_close(together[part], alone, atol=3e-5, rtol=0)
        first += length


TABLE = make_table()


def test_sampled_tokens_have_the_features_of_their_places() -> None:
    table, taken = make_table(), []
    exact = []
    for seed in range(3):
        ids, starts = microbatch(seed=seed)
        chosen = torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(seed))[:50]
        taken.append((ids, starts, chosen))
        exact.append(slow_features(table.embed(ids), starts)[chosen.numpy()])
    found = SampledTokens(tuple(taken)).features(table, "context")
    assert found is not None
    np.testing.assert_allclose(found.numpy(), np.concatenate(exact), atol=2e-5)
    assert SampledTokens(tuple(taken)).features(table, "none") is None


# -- the fit -------------------------------------------------------------------------------------------


def metric_of(gradient: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    values, vectors = np.linalg.eigh(gradient.T @ gradient / len(gradient))
    return (vectors * np.sqrt(values + 0.1 * values.mean())) @ vectors.T


@pytest.mark.parametrize("rank", [HIDDEN, 5])
def test_the_fit_is_the_ridge_solution_projected_in_the_metric(rank: int) -> None:
    generator = np.random.default_rng(3)
    features = generator.normal(size=(900, 30)) @ generator.normal(size=(30, 30)) + 2.0
    states = features @ generator.normal(size=(30, HIDDEN)) + generator.normal(size=(900, HIDDEN)) - 7.0
    metric = metric_of(generator.normal(size=(500, HIDDEN)) * np.logspace(0, -2, HIDDEN))
    config = BasisConfig(prediction="context", prediction_rank=rank)
    found = fit_prediction(
        torch.from_numpy(states),
        torch.from_numpy(features).float(),
        torch.from_numpy(metric),
        torch.from_numpy(np.linalg.inv(metric)),
        config,
    )
    assert found["predict_in"].dtype == found["predict_out"].dtype == torch.int8
    assert found["predict_in"].shape == (30, min(rank, 30))
    # Ridge as least squares with extra rows.
    centred, target = features - features.mean(axis=0), states - states.mean(axis=0)
    penalty = np.sqrt(config.prediction_ridge * (centred**2).sum(axis=0).mean())
    exact, *_ = np.linalg.lstsq(
        np.concatenate([centred, penalty * np.eye(30)]),
        np.concatenate([target, np.zeros((30, HIDDEN))]),
        rcond=None,
    )
    # What is dropped is the prediction's least part in the metric.
    left, values, right = np.linalg.svd(centred @ exact @ metric, full_matrices=False)
    best = (left[:, :rank] * values[:rank]) @ right[:rank] @ np.linalg.inv(metric)
    predicted = (
        centred @ (matrix_of(found, "predict_in").double() @ matrix_of(found, "predict_out").double()).numpy()
    )
    error = np.linalg.norm((predicted - best) @ metric) / np.linalg.norm(best @ metric)
    assert error < 0.01


def make_codec(
    prediction: Prediction = "context", ratio: float = 80, **options: Any
) -> tuple[BasisCodec, dict[str, Tensor], TokenTable]:
    config = BasisConfig(mask_ratio=ratio, prediction=prediction, **options)
    table = make_table(prediction)
    hidden, gradient, offsets, tokens = make_samples(table)
    prior = fit_basis_prior(hidden, gradient, offsets, config, tokens.features(table, prediction))
    return build(config, prior, table), prior, table


def build(
    config: BasisConfig,
    prior: dict[str, Tensor],
    table: TokenTable | None,
    dtype: torch.dtype = torch.float32,
) -> BasisCodec:
    return BasisCodec(
        config,
        hidden_size=HIDDEN,
        boundary=3,
        prior=prior,
        device="cpu",
        dtype=dtype,
        tokens=table,
    )


def states_of(table: TokenTable, ids: Tensor, starts: Tensor, seed: int) -> Tensor:
    """States [B * T, H], all but a few percent of whose variance follows from the context, most from the token."""
    weights = torch.randn(3, table.features, HIDDEN, generator=torch.Generator().manual_seed(11))
    weights = (weights * torch.tensor([2.0, 1.0, 1.0]).view(3, 1, 1)).flatten(0, 1)
    explained = token_features(table, ids, starts, "context") @ weights
    noise = torch.randn(explained.shape, generator=torch.Generator().manual_seed(seed))
    return explained + 0.2 * explained.std() * noise + 20.0


def make_samples(table: TokenTable) -> tuple[Tensor, Tensor, Tensor, SampledTokens]:
    ids, starts = microbatch(rows=40, seed=21)
    hidden = states_of(table, ids, starts, 22)
    gradient = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(23))
    taken = SampledTokens(((ids, starts, torch.arange(ids.numel())),))
    return hidden, gradient, document_positions(starts).flatten(), taken


def make_key(seed: int = 31) -> CodecKey:
    ids, starts = microbatch(seed=seed)
    return CodecKey(step=0, sample_ids=torch.arange(4), document_starts=starts, token_ids=ids)


def test_features_belong_to_prediction() -> None:
    hidden, gradient, offsets, tokens = make_samples(TABLE)
    for prediction, features in (("none", tokens.features(TABLE, "token")), ("token", None)):
        with pytest.raises(ValueError, match=f"prediction '{prediction}' with features"):
            fit_basis_prior(hidden, gradient, offsets, BasisConfig(prediction=prediction), features)


# -- the codec -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prediction", ["token", "context"])
def test_the_codec_predicts_what_the_features_say(prediction: Prediction) -> None:
    _, prior, table = make_codec(prediction)
    key = make_key()
    predictor = TokenPredictor(
        prediction, table, prior, hidden_size=HIDDEN, device="cpu", dtype=torch.float32
    )
    chosen = torch.tensor([0, 5, 7, 61, 130, 239])
    assert key.token_ids is not None
    features = token_features(table, key.token_ids, key.document_starts, prediction)
    exact = (
        features[chosen].double()
        @ matrix_of(prior, "predict_in").double()
        @ matrix_of(prior, "predict_out").double()
    )
    torch.testing.assert_close(predictor(key, chosen).double(), exact, atol=1e-3, rtol=1e-4)


def test_what_follows_from_the_tokens_need_not_be_sent() -> None:
    """At the same bytes the error falls with what is predicted, and ordinary tokens cost the same as before."""
    key = make_key()
    ordinary = ~key.document_starts
    errors, sizes = [], []
    modes: tuple[Prediction, ...] = ("none", "token", "context")
    for prediction in modes:
        codec, _, table = make_codec(prediction)
        assert key.token_ids is not None
        hidden = states_of(table, key.token_ids, key.document_starts, 5).view(*key.shape, HIDDEN)
        payload = codec.encode(hidden, key)
        decoded = codec.decode(payload, key)
        errors.append(float((decoded - hidden)[ordinary].square().mean() / hidden[ordinary].var()))
        assert torch.equal(decoded[~ordinary], hidden[~ordinary].to(torch.bfloat16).float())
        layout = codec.layout(key)
        assert {n: (s.dtype, s.shape) for n, s in layout.items()} == {
            n: (t.dtype, tuple(t.shape)) for n, t in payload.items()
        }
        count = int(ordinary.sum())
        dense = layout.pop("dense").nbytes
        assert dense == 2 * HIDDEN * int(key.document_starts.sum())
        assert payload_bytes(layout) <= count * token_budget_bytes(80, HIDDEN)
        assert codec.byte_count(key).total == payload_bytes(layout) + dense
        sizes.append(payload_bytes(layout) / (count * token_budget_bytes(80, HIDDEN)))
    print(errors)
    assert errors[1] < 0.85 * errors[0]
    assert errors[2] < 0.5 * errors[0]
    assert min(sizes) > 0.9


def test_gradients_are_coded_as_without_prediction() -> None:
    key = make_key()
    gradient = torch.randn(*key.shape, HIDDEN, generator=torch.Generator().manual_seed(2))
    plain, predicting = make_codec("none")[0], make_codec("context")[0]
    first, second = plain.encode_gradient(gradient, key), predicting.encode_gradient(gradient, key)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(plain.decode_gradient(first, key), predicting.decode_gradient(first, key))


@pytest.mark.parametrize(
    ("sends", "receives"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_ends_may_compute_in_different_formats(sends: torch.dtype, receives: torch.dtype) -> None:
    """Each end predicts and decodes in its own format; what that adds is rounding."""
    codec, prior, table = make_codec()
    config = BasisConfig(mask_ratio=80, prediction="context")
    sender, receiver = build(config, prior, table, sends), build(config, prior, table, receives)
    key = make_key()
    assert key.token_ids is not None
    hidden = states_of(table, key.token_ids, key.document_starts, 5).view(*key.shape, HIDDEN)

    def error(decoded: Tensor, exact: Tensor) -> float:
        return float((decoded.float() - exact).square().mean() / exact.var())

    decoded = receiver.decode(sender.encode(hidden.to(sends), key), key)
    assert decoded.dtype == receives
    assert error(decoded, hidden) < 1.05 * error(codec.decode(codec.encode(hidden, key), key), hidden) + 1e-4
    gradient = torch.randn(*key.shape, HIDDEN, generator=torch.Generator().manual_seed(2))
    mixed = receiver.decode_gradient(sender.encode_gradient(gradient.to(sends), key), key)
    alike = codec.decode_gradient(codec.encode_gradient(gradient, key), key)
    assert error(mixed, gradient) < 1.02 * error(alike, gradient)


def test_both_ends_build_equal_codecs_from_the_files() -> None:
    codec, prior, _ = make_codec()
    key = make_key()
    arrays = make_token_table(embedding(), torch.bincount(microbatch()[0].flatten()), "context")
    config = BasisConfig(mask_ratio=80, prediction="context")
    other = build(config, load(save(prior)), TokenTable(load(save(arrays))))
    hidden = torch.randn(*key.shape, HIDDEN, generator=torch.Generator().manual_seed(4)) + 20.0
    sent = codec.encode(hidden, key)
    again = other.encode(hidden, key)
    assert all(torch.equal(sent[name], again[name]) for name in sent)
    assert torch.equal(codec.decode(sent, key), other.decode(sent, key))


def test_rank_is_bounded() -> None:
    _, prior, _ = make_codec(prediction_rank=7)
    assert prior["predict_in"].shape == (3 * HIDDEN, 7) and prior["predict_out"].shape == (7, HIDDEN)
    _, prior, _ = make_codec(prediction_rank=10 * HIDDEN)
    assert prior["predict_out"].shape == (HIDDEN, HIDDEN)


def test_what_does_not_fit_is_refused_by_name() -> None:
    _, prior, table = make_codec()
    config = BasisConfig(mask_ratio=80, prediction="context")
    plain = make_codec("none")[1]
    nan = prior["predict_out_steps"].clone()
    nan[0] = float("nan")
    for broken, reason in (
        (plain, r"prior of boundary 3: lacks \['predict_in', 'predict_out'\]"),
        ({**prior, "predict_in": prior["predict_in"][:-1]}, "another token table"),
        ({**prior, "predict_out": prior["predict_out"][:, :-1]}, "another token table"),
        ({**prior, "predict_out_steps": nan}, "not finite"),
    ):
        with pytest.raises(ValueError, match=reason):
            build(config, broken, table)
    with pytest.raises(ValueError, match="needs the run's token table"):
        build(config, prior, None)
    codec, key = build(config, prior, table), make_key()
    blind = CodecKey(step=0, sample_ids=key.sample_ids, document_starts=key.document_starts)
    with pytest.raises(ValueError, match="the key has none"):
        codec.encode(torch.zeros(*key.shape, HIDDEN), blind)
