"""What an anchor remembers of clean gradients, on disk, and what it makes of them: the correctors' priors.

The memory moves at every pass. Factoring it takes seconds, so it is done in a thread of its own, stage by stage,
and offered when it is ready; a pass that ends meanwhile is factored next, and those between are left out. Nobody
waits for any of it. A restarted anchor goes on with the memory it has written, a new one starts cold.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from peers.prior_parts import PriorPart
from swarm.anchor.config import PriorCorrectorConfig
from swarm.anchor.corrector import Corrector
from swarm.anchor.factor import Factors, factorise
from swarm.anchor.memory import GradientMemory
from swarm.anchor.prior import SpectralPrior, encode_spectral_prior
from swarm.anchor.registry import build_corrector
from swarm.manifest import RunManifest

logger = logging.getLogger("swarm_peer.anchor")
Offer = Callable[[int, PriorPart, bytes], Awaitable[None]]
"""Serves a prior of a version and says so."""


@dataclass(frozen=True, slots=True)
class _Made:
    """The last prior of a stage. step: version of the weights behind its newest gradient. seconds: of factoring."""

    step: int
    nbytes: int
    seconds: float


class AnchorMemory:
    """See the module. Lives in the communication loop; arithmetic and disk in threads.

    config: the run's corrector. targets: the matrices of each of the anchor's stages, by stage. offer: called for
    each stage whose prior is ready. note: for what people should know.
    skipped: passes that were not factored, since a later one had ended.
    """

    def __init__(
        self,
        *,
        config: PriorCorrectorConfig,
        manifest: RunManifest,
        targets: Mapping[int, Mapping[str, tuple[int, int]]],
        directory: Path,
        offer: Offer,
        note: Callable[[str], None],
    ) -> None:
        self.skipped = 0
        self._config, self._run_id, self._seed = config, manifest.run_id, manifest.seed
        self._targets = {stage: dict(shapes) for stage, shapes in targets.items()}
        self._directory, self._offer, self._note = directory, offer, note
        self._memories = {
            stage: GradientMemory(shapes, beta=config.ema_beta, max_staleness=config.max_staleness)
            for stage, shapes in self._targets.items()
        }
        self._factors: dict[int, dict[str, Factors]] = {}
        self._made: dict[int, _Made] = {}
        self._task: asyncio.Task[None] | None = None
        self._next: int | None = None
        self._whole = asyncio.Lock()  # held while a pass's gradients are taken, matrix by matrix
        self._offered: dict[int, int] = {}  # newest step offered, by stage
        self._has_failed = False
        self._failing: set[int] = set()

    @property
    def version(self) -> int | None:
        """Version of the weights whose clean gradient is the newest in the memory; None if it is cold."""
        steps = [memory.source_step for memory in self._memories.values()]
        return max((step for step in steps if step is not None), default=None)

    @property
    def refused(self) -> int:
        """Clean gradients of single matrices that were not taken."""
        return sum(sum(memory.refused.values()) for memory in self._memories.values())

    @property
    def factor_s(self) -> float:
        """Seconds of the last factorisation of each stage, in all."""
        return sum(made.seconds for made in self._made.values())

    @property
    def prior_bytes(self) -> int:
        """Of the last prior of each stage, in all."""
        return sum(made.nbytes for made in self._made.values())

    def correctors(self) -> list[Corrector] | None:
        """The correctors of the last priors, by stage; None before the first ones."""
        if set(self._made) != set(self._targets):
            return None
        return [
            build_corrector(
                self._config,
                prior=SpectralPrior(stage, 0, self._made[stage].step, self._factors[stage]),
                shapes=dict(shapes),
            )
            for stage, shapes in self._targets.items()
        ]

    async def start(self) -> None:
        """Take over what an earlier life has written."""
        for stage, memory in self._memories.items():
            try:
                matrices, step = await asyncio.to_thread(self._read, stage)
                memory.restore(matrices, step)
            except FileNotFoundError:
                continue
            except (OSError, SafetensorError, ValueError, KeyError) as error:
                self._note(f"warning: the memory of stage {stage} starts cold: {error}")
                continue
            self._note(f"going on with the memory of stage {stage}, of version {step}")

    async def ingest(self, version: int, gradients: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Take a pass's clean gradients (float [m, n] by name, by stage) into the memory; the rest goes on by itself.

        version: of the weights they were computed at.
        """

        def take() -> None:
            for stage, found in gradients.items():
                moved = {name: gradient.cpu() for name, gradient in found.items()}
                self._memories[stage].ingest(moved, source_step=version, step=version)

        async with self._whole:
            await asyncio.to_thread(take)
        self.skipped += self._next is not None
        self._next = version
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())

    async def settle(self) -> None:
        """Wait until what was ingested is factored, written and offered (tests)."""
        if self._task is not None:
            await self._task

    def close(self) -> None:
        """Work on no more."""
        if self._task is not None:
            self._task.cancel()

    async def _work(self) -> None:
        while self._next is not None:
            self._next = None
            done: list[_Made] = []
            for stage, memory in self._memories.items():
                async with self._whole:  # a later pass may have been taken meanwhile, or is being taken
                    matrices, step = memory.matrices, memory.source_step
                if step is None or step == self._offered.get(stage):  # no pass here, or no other since
                    continue
                await self._write(stage, matrices, step)
                began = time.monotonic()
                try:
                    factors = await asyncio.to_thread(self._factorise, stage, matrices)
                    seconds = time.monotonic() - began
                    self._factors[stage] = factors
                    prior = SpectralPrior(stage, 0, step, factors)  # the plan that puts it in force counts
                    data = await asyncio.to_thread(encode_spectral_prior, prior)
                    await self._offer(step, PriorPart("corrector", stage), data)
                    self._offered[stage] = step
                except (ValueError, OSError, RuntimeError, MemoryError) as error:
                    # RuntimeError: what torch raises for a decomposition that does not converge.
                    self._say_failed(stage, error)
                    continue
                self._made[stage] = _Made(step, len(data), seconds)
                done.append(self._made[stage])
                self._failing.discard(stage)
            if done:  # else all was factored with the pass before, or nothing could be
                self._note(
                    f"corrector's priors of version {max(made.step for made in done)}: "
                    f"{sum(made.nbytes for made in done) / 1e6:.1f} MB, factored in "
                    f"{sum(made.seconds for made in done):.1f} s"
                )

    def _say_failed(self, stage: int, error: BaseException) -> None:
        """Once, until it goes well again: the next pass is likely to fail the same way."""
        if stage not in self._failing:
            self._failing.add(stage)
            cause = str(error) or type(error).__name__
            self._note(
                f"warning: no corrector's prior of stage {stage}: {cause} (more of this is only logged)"
            )
        logger.warning("no corrector's prior of stage %d: %s", stage, error)

    def _factorise(self, stage: int, matrices: Mapping[str, Tensor]) -> dict[str, Factors]:
        found = factorise(matrices, self._config.rank, seed=self._seed, previous=self._factors.get(stage))
        return {name: each.factors for name, each in found}

    # -- on disk ---------------------------------------------------------------------------------------------

    def _path(self, stage: int) -> Path:
        return self._directory / f"memory-{self._run_id[:16]}-stage-{stage}.safetensors"

    def _read(self, stage: int) -> tuple[dict[str, Tensor], int]:
        """Averages, and the step of the newest gradient in them.

        Raises OSError, SafetensorError, ValueError or KeyError for anything but a file of ours.
        """
        with safe_open(str(self._path(stage)), framework="pt", device="cpu") as file:
            step = int(file.metadata()["step"])
            return {name: file.get_tensor(name) for name in self._targets[stage] if name in file.keys()}, step  # noqa: SIM118

    async def _write(self, stage: int, matrices: Mapping[str, Tensor], version: int) -> None:
        path = self._path(stage)
        temporary = path.with_suffix(".new")

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(dict(matrices), str(temporary), metadata={"step": str(version)})
            temporary.replace(path)

        try:
            await asyncio.to_thread(write)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            if not self._has_failed:
                self._note(
                    f"warning: the memory cannot be kept in {self._directory}: {error}; it goes on in RAM"
                )
            self._has_failed = True
