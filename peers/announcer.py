"""What a peer says of itself on the noticeboard."""

from __future__ import annotations

import hashlib
import logging
import math

from dht.identity import Identity
from dht.noticeboard import Noticeboard
from dht.records import ManifestPointer, PeerRecord, Role
from peers.lifecycle import Lifecycle
from peers.priors import Priors
from peers.snapshots import Snapshots
from peers.status import StatusBoard
from peers.trainer import Trainer
from swarm.manifest import RunManifest

logger = logging.getLogger("swarm_peer.announcer")


class Announcer:
    """Publishes this peer's record, as its state stands when asked. A seed also points to the manifest."""

    def __init__(
        self,
        board: Noticeboard,
        identity: Identity,
        manifest: RunManifest,
        role: Role,
        stage: int | None,
        addresses: tuple[str, ...],
        lifecycle: Lifecycle,
        status: StatusBoard,
    ) -> None:
        self.trainer: Trainer | None = None
        self.snapshots: Snapshots | None = None
        self.priors: Priors | None = None
        self.span: tuple[int, int] | None = None
        self._board, self._identity, self._manifest = board, identity, manifest
        self._role, self._stage, self._addresses = role, stage, addresses
        self._lifecycle, self._status = lifecycle, status

    async def point_to_manifest(self) -> None:
        """Say that the run's manifest can be had here."""
        data = self._manifest.canonical_bytes()
        pointer = ManifestPointer(
            run_id=self._manifest.run_id,
            peer_id=self._identity.peer_id,
            public_key=self._identity.public_key,
            incarnation=self._identity.incarnation,
            manifest_sha256=hashlib.sha256(data).hexdigest(),
            nbytes=len(data),
            name=self._manifest.name,
        )
        await self._board.publish(pointer)

    def _measured(self) -> dict[str, float]:
        """What an anchor has measured of coding and correcting, as far as it is a number."""
        figures = self._status.anchor
        names = ("coded_cosine", "raw_cosine", "corrected_cosine")
        found = {name: getattr(figures, name, None) for name in names}
        return {
            name: min(1.0, max(-1.0, value))  # rounding
            for name, value in found.items()
            if value is not None and math.isfinite(value)
        }

    async def publish(self) -> None:
        """Renew this peer's record; a failure is logged and the next one tries again."""
        status, trainer, snapshots = self._status.snapshot(), self.trainer, self.snapshots
        loss: float | None = status["loss"]
        record = PeerRecord(
            run_id=self._manifest.run_id,
            peer_id=self._identity.peer_id,
            public_key=self._identity.public_key,
            incarnation=self._identity.incarnation,
            role=self._role,
            stage=self._stage,
            stages=self.span,
            state=self._lifecycle.state,
            step=trainer.version if trainer is not None else 0,
            training=trainer is not None and trainer.is_voting and self._lifecycle.state == "online",
            addresses=self._addresses,
            loss=loss if loss is not None and math.isfinite(loss) else None,
            tokens_per_s=status["tokens_per_s"],
            upload_mbps=status["upload_mbps"],
            download_mbps=status["download_mbps"],
            versions=tuple(snapshots.served[-32:]) if snapshots is not None else (),
            priors=self.priors.names if self.priors is not None else (),
            prior_age=self.priors.age if self.priors is not None else None,
        )
        record = record.model_copy(update=self._measured())
        try:
            await self._board.publish(record)
        except (TimeoutError, OSError) as error:
            logger.warning("could not publish this peer's record: %s", error or type(error).__name__)
