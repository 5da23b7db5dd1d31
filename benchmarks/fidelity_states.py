"""Weights of a short dense run, and boundary tensors at those weights: made once, kept on disk.

The probe (`fidelity.py`) asks how well a codec carries states and gradients at weights that training has
moved. Everything here is resumable: one file per ten steps, one per captured step.
"""

from __future__ import annotations

import itertools
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from benchmarks.quality.domains import domain_source
from swarm.activation.calibrate import decoder_layers, replace_hidden
from swarm.batch import IGNORED_LABEL, Batch, default_loss_positions
from swarm.model.packed import packed_kwargs
from swarm.model.source import DEMO_MODEL, load_pretrained
from swarm.optim import OptimizerConfig
from swarm.reference import ReferenceTrainer, untie_head_

ROWS, TOKENS = 8, 128
CUTS = (8, 15, 22)
HELD_OUT = 10
"""One document in this many is held out."""

_MICROBATCHES = 128


@dataclass(frozen=True, slots=True)
class Captured:
    """Boundary tensors of microbatches: hidden and gradient fp32 [M, B, T, H] per boundary, and the batches."""

    hidden: list[Tensor]
    gradient: list[Tensor]
    batches: list[Batch]


class States:
    """What the probe measures on, from a cache folder.

    cache: where everything is kept, under the domain's name. total_steps: length of the dense run's learning-rate
    schedule. say: told what takes time.
    """

    def __init__(
        self, cache: Path, domain: str, *, total_steps: int = 80, say: Callable[[str], object] = print
    ) -> None:
        self.cache = cache / domain
        self.cache.mkdir(parents=True, exist_ok=True)
        self._texts = cache, domain
        self._total_steps = total_steps
        self._say = say
        self._model: Any = None
        self._step = -1

    def batches(self, first: int, count: int, *, held_out: bool) -> list[Batch]:
        """Microbatches `first` .. `first + count - 1` of one part of the domain."""
        path = self.cache / f"batches-{'heldout' if held_out else 'train'}.safetensors"
        if not path.is_file():
            made = list(itertools.islice(self._packed(held_out), _MICROBATCHES))
            save_file(
                {
                    "ids": torch.stack([b.token_ids for b in made]),
                    "starts": torch.stack([b.document_starts for b in made]).to(torch.uint8),
                },
                path,
            )
        stored = load_file(path)
        if first + count > stored["ids"].shape[0]:
            raise SystemExit(
                f"the domain has {stored['ids'].shape[0]} microbatches of {ROWS} x {TOKENS} tokens"
            )
        starts = stored["starts"].bool()
        return [
            Batch(
                token_ids=stored["ids"][i],
                document_starts=starts[i],
                loss_positions=default_loss_positions(starts[i]),
                sample_ids=torch.arange(i * ROWS, (i + 1) * ROWS),
            )
            for i in range(first, first + count)
        ]

    def _packed(self, held_out: bool) -> Iterator[Batch]:
        """Documents in a fixed shuffled order, one after the other; a row's end cuts a document."""
        source = domain_source(self._texts[1], self._texts[0])
        folder = Path(sysconfig.get_paths()["stdlib"]) if source == "stdlib" else Path(source)
        files = sorted(folder.glob("*.py") if source == "stdlib" else filter(Path.is_file, folder.rglob("*")))
        chosen = [path for index, path in enumerate(files) if (index % HELD_OUT == 0) == held_out]
        _, tokenizer = load_pretrained(DEMO_MODEL, torch.float32)
        assert tokenizer is not None
        ids: list[int] = []
        starts: list[bool] = []
        for index in torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0)).tolist():
            text = tokenizer(chosen[index].read_text(errors="replace")).input_ids
            ids += text
            starts += [True] + [False] * (len(text) - 1)
            while len(ids) >= ROWS * TOKENS:
                token_ids = torch.tensor(ids[: ROWS * TOKENS]).view(ROWS, TOKENS)
                begins = torch.tensor(starts[: ROWS * TOKENS]).view(ROWS, TOKENS)
                begins[:, 0] = True
                yield Batch(token_ids, begins, default_loss_positions(begins), torch.arange(ROWS))
                ids, starts = ids[ROWS * TOKENS :], starts[ROWS * TOKENS :]

    def load(self, step: int) -> Any:
        """The model with the weights after `step` dense steps (a multiple of 5), training it as far as needed."""
        if step != self._step:
            path = self.cache / f"weights-{step}.safetensors"
            if step and not path.is_file():
                self._train(step)
            self._model, _ = load_pretrained(DEMO_MODEL, torch.float32)
            untie_head_(self._model)
            if step:
                self._restore(load_file(path))
            self._step = step
        return self._model

    def _train(self, until: int) -> None:
        """Dense steps up to `until`, from the last file there is."""
        trainer_model, _ = load_pretrained(DEMO_MODEL, torch.float32)
        optimizer = OptimizerConfig(learning_rate=3e-4, warmup_steps=8, eps=1e-10)
        trainer = ReferenceTrainer(
            trainer_model, (), (), optimizer, self._total_steps, freeze=frozenset({"embedding", "head"})
        )
        done = max((s for s in range(0, until, 5) if (self.cache / f"run-{s}.pt").is_file()), default=0)
        if done:
            saved = torch.load(self.cache / f"run-{done}.pt")
            with torch.no_grad():
                for name, master in trainer.masters.items():
                    master.copy_(saved["masters"][name])
            trainer._optimizer.load_state_dict(saved["optimizer"])
        for step in range(done, until):
            loss = trainer.step(self.batches(step, 1, held_out=False), step)
            self._say(f"dense step {step}: loss {loss:.3f}")
            if (step + 1) % 5 == 0:
                masters = {name: master.detach() for name, master in trainer.masters.items()}
                save_file(
                    {name: tensor.contiguous() for name, tensor in masters.items()},
                    self.cache / f"weights-{step + 1}.safetensors",
                )
                torch.save(
                    {"masters": masters, "optimizer": trainer._optimizer.state_dict()},
                    self.cache / f"run-{step + 1}.pt",
                )
                (self.cache / f"run-{step - 4}.pt").unlink(missing_ok=True)

    def _restore(self, weights: dict[str, Tensor]) -> None:
        """Write master weights into the model."""
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                if name in weights:
                    parameter.copy_(weights[name])

    def captured(self, step: int, first: int, count: int, *, held_out: bool) -> Captured:
        """Boundary tensors at the weights of `step`, on microbatches `first` .. of one part."""
        part = "heldout" if held_out else "train"
        path = self.cache / f"captured-{step}-{part}-{first}-{count}.safetensors"
        batches = self.batches(first, count, held_out=held_out)
        if not path.is_file():
            self._say(f"capturing {count} microbatches of {part} at step {step}")
            model = self.load(step)
            arrays: dict[str, list[Tensor]] = {}
            for parameter in model.parameters():
                parameter.requires_grad_(False)
            for batch in batches:
                kept: list[Tensor] = []

                def keep(states: Tensor, kept: list[Tensor] = kept) -> Tensor:
                    if not states.requires_grad:
                        states = states.detach().requires_grad_(True)
                    states.retain_grad()
                    kept.append(states)
                    return states

                with boundary_hooks(model, [keep] * len(CUTS)):
                    batch_loss(model, batch).backward()
                for boundary, states in enumerate(kept):
                    assert states.grad is not None
                    arrays.setdefault(f"hidden{boundary}", []).append(states.detach())
                    arrays.setdefault(f"gradient{boundary}", []).append(states.grad)
            save_file({name: torch.stack(parts) for name, parts in arrays.items()}, path)
        stored = load_file(path)
        return Captured(
            hidden=[stored[f"hidden{b}"] for b in range(len(CUTS))],
            gradient=[stored[f"gradient{b}"] for b in range(len(CUTS))],
            batches=batches,
        )


def batch_loss(model: Any, batch: Batch) -> Tensor:
    """Mean token loss of one microbatch."""
    logits = model(**packed_kwargs(model.config, batch, torch.float32, "cpu")).logits
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), batch.labels().flatten(), ignore_index=IGNORED_LABEL
    )


@contextmanager
def boundary_hooks(model: Any, functions: Sequence[Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Within the context, function i replaces the states that leave stage i."""
    layers = decoder_layers(model)

    def hook(function: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
        return lambda _module, _inputs, output: replace_hidden(output, function)

    handles = [layers[cut - 1].register_forward_hook(hook(f)) for cut, f in zip(CUTS, functions, strict=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
