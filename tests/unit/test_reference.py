"""The reference trainer, and calibration samples, on tiny random models."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from swarm.activation.base import BoundaryCodec, CodecKey, PayloadError
from swarm.activation.calibrate import collect_boundary_samples
from swarm.activation.config import BasisConfig, DenseConfig, MaskConfig
from swarm.activation.fit import fit_basis_prior
from swarm.activation.registry import build_codec
from swarm.anchor.config import SpectralConfig
from swarm.anchor.factor import factorise
from swarm.anchor.memory import GradientMemory, target_matrices
from swarm.anchor.prior import SpectralPrior
from swarm.anchor.registry import build_corrector
from swarm.batch import Batch, default_loss_positions
from swarm.optim import OptimizerConfig, learning_rate
from swarm.reference import ReferenceTrainer, frozen_names, parameter_stages

CUTS = (1, 3)


def tiny_model(*, tied: bool = False) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config)


def make_batches(count: int, rows: int = 2, tokens: int = 12, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for index in range(count):
        starts = torch.zeros(rows, tokens, dtype=torch.bool)
        starts[:, 0] = True
        starts[0, 5 + index] = True
        batches.append(
            Batch(
                token_ids=torch.randint(0, 61, (rows, tokens), generator=generator),
                document_starts=starts,
                loss_positions=default_loss_positions(starts),
                sample_ids=torch.arange(rows) + rows * index,
            )
        )
    return batches


def make_codecs(config: Any, dtype: torch.dtype = torch.float32) -> list[BoundaryCodec]:
    return [
        build_codec(config, hidden_size=32, boundary=b, run_seed=3, prior=None, device="cpu", dtype=dtype)
        for b in range(len(CUTS))
    ]


def plain_loss(model: Any, batches: list[Batch]) -> Tensor:
    """Mean token loss, every document run alone: no packing, no masks."""
    total, count = torch.zeros(()), 0
    for batch in batches:
        for row in range(batch.rows):
            bounds = [*batch.document_starts[row].nonzero().flatten().tolist(), batch.token_ids.shape[1]]
            for first, last in itertools.pairwise(bounds):
                ids = batch.token_ids[row, first:last].unsqueeze(0)
                logits = model(input_ids=ids).logits[0, :-1]
                total = total + functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
                count += last - first - 1
    return total / count


@pytest.mark.parametrize("codec", [None, DenseConfig(values="fp32"), MaskConfig(mask_ratio=0, values="fp32")])
def test_lossless_codecs_train_like_a_plain_loop(codec: Any) -> None:
    plain = tiny_model()
    config = OptimizerConfig(learning_rate=1e-2, clip_norm=None, warmup_steps=1, weight_decay=0.1)
    codecs: list[Any] = [None, None] if codec is None else list(make_codecs(codec))
    trainer = ReferenceTrainer(copy.deepcopy(plain), CUTS, codecs, config, 4)
    decayed = [p for p in plain.parameters() if p.ndim > 1]
    others = [p for p in plain.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
        eps=1e-8,
    )
    for step in range(4):
        batches = make_batches(3, seed=step)
        loss = plain_loss(plain, batches)
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, 4)
        optimizer.step()
        assert trainer.step(batches, step) == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, parameter in plain.named_parameters():
        assert torch.allclose(trainer.masters[name], parameter, atol=2e-4), name


def test_masked_boundaries_change_forward_and_backward() -> None:
    batches = make_batches(2)
    config = OptimizerConfig()
    dense = ReferenceTrainer(tiny_model(), CUTS, [None, None], config, 2)
    masked = ReferenceTrainer(
        tiny_model(), CUTS, make_codecs(MaskConfig(mask_ratio=50, values="fp32")), config, 2
    )
    again = ReferenceTrainer(
        tiny_model(), CUTS, make_codecs(MaskConfig(mask_ratio=50, values="fp32")), config, 2
    )
    assert dense.evaluate(batches) == masked.evaluate(batches)
    loss = masked.step(batches, 0)
    assert loss != pytest.approx(dense.step(batches, 0), rel=1e-3)
    assert loss == again.step(batches, 0)


def test_masked_gradients_equal_autograd_through_the_codec() -> None:
    """The boundary's backward is that of the coded forward, here with the codec inside the graph."""
    batch = make_batches(1)[0]
    codecs = make_codecs(MaskConfig(mask_ratio=60, values="fp32", rescale="rms"))
    trainer = ReferenceTrainer(tiny_model(), CUTS, codecs, OptimizerConfig(), 1)
    trainer.step([batch], 0)
    key = CodecKey.of(batch, 0)
    model = tiny_model().eval()
    for codec, cut in zip(codecs, CUTS, strict=True):
        model.model.layers[cut - 1].register_forward_hook(
            lambda _module, _inputs, output, codec=codec: codec.decode(codec.encode(output, key), key)
        )
    logits = model(input_ids=batch.token_ids, position_ids=batch.positions(), use_cache=False).logits
    functional.cross_entropy(logits.flatten(0, 1), batch.labels().flatten()).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(trainer.gradients[name], parameter.grad, rtol=1e-4, atol=1e-6), name


def test_microbatches_add_up_whatever_their_normalisation() -> None:
    whole = ReferenceTrainer(tiny_model(), CUTS, [None, None], OptimizerConfig(), 1)
    parts = ReferenceTrainer(tiny_model(), CUTS, [None, None], OptimizerConfig(), 1, reference_loss_tokens=22)
    batches = make_batches(3)
    joined = Batch(*(torch.cat([getattr(b, n) for b in batches]) for n in Batch.__slots__))
    assert whole.step([joined], 0) == pytest.approx(parts.step(batches, 0), rel=1e-5)
    for name in whole.gradients:
        assert torch.allclose(whole.gradients[name], parts.gradients[name], rtol=1e-3, atol=1e-6), name


def test_every_stage_clips_to_its_share() -> None:
    """SGD without momentum at rate 1: the change of the weights is the clipped gradient."""
    clip = 1e-3
    config = OptimizerConfig(name="sgd", learning_rate=1.0, schedule="constant", clip_norm=clip)
    trainer = ReferenceTrainer(tiny_model(), CUTS, [None, None], config, 1)
    before = {name: master.detach().clone() for name, master in trainer.masters.items()}
    trainer.step(make_batches(2), 0)
    stages = parameter_stages(trainer.model, CUTS)
    for stage in range(3):
        own = [name for name in before if stages[name] == stage]
        moved = torch.cat([(trainer.masters[name] - before[name]).flatten() for name in own])
        assert float(moved.detach().norm()) == pytest.approx(clip / math.sqrt(3), rel=1e-2)


def test_corrector_works_on_averaged_gradients_before_they_are_clipped() -> None:
    """SGD at rate 1: weights move by the corrected gradient, clipped to the share of every stage."""
    clip = 1e-3
    config = OptimizerConfig(name="sgd", learning_rate=1.0, schedule="constant", clip_norm=clip)
    plain = ReferenceTrainer(tiny_model(), CUTS, [None, None], config, 1)
    plain.step(make_batches(2), 5)
    seen: list[tuple[int, set[str]]] = []

    def double_queries(gradients: dict[str, Tensor], step: int) -> None:
        seen.append((step, set(gradients)))
        for name, gradient in gradients.items():
            assert torch.equal(gradient, plain.gradients[name]), name
            gradient.mul_(2.0 if "q_proj" in name else 0.5)

    trainer = ReferenceTrainer(tiny_model(), CUTS, [None, None], config, 1, corrector=double_queries)
    before = {name: master.detach().clone() for name, master in trainer.masters.items()}
    trainer.step(make_batches(2), 5)
    assert seen == [(5, set(before))]
    stages = parameter_stages(trainer.model, CUTS)
    for stage in range(3):
        own = [name for name in before if stages[name] == stage]
        corrected = {n: plain.gradients[n] * (2.0 if "q_proj" in n else 0.5) for n in own}
        norm = float(torch.cat([each.flatten() for each in corrected.values()]).norm())
        assert norm > clip
        for name in own:
            step = corrected[name] * (clip / math.sqrt(3) / norm)
            torch.testing.assert_close(trainer.masters[name].detach(), before[name] - step, rtol=0, atol=1e-6)


def test_training_under_a_spectral_prior_goes_down_and_alpha_one_changes_nothing() -> None:
    config = OptimizerConfig(learning_rate=3e-3)
    clean = ReferenceTrainer(tiny_model(), CUTS, [None, None], config, 6)
    clean.step(make_batches(4), 0)
    shapes = {name: tuple(gradient.shape) for name, gradient in clean.gradients.items()}
    memory = GradientMemory(target_matrices(shapes), beta=0.95, max_staleness=30)
    assert memory.ingest(clean.gradients, source_step=0, step=0).taken == 28
    factors = {name: found.factors for name, found in factorise(memory.matrices, 8, seed=0)}
    prior = SpectralPrior(stage=0, version=1, step=0, factors=factors)

    def train(alpha: float | None) -> tuple[float, dict[str, Tensor]]:
        trainer = ReferenceTrainer(tiny_model(), CUTS, [None, None], config, 6)
        if alpha is not None:
            settings = SpectralConfig(alpha=alpha, rank=8, tau_is_relative=True)
            trainer.corrector = build_corrector(settings, prior=prior, shapes=shapes)
        for step in range(6):
            trainer.step(make_batches(4), step)
        return trainer.evaluate(make_batches(4)), trainer.masters

    start = ReferenceTrainer(tiny_model(), CUTS, [None, None], config, 6).evaluate(make_batches(4))
    loss, weights = train(None)
    same_loss, same_weights = train(1.0)
    assert same_loss == loss
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)
    filtered_loss, filtered = train(0.3)
    assert not torch.equal(
        filtered["model.layers.0.mlp.up_proj.weight"], weights["model.layers.0.mlp.up_proj.weight"]
    )
    assert start - filtered_loss > 0.5 * (start - loss) > 0.05


def test_stages_own_their_parameters() -> None:
    stages = parameter_stages(tiny_model(), CUTS)
    assert stages["model.embed_tokens.weight"] == 0
    assert stages["model.layers.0.mlp.up_proj.weight"] == 0
    assert stages["model.layers.1.mlp.up_proj.weight"] == 1
    assert stages["model.layers.2.input_layernorm.weight"] == 1
    assert stages["model.layers.3.self_attn.q_proj.weight"] == 2
    assert stages["model.norm.weight"] == 2
    assert stages["lm_head.weight"] == 2


def test_frozen_parts_stay_and_a_tied_head_gets_its_own_weights() -> None:
    config = OptimizerConfig(learning_rate=1e-2)
    trainer = ReferenceTrainer(
        tiny_model(tied=True), CUTS, [None, None], config, 2, freeze=frozenset({"embedding", "norms"})
    )
    model = trainer.model
    embedding = model.get_input_embeddings().weight.detach().clone()
    assert torch.equal(model.lm_head.weight, embedding)
    trainer.step(make_batches(1), 0)
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    assert not torch.equal(model.lm_head.weight, embedding)
    assert frozen_names(model, frozenset({"norms"})) == {
        n for n, _ in model.named_parameters() if "norm" in n
    }
    assert "lm_head.weight" in trainer.masters
    with pytest.raises(ValueError, match="choose from embedding, head, norms"):
        frozen_names(model, frozenset({"attention"}))


def test_bf16_compute_keeps_fp32_masters() -> None:
    """Updates below bf16's resolution add up in the masters."""
    config = OptimizerConfig(learning_rate=1e-5, schedule="constant")
    codecs = make_codecs(DenseConfig(), torch.bfloat16)
    trainer = ReferenceTrainer(tiny_model(), CUTS, codecs, config, 3, compute_dtype=torch.bfloat16)
    exact = tiny_model()
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(trainer.masters[name], dict(exact.named_parameters())[name])
    assert trainer.model.model.rotary_emb.inv_freq.dtype == torch.float32
    for step in range(3):
        trainer.step(make_batches(1), step)
    assert trainer.masters[name].dtype == torch.float32
    moved = (trainer.masters[name] - dict(exact.named_parameters())[name]).detach().abs()
    assert 2e-5 < float(moved.mean()) < 3.1e-5
    compute = dict(trainer.model.named_parameters())[name]
    assert torch.equal(compute, trainer.masters[name].to(torch.bfloat16))


def test_basis_training_follows_dense_training() -> None:
    model = tiny_model()
    batches = make_batches(4, rows=4)
    samples = collect_boundary_samples(model, CUTS, make_batches(8, rows=16, tokens=16), torch.float32)
    config = BasisConfig(mask_ratio=60)
    codecs = [
        build_codec(
            config,
            hidden_size=32,
            boundary=b,
            run_seed=3,
            prior=fit_basis_prior(s.hidden, s.gradient, s.offsets, config),
            device="cpu",
            dtype=torch.float32,
        )
        for b, s in enumerate(samples)
    ]
    settings = OptimizerConfig(learning_rate=3e-3)
    dense = ReferenceTrainer(copy.deepcopy(model), CUTS, [None, None], settings, 6)
    coded = ReferenceTrainer(copy.deepcopy(model), CUTS, codecs, settings, 6)
    start = dense.evaluate(batches)
    for step in range(6):
        dense.step(batches, step)
        coded.step(batches, step)
    gain = start - dense.evaluate(batches)
    assert gain > 0.1
    assert start - coded.evaluate(batches) > 0.7 * gain


def test_steps_without_loss_or_with_broken_gradients_change_nothing() -> None:
    trainer = ReferenceTrainer(tiny_model(), CUTS, [None, None], OptimizerConfig(), 2)
    before = {name: master.detach().clone() for name, master in trainer.masters.items()}
    batch = make_batches(1)[0]
    silent = Batch(
        batch.token_ids, batch.document_starts, torch.zeros_like(batch.loss_positions), batch.sample_ids
    )
    assert trainer.step([silent], 0) == 0.0
    assert all(torch.equal(trainer.masters[name], before[name]) for name in before)
    with torch.no_grad():
        trainer.model.model.layers[3].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="gradient of step 1 is not finite"):
        trainer.step([batch], 1)
    coded = ReferenceTrainer(
        trainer.model, CUTS, make_codecs(DenseConfig(values="fp32")), OptimizerConfig(), 2
    )
    with torch.no_grad():
        coded.model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(PayloadError, match="non-finite"):
        coded.step([batch], 1)


def test_calibration_samples_are_the_models_own_states_and_gradients() -> None:
    model = tiny_model()
    batches = make_batches(2)
    model.train()
    samples = collect_boundary_samples(model, CUTS, batches, torch.float32)
    assert model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not any(layer._forward_hooks for layer in model.model.layers)
    model.eval()
    for boundary, cut in enumerate(CUTS):
        hidden, gradient, offsets = [], [], []
        for batch in batches:
            outputs = model(
                input_ids=batch.token_ids,
                position_ids=batch.positions(),
                use_cache=False,
                output_hidden_states=True,
            )
            states = outputs.hidden_states[cut]
            loss = functional.cross_entropy(outputs.logits.flatten(0, 1), batch.labels().flatten())
            (found,) = torch.autograd.grad(loss, states)
            hidden.append(states.detach().flatten(0, 1))
            gradient.append(found.flatten(0, 1))
            offsets.append(batch.positions().flatten())
        # Samples come in another order; equal tokens at document starts have equal states.
        order = (torch.cat(hidden)[:, 0] + torch.cat(gradient)[:, 0]).argsort()
        found_order = (samples[boundary].hidden[:, 0] + samples[boundary].gradient[:, 0]).argsort()
        for exact, collected in (
            (torch.cat(hidden), samples[boundary].hidden),
            (torch.cat(gradient), samples[boundary].gradient),
            (torch.cat(offsets), samples[boundary].offsets),
        ):
            assert torch.allclose(exact[order], collected[found_order], rtol=1e-4, atol=1e-6)


def test_calibration_memory_is_bounded() -> None:
    samples = collect_boundary_samples(tiny_model(), CUTS, make_batches(3), torch.float32, max_tokens=15)
    assert [tuple(s.hidden.shape) for s in samples] == [(15, 32), (15, 32)]
    assert collect_boundary_samples(tiny_model(), (), make_batches(1), torch.float32) == []
    with pytest.raises(ValueError, match="at least one microbatch"):
        collect_boundary_samples(tiny_model(), CUTS, [], torch.float32)
    with pytest.raises(ValueError, match="must lie in"):
        collect_boundary_samples(tiny_model(), (4,), make_batches(1), torch.float32)


def test_boundaries_and_codecs_must_match() -> None:
    with pytest.raises(ValueError, match="2 boundaries need as many codecs"):
        ReferenceTrainer(tiny_model(), CUTS, [None], OptimizerConfig(), 1)
