"""One row: train the uncut model as the swarm would, with the anchors' priors one interval late."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality.anchors import DTYPES, AnchorCircuit, PriorSet
from benchmarks.quality.config import RowConfig
from benchmarks.quality.prepare import Prepared
from benchmarks.quality.wire import WireBytes, dense_codecs, step_bytes
from swarm.anchor.corrector import CorrectionReport
from swarm.reference import ReferenceTrainer

CHECKPOINT_EVERY = 20

Progress = Callable[[int, int, str], None]
"""progress(steps done, steps, what is being done)."""


@dataclass(slots=True)
class Seconds:
    """Wall seconds of a row by what they were for, and the CPU seconds of its training steps."""

    steps: float = 0.0
    steps_cpu: float = 0.0
    anchors: float = 0.0
    evaluation: float = 0.0


@dataclass(slots=True)
class Course:
    """What has happened in a row so far.

    curve: held-out loss of the uncoded model by version (nats per token). train_loss: of the coded model, by step.
    corrections: cosine of corrected with raw gradient, relative change, and eta, by step, where there were any.
    """

    curve: dict[int, float] = field(default_factory=dict)
    train_loss: list[float] = field(default_factory=list)
    wire: WireBytes = field(default_factory=WireBytes)
    wire_curve: dict[int, int] = field(default_factory=dict)
    corrections: list[tuple[int, float, float, float]] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)


def simulate(config: RowConfig, prepared: Prepared, scratch: Path, progress: Progress) -> Course:
    """Run a row to its end, going on from its checkpoint in `scratch` if there is one.

    Raises ValueError for a configuration that no codec or corrector takes, or a gradient that is not finite.
    """
    trainer = ReferenceTrainer(
        prepared.fresh_model(),
        config.cuts,
        [None] * len(config.cuts),
        config.optimizer_config(),
        config.steps,
        freeze=frozenset({"embedding", "head"}),
        compute_dtype=DTYPES[config.compute],
    )
    return _Row(config, prepared, trainer, scratch, progress).run()


class _Row:
    """A row under way."""

    def __init__(
        self,
        config: RowConfig,
        prepared: Prepared,
        trainer: ReferenceTrainer,
        scratch: Path,
        progress: Progress,
    ) -> None:
        self._config, self._prepared, self._trainer, self._progress = config, prepared, trainer, progress
        self._path = scratch / f"{config.key}.checkpoint"
        self._step = 0
        self._course = Course()
        self._circuit = AnchorCircuit(config, prepared, trainer, scratch, self._note)
        self._passes = config.anchors.passes(config.steps) if config.anchors is not None else {}
        self._in_force: PriorSet | None = None
        self._pending: dict[int, PriorSet] = {}  # by the step from which they are in force
        self._heldout = prepared.heldout_batches(config)

    def run(self) -> Course:
        """From the first step, or the checkpoint, to the last."""
        config, trainer = self._config, self._trainer
        if self._path.is_file():
            self._load()
        elif self._circuit.is_needed:
            self._in_force = self._timed("anchors", self._circuit.initial)
            self._course.wire.initial_priors += self._received(self._in_force)
        codecs = self._circuit.codecs(self._in_force)
        uncoded = dense_codecs(config, int(trainer.model.config.hidden_size))
        trainer.corrector = self._corrector()
        while self._step < config.steps:
            step = self._step
            self._evaluate_if_due()
            if self._circuit.is_needed and step in self._passes:
                self._note("anchors' pass")
                number = sorted(self._passes).index(step)
                made = self._timed("anchors", self._circuit.made_at, step, number)
                self._pending[self._passes[step]] = made
                self._course.wire.priors += self._received(made)
            if step in self._pending:
                self._in_force = self._pending.pop(step)
                codecs = self._circuit.codecs(self._in_force)
                trainer.corrector = self._corrector()
            is_dense = config.dense_every > 0 and (step + 1) % config.dense_every == 0
            trainer.codecs = [*(uncoded if is_dense else codecs)]
            batches = self._prepared.step_batches(config, step)
            step_bytes(self._course.wire, trainer.codecs, batches, step)
            cpu = time.process_time()
            self._course.train_loss.append(self._timed("steps", trainer.step, batches, step))
            self._course.seconds.steps_cpu += time.process_time() - cpu
            self._step += 1
            self._note("")
            if self._step % CHECKPOINT_EVERY == 0 and self._step < config.steps:
                self._save()
        self._evaluate_if_due()
        self._path.unlink(missing_ok=True)
        return self._course

    def _corrector(self) -> Callable[[dict[str, torch.Tensor], int], object] | None:
        """The corrector in force, its reports kept."""
        corrector = self._circuit.corrector(self._in_force)
        if corrector is None:
            return None

        def correct(gradients: dict[str, torch.Tensor], step: int) -> None:
            report: CorrectionReport = corrector(gradients, step)
            if report.cosine is not None and report.relative_change is not None and report.eta is not None:
                self._course.corrections.append((step, report.cosine, report.relative_change, report.eta))

        return correct

    def _received(self, made: PriorSet) -> int:
        """Prior bytes that fast peers receive, one replica per stage: a boundary's by both its ends."""
        return made.boundary_bytes * 2 + made.corrector_bytes

    def _evaluate_if_due(self) -> None:
        """Held-out loss of the current weights, at every `eval_every` versions and at the end."""
        version, course = self._step, self._course
        due = version % self._config.eval_every == 0 or version == self._config.steps
        if due and version not in course.curve:
            self._note("evaluating")
            course.curve[version] = self._timed("evaluation", self._trainer.evaluate, self._heldout)
            course.wire_curve[version] = course.wire.total

    def _timed(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call, and add the wall seconds to what they were for."""
        began = time.monotonic()
        result = function(*arguments)
        seconds = self._course.seconds
        setattr(seconds, what, getattr(seconds, what) + time.monotonic() - began)
        return result

    def _note(self, what: str) -> None:
        self._progress(self._step, self._config.steps, what)

    def _save(self) -> None:
        """Checkpoint, atomically."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".partial")
        torch.save(
            {
                "step": self._step,
                "course": self._course,
                "trainer": self._trainer.state(),
                "circuit": self._circuit.state(),
                "in_force": self._in_force,
                "pending": self._pending,
            },
            temporary,
        )
        temporary.rename(self._path)

    def _load(self) -> None:
        """Go on from the checkpoint."""
        # Written by this program into its own scratch folder, never received.
        state = torch.load(self._path, weights_only=False, mmap=True)
        self._step, self._course = state["step"], state["course"]
        self._trainer.load_state(state["trainer"])
        self._circuit.load_state(state["circuit"])
        self._in_force, self._pending = state["in_force"], state["pending"]
