"""Whose frames are taken before and after anything names their sender."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from peers.frames import Frame, FrameError, Kind
from peers.gate import Gate
from peers.limits import LIMITS
from peers.link import Hello


@dataclass(eq=False)
class Neighbour:
    """What the gate sees of a link."""

    peer: str
    stage: int
    is_open: bool = True
    refused: list[str] = field(default_factory=list)

    @property
    def hello(self) -> Hello:
        return Hello("a" * 40, self.stage, 1)

    def refuse(self, reason: str) -> None:
        self.refused.append(reason)


class Setting:
    """A gate of stage 1, and what names peers."""

    def __init__(self) -> None:
        self.records: set[tuple[str, int]] = set()
        self.round: set[tuple[str, int]] = set()
        self.gate = Gate(
            lambda: None,
            lambda peer, stage: (peer, stage) in self.records,
            lambda peer, stage: (peer, stage) in self.round,
        )

    def admits(self, link: Any, kind: Kind) -> bool:
        return self.gate.admits(link, Frame(kind, {}))


@pytest.mark.parametrize("source", ["records", "round"])
def test_a_neighbour_is_heard_once_its_record_or_its_round_names_it_in_its_stage(source: str) -> None:
    setting, link = Setting(), Neighbour("joiner", 1)
    assert not setting.admits(link, Kind.AVERAGE)
    assert link.refused == ["stranger"]
    getattr(setting, source).add(("joiner", 2))
    assert not setting.admits(link, Kind.AVERAGE), "named in another stage than it says"
    getattr(setting, source).add(("joiner", 1))
    assert setting.admits(link, Kind.AVERAGE)
    getattr(setting, source).clear()
    assert setting.admits(link, Kind.AVERAGE), "who was known stays known while the link stands"
    assert not setting.admits(Neighbour("joiner", 1), Kind.AVERAGE), "another link is another matter"


def test_what_leads_to_being_known_is_taken_from_everybody() -> None:
    setting, link = Setting(), Neighbour("stranger", 0)
    assert all(setting.admits(link, kind) for kind in (Kind.START, Kind.QUERY, Kind.ANSWER))
    assert link.refused == []


def test_ready_of_a_newcomer_counts_once_it_is_known() -> None:
    setting, link = Setting(), Neighbour("joiner", 2)
    assert not setting.admits(link, Kind.READY)
    assert setting.gate.newly_known() == []
    setting.records.add(("joiner", 2))
    assert setting.gate.newly_known() == [link]
    assert setting.gate.newly_known() == []


def test_a_stranger_that_goes_on_is_an_offender() -> None:
    setting, link = Setting(), Neighbour("stranger", 1)
    for _ in range(LIMITS.stranger_frames):
        assert not setting.admits(link, Kind.AVERAGE)
    with pytest.raises(FrameError, match="no record"):
        setting.admits(link, Kind.AVERAGE)
