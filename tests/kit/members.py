"""Members of one stage that really average and apply, over links in memory, and keep what catching up needs."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import save_file
from torch import Tensor

from peers.compute import Boundaries, StageCompute, build_compute, model_config, take_step
from peers.engine import Engine, JobPriority
from peers.exchange import Exchange, alone_digest
from peers.frames import Frame, Kind
from peers.limits import PROTOCOL_VERSION
from peers.round_messages import Group
from peers.updates import Update, alone_update, exchanged_update
from swarm.activation.config import DenseConfig
from swarm.data.index import ChunkInfo, DataIndex
from swarm.gradient.averaging import AveragingConfig
from swarm.gradient.config import compressor_config
from swarm.manifest import Artifact, ModelSection, RunManifest
from swarm.model.stage import stage_tensor_names
from swarm.optim import OptimizerConfig
from swarm.sketch import slice_span
from tests.kit.tiny import tiny_config

STAGE = 0
FILE = "stage-0.safetensors"

# torch makes a folder for temporary files with the first optimizer: now, before a test takes care of such folders.
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


def stage_run(
    directory: Path,
    *,
    values: str = "fp16",
    hidden: int = 16,
    layers: int = 1,
    compute: str = "fp32",
    **more: Any,
) -> RunManifest:
    """A signed manifest of two stages, and the initial file of the first, of so many layers, in `directory`. more:
    fields of the manifest.
    """
    config = tiny_config("llama", layers + 1, hidden, 64).to_dict()
    model = ModelSection(name="tiny", config=config, cuts=(layers,))
    rows = ChunkInfo(name="train-00000.safetensors", sha256="0" * 64, nbytes=1, samples=1)
    data = DataIndex(
        sequence_length=8,
        vocabulary_size=64,
        token_dtype="uint16",
        train=(rows,),
        heldout=(),
        train_samples=1,
        heldout_samples=0,
        train_tokens=8,
        heldout_tokens=0,
        train_documents=1,
        heldout_documents=0,
    )
    fields: dict[str, Any] = {
        "protocol": PROTOCOL_VERSION,
        "name": "a run",
        "owner_public_key": "0" * 64,
        "seed": 1,
        "model": model,
        "data": data,
        "rows_per_microbatch": 1,
        "samples_per_step": 1,
        "total_steps": 100,
        "compute": compute,
        "codec": DenseConfig(),
        "averaging": AveragingConfig(compressor=compressor_config(values)),
        "optimizer": OptimizerConfig(learning_rate=0.01, weight_decay=0.1),
        "snapshot_every": 20,
        **more,
    }
    draft = RunManifest(**fields)
    generator = torch.Generator().manual_seed(0)
    shapes = stage_tensor_names(model_config(draft), model.cuts, STAGE)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}, directory / FILE
    )
    fields["artifacts"] = (Artifact.of(directory / FILE, FILE),)
    return RunManifest(**fields).signed(Ed25519PrivateKey.generate())


def stage_compute(manifest: RunManifest, directory: Path) -> StageCompute:
    """The first stage, really computing."""
    return build_compute(
        manifest,
        STAGE,
        directory / FILE,
        Boundaries(None, None),
        device="cpu",
        microseconds_per_token=None,
    )


@contextmanager
def running_engine() -> Iterator[Engine]:
    """A compute thread."""
    engine = Engine()
    thread = threading.Thread(target=engine.run)
    thread.start()
    try:
        yield engine
    finally:
        engine.stop()
        thread.join()


class _Wire:
    """One direction between two members."""

    def __init__(self, exchanges: dict[str, Exchange], source: str, target: str) -> None:
        self._exchanges, self._source, self._target = exchanges, source, target

    async def send(self, kind: Kind, header: dict[str, Any], payload: list[memoryview]) -> None:
        await asyncio.sleep(0)
        frame = Frame(
            kind, msgpack.unpackb(msgpack.packb(header)), (memoryview(bytearray(b"".join(payload))),)
        )
        self._exchanges[self._target].on_frame(self._source, frame)


class Members:
    """Replicas of the stage. version, lineage: what they all hold. updates: by step, as every one recorded it."""

    def __init__(self, manifest: RunManifest, directory: Path, engine: Engine, count: int = 2) -> None:
        self.names = [f"member-{number}" for number in range(count)]
        self.computes = {name: stage_compute(manifest, directory) for name in self.names}
        self.version, self.lineage = 0, ""
        self.updates: dict[int, Update] = {}
        self._manifest, self._engine = manifest, engine
        self._random = torch.Generator().manual_seed(7)

    @property
    def numel(self) -> int:
        return self.computes[self.names[0]].trainable.numel

    @property
    def state(self) -> dict[str, Tensor]:
        return self.computes[self.names[0]].state()

    async def step(self, weights: tuple[int, ...] | None = None, scale: float = 1e-3) -> Update:
        """One committed step. weights: of the members; one weight for a group of one, all zero for nothing."""
        weights = weights or tuple(range(1, len(self.names) + 1))
        names = tuple(self.names[: len(weights)])
        step = self.version
        group_id = hashlib.sha256(f"group/{step}/{names}/{weights}/{scale}".encode()).hexdigest()
        group = Group(group_id, step, 0, names[-1], names, weights, ("",) * len(names), "")
        vectors = {name: scale * torch.randn(self.numel, generator=self._random) for name in names}
        if len(names) > 1 and sum(weights) > 0:
            updates = await self._exchange(group, vectors)
        else:
            updates = [await self._alone(group, vectors[names[0]])]
        assert len({update.digest for update in updates}) == 1
        self.lineage, self.version = updates[0].next_lineage, step + 1
        self.updates[step] = updates[0]
        return updates[0]

    async def _exchange(self, group: Group, vectors: dict[str, Tensor]) -> list[Update]:
        exchanges: dict[str, Exchange] = {}
        span = slice_span(group.step, self.numel, self.numel)
        for name in group.members:
            exchanges[name] = Exchange(
                group,
                name,
                self.numel,
                self.computes[name].compressor.phases(group.step),
                self._engine,
                lambda target, source=name: _Wire(exchanges, source, target),  # type: ignore[misc,arg-type,return-value]
                slice_span=span,
            )

        async def member(name: str) -> Update:
            exchange, compute = exchanges[name], self.computes[name]
            own = compute.read_slice(*span) if name == group.leader else None
            weight = group.weights[group.members.index(name)]
            compression = compute.compressor.begin(vectors[name], group.step, weight)
            average, digest = await exchange.run(compression, own)
            compression.commit()
            await self._engine.submit(JobPriority.ROUND, _apply, compute, average, group.step, exchange.slice)
            return exchanged_update(
                exchange,
                group=group,
                run=self._manifest.run_id,
                stage=STAGE,
                lineage=self.lineage,
                digest=digest,
            )

        return list(await asyncio.gather(*(member(name) for name in group.members)))

    async def _alone(self, group: Group, vector: Tensor) -> Update:
        place: dict[str, Any] = {"run": self._manifest.run_id, "stage": STAGE, "lineage": self.lineage}
        update = alone_update(group, vector, total_weight=sum(group.weights), **place)
        assert update.digest == alone_digest(group.id)
        for compute in self.computes.values():  # the others come back in step: as after a COMMIT of their own
            if sum(group.weights):
                await self._engine.submit(JobPriority.ROUND, _apply, compute, vector, group.step, None)
            else:
                compute.clear()
        return update


def _apply(
    compute: StageCompute, average: Tensor, step: int, taken: tuple[int, Tensor] | None
) -> float | None:
    try:
        return take_step(compute, average, step, taken)
    except ValueError:
        return None  # not finite: every member refuses it alike
