"""Every supported family: stages equal the uncut model, and packed documents equal documents run alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.batch import Batch, default_loss_positions
from swarm.model import build_stage, packed_kwargs, random_model, require_pipeline_plan, stage_tensor_names
from swarm.model.families import SUPPORTED_FAMILIES
from tests.kit.families import VOCABULARY, tiny_config

CUTS: tuple[tuple[int, ...], ...] = ((), (2,), (1, 3), (1, 2, 3))


def tiny_batch(starts: dict[int, list[int]], rows: int = 3, tokens: int = 24) -> Batch:
    """Random rows with document starts inside the given rows."""
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)
    document_starts = torch.zeros(rows, tokens, dtype=torch.bool)
    document_starts[:, 0] = True
    for row, columns in starts.items():
        document_starts[row, columns] = True
    return Batch(token_ids, document_starts, default_loss_positions(document_starts), torch.arange(rows))


# A document of one token, one shorter and several longer than the window, and a row that is one document.
PACKED = tiny_batch({0: [7, 8, 20], 1: [13]})
UNPACKED = tiny_batch({})


def uncut_logits(model: Any, batch: Batch) -> Tensor:
    """Logits of the uncut model on packed rows."""
    logits: Tensor = model(**packed_kwargs(model.config, batch, torch.float32, "cpu")).logits
    return logits


def alone_logits(model: Any, batch: Batch) -> Tensor:
    """Logits of the uncut model with every document alone and no argument but its tokens."""
    rows = []
    for token_ids, starts in zip(batch.token_ids, batch.document_starts, strict=True):
        edges = [*starts.nonzero().flatten().tolist(), token_ids.numel()]
        documents = [token_ids[None, first:last] for first, last in pairwise(edges)]
        rows.append(torch.cat([model(input_ids=each, use_cache=False).logits[0] for each in documents]))
    return torch.stack(rows)


def cut_logits(model: Any, batch: Batch, cuts: tuple[int, ...]) -> Tensor:
    """Logits of the stages, each built from its own tensors only."""
    state = model.state_dict()
    hidden = None
    for number in range(len(cuts) + 1):
        names = stage_tensor_names(model.config, cuts, number)
        stage = build_stage(
            model.config,
            cuts,
            number,
            dtype=torch.float32,
            device="cpu",
            tensors={name: state[name] for name in names},
        )
        hidden = stage.logits(batch, hidden) if stage.is_last else stage(batch, hidden)
    assert hidden is not None
    return hidden


@torch.no_grad()
@pytest.mark.parametrize("family", sorted(SUPPORTED_FAMILIES))
def test_stages_equal_the_uncut_model_and_documents_stay_apart(family: str) -> None:
    config = tiny_config(family)
    require_pipeline_plan(config)
    model = random_model(config, seed=1)
    for batch in (PACKED, UNPACKED):
        whole = uncut_logits(model, batch)
        scale = float(whole.std())
        assert scale > 1e-3, "the logits are too flat for the comparison to mean anything"
        torch.testing.assert_close(whole, alone_logits(model, batch), rtol=0, atol=1e-5 * max(1.0, scale))
        for cuts in CUTS if batch is PACKED else CUTS[-1:]:
            torch.testing.assert_close(cut_logits(model, batch, cuts), whole, rtol=0, atol=1e-5)


@torch.no_grad()
def test_packing_changes_the_logits_so_the_comparison_is_not_empty() -> None:
    model = random_model(tiny_config("llama"), seed=1)
    same_tokens = uncut_logits(model, UNPACKED)
    packed = uncut_logits(model, PACKED)
    assert not torch.allclose(same_tokens[0, 8:], packed[0, 8:], atol=1e-3)
    torch.testing.assert_close(same_tokens[2], packed[2], rtol=0, atol=1e-5)


@torch.no_grad()
def test_sliding_window_and_softcap_change_the_logits_so_their_tests_are_not_empty() -> None:
    for family, field in (("mistral", "sliding_window"), ("gemma2", "attn_logit_softcapping")):
        config = tiny_config(family)
        with_it = uncut_logits(random_model(config, seed=1), UNPACKED)
        setattr(config, field, None)
        without = uncut_logits(random_model(config, seed=1), UNPACKED)
        assert not torch.allclose(with_it, without, atol=1e-5), f"{family}.{field} has no effect"
