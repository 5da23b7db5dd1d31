"""Where the model is cut, and the layout of a stage's trainable tensors."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, MixtralConfig

from swarm.model import TrainableSet, check_cuts, equal_cost_cuts, stage_ranges
from swarm.model.cut import _smallest_maximum


def llama(layers: int, vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
    )


@pytest.mark.parametrize("stages", range(1, 13))
def test_every_stage_gets_a_layer_and_the_layers_are_shared_out(stages: int) -> None:
    cuts = equal_cost_cuts(llama(12, 32000), stages, 256)
    ranges = stage_ranges(cuts, 12)
    assert len(ranges) == stages and all(each.layers >= 1 for each in ranges)
    assert ranges[0].first_layer == 0 and ranges[-1].last_layer_exclusive == 12


def test_head_and_embedding_count() -> None:
    tiny_vocabulary = stage_ranges(equal_cost_cuts(llama(12, 16), 3, 64), 12)
    assert [each.layers for each in tiny_vocabulary] == [4, 4, 4]
    large_vocabulary = stage_ranges(equal_cost_cuts(llama(12, 4000), 3, 64), 12)
    assert large_vocabulary[-1].layers < large_vocabulary[0].layers < large_vocabulary[1].layers


def test_mixture_of_experts_counts_the_chosen_experts_only() -> None:
    config = MixtralConfig(
        vocab_size=2000, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=16, num_experts_per_tok=1,
    )  # fmt: skip
    few = stage_ranges(equal_cost_cuts(config, 2, 64), 6)[-1].layers
    config.num_experts_per_tok = 16
    assert few <= stage_ranges(equal_cost_cuts(config, 2, 64), 6)[-1].layers


def test_the_partition_has_the_smallest_maximum() -> None:
    assert _smallest_maximum([1, 1, 1, 1, 4], 2) == (4,)
    assert _smallest_maximum([5, 1, 1, 1, 1, 1], 3) == (1, 3)
    assert _smallest_maximum([1, 1, 1], 1) == ()


def test_bad_cuts_are_refused() -> None:
    with pytest.raises(ValueError, match="13 stages do not fit a model of 12 layers"):
        equal_cost_cuts(llama(12, 100), 13, 64)
    with pytest.raises(ValueError, match="0 stages"):
        equal_cost_cuts(llama(12, 100), 0, 64)
    with pytest.raises(ValueError, match=r"cuts \[0, 12\] are outside 1..11"):
        check_cuts((0, 3, 12), 12)
    with pytest.raises(ValueError, match="increase strictly"):
        check_cuts((3, 3), 12)
    assert check_cuts([3, 5], 12) == (3, 5)


def named() -> dict[str, torch.Tensor]:
    return {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor([7.0]), "c": torch.arange(4.0)}


def test_flat_vector_keeps_the_given_order_and_views_write_through() -> None:
    layout = TrainableSet.of(named())
    assert layout.names == ("b", "a", "c") and layout.offsets == (0, 6, 7) and layout.numel == 11
    flat = layout.flatten(named())
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 7, 0, 1, 2, 3]
    layout.views(flat)["a"].fill_(-1)
    assert flat[6] == -1
    out = torch.zeros(11, dtype=torch.bfloat16)
    assert layout.flatten(named(), out) is out and out[6] == 7


def test_masters_are_written_into_bf16_weights_and_gradients_taken_in_fp32() -> None:
    weights = {name: torch.nn.Parameter(tensor.bfloat16()) for name, tensor in named().items()}
    layout = TrainableSet.of(weights)
    layout.write(torch.full((11,), 1.01), weights)
    assert weights["c"][0].item() == torch.tensor(1.01).bfloat16().item()
    accumulator = layout.empty()
    for _ in range(2):
        (weights["a"].sum() * 3).backward()
        layout.take_gradients(weights, accumulator)
    assert accumulator.dtype == torch.float32 and accumulator.tolist() == [0.0] * 6 + [6.0] + [0.0] * 4
    assert weights["a"].grad is None


def test_schema_hash_follows_names_shapes_and_order() -> None:
    layout = TrainableSet.of(named())
    assert layout.schema_hash == TrainableSet.of(named()).schema_hash and len(layout.schema_hash) == 64
    reordered = dict(sorted(named().items()))
    reshaped = {**named(), "c": torch.zeros(2, 2)}
    assert (
        len({layout.schema_hash, *(TrainableSet.of(each).schema_hash for each in (reordered, reshaped))}) == 3
    )


def test_wrong_tensors_and_vectors_are_refused() -> None:
    layout = TrainableSet.of(named())
    with pytest.raises(ValueError, match=r"missing \['a'\], unexpected \['d'\]"):
        layout.flatten({"b": torch.zeros(2, 3), "c": torch.zeros(4), "d": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"c must have shape \(4,\), got \(5,\)"):
        layout.write(torch.zeros(11), {**named(), "c": torch.zeros(5)})
    with pytest.raises(ValueError, match=r"flat vector must be \[11\]"):
        layout.views(torch.zeros(12))


def test_an_empty_set_is_a_set() -> None:
    layout = TrainableSet.of({})
    assert layout.numel == 0 and layout.flatten({}).numel() == 0 and layout.views(torch.zeros(0)) == {}
