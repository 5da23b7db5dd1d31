"""init, eval and export on a tiny model."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import stat
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from dht.records import PeerRecord
from peers.checkpoint import CheckpointStore
from peers.cli import main
from peers.commands.assembly import choose_version
from peers.commands.compare import dense_trainer, share_of_gain
from peers.commands.evaluate import heldout_loss, run_dataset, spread
from peers.commands.export import next_command
from peers.commands.init import DEFAULT_PREDICTION, RunOptions, create_run
from peers.commands.inspect import boundary_bytes, part_batches, run_codecs, stage_rows, step_samples
from peers.commands.local import LocalOptions, run_options_without_effect
from peers.commands.status import describe, render
from peers.config import UserError
from swarm.activation.base import CodecKey
from swarm.activation.config import BasisConfig
from swarm.activation.tokens import TOKENS_FILE
from swarm.data.dataset import PackedDataset
from swarm.manifest import ManifestError, RunManifest
from swarm.model.packed import packed_kwargs
from swarm.model.source import random_model

TEXT = "def add(first, second):\n    return first + second\n"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=280, special_tokens=["<end>"], initial_alphabet=alphabet)
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    random_model(config, 0).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(40):
        (folder / f"{number}.txt").write_text(TEXT * (number % 5 + 1) + str(number))
    return folder


@pytest.fixture(scope="module")
def options(model_dir: Path, texts: Path) -> RunOptions:
    return RunOptions(
        model=str(model_dir),
        data=str(texts),
        stages=3,
        replicas=1,
        steps=4,
        samples_per_step=4,
        sequence_length=32,
        mask_ratio=80.0,
        calibration_microbatches=4,
        heldout_percent=10,
        compute="fp32",
    )


@pytest.fixture(scope="module")
def run_dir(options: RunOptions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    create_run(options, folder)
    return folder


@pytest.fixture(scope="module")
def manifest(run_dir: Path) -> RunManifest:
    return RunManifest.load(run_dir / "manifest.yaml")


def test_run_holds_everything_its_manifest_names(run_dir: Path, manifest: RunManifest) -> None:
    names = {artifact.name for artifact in manifest.artifacts}
    assert {
        "stage-0.safetensors",
        "stage-2.safetensors",
        "prior-0.safetensors",
        "prior-1.safetensors",
    } <= names
    assert {"tokenizer/tokenizer.json", "train-00000.safetensors", "heldout-00000.safetensors"} <= names
    for artifact in manifest.artifacts:
        assert (run_dir / "artifacts" / artifact.name).stat().st_size == artifact.nbytes
    on_disk = {p.relative_to(run_dir / "artifacts").as_posix() for p in (run_dir / "artifacts").rglob("*.*")}
    assert on_disk == names
    assert stat.S_IMODE((run_dir / "owner.key").stat().st_mode) == 0o600
    assert not run_dir.with_name("run.partial").exists()


def test_stages_are_described(manifest: RunManifest) -> None:
    rows = stage_rows(manifest)
    assert [row.first_layer for row in rows] == [0, *manifest.model.cuts]
    assert rows[-1].last_layer == 3
    assert sum(row.compute_share for row in rows) == pytest.approx(1.0)


def test_bytes_per_token_stay_within_the_budget(run_dir: Path, manifest: RunManifest) -> None:
    cost = boundary_bytes(manifest, run_dir / "artifacts")
    assert cost is not None
    assert 0 < cost.coded <= 0.2 * cost.uncoded
    assert cost.ids == pytest.approx(2.25)
    assert cost.forward - cost.backward == pytest.approx(cost.ids)


def test_changed_manifest_is_refused(run_dir: Path, tmp_path: Path) -> None:
    text = (run_dir / "manifest.yaml").read_text().replace("total_steps: 4", "total_steps: 5")
    (tmp_path / "manifest.yaml").write_text(text)
    with pytest.raises(ManifestError, match="not signed"):
        RunManifest.load(tmp_path / "manifest.yaml")


def test_existing_run_is_not_overwritten(
    run_dir: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run_dir / "owner.key").read_bytes()
    assert main(["init", str(run_dir), "--model", str(model_dir)]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert (run_dir / "owner.key").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": 5}, "5 stages do not fit a model of 4 layers"),
        ({"cuts": (1, 9)}, "outside"),
        ({"cuts": (2,)}, "--cuts 2 makes 2 stages"),
        ({"sequence_length": 512}, "exceeds the model's 128 positions"),
        ({"mask_ratio": 99.9}, "too few"),
        ({"mask_ratio": 100.0}, "mask-ratio"),
        ({"codec": "dense"}, "--mask-ratio belongs to"),
        ({"codec_values": "int8"}, "--codec-values belongs to"),
        ({"codec": "mask", "prediction": "token"}, "--prediction belongs to"),
        ({"learning_rate": -1.0}, "learning-rate"),
        ({"optimizer": "adamw", "momentum": 0.5}, "momentum"),
        ({"samples_per_step": 1, "rows_per_microbatch": 2}, "less than one microbatch"),
        ({"steps": 0}, "--steps 0"),
    ],
)
def test_impossible_runs_are_refused_and_leave_nothing(
    options: RunOptions, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        create_run(dataclasses.replace(options, **change), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_family_without_a_pipeline_plan_is_one_clear_line(
    texts: Path, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    shutil.copytree(model_dir, tmp_path / "gpt2")
    GPT2LMHeadModel(
        GPT2Config(vocab_size=280, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    ).save_pretrained(tmp_path / "gpt2")
    code = main(["init", str(tmp_path / "run"), "--model", str(tmp_path / "gpt2"), "--data", str(texts)])
    assert code == 2
    assert "pipeline plan" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "run.partial").exists()


def test_missing_data_is_one_clear_line(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["init", str(tmp_path / "run"), "--model", str(model_dir), "--data", "./no/such/data"]
    assert main([*arguments, "--stages", "2", "--sequence-length", "32"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("swarm-peer: error: ")
    assert "./no/such/data" in err


@pytest.mark.parametrize("prediction", [None, "token", "none"])
def test_run_that_predicts_publishes_its_token_table(
    options: RunOptions, tmp_path: Path, prediction: Literal["token", "none"] | None
) -> None:
    manifest = create_run(dataclasses.replace(options, prediction=prediction), tmp_path / "run")
    artifacts = tmp_path / "run" / "artifacts"
    assert isinstance(manifest.codec, BasisConfig)
    assert manifest.codec.prediction == (prediction or DEFAULT_PREDICTION)
    names = {artifact.name for artifact in manifest.artifacts}
    assert (TOKENS_FILE in names) == (prediction != "none")
    codecs = run_codecs(manifest, artifacts)
    if prediction == "none":
        return
    dataset = PackedDataset(artifacts, manifest.data)
    trained = dataset.batch(range(len(dataset)))
    arrays = load_file(artifacts / TOKENS_FILE)
    assert arrays["ids"].tolist() == trained.token_ids.unique().tolist()
    assert arrays["rows"].shape[1] == manifest.model.hidden_size
    key = CodecKey.of(dataset.batch([0, 1]), 0)
    hidden = torch.zeros(*key.shape, manifest.model.hidden_size)
    assert codecs[0].decode(codecs[0].encode(hidden, key), key).shape == hidden.shape


def test_mask_run_needs_no_calibration(options: RunOptions, tmp_path: Path) -> None:
    manifest = create_run(
        dataclasses.replace(options, codec="mask", mask_ratio=None, weights="bf16"), tmp_path / "run"
    )
    assert manifest.codec.name == "mask"
    assert not any(artifact.name.startswith("prior") for artifact in manifest.artifacts)
    stage = load_file(tmp_path / "run" / "artifacts" / "stage-0.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in stage.values())


def test_heldout_loss_is_the_models_own(run_dir: Path, model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    dataset = run_dataset(run_dir)
    loss = heldout_loss(model, dataset, 1000)
    batch = dataset.batch(range(len(dataset)))
    with torch.no_grad():
        logits = model(**packed_kwargs(model.config, batch, torch.float32, "cpu")).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels().flatten())
    assert loss == pytest.approx(float(expected), rel=1e-5)


def test_eval_command_writes_json(run_dir: Path, model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "loss.json"
    arguments = ["eval", str(model_dir), "--run-dir", str(run_dir), "--json", str(out), "--prompt", "def"]
    assert main([*arguments, "--max-samples", "3", "--new-tokens", "2"]) == 0
    result = json.loads(out.read_text())
    assert result["samples"] == 3
    assert result["loss"] > 0
    assert set(result["texts"]) == {"def"}


def test_eval_takes_either_a_run_or_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "somewhere"]) == 2
    assert "either --run-dir" in capsys.readouterr().err


def save_stages(run_dir: Path, manifest: RunManifest, folder: Path, version: int, shift: float) -> None:
    """Checkpoints as peers write them: the initial weights moved by `shift`."""
    for stage in range(manifest.model.stages):
        tensors = load_file(run_dir / "artifacts" / f"stage-{stage}.safetensors")
        state = {f"weight.{name}": tensor.float() + shift for name, tensor in tensors.items()}
        state["optimizer.0.step"] = torch.zeros(1)
        meta = {"run_id": manifest.run_id, "stage": stage}
        CheckpointStore(folder / f"peer-{stage}", keep=5).save(version, state, meta)


def test_export_assembles_the_newest_complete_step(
    run_dir: Path, manifest: RunManifest, tmp_path: Path, model_dir: Path
) -> None:
    peers = tmp_path / "peers"
    save_stages(run_dir, manifest, peers, 2, 1.0)
    save_stages(run_dir, manifest, peers, 4, 0.0)
    CheckpointStore(peers / "peer-0").save(
        5, {"weight.x": torch.zeros(1)}, {"run_id": manifest.run_id, "stage": 0}
    )
    out = tmp_path / "out"
    arguments = ["export", str(out), "--run-dir", str(run_dir), "--from-checkpoints", str(peers)]
    assert main(arguments) == 0
    exported = AutoModelForCausalLM.from_pretrained(out)
    assert not exported.config.tie_word_embeddings
    dataset = run_dataset(run_dir)
    original = AutoModelForCausalLM.from_pretrained(model_dir)
    assert heldout_loss(exported, dataset, 10) == pytest.approx(heldout_loss(original, dataset, 10), rel=1e-6)
    assert (out / "tokenizer.json").is_file()
    assert main(arguments) == 2  # never overwritten


def test_export_takes_another_replica_when_one_is_damaged(
    run_dir: Path, manifest: RunManifest, tmp_path: Path
) -> None:
    save_stages(run_dir, manifest, tmp_path / "a", 4, 0.0)
    save_stages(run_dir, manifest, tmp_path / "b", 4, 0.0)
    for path in (tmp_path / "a").rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-8])
    arguments = ["export", str(tmp_path / "out"), "--run-dir", str(run_dir), "--dtype", "bf16"]
    assert main([*arguments, "--from-checkpoints", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert next(exported.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("step", "message"),
    [("latest", "no step has a snapshot of all 3 stages"), ("7", "not all 3"), ("x", "give a number")],
)
def test_export_says_what_is_missing(step: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose_version({5: [0, 1], 6: [2]}, 3, step)


def test_dense_training_lowers_the_loss(run_dir: Path, manifest: RunManifest, model_dir: Path) -> None:
    fast = manifest.model_copy(
        update={"optimizer": manifest.optimizer.model_copy(update={"learning_rate": 1e-2})}
    )
    trainer = dense_trainer(fast, AutoModelForCausalLM.from_pretrained(model_dir))
    dataset = run_dataset(run_dir)
    before = heldout_loss(trainer.model, dataset, 10)
    rows = PackedDataset(run_dir / "artifacts", manifest.data)
    for step in range(manifest.total_steps):
        trainer.step(part_batches(rows, step_samples(fast, step), fast.rows_per_microbatch), step)
    assert heldout_loss(trainer.model, dataset, 10) < before


def test_small_helpers() -> None:
    assert spread(3, 10) == [0, 1, 2]
    assert spread(10, 4) == [0, 2, 5, 7]
    assert spread(0, 4) == []
    assert share_of_gain(3.0, 2.2, 2.0) == pytest.approx(0.8)
    assert share_of_gain(2.0, 2.0, 2.1) is None


def test_eval_of_a_prompt_alone_computes_no_loss(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(model_dir), "--prompt", "def", "--new-tokens", "3"]) == 0
    out = capsys.readouterr().out
    assert "'def' -> " in out
    assert "loss" not in out
    assert main(["eval", str(model_dir)]) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["init", "RUN", "--model", "./nowhere"],
        ["init", "RUN", "--data", "notes.jsonl"],
        ["local", "RUN", "--data", "a/b/c"],
        ["eval", "./nowhere", "--prompt", "x"],
    ],
)
def test_path_to_nothing_is_told_at_once(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "run") if word == "RUN" else word for word in arguments]) == 2
    assert "no such file or folder" in capsys.readouterr().err


def test_export_ends_with_a_command_that_can_be_run() -> None:
    assert next_command(Path("m1"), Path("my-run")) == "swarm-peer eval m1 --run-dir my-run"
    assert next_command(Path("m1"), None) == "swarm-peer eval m1 --prompt 'import os'"


def test_folder_that_is_no_run_is_not_offered_for_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").touch()
    assert main(["init", str(tmp_path)]) == 2
    assert "swarm-peer seed" not in capsys.readouterr().err


def test_options_that_contradict_an_existing_run_are_refused(run_dir: Path, manifest: RunManifest) -> None:
    same = LocalOptions(run_dir=run_dir, stages=3, steps=4, mask_ratio=80.0, warmup_steps=1)
    assert run_options_without_effect(same, manifest) == ["warmup_steps"]
    with pytest.raises(UserError, match=r"--steps 5 \(the run has 4\)"):
        run_options_without_effect(dataclasses.replace(same, steps=5), manifest)


@pytest.mark.parametrize(
    ("step", "message"), [(0, "peers wanted: stage 0"), (2, "training"), (4, "finished")]
)
def test_status_wants_peers_only_before_the_first_step(
    manifest: RunManifest, step: int, message: str
) -> None:
    console = Console(file=io.StringIO(), width=200, highlight=False)
    console.print(render({**describe(manifest, {}), "step": step}))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert message in text
    assert ("peers wanted" in text) == (step == 0)


def test_status_tells_how_old_priors_are_and_what_an_anchor_measured(manifest: RunManifest) -> None:
    common: dict[str, Any] = {
        "run_id": manifest.run_id,
        "public_key": b"",
        "incarnation": 1,
        "state": "online",
    }
    records = {
        "Qm1": PeerRecord.model_construct(
            **common, peer_id="Qm1", role="stage", stage=1, step=9, prior_age=7
        ),
        "Qm2": PeerRecord.model_construct(
            **common, peer_id="Qm2", role="anchor", coded_cosine=0.41, raw_cosine=0.2, corrected_cosine=0.25
        ),
    }
    console = Console(file=io.StringIO(), width=200, highlight=False)
    console.print(render(describe(manifest, records)))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "7 steps" in text
    assert "anchor Qm2: coded gradients have a cosine of 0.410 with dense ones" in text
    assert "the corrector helps: 0.200 with a clean gradient before, 0.250 after" in text
