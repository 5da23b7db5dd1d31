"""Priors that say, verifiably, which anchor of which run made them (`swarm.anchor.seal`)."""

from __future__ import annotations

from dht.identity import Identity, peer_id_of, verify
from swarm.anchor.prior_file import PriorFileError
from swarm.anchor.seal import Seal, SealError, content_hash, seal_of, with_seal


class UntrustedPriorError(ValueError):
    """A prior that no anchor of this run has made, whoever names it."""


def seal_prior(data: bytes, run_id: str, identity: Identity) -> bytes:
    """A prior file with this peer's seal. Raises PriorFileError for bytes that are no safetensors file."""
    signature = identity.sign(_signed_bytes(data, run_id))
    seal = Seal(publisher=identity.peer_id, public_key=identity.public_key.hex(), signature=signature.hex())
    return with_seal(data, seal)


def publisher_of(data: bytes, run_id: str) -> str:
    """The peer that made a prior for this run. Raises UntrustedPriorError if nobody can be held to it, PriorFileError
    if it is no prior at all.
    """
    try:
        seal = seal_of(data)
        public_key, signed = bytes.fromhex(seal.public_key), _signed_bytes(data, run_id)
        if peer_id_of(public_key) != seal.publisher:
            raise UntrustedPriorError(f"its seal names {seal.publisher[-8:]}, by another peer's key")
    except SealError as error:
        raise UntrustedPriorError(str(error)) from error
    except (PriorFileError, UntrustedPriorError):
        raise
    except ValueError as error:
        raise UntrustedPriorError(f"its seal has no usable key: {error}") from error
    if not verify(public_key, signed, bytes.fromhex(seal.signature)):
        raise UntrustedPriorError(f"{seal.publisher[-8:]} has not sealed this for run {run_id}")
    return seal.publisher


def _signed_bytes(data: bytes, run_id: str) -> bytes:
    """What is signed: a prior of one run must not pass for another's."""
    return b"prior\0" + run_id.encode("ascii") + b"\0" + content_hash(data)
