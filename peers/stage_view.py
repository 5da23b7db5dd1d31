"""What the noticeboard says of one stage's peers."""

from __future__ import annotations

from collections.abc import Iterator

from dht.noticeboard import Noticeboard
from dht.records import PeerRecord


class StageView:
    """See `membership.View`. Records are words of strangers: whoever acts on them asks their peers too."""

    def __init__(self, board: Noticeboard, stage: int, me: str) -> None:
        self._board, self._stage, self._me = board, stage, me

    def donors(self) -> dict[str, tuple[int, ...]]:
        """Peers that may serve this stage's snapshots and updates, with the versions they name."""
        return {peer: record.versions for peer, record in self._others() if record.state == "online"}

    def claimants(self) -> list[str]:
        """Other peers whose records say that they train this stage."""
        return [peer for peer, record in self._others() if record.training and record.state == "online"]

    def waiting(self) -> list[str]:
        """Other peers of this stage that are online and do not train."""
        return [peer for peer, record in self._others() if record.state == "online" and not record.training]

    def knows(self, peer: str, stage: int) -> bool:
        """Whether a live record says that this peer holds this stage."""
        record = self._board.view().get(peer)
        return record is not None and record.stage == stage and record.state == "online"

    def _others(self) -> Iterator[tuple[str, PeerRecord]]:
        for peer, record in self._board.view().items():
            if peer != self._me and record.stage == self._stage:
                yield peer, record
