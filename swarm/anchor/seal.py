"""Who made a prior: a seal in the file's own metadata, so that it is worth as much wherever the file comes from.

The seal is a second string of the safetensors metadata, `seal`: JSON with publisher (peer id), public_key and
signature (hex). What is signed is a hash over everything else: the header without the seal, as compact JSON with
sorted keys, and the arrays' bytes. The header is written in exactly that form, which is compared when a seal is
read: so no two readers can see different headers in one sealed file.
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm.anchor.prior_file import SEAL_BYTES, SEAL_KEY, PriorFileError

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_LARGEST_HEADER = 2**24
Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$", max_length=2048)]


class SealError(PriorFileError):
    """A prior file of which nobody can be held to be the maker."""


class Seal(BaseModel):
    """publisher: peer id, the hash of public_key (DER). signature: over `content_hash` of the file, by that key."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    publisher: str = Field(max_length=64)
    public_key: Hex
    signature: Hex


def content_hash(data: bytes) -> bytes:
    """What a seal signs: sha256 of a prior file without its seal. Raises PriorFileError."""
    header, body = _split(data)
    header.get(_METADATA, {}).pop(SEAL_KEY, None)
    digest = hashlib.sha256(_canonical(header))
    digest.update(body)
    return digest.digest()


def with_seal(data: bytes, seal: Seal) -> bytes:
    """The file with this seal in place of any other. Raises PriorFileError, ValueError for a seal that is too long."""
    header, body = _split(data)
    metadata = header.setdefault(_METADATA, {})
    metadata[SEAL_KEY] = _text(seal)
    nbytes = len(json.dumps(metadata[SEAL_KEY])) + len(SEAL_KEY) + 16
    if nbytes > SEAL_BYTES:
        raise ValueError(f"a seal of {nbytes} bytes; at most {SEAL_BYTES}")
    head = _canonical(header)
    return _LENGTH.pack(len(head)) + head + body


def seal_of(data: bytes) -> Seal:
    """The seal of a file. Raises SealError if it has none, or its header is not written as sealed ones are, and
    PriorFileError if it is no safetensors file.
    """
    header, body = _split(data)
    metadata = header.get(_METADATA)
    text = metadata.get(SEAL_KEY) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise SealError("prior file: it has no seal: nobody says who made it")
    if bytes(memoryview(data)[_LENGTH.size : len(data) - len(body)]) != _canonical(header):
        raise SealError("prior file: its header is not written as a sealed one is")
    try:
        seal = Seal.model_validate_json(text)
    except ValidationError as error:
        raise SealError(f"prior file: its seal is none ({error.errors()[0]['msg']:.80})") from error
    if text != _text(seal):  # or one prior could be had under any number of hashes
        raise SealError("prior file: its seal is not written as seals are")
    return seal


def _text(seal: Seal) -> str:
    """The one spelling of a seal."""
    return json.dumps(seal.model_dump(), sort_keys=True, separators=(",", ":"))


def _canonical(header: dict[str, Any]) -> bytes:
    """A header's bytes: compact JSON with sorted keys, and spaces up to a multiple of eight."""
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _split(data: bytes) -> tuple[dict[str, Any], memoryview]:
    """Header and arrays of a safetensors file. Raises PriorFileError."""
    if len(data) < _LENGTH.size:
        raise PriorFileError(f"prior file: {len(data)} bytes hold no header")
    (length,) = _LENGTH.unpack_from(data)
    if length > min(_LARGEST_HEADER, len(data) - _LENGTH.size):
        raise PriorFileError(f"prior file: a header of {length} bytes in {len(data)} bytes")
    end = _LENGTH.size + length
    try:
        header = json.loads(data[_LENGTH.size : end])
    except (ValueError, RecursionError) as error:
        raise PriorFileError(f"prior file: its header is no JSON: {error}") from error
    if not isinstance(header, dict) or not isinstance(header.get(_METADATA, {}), dict):
        raise PriorFileError("prior file: its header is no object with metadata")
    return header, memoryview(data)[end:]
