"""Whether the ledgers of a round's members partition the plan, and what to do where they do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from peers.round_messages import Arrival, CompactKey


@dataclass(frozen=True, slots=True)
class Coverage:
    """doubled: members to be fenced. uncovered: keys that nobody has. lost: keys that nobody can give."""

    doubled: tuple[str, ...]
    uncovered: tuple[CompactKey, ...]
    lost: tuple[CompactKey, ...]


def cover(plan: frozenset[CompactKey], arrivals: Mapping[str, Arrival], leader: str) -> Coverage:
    """Compare ledgers (in roster order) with the plan.

    Of two that share a key the smaller one has to go, of equal ones the later; never the leader's. A ledger
    with a key that the plan does not have has to go too.
    """
    order = {peer: number for number, peer in enumerate(arrivals)}
    by_size = sorted(arrivals, key=lambda peer: (peer != leader, -len(arrivals[peer].keys), order[peer]))
    held: set[CompactKey] = set()
    doubled: list[str] = []
    for peer in by_size:
        keys = arrivals[peer].keys
        if peer != leader and not (held.isdisjoint(keys) and plan.issuperset(keys)):
            doubled.append(peer)
        else:
            held.update(keys)
    given_up = {key for arrival in arrivals.values() for key in arrival.lost}
    lost = (given_up & plan) - held
    return Coverage(tuple(doubled), tuple(sorted(plan - held - lost)), tuple(sorted(lost)))
