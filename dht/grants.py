"""Whom a run's owner has made an anchor after the manifest was signed.

A grant is a small JSON object, signed with the owner's Ed25519 key. A run's id is the hash of that key, so whoever
knows the id can check a grant; who passes it on does not matter. Each one is the whole list and has a number:
the highest counts, so a later grant revokes what it leaves out.
"""

from __future__ import annotations

import functools
import hashlib
import json
from typing import Annotated, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dht.fields import Count, PeerIdText

MAX_GRANT_BYTES = 6144
MAX_GRANTED = 32
"""Peers that a grant names, and as many again that it revokes."""
_DOMAIN = b"swarm-peer anchor grant 1\0"
"""The owner's key also signs the manifest: one must not pass for the other."""

Peers = Annotated[tuple[PeerIdText, ...], Field(max_length=MAX_GRANTED)]


class GrantError(ValueError):
    """No grant, or none that the run's owner has signed."""


class AnchorGrant(BaseModel):
    """Anchors beside the manifest's.

    number: of grants of one run the one with the highest counts. peers: who may publish priors, after the
    manifest's anchors, in this order. revoked: former anchors, whose priors count no more.
    owner_public_key, signature: Ed25519, hex.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    number: Annotated[Count, Field(ge=1)]
    peers: Peers = ()
    revoked: Peers = ()
    owner_public_key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] = "0" * 64
    signature: Annotated[str, Field(pattern=r"^([0-9a-f]{128})?$")] = ""

    @model_validator(mode="after")
    def _every_peer_once(self) -> Self:
        if len({*self.peers, *self.revoked}) != len(self.peers) + len(self.revoked):
            raise ValueError("a peer is named twice")
        return self

    def signed(self, key: Ed25519PrivateKey) -> AnchorGrant:
        """This grant with the owner's key and signature. Raises GrantError if the key is of another run."""
        public = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        if _run_id_of(public) != self.run_id:
            raise GrantError(f"the key is the owner's of run {_run_id_of(public)}, not of run {self.run_id}")
        unsigned = self.model_copy(update={"owner_public_key": public.hex(), "signature": ""})
        return unsigned.model_copy(update={"signature": key.sign(unsigned._signed_bytes()).hex()})

    def encode(self) -> bytes:
        """Wire and file form: JSON, at most `MAX_GRANT_BYTES`."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()

    def order(self, anchors: tuple[str, ...]) -> tuple[str, ...]:
        """All anchors whose priors count, the first most. anchors: the manifest's."""
        named = tuple(peer for peer in anchors if peer not in self.revoked)
        return named + tuple(peer for peer in self.peers if peer not in named)

    def _signed_bytes(self) -> bytes:
        return _DOMAIN + self.model_copy(update={"signature": ""}).encode()


@functools.lru_cache(maxsize=64)
def decode_grant(data: bytes) -> AnchorGrant:
    """The grant in `data`, its signature checked. Raises GrantError."""
    if len(data) > MAX_GRANT_BYTES:
        raise GrantError(f"a grant of {len(data)} bytes; at most {MAX_GRANT_BYTES}")
    try:
        grant = AnchorGrant.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))[:80]
        raise GrantError(f"no grant: {where}: {first['msg']}") from error
    public = bytes.fromhex(grant.owner_public_key)
    if _run_id_of(public) != grant.run_id:
        raise GrantError(f"a grant of run {grant.run_id} with the key of another run's owner")
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(
            bytes.fromhex(grant.signature), grant._signed_bytes()
        )
    except (InvalidSignature, ValueError) as error:
        raise GrantError(f"the owner of run {grant.run_id} has not signed this grant") from error
    return grant


def _run_id_of(public_key: bytes) -> str:
    """Run id of an owner's public key: see `swarm.manifest.run_id_of`."""
    return hashlib.sha256(public_key).hexdigest()[:40]
