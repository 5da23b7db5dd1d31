"""Which anchors make a pass together, and who leads it. Pure.

An anchor that holds all stages passes alone. The others form a circuit: a row of anchors, each with the stages from
where the one before it ends. Every anchor finds the same row from the same records, and the first in it leads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peers.frames import FrameError

Span = tuple[int, int]
"""First and last stage that an anchor holds."""


@dataclass(frozen=True, slots=True)
class Leg:
    """What one anchor (peer id) does in a pass: stages `first` to `last`."""

    peer: str
    first: int
    last: int

    def pack(self) -> list[object]:
        """Wire form."""
        return [self.peer, self.first, self.last]


def circuit(spans: Mapping[str, Span], anchors: Sequence[str], stages: int) -> tuple[Leg, ...]:
    """The row of anchors that covers stages 0 to `stages` - 1; empty if these cannot, or one of them holds all.

    spans: of the anchors that are there. anchors: those whose priors count, the first most; others do not take part.
    At each stage the anchor that reaches furthest goes on, of equal ones the first: the shortest row.
    """
    here = [(peer, *spans[peer]) for peer in anchors if peer in spans]
    if any(first == 0 and last >= stages - 1 for _, first, last in here):
        return ()
    legs: list[Leg] = []
    stage = 0
    while stage < stages:
        fitting = [(peer, last) for peer, first, last in here if first <= stage <= last]
        if not fitting:
            return ()
        reach = min(max(last for _, last in fitting), stages - 1)
        peer = next(peer for peer, last in fitting if last >= reach)
        legs.append(Leg(peer, stage, reach))
        stage = reach + 1
    return tuple(legs)


def uncovered(spans: Mapping[str, Span], anchors: Sequence[str], stages: int) -> tuple[int, ...]:
    """The stages that none of these anchors holds."""
    here = [spans[peer] for peer in anchors if peer in spans]
    return tuple(s for s in range(stages) if not any(first <= s <= last for first, last in here))


def unpack_legs(value: object, stages: int) -> tuple[Leg, ...]:
    """The wire form of a row. Raises FrameError."""
    if not isinstance(value, list) or not 2 <= len(value) <= stages:
        raise FrameError("header", f"field 'legs': 2 to {stages} legs expected")
    legs = []
    for item in value:
        match item:
            case [str(peer), int(first), int(last)] if len(peer) <= 64:
                legs.append(Leg(peer, first, last))
            case _:
                raise FrameError("header", "field 'legs': [peer, first stage, last stage] expected")
    return tuple(legs)


def place_of(
    legs: Sequence[Leg], me: str, sender: str, span: Span, anchors: Sequence[str], stages: int
) -> int:
    """This anchor's place in a row that the one before it sent. Raises FrameError unless it may take part.

    The row must cover all stages in order with anchors of this run, this one with stages that it holds, and behind
    whoever sends it.
    """
    stage = 0
    for leg in legs:
        if leg.first != stage or not stage <= leg.last < stages:
            raise FrameError("range", f"the legs of a pass leave stage {stage} out")
        if leg.peer not in anchors:
            raise FrameError("stranger", f"{leg.peer[-8:]} is no anchor of this run")
        stage = leg.last + 1
    peers = [leg.peer for leg in legs]
    if stage != stages or len(set(peers)) != len(peers):
        raise FrameError(
            "range", f"the legs of a pass end at stage {stage} of {stages}, or name a peer twice"
        )
    if me not in peers[1:] or peers[peers.index(me) - 1] != sender:
        raise FrameError("stranger", f"{sender[-8:]} is not before this anchor in the pass")
    place = peers.index(me)
    if not span[0] <= legs[place].first <= legs[place].last <= span[1]:
        raise FrameError("range", f"stages {legs[place].first}-{legs[place].last} are not held here")
    return place
