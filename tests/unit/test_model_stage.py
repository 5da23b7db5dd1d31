"""Stages as training uses them: loss, gradients, loading, freezing, errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import Gemma2Config, GPT2Config, LlamaConfig, OlmoHybridConfig, Qwen2Config

from swarm.batch import IGNORED_LABEL, Batch, default_loss_positions
from swarm.model import (
    NoPipelinePlan,
    StageModel,
    build_stage,
    packed_kwargs,
    random_model,
    require_pipeline_plan,
    stage_tensor_names,
    untie_head,
)
from swarm.model import loss as loss_module
from swarm.model.packed import document_mask

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LLAMA = LlamaConfig(**SIZES, attention_bias=True, tie_word_embeddings=True, attention_dropout=0.5)
GEMMA2 = Gemma2Config(
    **SIZES,
    head_dim=8,
    query_pre_attn_scalar=8,
    sliding_window=5,
    final_logit_softcapping=0.5,
    tie_word_embeddings=True,
)


def make_batch(rows: int = 2, tokens: int = 16) -> Batch:
    generator = torch.Generator().manual_seed(3)
    token_ids = torch.randint(1, 61, (rows, tokens), generator=generator)
    starts = torch.zeros(rows, tokens, dtype=torch.bool)
    starts[:, 0] = True
    starts[0, [5, 6]] = True
    return Batch(token_ids, starts, default_loss_positions(starts), torch.arange(rows))


def make_stages(
    model: Any, cuts: Sequence[int], dtype: torch.dtype = torch.float32, freeze: frozenset[str] = frozenset()
) -> list[StageModel]:
    state = model.state_dict()
    return [
        build_stage(
            model.config,
            cuts,
            number,
            dtype=dtype,
            device="cpu",
            tensors={name: state[name] for name in stage_tensor_names(model.config, cuts, number)},
            freeze=freeze,
        )
        for number in range(len(cuts) + 1)
    ]


def pipeline_loss(stages: list[StageModel], batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Loss sum through stages joined as a link joins them: by value, with a gradient sent back."""
    hidden: Tensor | None = None
    received: list[Tensor] = []
    for stage in stages[:-1]:
        sent = stage(batch, hidden)
        hidden = sent.detach().requires_grad_()
        received += [sent, hidden]
    return stages[-1].loss_sum(batch, hidden), received


def backward(loss: Tensor, received: list[Tensor]) -> None:
    loss.backward()
    while received:
        hidden, sent = received.pop(), received.pop()
        assert hidden.grad is not None
        sent.backward(hidden.grad)


@pytest.mark.parametrize("config", [LLAMA, GEMMA2], ids=["llama", "gemma2"])
@pytest.mark.parametrize("cuts", [(), (1, 3)])
@pytest.mark.parametrize("chunk", [1 << 25, 61 * 7], ids=["whole", "chunked"])
def test_loss_and_gradients_equal_the_uncut_model(
    config: Any, cuts: tuple[int, ...], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "LOGIT_ELEMENTS_PER_CHUNK", chunk)
    model = random_model(config, seed=5)
    untie_head(model)
    batch = make_batch()
    logits = model(**packed_kwargs(config, batch, torch.float32, "cpu")).logits
    expected = F.cross_entropy(
        logits.flatten(0, 1), batch.labels().flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    (expected / 7).backward()
    stages = make_stages(model, cuts)
    loss, received = pipeline_loss(stages, batch)
    assert loss.dtype == torch.float32 and loss.ndim == 0
    backward(loss / 7, received)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-5)
    theirs = dict(model.named_parameters())
    ours = {name: tensor for stage in stages for name, tensor in stage.named_trainable().items()}
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert tensor.grad is not None, f"no gradient reached {name}"
        torch.testing.assert_close(
            tensor.grad, theirs[name].grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_chunked_loss_has_a_gradient_with_a_frozen_head_and_none_without_grad(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = random_model(LLAMA, seed=5)
    batch = make_batch()
    whole = make_stages(model, (2,), freeze=frozenset({"head"}))
    loss, received = pipeline_loss(whole, batch)
    backward(loss, received)
    monkeypatch.setattr(loss_module, "LOGIT_ELEMENTS_PER_CHUNK", 61 * 4)
    chunked = make_stages(model, (2,), freeze=frozenset({"head"}))
    chunked_loss, received = pipeline_loss(chunked, batch)
    backward(chunked_loss, received)
    torch.testing.assert_close(chunked_loss, loss)
    for first, second in zip(whole, chunked, strict=True):
        for name, tensor in first.named_trainable().items():
            torch.testing.assert_close(second.named_trainable()[name].grad, tensor.grad, rtol=1e-4, atol=1e-6)
    assert "lm_head.weight" not in chunked[-1].named_trainable()
    with torch.no_grad():
        evaluated, _ = pipeline_loss(chunked, batch)
    assert not evaluated.requires_grad
    torch.testing.assert_close(evaluated, loss.detach())


def test_a_batch_without_loss_positions_has_loss_zero_and_a_zero_gradient() -> None:
    batch = make_batch()
    silent = Batch(
        batch.token_ids, batch.document_starts, torch.zeros_like(batch.loss_positions), batch.sample_ids
    )
    last = make_stages(random_model(LLAMA, seed=5), (2,))[1]
    hidden = torch.randn(2, 16, 32, requires_grad=True)
    loss = last.loss_sum(silent, hidden)
    loss.backward()
    assert loss.item() == 0.0 and hidden.grad is not None and float(hidden.grad.abs().max()) == 0.0


def test_bf16_stages_stay_near_fp32_and_several_microbatches_can_be_in_flight() -> None:
    model = random_model(LLAMA, seed=5)
    batch, other = make_batch(), make_batch(rows=3)
    exact, _ = pipeline_loss(make_stages(model, (2,)), batch)
    stages = make_stages(model, (2,), dtype=torch.bfloat16)
    first, first_received = pipeline_loss(stages, batch)
    second, second_received = pipeline_loss(stages, other)
    assert first_received[0].dtype == torch.bfloat16
    backward(second, second_received)
    backward(first, first_received)
    assert first.item() == pytest.approx(exact.item(), rel=0.02)
    assert all(tensor.grad is not None for stage in stages for tensor in stage.named_trainable().values())


def test_a_stage_is_a_function_of_its_input_even_in_training_mode() -> None:
    stage = make_stages(random_model(LLAMA, seed=5), (2,))[0].train()
    batch = make_batch()
    assert torch.equal(stage(batch, None), stage(batch, None))
    assert not any(module.training for module in stage.modules())


def test_freezing_leaves_exactly_the_named_parts_out() -> None:
    model = random_model(LLAMA, seed=5)
    everything = {name for stage in make_stages(model, (2,)) for name in stage.trainable_set.names}
    left = {
        name
        for stage in make_stages(model, (2,), freeze=frozenset({"embedding", "head", "norms"}))
        for name in stage.trainable_set.names
    }
    gone = everything - left
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= gone
    assert all("norm" in name or name in {"model.embed_tokens.weight", "lm_head.weight"} for name in gone)
    assert not any("norm" in name for name in left)
    first = make_stages(model, (2,), freeze=frozenset({"embedding"}))[0]
    assert "model.embed_tokens.weight" in first.state_tensors()
    with pytest.raises(ValueError, match=r"cannot freeze \['attention'\]"):
        make_stages(model, (2,), freeze=frozenset({"attention"}))


def test_a_stage_holds_only_its_own_tensors_under_the_uncut_models_names(tmp_path: Path) -> None:
    model = random_model(LLAMA, seed=5)
    state = model.state_dict()
    names = stage_tensor_names(LLAMA, (1, 3), 1)
    assert all(name.startswith(("model.layers.1.", "model.layers.2.")) for name in names)
    save_file({name: state[name].bfloat16() for name in names}, str(tmp_path / "stage.safetensors"))
    stage = build_stage(
        LLAMA, (1, 3), 1, dtype=torch.float32, device="cpu", tensors=tmp_path / "stage.safetensors"
    )
    assert set(stage.state_tensors()) == set(names)
    for name, tensor in stage.state_tensors().items():
        torch.testing.assert_close(tensor, state[name].bfloat16().float())
    held = sum(tensor.numel() for tensor in [*stage.parameters(), *stage.buffers()])
    assert held == stage.trainable_set.numel + sum(buffer.numel() for buffer in stage.buffers())
    assert not any(tensor.is_meta for tensor in [*stage.parameters(), *stage.buffers()])


def test_a_stage_copies_the_tensors_it_is_given() -> None:
    model = random_model(LLAMA, seed=5)
    stage = make_stages(model, ())[0]
    with torch.no_grad():
        for tensor in stage.named_trainable().values():
            tensor.zero_()
    assert all(float(tensor.abs().sum()) > 0 for tensor in model.parameters())
    assert (
        stage.named_trainable()["lm_head.weight"] is not stage.named_trainable()["model.embed_tokens.weight"]
    )


def test_wrong_tensors_are_refused_with_their_names(tmp_path: Path) -> None:
    state = random_model(LLAMA, seed=5).state_dict()
    tensors = {name: state[name] for name in stage_tensor_names(LLAMA, (2,), 1)}
    arguments: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    short = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    with pytest.raises(ValueError, match=r"1 missing \['model.norm.weight'\], 0 unexpected"):
        build_stage(LLAMA, (2,), 1, tensors=short, **arguments)
    with pytest.raises(ValueError, match=r"1 unexpected \['model.embed_tokens.weight'\]"):
        build_stage(
            LLAMA, (2,), 1, tensors={**tensors, "model.embed_tokens.weight": torch.zeros(1)}, **arguments
        )
    with pytest.raises(ValueError, match=r"model.norm.weight must be \(32,\), got \(33,\)"):
        build_stage(LLAMA, (2,), 1, tensors={**tensors, "model.norm.weight": torch.zeros(33)}, **arguments)
    with pytest.raises(ValueError, match="no file"):
        build_stage(LLAMA, (2,), 1, tensors=tmp_path / "none.safetensors", **arguments)
    with pytest.raises(ValueError, match="stage 2 does not exist"):
        build_stage(LLAMA, (2,), 2, tensors=tensors, **arguments)


def test_wrong_hidden_states_are_refused() -> None:
    first, last = make_stages(random_model(LLAMA, seed=5), (2,))
    batch = make_batch()
    with pytest.raises(ValueError, match="takes no hidden states"):
        first(batch, torch.zeros(2, 16, 32))
    with pytest.raises(ValueError, match=r"needs hidden states \(2, 16, 32\), got None"):
        last(batch, None)
    with pytest.raises(ValueError, match=r"got \(2, 15, 32\)"):
        last(batch, torch.zeros(2, 15, 32))
    with pytest.raises(RuntimeError, match="only the last stage"):
        first.loss_sum(batch, None)
    with pytest.raises(ValueError, match="shorter sequence_length"):
        first(make_batch(tokens=65), None)


def test_families_that_cannot_be_cut_are_refused_with_the_ones_that_can() -> None:
    with pytest.raises(
        NoPipelinePlan, match=r"'gpt2' publishes no pipeline plan.*Families that work:.*llama"
    ):
        require_pipeline_plan(GPT2Config())
    with pytest.raises(NoPipelinePlan, match=r"'olmo_hybrid'.*not known to equal.*Families that work:"):
        require_pipeline_plan(OlmoHybridConfig())
    with pytest.raises(NoPipelinePlan, match="tokens see later ones"):
        require_pipeline_plan(Gemma2Config(**SIZES, use_bidirectional_attention=True))
    mixed = Qwen2Config(**SIZES)
    mixed.layer_types = ["full_attention", "linear_attention"] * 2
    with pytest.raises(NoPipelinePlan, match="linear_attention"):
        require_pipeline_plan(mixed)


def test_document_mask_shows_the_own_document_and_window_only() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1]])
    full = document_mask(documents, None, torch.float32)[0, 0] == 0
    assert full.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    windowed = document_mask(documents, 2, torch.bfloat16)[0, 0] == 0
    assert windowed.int()[2].tolist() == [0, 1, 1, 0, 0]
