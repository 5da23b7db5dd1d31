"""READY, FENCE and MISSING: what a stage tells the previous one about its work, as checked values.

Everything here arrives from remote peers: `parse_*` raise FrameError and nothing else.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any

from peers.frames import FrameError, need, need_count
from peers.round_messages import HASH_LENGTH, MAX_STEP, CompactKey
from swarm.plan import MAX_SAMPLES_PER_STEP, MAX_SLOTS, MicrobatchKey, Plan

MAX_PEER_ID = 128
MAX_REASON = 40
MAX_WITHOUT = 32
"""Peers one READY names: its header is a short one."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The sender works in its stage from this step on. without: replicas of it that the stage goes on without."""

    step: int
    without: tuple[str, ...] = ()

    def header(self) -> dict[str, Any]:
        """Wire form."""
        return {"step": self.step} | ({"without": list(self.without)} if self.without else {})


def parse_ready(header: dict[str, Any]) -> Ready:
    """A READY frame's header."""
    without = header.get("without", [])
    if not isinstance(without, list) or len(without) > MAX_WITHOUT:
        raise FrameError("header", "a READY names a few peers its stage goes on without")
    if not all(isinstance(peer, str) and 0 < len(peer) <= MAX_PEER_ID for peer in without):
        raise FrameError("header", "a READY names something that is no peer")
    return Ready(need_count(header, "step", MAX_STEP), tuple(without))


@dataclass(frozen=True, slots=True)
class Fence:
    """`peer` takes no more work of the plan with this hash: what it has of it is void and goes elsewhere."""

    plan: str
    peer: str
    reason: str

    def header(self) -> dict[str, Any]:
        """Wire form."""
        return {"plan": self.plan, "peer": self.peer, "reason": self.reason}


def parse_fence(header: dict[str, Any]) -> Fence:
    """A FENCE frame's header."""
    plan, peer = need(header, "plan", str), need(header, "peer", str)
    if len(plan) != HASH_LENGTH or not 0 < len(peer) <= MAX_PEER_ID:
        raise FrameError("header", f"a fence of {reprlib.repr(peer)} under plan {reprlib.repr(plan)}")
    return Fence(plan, peer, need(header, "reason", str)[:MAX_REASON])


@dataclass(frozen=True, slots=True)
class Missing:
    """Keys of a plan that a stage's settled ledgers lack: whoever keeps them sends them again."""

    plan: str
    keys: tuple[CompactKey, ...]

    def header(self) -> dict[str, Any]:
        """Wire form."""
        return {"plan": self.plan, "keys": [list(key) for key in self.keys]}

    def of(self, plan: Plan) -> list[MicrobatchKey]:
        """Full keys. Raises FrameError unless it is about this plan and the plan has them all."""
        digest = plan.digest()
        if digest != self.plan:
            raise FrameError("plan", f"keys of plan {self.plan[:6]} looked up in {digest[:6]}")
        for slot, number in self.keys:
            rows = plan.rows_per_microbatch
            if slot >= len(plan.slots) or number * rows >= len(plan.slots[slot].samples):
                raise FrameError("key", f"the plan of step {plan.step} has no microbatch {slot}.{number}")
        return [MicrobatchKey(step=plan.step, plan=digest, slot=s, microbatch=n) for s, n in self.keys]


def parse_missing(header: dict[str, Any]) -> Missing:
    """A MISSING frame's header."""
    plan, raw = need(header, "plan", str), need(header, "keys", list)
    if len(plan) != HASH_LENGTH or len(raw) > MAX_SAMPLES_PER_STEP:
        raise FrameError("range", f"{len(raw)} keys of plan {reprlib.repr(plan)}")
    keys: list[CompactKey] = []
    for item in raw:
        if not isinstance(item, list) or len(item) != 2 or any(type(part) is not int for part in item):
            raise FrameError("header", f"a key is [slot, microbatch], got {reprlib.repr(item):.40}")
        if not (0 <= item[0] < MAX_SLOTS and 0 <= item[1] < MAX_SAMPLES_PER_STEP):
            raise FrameError("range", f"key {item} is out of range")
        keys.append((item[0], item[1]))
    return Missing(plan, tuple(sorted(set(keys))))
