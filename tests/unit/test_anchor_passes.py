"""An anchor's samples are those of the uncut model at the same weights."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from swarm.activation.calibrate import collect_boundary_samples
from swarm.anchor.passes import AnchorModel
from swarm.batch import Batch, default_loss_positions
from swarm.model import build_stage, random_model
from swarm.model.cut import layer_count, stage_ranges
from swarm.model.stage import stage_tensor_names
from swarm.reference import untie_head_

CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
)
CUTS = (1, 3)


def batches(count: int = 3) -> list[Batch]:
    made = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        starts = torch.zeros(2, 16, dtype=torch.bool)
        starts[:, 0] = True
        starts[0, 5 + number] = True
        ids = torch.randint(1, 61, (2, 16), generator=generator)
        made.append(Batch(ids, starts, default_loss_positions(starts), torch.arange(2)))
    return made


def model_and_anchor(seed: int = 1, loaded_from: int | None = None):  # type: ignore[no-untyped-def]
    model = random_model(CONFIG, seed=seed)
    untie_head_(model)
    tensors = model.state_dict()
    stages = []
    for stage in range(len(stage_ranges(CUTS, layer_count(CONFIG)))):
        names = stage_tensor_names(CONFIG, CUTS, stage)
        own = {name: tensors[name] for name in names}
        stages.append(build_stage(CONFIG, CUTS, stage, dtype=torch.float32, device="cpu", tensors=own))
    return model, AnchorModel(stages), stages


def test_samples_are_those_of_the_uncut_model() -> None:
    model, anchor, _ = model_and_anchor()
    mine = anchor.boundary_samples(batches(), 60)
    theirs = collect_boundary_samples(model, CUTS, batches(), torch.float32, max_tokens=60)
    assert len(mine) == len(theirs) == 2
    for one, other in zip(mine, theirs, strict=True):
        assert one.hidden.shape == (60, 32)
        torch.testing.assert_close(one.hidden, other.hidden, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(one.gradient, other.gradient, atol=1e-6, rtol=1e-4)
        assert torch.equal(one.offsets, other.offsets)
        assert float(one.gradient.norm()) > 0


def test_snapshot_replaces_the_weights() -> None:
    other, _, other_stages = model_and_anchor(seed=2)
    _, anchor, _ = model_and_anchor(seed=1)
    before = anchor.boundary_samples(batches(), 60)
    for stage, source in enumerate(other_stages):
        anchor.load(stage, dict(source.causal.named_parameters()))
    after = anchor.boundary_samples(batches(), 60)
    assert not torch.allclose(before[0].hidden, after[0].hidden)
    theirs = collect_boundary_samples(other, CUTS, batches(), torch.float32, max_tokens=60)
    torch.testing.assert_close(after[1].hidden, theirs[1].hidden, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fault", ["missing", "shape", "nan"])
def test_snapshot_that_does_not_fit_changes_nothing(fault: str) -> None:
    _, anchor, stages = model_and_anchor()
    weights = {name: parameter.detach() + 1 for name, parameter in stages[1].causal.named_parameters()}
    name = sorted(weights)[-1]
    if fault == "missing":
        del weights[name]
    else:
        weights[name] = torch.zeros(3) if fault == "shape" else torch.full_like(weights[name], float("nan"))
    before = anchor.boundary_samples(batches(1), 20)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        anchor.load(1, weights)
    after = anchor.boundary_samples(batches(1), 20)
    assert all(torch.equal(x.hidden, y.hidden) for x, y in zip(before, after, strict=True))
