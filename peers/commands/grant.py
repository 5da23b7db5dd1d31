"""`swarm-peer init RUN_DIR --grant-anchor`: name anchors after the run was made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from dht.grants import MAX_GRANTED, AnchorGrant, GrantError
from peers.config import UserError
from peers.grants import FILE, read_grant, write_grant
from swarm.activation.config import BasisConfig
from swarm.anchor.registry import needs_prior
from swarm.manifest import ManifestError, RunManifest, load_owner_key


def grant_anchors(run_dir: Path, granted: Sequence[str], revoked: Sequence[str]) -> tuple[str, ...]:
    """Sign a grant that adds and revokes anchors, and put it into the run's folder; returns all anchors, in order.

    Raises UserError if the folder is no run, holds no owner key, or the peers are none that can be granted.
    """
    try:
        manifest = RunManifest.load(run_dir / "manifest.yaml")
        key = load_owner_key(run_dir / "owner.key")
        before = read_grant(run_dir, manifest.run_id)
    except FileNotFoundError as error:
        raise UserError(
            f"{error.filename} does not exist: anchors are granted in the folder that `swarm-peer init` made"
        ) from error
    except (ManifestError, GrantError, OSError) as error:
        raise UserError(str(error)) from error
    if not isinstance(manifest.codec, BasisConfig) and not needs_prior(manifest.corrector):
        raise UserError(
            f"codec {manifest.codec.name} of run {manifest.name!r} has no priors: no anchor is needed"
        )
    if manifest.anchors.source == "leaders":
        raise UserError(f"the peers of run {manifest.name!r} make its priors themselves: no anchor is needed")
    if both := sorted({*granted} & {*revoked}):
        raise UserError(f"{both[0]} is granted and revoked at once")
    named = manifest.anchors.peers
    peers = [peer for peer in (before.peers if before else ()) if peer not in revoked]
    peers += [peer for peer in dict.fromkeys(granted) if peer not in peers and peer not in named]
    gone = [peer for peer in (before.revoked if before else ()) if peer not in granted]
    gone += [peer for peer in dict.fromkeys(revoked) if peer not in gone]
    known = {*named, *(before.peers if before else ())}
    if unknown := [peer for peer in revoked if peer not in known]:
        raise UserError(f"{unknown[0]} is no anchor of run {manifest.name!r}: there is nothing to revoke")
    for peer in [peer for peer in gone if peer not in named][: max(0, len(gone) - MAX_GRANTED)]:
        gone.remove(peer)  # of the granted ones only the latest are remembered; the manifest's must be
    if len(peers) > MAX_GRANTED:
        raise UserError(
            f"{len(peers)} granted anchors: at most {MAX_GRANTED}; --revoke-anchor takes some back"
        )
    number = before.number + 1 if before else 1
    try:
        unsigned = AnchorGrant(run_id=manifest.run_id, number=number, peers=tuple(peers), revoked=tuple(gone))
    except ValidationError as error:
        bad = error.errors()[0]["input"]
        raise UserError(f"{bad!r:.80} is no peer id: `swarm-peer identity KEY_FILE` prints one") from error
    try:
        grant = unsigned.signed(key)
    except GrantError as error:
        raise UserError(f"{run_dir / 'owner.key'}: {error}") from error
    try:
        write_grant(run_dir, grant)
    except OSError as error:
        raise UserError(f"cannot write {run_dir / FILE}: {error.strerror or error}") from error
    return grant.order(named)
