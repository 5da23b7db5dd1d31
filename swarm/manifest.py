"""The manifest: everything a run fixes, signed by its owner.

A run's id is the hash of the owner's public key. Peers take the manifest from whoever serves it and trust
it by its signature alone: a manifest signed by another key belongs to another run.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from swarm.activation.config import CodecConfig
from swarm.anchor.config import CorrectorConfig, NoCorrectorConfig
from swarm.data.index import DataIndex
from swarm.gradient.averaging import AveragingConfig
from swarm.gradient.config import check_combination
from swarm.optim import OptimizerConfig

ARTIFACT_CHUNK_BYTES = 1024 * 1024
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _PlainLoader(yaml.SafeLoader):
    """YAML without aliases: a few of them can stand for gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse an alias, compose everything else."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("a manifest has no aliases")
        return super().compose_node(parent, index)


class ManifestError(ValueError):
    """A manifest that cannot be read, or is not what its signature says."""


class Artifact(BaseModel):
    """A file of the run that any holder may serve: addressed by name, trusted by hash.

    chunks: sha256 of every 1 MiB of it, so that a transfer is checked as it comes and can be resumed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")
    nbytes: int = Field(ge=0)
    sha256: Sha256
    chunks: tuple[Sha256, ...]

    @model_validator(mode="after")
    def _chunks_cover_the_file(self) -> Self:
        if ".." in self.name:
            raise ValueError(f"artifact name {self.name!r} leaves its folder")
        if len(self.chunks) != -(-self.nbytes // ARTIFACT_CHUNK_BYTES):
            raise ValueError(f"artifact {self.name}: {len(self.chunks)} chunk hashes for {self.nbytes} bytes")
        return self

    @classmethod
    def of(cls, path: Path, name: str) -> Self:
        """Describe a file. Reads it once."""
        whole, chunks, nbytes = hashlib.sha256(), [], 0
        with path.open("rb") as file:
            while data := file.read(ARTIFACT_CHUNK_BYTES):
                whole.update(data)
                chunks.append(hashlib.sha256(data).hexdigest())
                nbytes += len(data)
        return cls(name=name, nbytes=nbytes, sha256=whole.hexdigest(), chunks=tuple(chunks))


class ModelSection(BaseModel):
    """The model and how it is cut.

    config: the transformers configuration (to_dict). cuts: index of the first layer of stages 1..P-1.
    freeze: parts that are not trained and never travel after the join.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    config: dict[str, Any]
    cuts: tuple[int, ...]
    freeze: tuple[Literal["embedding", "head", "norms"], ...] = ()

    @property
    def stages(self) -> int:
        """Number of stages P."""
        return len(self.cuts) + 1

    @property
    def hidden_size(self) -> int:
        """Width H of the hidden states that cross a boundary."""
        return int(self.config["hidden_size"])


class AnchorSection(BaseModel):
    """The anchor circuit: whose priors count, and how they are made.

    peers: peer ids of the anchors that the owner names; of two priors of one version the first in this order
    counts. microbatches: how many are passed unmasked through a snapshot for one prior. source: who makes the
    boundaries' priors: these anchors, or peers of the stages themselves, every `every` steps, from what they train.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    peers: tuple[Annotated[str, Field(pattern=r"^[1-9A-HJ-NP-Za-km-z]{40,64}$")], ...] = Field(
        default=(), max_length=32
    )
    microbatches: int = Field(default=8, ge=1, le=1024)
    source: Literal["anchors", "leaders"] = "anchors"
    every: int = Field(default=5, ge=1, le=10_000)

    @model_validator(mode="after")
    def _every_anchor_once(self) -> Self:
        if len(set(self.peers)) != len(self.peers):
            raise ValueError("an anchor is named twice")
        return self


class RunManifest(BaseModel):
    """Everything a run fixes. Two peers with the same manifest train together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    protocol: int = Field(ge=1)
    name: str = Field(min_length=1, max_length=64)
    owner_public_key: str = Field(pattern=r"^[0-9a-f]{64}$", description="Ed25519, hex")
    seed: int = Field(ge=0, lt=2**31)
    model: ModelSection
    data: DataIndex
    rows_per_microbatch: int = Field(ge=1, le=4096)
    samples_per_step: int = Field(ge=1, le=65_536)
    total_steps: int = Field(ge=1)
    compute: Literal["bf16", "fp32"] = "bf16"
    codec: CodecConfig
    averaging: AveragingConfig = AveragingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    corrector: CorrectorConfig = NoCorrectorConfig()
    min_replicas: int = Field(default=1, ge=1, le=256)
    snapshot_every: int = Field(default=20, ge=1)
    early_snapshots: tuple[int, ...] = (2, 5, 10, 15, 30)  # the first steps move the model most
    anchors: AnchorSection = AnchorSection()
    artifacts: tuple[Artifact, ...] = ()
    signature: str = ""

    @model_validator(mode="after")
    def _averages_suit_the_optimizer(self) -> RunManifest:
        check_combination(self.averaging.compressor, self.optimizer)
        return self

    @property
    def run_id(self) -> str:
        """Hash of the owner's public key: sha256, hex, first 40 characters."""
        return run_id_of(self.owner_public_key)

    @property
    def tokens_per_microbatch(self) -> int:
        """Tokens of a full microbatch."""
        return self.rows_per_microbatch * self.data.sequence_length

    @property
    def reference_loss_tokens(self) -> int:
        """N_ref: loss tokens of a full microbatch, one less per row than its tokens."""
        return self.rows_per_microbatch * (self.data.sequence_length - 1)

    def artifact(self, name: str) -> Artifact:
        """An artifact by name. Raises KeyError naming it."""
        for artifact in self.artifacts:
            if artifact.name == name:
                return artifact
        raise KeyError(f"the manifest of run {self.name!r} names no artifact {name!r}")

    @property
    def renewed_every(self) -> int:
        """Steps after which priors are renewed, if whoever makes them is there."""
        return self.anchors.every if self.anchors.source == "leaders" else self.snapshot_every

    def keeps_snapshot(self, step: int) -> bool:
        """Whether the version after step `step` is kept as a snapshot."""
        version = step + 1
        return (
            version % self.snapshot_every == 0
            or version in self.early_snapshots
            or version == self.total_steps
        )

    def canonical_bytes(self) -> bytes:
        """What the owner signs: the manifest without its signature, as sorted JSON.

        Fields that a later version of the program adds, with a default, are not part of an older manifest.
        """
        data = self.model_dump(mode="json", exclude={"signature"}, exclude_unset=True)
        return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    def signed(self, key: Ed25519PrivateKey) -> RunManifest:
        """This manifest with the owner's public key and signature."""
        public = (
            key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw).hex()
        )
        data = self.model_dump(mode="json") | {"owner_public_key": public, "signature": ""}
        unsigned = RunManifest.model_validate(data)  # every field counts as set: defaults are signed too
        return unsigned.model_copy(update={"signature": key.sign(unsigned.canonical_bytes()).hex()})

    def verify(self, run_id: str | None = None) -> None:
        """Raise ManifestError unless signed by its owner, and, with `run_id`, by the owner of that run."""
        if run_id is not None and self.run_id != run_id:
            raise ManifestError(
                f"the manifest is signed by the owner of run {self.run_id}, not of run {run_id}: "
                f"check --run, or ask the owner for the addresses of its seeds"
            )
        try:
            public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.owner_public_key))
            public.verify(bytes.fromhex(self.signature), self.canonical_bytes())
        except (InvalidSignature, ValueError) as error:
            raise ManifestError(
                f"the manifest of run {self.run_id} ({self.name!r}) was not signed by its owner's key: "
                f"it was changed after signing; get it again from a seed you trust"
            ) from error

    def to_bytes(self) -> bytes:
        """Wire form: JSON with the signature."""
        data = self.model_dump(mode="json", exclude_unset=True)
        return json.dumps(data, sort_keys=True, allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> RunManifest:
        """Parse the wire form (JSON) or a YAML file. Raises ManifestError naming the first bad field."""
        try:
            # JSON first: YAML's parser is a hundred times slower on the long hash lists.
            value = json.loads(data) if data[:1] == b"{" else yaml.load(data, Loader=_PlainLoader)
            return cls.model_validate(value)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ManifestError(
                f"manifest field {place}: {first['msg']} (got {first.get('input')!r:.80})"
            ) from error
        except (ValueError, yaml.YAMLError, RecursionError) as error:
            raise ManifestError(f"not a manifest: {error}") from error

    def save(self, path: Path) -> None:
        """Write the manifest as YAML, atomically."""
        data = self.model_dump(mode="json", exclude_unset=True)
        text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=110)
        if yaml.load(text, Loader=_PlainLoader) != data:
            # YAML folds some Unicode line breaks away; escaped, they survive.
            text = yaml.safe_dump(data, sort_keys=False, allow_unicode=False, width=110)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> RunManifest:
        """Read and verify a manifest file. Raises ManifestError, FileNotFoundError."""
        manifest = cls.from_bytes(path.read_bytes())
        manifest.verify()
        return manifest


def run_id_of(owner_public_key: str) -> str:
    """Run id of an owner's public key (hex)."""
    return hashlib.sha256(bytes.fromhex(owner_public_key)).hexdigest()[:40]


def create_owner_key(path: Path) -> Ed25519PrivateKey:
    """Make an owner key, readable by its owner alone from the first byte. Raises FileExistsError."""
    key = Ed25519PrivateKey.generate()
    data = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    return key


def load_owner_key(path: Path) -> Ed25519PrivateKey:
    """Read an owner key. Raises ManifestError if the file holds no Ed25519 key."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except ValueError as error:
        raise ManifestError(f"{path} holds no owner key: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ManifestError(f"{path} holds a {type(key).__name__} where an Ed25519 key was expected")
    return key
