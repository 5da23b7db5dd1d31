"""Whose priors count in a run: its anchors', or, where the manifest says so, those of peers that train.

With `anchors.source: leaders` the prior of a boundary is fitted by a peer of the stage behind it, and any peer that
trains there may offer one, of a step at which one is due. Those who code at that boundary go only by peers that they
have a link with; the others, who know them from records alone, by what those say that they hold. Who made a prior
cannot be told later, so one that a plan names is then used whoever has sealed it: such a run trusts whoever leads a
round of stage 0 not to make its codec useless.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

from dht.noticeboard import Noticeboard
from peers.prior_shelf import Offer
from peers.revoked import Revocations
from peers.sealed_prior import UntrustedPriorError, publisher_of
from swarm.manifest import RunManifest

Peers = Callable[[], tuple[str, ...]]


class PriorTrust:
    """See the module. anchors: whose priors count now, the first most; former: whose counted once.

    stage: of this peer. is_linked: whether a peer is this one, or there is a link with it.
    """

    def __init__(
        self,
        manifest: RunManifest,
        board: Noticeboard,
        anchors: Peers,
        former: Peers,
        *,
        stage: int,
        is_linked: Callable[[str], bool],
    ) -> None:
        self._stage, self._is_linked, self._every = stage, is_linked, manifest.anchors.every
        self.is_leaders = manifest.anchors.source == "leaders"
        self._run_id, self._board = manifest.run_id, board
        self._anchors, self._former = anchors, former
        self._revocations = Revocations(anchors())

    @property
    def has_makers(self) -> bool:
        """Whether anybody is expected to renew the run's priors."""
        return self.is_leaders or bool(self._anchors())

    @property
    def maker(self) -> str:
        """What those are called who make priors in this run."""
        return "peer that makes priors" if self.is_leaders else "anchor"

    @property
    def makers(self) -> tuple[str, ...]:
        """Those whose offers may count; what was said of an offer holds until this changes. Of leaders those with a
        link are there twice.
        """
        if not self.is_leaders:
            return self._anchors()
        training = sorted(peer for peer, record in self._board.view().items() if record.training)
        return (*training, *filter(self._is_linked, training))

    def rank(self, offer: Offer) -> int | None:
        """Of several offers of one step the lowest counts; None for one that does not count at all."""
        if not self.is_leaders:
            anchors = self._anchors()
            return anchors.index(offer.publisher) if offer.publisher in anchors else None
        if not self._may_lead(offer) or self.is_unlinked(offer):
            return None
        return leader_rank(self._run_id, offer.part.ordinal, offer.step, offer.publisher)

    def is_unlinked(self, offer: Offer) -> bool:
        """Whether an offer is only not judged yet: its maker may make it, and the link that this peer goes by is not
        there (any more).
        """
        is_ours = self.is_leaders and self._stage in offer.part.stages
        return is_ours and self._may_lead(offer) and not self._is_linked(offer.publisher)

    def _may_lead(self, offer: Offer) -> bool:
        """Whether a peer trains where priors of this part are made, and one is due of this step."""
        record = self._board.view().get(offer.publisher)
        is_boundary = offer.part.kind == "boundary"
        if not is_boundary or record is None or not record.training or record.stage != offer.part.stages[-1]:
            return False
        return offer.step > 0 and offer.step % self._every == 0

    def look(self, offered: Iterable[str], now: float) -> None:
        """Take in what the owner has granted and revoked since. offered: hashes of the offers that are known."""
        self._revocations.change(self._anchors(), self._former(), offered, now)

    def named(self, hashes: Iterable[str], now: float) -> None:
        """A plan that is adopted names priors with these hashes."""
        self._revocations.named(hashes, now)

    def check(self, data: bytes, sha256: str, *, is_named: bool) -> None:
        """Raise UntrustedPriorError unless a prior's file may be used. is_named: by a plan: then it may be of an anchor
        that was revoked since (`peers.revoked`).
        """
        publisher = publisher_of(data, self._run_id)
        if self.is_leaders or self._revocations.accepts(publisher, sha256, is_named=is_named):
            return
        raise UntrustedPriorError(f"{publisher[-8:]} made it, who is no anchor of this run")


def leader_rank(run_id: str, boundary: int, step: int, peer: str) -> int:
    """A peer's place in the seeded order in which a stage's peers fit the prior of a boundary at a step."""
    text = f"prior/{run_id}/{boundary}/{step}/{peer}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
