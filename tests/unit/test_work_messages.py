"""READY, FENCE and MISSING survive the wire, and nothing else gets through."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from peers.frames import FrameError
from peers.work_messages import Fence, Missing, Ready, parse_fence, parse_missing, parse_ready
from swarm.plan import Plan, Slot

PLAN = Plan(
    step=3,
    attempt=0,
    group="",
    rows_per_microbatch=2,
    slots=(Slot(number=0, samples=(0, 1, 2)), Slot(number=1, samples=(3, 4))),
    prior_versions=(),
    prior_hashes=(),
)


def over_the_wire(header: dict[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = msgpack.unpackb(msgpack.packb(header))
    return read


def test_messages_come_back_as_they_were_sent() -> None:
    fence = Fence(PLAN.digest(), "peer", "key")
    assert parse_fence(over_the_wire(fence.header())) == fence
    for ready in (Ready(7), Ready(7, ("peer", "other"))):
        assert parse_ready(over_the_wire(ready.header())) == ready
    missing = Missing(PLAN.digest(), ((0, 1), (1, 0)))
    assert parse_missing(over_the_wire(missing.header())) == missing
    assert [(key.slot, key.microbatch) for key in missing.of(PLAN)] == [(0, 1), (1, 0)]
    assert set(missing.of(PLAN)) < set(PLAN.keys())


@pytest.mark.parametrize(
    "change",
    [{"plan": "short"}, {"plan": 5}, {"peer": ""}, {"peer": "x" * 200}, {"peer": None}, {"reason": []}],
)
def test_malformed_fence_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        parse_fence({**Fence(PLAN.digest(), "peer", "key").header(), **change})


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"step": -1},
        {"step": "1"},
        {"step": 1, "without": "peer"},
        {"step": 1, "without": [1]},
        {"step": 1, "without": [""]},
        {"step": 1, "without": ["x" * 200]},
        {"step": 1, "without": ["peer"] * 33},
    ],
)
def test_malformed_ready_is_refused(header: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        parse_ready(header)


@pytest.mark.parametrize(
    "keys", [None, [1], [[1]], [["0", 0]], [[True, 0]], [[-1, 0]], [[0, 2**40]], [[0, 0]] * 70_000]
)
def test_malformed_missing_is_refused(keys: Any) -> None:
    with pytest.raises(FrameError):
        parse_missing({"plan": PLAN.digest(), "keys": keys})


@pytest.mark.parametrize("key", [(2, 0), (0, 2), (1, 1)])
def test_keys_the_plan_does_not_have_are_refused(key: tuple[int, int]) -> None:
    with pytest.raises(FrameError, match="no microbatch"):
        Missing(PLAN.digest(), (key,)).of(PLAN)


def test_keys_of_another_plan_are_refused() -> None:
    with pytest.raises(FrameError, match="looked up"):
        Missing("0" * 64, ((0, 0),)).of(PLAN)
