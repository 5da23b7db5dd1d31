"""Tiny but real runs: a random model of a real family, a trained byte-level tokenizer, real text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = (
    "stage replica boundary microbatch ledger round roster leader commit gradient prior swarm peer step plan"
)


def write_texts(directory: Path, files: int = 24, lines: int = 40) -> Path:
    """A folder of small text files with structure a model can learn."""
    directory.mkdir(parents=True, exist_ok=True)
    words = WORDS.split()
    for number in range(files):
        text = "\n".join(
            f"the {words[(number + line) % len(words)]} of the {words[(number * 7 + line * 3) % len(words)]} "
            f"has {(number * line) % 10} parts"
            for line in range(lines)
        )
        (directory / f"text-{number:02d}.txt").write_text(text, encoding="utf-8")
    return directory


def write_model(
    directory: Path, texts: Path, family: str = "llama", layers: int = 6, hidden: int = 64
) -> Path:
    """A random model of a family and a byte-level BPE tokenizer trained on the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from swarm.model.source import random_model

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train([str(path) for path in sorted(texts.iterdir())], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory)
    random_model(tiny_config(family, layers, hidden, tokenizer.get_vocab_size()), seed=1).save_pretrained(
        directory
    )
    return directory


def tiny_config(family: str, layers: int, hidden: int, vocabulary: int) -> Any:
    """A small configuration of a family."""
    from transformers import AutoConfig

    return AutoConfig.for_model(
        family,
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )


def make_run(folder: Path, options: dict[str, Any]) -> Any:
    """A tiny run in `folder / "run"`. options: fields of RunOptions, and family, layers, hidden for the model.

    With a model among the options that one is used, whatever its size.
    """
    from peers.commands.init import RunOptions, create_run

    chosen = dict(options)
    shape = {name: chosen.pop(name) for name in ("family", "layers", "hidden") if name in chosen}
    texts = write_texts(folder / "texts")
    model = chosen.get("model") or write_model(folder / "model", texts, **shape)
    defaults = {
        "model": str(model),
        "data": str(texts),
        "samples_per_step": 8,
        "rows_per_microbatch": 1,
        "sequence_length": 32,
        "codec": "dense",
        "compute": "fp32",
        "averaging": "fp32",
        "calibration_microbatches": 16,
    }
    return create_run(RunOptions(**{**defaults, **chosen}), folder / "run")
