"""The core of the rounds at one of four peers of a stage, and what its tests say to it."""

from __future__ import annotations

from peers import rounds
from peers.frames import Kind
from peers.round_messages import Arrival, Group, Held
from peers.rounds import RoundCore
from swarm.plan import seeded_order

KEYS = frozenset((0, number) for number in range(6))
PLAN = "p" * 64
NAMES = tuple(seeded_order([f"peer-{i}" for i in range(4)], 7, 1, 0))
"""In the order in which they lead step 0."""
LEADER = NAMES[0]
HELD = "c" * 64
"""Digest of what members hold: a corrector, or averages that have travelled."""


def core_of(me: str, roster: tuple[str, ...] = NAMES[:3], followers: tuple[str, ...] = ()) -> RoundCore:
    core = RoundCore(run_id="run", run_seed=7, stage=1, me=me, make_plan=lambda *_: (b"", ()))
    core.begin(0, roster, "", followers)
    core.on_plan(PLAN, KEYS, 0.0)
    return core


def arrival(*numbers: int, lost: tuple[int, ...] = (), held: Held | None = None) -> Arrival:
    keys = tuple((0, number) for number in numbers)
    return Arrival(0, PLAN, keys, len(keys), lost=tuple((0, n) for n in lost), held=held)


def groups(actions: list[rounds.Action]) -> list[Group]:
    found = [a.body for a in actions if isinstance(a, rounds.Send) and a.kind is Kind.GROUP]
    return [body for body in found if isinstance(body, Group)]


def entered(actions: list[rounds.Action]) -> Group:
    (exchange,) = [a for a in actions if isinstance(a, rounds.Exchange)]
    return exchange.group


def exchanging(size: int = 4) -> tuple[RoundCore, Group]:
    core = core_of(LEADER, NAMES[:size])
    core.on_ready(arrival(*range(6)), 0.0)
    actions: list[rounds.Action] = []
    for name in NAMES[1:size]:
        actions = core.on_arrive(name, arrival(), 0.0)
    return core, entered(actions)
