"""Which priors a peer knows of, and which one the next plan may name. Pure.

An offer counts if an anchor that the owner named or granted has signed it. Of two anchors' offers for one version
of the weights that of the first anchor counts (the manifest's order, then that of the grant); the other is a
counted conflict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from dht.records import PRIOR_NAME_CHARACTERS
from peers.planning import PriorRef
from peers.prior_parts import PriorPart

KEPT_OFFERS = 8
"""Newest offers per part that are remembered."""
PATIENCE_S = 15.0
"""A prior that not every peer of its stages has fetched so long after it was first seen is named once half of
them have it."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A prior that somebody says can be had. See `dht.records.PriorRecord`."""

    publisher: str
    part: PriorPart
    step: int
    sha256: str
    nbytes: int

    @property
    def name(self) -> str:
        """How records name it."""
        return self.sha256[:PRIOR_NAME_CHARACTERS]


def able(peers: Sequence[str], sha256: str, held: Mapping[str, Collection[str]]) -> list[str]:
    """Of these peers those that can code with a prior (hash; "" for the initial one, which all have), in their order.

    held: names of the priors that each peer says it holds; one that is not there is believed to. If none can, all are
    returned: waiting for one of them is all that is left.
    """
    name = sha256[:PRIOR_NAME_CHARACTERS]
    found = [peer for peer in peers if not name or peer not in held or name in held[peer]]
    return found or list(peers)


class PriorShelf:
    """The offers one peer has seen.

    anchors: peer ids, the first counts most. parts: the run's, in its plans' order. limit_bytes: of one prior.
    counters: offers refused, by reason (stranger, part, size), and conflicts, each offer once. rank_of: where others
    than anchors make priors: of several offers of one step that with the lowest counts, and without one none.
    """

    def __init__(
        self,
        anchors: Sequence[str],
        parts: Sequence[PriorPart],
        limit_bytes: int,
        rank_of: Callable[[Offer], int | None] | None = None,
    ) -> None:
        self._rank_of = rank_of
        self.counters: Counter[str] = Counter()
        self._anchors = tuple(anchors)
        self._ranks = {peer: rank for rank, peer in enumerate(anchors)}
        self._parts, self._limit_bytes = tuple(parts), limit_bytes
        self._offers: dict[PriorPart, dict[int, Offer]] = {part: {} for part in parts}
        self._replaced: dict[PriorPart, dict[str, Offer]] = {part: {} for part in parts}
        self._since: dict[Offer, float] = {}
        self._judged: set[Offer] = set()
        self._limit_step: int | None = None

    @property
    def hashes(self) -> list[str]:
        """Of all offers that are remembered."""
        return [offer.sha256 for offers in self._offers.values() for offer in offers.values()]

    def recognise(self, anchors: tuple[str, ...]) -> None:
        """Go by these anchors from now on: offers that were a stranger's are looked at anew, those of an anchor that
        is revoked are forgotten.
        """
        if anchors != self._anchors:
            self._anchors = anchors
            self._ranks = {peer: rank for rank, peer in enumerate(anchors)}
            self._judged.clear()
            if self._rank_of is not None:
                return  # who leaves a stage has made no worse a prior
            for offers in self._offers.values():
                for step in [step for step, offer in offers.items() if offer.publisher not in self._ranks]:
                    self._since.pop(offers.pop(step), None)
            for replaced in self._replaced.values():
                for old in [old for old, offer in replaced.items() if offer.publisher not in self._ranks]:
                    del replaced[old]

    def forget_beyond(self, step: int) -> None:
        """Forget offers that speak of later weights than there can be, and take none: they would stand before all
        others. One to come is looked at again.
        """
        self._limit_step = step
        for offers in self._offers.values():
            for later in [later for later in offers if later > step]:
                offer = offers.pop(later)
                self._since.pop(offer, None)
                self._judged.discard(offer)

    def take(self, offer: Offer, now: float) -> str | None:
        """Look at an offer. Returns "new" for one that counts from now on, the reason if it is refused, and None
        for one that was seen before, or that is not looked at yet.
        """
        if offer in self._judged or (self._limit_step is not None and offer.step > self._limit_step):
            return None
        if len(self._judged) > 64 * KEPT_OFFERS * max(1, len(self._parts)):
            self._judged.clear()  # strangers' offers cost nothing
        self._judged.add(offer)
        if self._is_known(offer):
            return None
        verdict = self._judge(offer)
        if verdict != "new":
            self.counters[verdict] += 1
            return verdict
        offers = self._offers[offer.part]
        if (before := offers.get(offer.step)) is not None:
            # It may be in force: that it is as new as this one must not be forgotten.
            replaced = self._replaced[offer.part]
            replaced[before.sha256] = before
            while len(replaced) > KEPT_OFFERS:
                replaced.pop(next(iter(replaced)))
            self._since.pop(before, None)
        offers[offer.step] = offer
        self._since[offer] = now
        while len(offers) > KEPT_OFFERS:
            self._since.pop(offers.pop(min(offers)), None)
        return verdict

    def newest(self, part: PriorPart) -> Offer | None:
        """The offer of the latest weights for a part."""
        offers = self._offers[part]
        return offers[max(offers)] if offers else None

    def find(self, part: PriorPart, sha256: str) -> Offer | None:
        """An offer by its hash, also one that another of the same step has replaced."""
        found = next((offer for offer in self._offers[part].values() if offer.sha256 == sha256), None)
        return found or self._replaced[part].get(sha256)

    def choose(
        self,
        current: Sequence[PriorRef],
        held: Mapping[str, Collection[str]],
        rosters: Sequence[Collection[str]],
        now: float,
    ) -> tuple[PriorRef, ...]:
        """The priors that the next plan names, given those of the plan in force, one per part.

        held: names of the priors that each peer holds. rosters: the peers at work in each stage. A newer prior
        is named once every peer of its stages holds it, or after `PATIENCE_S` half of each.
        """
        pairs = zip(self._parts, current, strict=True)
        return tuple(self._next(part, ref, held, rosters, now) for part, ref in pairs)

    def _next(
        self,
        part: PriorPart,
        current: PriorRef,
        held: Mapping[str, Collection[str]],
        rosters: Sequence[Collection[str]],
        now: float,
    ) -> PriorRef:
        before = self.find(part, current.sha256)
        offers = self._offers[part]
        for step in sorted(offers, reverse=True):
            offer = offers[step]
            if before is not None and (step < before.step or offer == before):
                break
            is_late = now - self._since[offer] > PATIENCE_S
            for stage in part.stages:
                peers = rosters[stage]
                have = sum(offer.name in held.get(peer, ()) for peer in peers)
                if not peers or (2 * have < len(peers) if is_late else have < len(peers)):
                    break
            else:
                return current.next(offer.sha256)
        return current

    def _is_known(self, offer: Offer) -> bool:
        return offer.part in self._offers and self._offers[offer.part].get(offer.step) == offer

    def _rank(self, offer: Offer) -> int | None:
        return self._ranks.get(offer.publisher) if self._rank_of is None else self._rank_of(offer)

    def _judge(self, offer: Offer) -> str:
        rank = self._rank(offer)
        if rank is None:
            return "stranger"
        if offer.part not in self._offers:
            return "part"
        if offer.nbytes > self._limit_bytes:
            return "size"
        known = self._offers[offer.part].get(offer.step)
        if known is not None and known.sha256 != offer.sha256:
            others = self._rank(known)
            if others is not None and others <= rank:
                return "conflict"
            self.counters["conflict"] += 1
        return "new"
