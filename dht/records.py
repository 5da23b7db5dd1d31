"""What stands on the noticeboard: signed, bounded records, and their bytes.

On the wire a record is msgpack [kind, payload, signature]; the signature covers kind and payload, is made
with the peer's libp2p key, and the payload holds that public key, whose hash must be the peer id. Everything
here comes from strangers: sizes are checked before anything is parsed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgpack
from hivemind.p2p import PeerID
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dht.addresses import MAX_ADDRESS_CHARACTERS
from dht.fields import Count, PeerIdText, RunId
from dht.grants import MAX_GRANT_BYTES, AnchorGrant, GrantError, decode_grant
from dht.identity import MAX_PUBLIC_KEY_BYTES, MAX_SIGNATURE_BYTES, Identity, peer_id_of, verify

PROTOCOL_VERSION = 1
MAX_RECORD_BYTES = 8192
MAX_RECORD_LIFE_S = 60.0
"""No record may expire later than this after now (swarm time): nobody can occupy the board for long."""

RECORD_LIFE_S = 30.0
PRIOR_NAME_CHARACTERS = 16
"""Of a prior's hash, in the record of who holds it."""
MAX_PRIOR_BYTES = 2**30

Ordinal = Annotated[int, Field(ge=0, le=4095)]
Role = Literal["seed", "stage", "anchor"]
Measure = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Cosine = Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)]
Reason = Literal[
    "too_large", "malformed", "protocol", "schema", "public_key", "peer_id", "signature", "owner"
]


class RecordError(ValueError):
    """Bytes that are no record of ours, or a record that cannot be encoded; `reason` is the kind of fault."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


class _Record(BaseModel):
    """What all records carry."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    protocol: Literal[1] = 1
    run_id: RunId
    peer_id: PeerIdText
    public_key: bytes = Field(max_length=MAX_PUBLIC_KEY_BYTES)
    incarnation: Count
    expires_at: float = Field(default=0.0, ge=0, le=1e11, allow_inf_nan=False)
    """Swarm time in seconds; the noticeboard fills it in when publishing."""

    @property
    def order(self) -> tuple[int, float]:
        """Of two records of a peer the greater is the newer: first by incarnation, then by expiry."""
        return (self.incarnation, self.expires_at)

    def __str__(self) -> str:
        """Without the key, for logs."""
        return repr(self.model_dump(exclude={"public_key"}))


class PeerRecord(_Record):
    """What one peer says of itself: where it is, what it serves, how it fares.

    stage: the stage it holds, None for a pure seed. step: the step its weights have reached. training:
    whether it has a plan in force. loss: mean token loss in nats, as last seen. tokens_per_s and the
    measured bandwidths (Mbit/s): None when unknown. versions: steps whose snapshots it can serve. priors:
    the first characters (`PRIOR_NAME_CHARACTERS`) of the hashes of the priors it holds and serves. stages: the first
    and the last that an anchor holds. prior_age: most steps that a prior in force here is old. coded_cosine: by an
    anchor's measurement, of the coded with the dense gradient; raw_cosine, corrected_cosine: of the coded gradient with
    a clean one, without and with the corrector.
    """

    role: Role
    stage: Ordinal | None = None
    state: Literal["joining", "syncing", "online", "draining", "offline"]
    step: Count = 0
    training: bool = False
    addresses: tuple[Annotated[str, Field(max_length=MAX_ADDRESS_CHARACTERS)], ...] = Field(
        default=(), max_length=16
    )
    loss: Annotated[float, Field(allow_inf_nan=False)] | None = None
    tokens_per_s: Measure | None = None
    upload_mbps: Measure | None = None
    download_mbps: Measure | None = None
    versions: tuple[Count, ...] = Field(default=(), max_length=32)
    stages: tuple[Ordinal, Ordinal] | None = None
    priors: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")], ...] = Field(default=(), max_length=16)
    prior_age: Count | None = None
    coded_cosine: Cosine | None = None
    raw_cosine: Cosine | None = None
    corrected_cosine: Cosine | None = None


class ManifestPointer(_Record):
    """Where a run's manifest can be had; `peer_id` is its holder, who signs this pointer.

    manifest_sha256: hash of the manifest's canonical bytes (hex); nbytes: their number; name: the run's
    name for people.
    """

    manifest_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    nbytes: Annotated[int, Field(ge=1, le=2**30)]
    name: Annotated[str, Field(max_length=128)]


class PriorRecord(_Record):
    """A prior that an anchor has fitted, and serves; `peer_id` is the anchor, who signs this.

    kind: what it is for. part: ordinal of the boundary (between stages part and part + 1), or of the corrector's
    stage. step: version of the weights it was fitted at. sha256, nbytes: of the file.
    """

    kind: Literal["boundary", "corrector"]
    part: Annotated[int, Field(ge=0, le=4095)]
    step: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    nbytes: Annotated[int, Field(ge=1, le=MAX_PRIOR_BYTES)]


class GrantRecord(_Record):
    """The owner's latest grant (`dht.grants`). `peer_id` is whoever put it up: all peers share one place for it.

    grant: its bytes; a record is valid only if the owner of its run has signed them.
    """

    grant: bytes = Field(max_length=MAX_GRANT_BYTES)

    @property
    def content(self) -> AnchorGrant:
        """The grant. Raises GrantError if it is not its owner's, which no decoded record's is."""
        return decode_grant(self.grant)

    @property
    def order(self) -> tuple[int, float]:
        """A grant of a higher number is newer, whoever put it up."""
        return (self.content.number, self.expires_at)


Record = PeerRecord | ManifestPointer | PriorRecord | GrantRecord
_KINDS: dict[str, type[Record]] = {
    "peer": PeerRecord,
    "manifest": ManifestPointer,
    "prior": PriorRecord,
    "grant": GrantRecord,
}

MANIFESTS_KEY = f"swarm-peer/{PROTOCOL_VERSION}/manifests"
"""DHT key of all manifest pointers; the noticeboard serves several runs."""


def peers_key(run_id: str) -> str:
    """DHT key of a run's peer records."""
    return f"swarm-peer/{PROTOCOL_VERSION}/run/{run_id}/peers"


def priors_key(run_id: str) -> str:
    """DHT key of the priors that a run's anchors offer."""
    return f"swarm-peer/{PROTOCOL_VERSION}/run/{run_id}/priors"


def grants_key(run_id: str) -> str:
    """DHT key of the grant of a run's owner."""
    return f"swarm-peer/{PROTOCOL_VERSION}/run/{run_id}/grants"


def place_of(record: Record) -> tuple[str, str]:
    """DHT key and subkey where a record stands; it is valid nowhere else."""
    if isinstance(record, PriorRecord):
        return priors_key(record.run_id), f"{record.peer_id}/{record.kind}/{record.part}"
    if isinstance(record, GrantRecord):
        return grants_key(record.run_id), "grant"
    if isinstance(record, ManifestPointer):
        return MANIFESTS_KEY, f"{record.peer_id}/{record.run_id}"
    return peers_key(record.run_id), record.peer_id


def encode_record(record: Record, identity: Identity) -> bytes:
    """Sign and serialise a record: at most `MAX_RECORD_BYTES` bytes.

    Raises RecordError ("too_large"), or ValueError if the record is not of this identity.
    """
    if record.peer_id != identity.peer_id or record.public_key != identity.public_key:
        raise ValueError(f"record of {record.peer_id} cannot be signed by {identity.peer_id}")
    kind = next(kind for kind, model in _KINDS.items() if type(record) is model)
    payload: bytes = msgpack.packb(record.model_dump(exclude_none=True), use_bin_type=True)
    signature = identity.sign(_signed_bytes(kind, payload))
    data: bytes = msgpack.packb([kind, payload, signature], use_bin_type=True)
    if len(data) > MAX_RECORD_BYTES:
        raise RecordError("too_large", f"record of {len(data)} bytes; at most {MAX_RECORD_BYTES}")
    return data


def decode_record(data: bytes) -> Record:
    """The record in `data`, its form, its key and its signature checked (not its expiry: `validators`).

    Raises RecordError with the reason.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise RecordError("too_large", f"record of {len(data)} bytes; at most {MAX_RECORD_BYTES}")
    match _unpack(data):
        case (str(kind), bytes(payload), bytes(signature)) if (
            kind in _KINDS and len(signature) <= MAX_SIGNATURE_BYTES
        ):
            fields = _unpack(payload)
        case _:
            raise RecordError("malformed", "not [kind, payload, signature]")
    if not isinstance(fields, dict):
        raise RecordError("malformed", "the payload is not a mapping")
    if fields.get("protocol") != PROTOCOL_VERSION:
        raise RecordError(
            "protocol", f"protocol {str(fields.get('protocol'))[:20]}; this is {PROTOCOL_VERSION}"
        )
    try:
        record: Record = _KINDS[kind].model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))[:80]
        raise RecordError("schema", f"{where}: {first['msg']}") from error
    try:
        actual = peer_id_of(record.public_key)
    except ValueError as error:
        raise RecordError("public_key", str(error)) from error
    if actual != record.peer_id:
        raise RecordError("peer_id", f"signed by the key of {actual}, but says {record.peer_id}")
    if not verify(record.public_key, _signed_bytes(kind, payload), signature):
        raise RecordError("signature", f"wrong signature on the record of {record.peer_id}")
    if isinstance(record, GrantRecord):
        try:
            owner_of = record.content.run_id
        except GrantError as error:
            raise RecordError("owner", str(error)) from error
        if owner_of != record.run_id:
            raise RecordError("owner", f"a grant of run {owner_of} on the board of run {record.run_id}")
    return record


def hivemind_peer_id(record: Record) -> PeerID:
    """The record's peer id as hivemind's P2P takes it."""
    return PeerID.from_base58(record.peer_id)


def _signed_bytes(kind: str, payload: bytes) -> bytes:
    """What is signed: a record of one kind must not pass for another."""
    return b"record\0" + kind.encode("ascii") + b"\0" + payload


def _unpack(data: bytes) -> Any:
    """msgpack with arrays as tuples; RecordError for anything it cannot read."""
    try:
        return msgpack.unpackb(data, use_list=False, raw=False, strict_map_key=True)
    except Exception as error:  # msgpack raises ValueError kinds, UnicodeDecodeError, RecursionError-like
        raise RecordError("malformed", "not msgpack") from error
