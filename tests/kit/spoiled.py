"""A member of a round that lies: the same program, whose own process alters what it says before it leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import numpy as np

from peers.frames import Kind
from peers.link import Link
from peers.round_messages import Arrival, Group

Lie = Literal["nan", "x1000", "shape", "weight", "greedy"]
"""What is wrong with its contributions. nan, x1000: every value. shape: a value is missing at the end. weight: it has
less than no tokens. greedy: where it leads, it has eight times its tokens.
"""
LIES: tuple[str, ...] = get_args(Lie)

_ALTER: dict[Lie, Callable[[bytes], bytes]] = {
    "nan": lambda data: np.full(len(data) // 4, np.nan, dtype="<f4").tobytes(),
    "x1000": lambda data: (np.frombuffer(data, dtype="<f4") * np.float32(1000.0)).tobytes(),
    "shape": lambda data: data[:-4],
}


def lie(what: Lie) -> None:
    """Make this process a liar, for the rest of its life. The run has to average values of fp32.

    Its own part of the chunks that it reduces itself stays as it is: nobody else sees that one.
    """
    if what == "weight":
        _negate_weights()
        return
    if what == "greedy":
        _scale_own_weight(8)
        return
    alter, send = _ALTER[what], Link.send

    async def altered(link: Link, kind: Kind, header: Mapping[str, Any], payload: list[memoryview]) -> None:
        if kind is Kind.PART:
            payload = [memoryview(bytearray(alter(b"".join(payload))))]
        await send(link, kind, header, payload)

    Link.send = altered  # type: ignore[method-assign]


def _negate_weights() -> None:
    arrival = Arrival.header

    def of_arrival(self: Arrival) -> dict[str, Any]:
        return {**arrival(self), "weight": -self.weight}

    Arrival.header = of_arrival  # type: ignore[method-assign]
    _scale_own_weight(-1)


def _scale_own_weight(factor: int) -> None:
    """In the groups that it leads."""
    group = Group.header

    def of_group(self: Group) -> dict[str, Any]:
        weights = [
            factor * weight if member == self.leader else weight
            for member, weight in zip(self.members, self.weights, strict=True)
        ]
        return {**group(self), "weights": weights}

    Group.header = of_group  # type: ignore[method-assign]
