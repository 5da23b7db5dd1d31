"""The anchor circuit of the simulation: passes through the training model's own weights, and what becomes of them.

As `peers.anchor` does it: samples come from the far end of the order, every pass has others, the initial priors come
from a calibration before the first step. Corrector rows also get the weights' clean gradients of the same
microbatches; their memory starts with one pass through the initial weights, which is in force at once.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.quality.config import AnchorPlan, RowConfig
from benchmarks.quality.prepare import Prepared
from benchmarks.quality.recording import RecordedCodec, Recording
from swarm.activation.base import BoundaryCodec
from swarm.activation.calibrate import BoundarySamples, collect_boundary_samples
from swarm.activation.config import BasisConfig, MaskConfig
from swarm.activation.fit import fit_basis_prior, fit_mean_prior
from swarm.activation.registry import build_codec, needs_prior, needs_tokens
from swarm.activation.tokens import SampledTokens, TokenTable, make_token_table
from swarm.anchor.boundary_prior import BoundaryPrior, encode_boundary_prior
from swarm.anchor.config import NoCorrectorConfig
from swarm.anchor.factor import Factors, factorise
from swarm.anchor.memory import GradientMemory, coding_bias, target_matrices
from swarm.anchor.prior import SpectralPrior, encode_spectral_prior
from swarm.anchor.registry import build_corrector, remembers_bias
from swarm.anchor.registry import needs_prior as corrector_needs_prior
from swarm.reference import ReferenceTrainer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PriorSet:
    """What one pass made. boundary: arrays of every boundary, empty if the codec has none; corrector: or None.

    boundary_bytes, corrector_bytes: of the files, once each.
    """

    version: int
    boundary: list[dict[str, Tensor]]
    corrector: SpectralPrior | None
    boundary_bytes: int
    corrector_bytes: int


class AnchorCircuit:
    """Makes priors of the trainer's current weights, and codecs and correctors of priors.

    cache: folder where samples of the initial weights are kept for other rows of the same seed.
    """

    def __init__(
        self, config: RowConfig, prepared: Prepared, trainer: ReferenceTrainer, cache: Path, note: Note
    ) -> None:
        self._row, self._prepared, self._trainer = config, prepared, trainer
        self._cache, self._note = cache, note
        self._codec, self._corrector = config.codec_config(), config.corrector_config()
        self._dtype = DTYPES[config.compute]
        self._plan = config.anchors or AnchorPlan()
        self._corrects = corrector_needs_prior(self._corrector)
        self._hidden = int(trainer.model.config.hidden_size)
        self._shapes = {name: tuple(master.shape) for name, master in trainer.masters.items()}
        self._recordings: list[Recording] = []
        if self._plan.source == "leaders":
            if self._corrects:
                raise ValueError("leaders make no priors of gradients: a corrector needs anchors")
            self._recordings = [Recording(self._plan.window) for _ in config.cuts]
        self._memory: GradientMemory | None = None
        self._factors: Mapping[str, Factors] = {}
        if self._corrects:
            assert not isinstance(self._corrector, NoCorrectorConfig)
            self._memory = GradientMemory(
                target_matrices(self._shapes),
                beta=self._corrector.ema_beta,
                max_staleness=self._corrector.max_staleness,
            )
        self._table: TokenTable | None = None
        if isinstance(self._codec, BasisConfig) and needs_tokens(self._codec):
            embedding = prepared.model.get_input_embeddings().weight.detach()
            self._table = TokenTable(
                make_token_table(embedding, prepared.token_counts(), self._codec.prediction)
            )

    @property
    def is_needed(self) -> bool:
        """Whether the row uses priors at all."""
        return needs_prior(self._codec) or self._corrects

    def initial(self) -> PriorSet:
        """Priors of the initial weights, from the calibration microbatches; for the corrector from one pass."""
        codec, samples = self._codec, None
        if needs_prior(codec):
            microbatches, tokens = _calibration(codec)
            samples = self._initial_samples(microbatches, tokens)
        return self._made(0, samples, self._far(0, self._plan.microbatches) if self._corrects else [])

    def made_at(self, version: int, number: int) -> PriorSet:
        """Priors of the current weights, version `version`, by the anchors' pass `number` (0-based)."""
        codec, samples = self._codec, None
        if self._recordings:
            return self._made(version, [recording.samples() for recording in self._recordings], [])
        skip = _calibration(codec)[0] + number * self._plan.microbatches
        batches = self._far(skip, self._plan.microbatches)
        if needs_prior(codec):
            samples = self._samples(batches, _calibration(codec)[1])
        return self._made(version, samples, batches)

    def codecs(self, priors: PriorSet | None) -> list[BoundaryCodec]:
        """The codec of every boundary under these priors."""
        codecs = [
            build_codec(
                self._codec,
                hidden_size=self._hidden,
                boundary=boundary,
                run_seed=self._row.seed,
                prior=priors.boundary[boundary] if priors is not None and priors.boundary else None,
                device="cpu",
                dtype=self._dtype,
                tokens=self._table,
            )
            for boundary in range(len(self._row.cuts))
        ]
        if not self._recordings:
            return codecs
        return [
            RecordedCodec(codec, recording) for codec, recording in zip(codecs, self._recordings, strict=True)
        ]

    def corrector(self, priors: PriorSet | None) -> Any:
        """The corrector under these priors, or None where the row has none."""
        if not self._corrects:
            return None
        prior = None if priors is None else priors.corrector
        return build_corrector(self._corrector, prior=prior, shapes=self._shapes)

    def state(self) -> dict[str, Any]:
        """The corrector's memory and the recordings, to go on from later."""
        return {"memory": self._memory, "factors": dict(self._factors), "recordings": self._recordings}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._memory, self._factors = state["memory"], state["factors"]
        self._recordings = state["recordings"]

    def _far(self, skip: int, microbatches: int) -> list[Any]:
        return self._prepared.far_batches(self._row, microbatches, skip)

    def _samples(self, batches: Sequence[Any], tokens: int) -> list[BoundarySamples]:
        return collect_boundary_samples(
            self._trainer.model, self._row.cuts, batches, self._dtype, max_tokens=tokens
        )

    def _initial_samples(self, microbatches: int, tokens: int) -> list[BoundarySamples]:
        """Samples of the initial weights; the same for all rows of a seed, so they are kept."""
        row = self._row
        batches = self._far(0, microbatches)
        cuts = "-".join(map(str, row.cuts))
        path = self._cache / (
            f"initial-{Path(row.domain).name}-{row.max_tokens}-{row.sequence_length}-{row.rows_per_microbatch}-"
            f"{row.seed}-{cuts}-{row.compute}-{microbatches}-{tokens}.safetensors"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:  # two processes may want them at once
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():
                self._note(f"calibrating on {microbatches} microbatches")
                _save_samples(self._samples(batches, tokens), path)
        arrays = load_file(path)
        taken = SampledTokens(
            tuple(
                (batch.token_ids, batch.document_starts, chosen)
                for batch, chosen in zip(batches, arrays["chosen"], strict=True)
            )
        )
        return [
            BoundarySamples(
                hidden=arrays[f"hidden{number}"],
                gradient=arrays[f"gradient{number}"],
                offsets=arrays["offsets"],
                tokens=taken,
            )
            for number in range(len(row.cuts))
        ]

    def _made(
        self, version: int, samples: Sequence[BoundarySamples] | None, batches: Sequence[Any]
    ) -> PriorSet:
        """Fit boundary priors to samples; take the batches' clean gradients into the corrector's memory."""
        boundary = [] if samples is None else self._fit(samples)
        boundary_bytes = sum(
            len(encode_boundary_prior(BoundaryPrior(number, version=0, step=version, arrays=arrays)))
            for number, arrays in enumerate(boundary)
        )
        if (
            version == 0 and self._memory is not None
        ):  # coded gradients are coded by the initial priors: these
            self._trainer.codecs = [*self.codecs(PriorSet(0, boundary, None, 0, 0))]
        spectral = self._spectral(version, batches) if self._memory is not None else None
        corrector_bytes = 0 if spectral is None else len(encode_spectral_prior(spectral))
        return PriorSet(version, boundary, spectral, boundary_bytes, corrector_bytes)

    def _fit(self, samples: Sequence[BoundarySamples]) -> list[dict[str, Tensor]]:
        codec = self._codec
        if isinstance(codec, MaskConfig):
            return [fit_mean_prior(each.hidden, each.offsets) for each in samples]
        assert isinstance(codec, BasisConfig)
        features = None
        if self._table is not None:  # the same tokens at every boundary
            features = samples[0].tokens.features(self._table, codec.prediction)
        return [
            fit_basis_prior(each.hidden, each.gradient, each.offsets, codec, features) for each in samples
        ]

    def _spectral(self, version: int, batches: Sequence[Any]) -> SpectralPrior:
        """Clean gradients into the memory, and its factors."""
        assert self._memory is not None and not isinstance(self._corrector, NoCorrectorConfig)
        trainer = self._trainer
        trainer.accumulate(batches, None)
        clean = {name: trainer.gradients[name] for name in target_matrices(self._shapes)}
        if remembers_bias(self._corrector):
            trainer.accumulate(batches, version)
            clean = coding_bias(clean, {name: trainer.gradients[name] for name in clean})
        # The anchor's memory is fed as soon as the gradient is there; lateness is the way to the peers.
        self._memory.ingest(clean, source_step=version, step=version)
        factors = {
            name: each.factors
            for name, each in factorise(
                self._memory.matrices, self._corrector.rank, seed=version, previous=self._factors
            )
        }
        self._factors = factors
        return SpectralPrior(stage=0, version=0, step=version, factors=factors)


def _save_samples(samples: Sequence[BoundarySamples], path: Path) -> None:
    """Write samples of all boundaries, atomically."""
    arrays: dict[str, Tensor] = {"offsets": samples[0].offsets}
    for number, each in enumerate(samples):
        arrays[f"hidden{number}"], arrays[f"gradient{number}"] = each.hidden, each.gradient
    arrays["chosen"] = torch.stack([chosen for _, _, chosen in samples[0].tokens.batches])
    temporary = path.with_suffix(".partial")
    save_file(arrays, temporary)
    temporary.rename(path)


def _calibration(codec: Any) -> tuple[int, int]:
    """Calibration microbatches and tokens that a codec asks for."""
    if not isinstance(codec, BasisConfig):
        codec = BasisConfig()
    return codec.calibration_microbatches, codec.calibration_tokens
