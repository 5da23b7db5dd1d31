"""Slots whose source is lost, fenced or begins anew are run by somebody, and by nobody twice."""

from __future__ import annotations

from typing import Any

from peers.assignments import Assignments
from peers.frames import Frame, Kind
from swarm.plan import Plan, Slot

PLAN = Plan(
    step=0,
    attempt=0,
    group="",
    rows_per_microbatch=1,
    slots=tuple(Slot(number=number, samples=(number,)) for number in range(3)),
    prior_versions=(),
    prior_hashes=(),
)


class Source:
    """A source with links to the others that carry frames at once."""

    def __init__(self, name: str, others: dict[str, Source]) -> None:
        self.name, self.others = name, others
        self.started: list[tuple[int, bool]] = []
        self.assignments = Assignments(name, self, self._run)  # type: ignore[arg-type]
        self.assignments.begin(PLAN, ["a", "b", "c"])
        others[name] = self

    def _run(self, plan: Plan, slot: int, is_replay: bool) -> None:
        self.started.append((slot, is_replay))

    def open_links(self, stage: int) -> list[Wire]:
        return [Wire(source) for name, source in self.others.items() if name != self.name]

    def get(self, digest: str) -> Plan | None:
        return PLAN if digest == PLAN.digest() else None


class Wire:
    def __init__(self, to: Source) -> None:
        self.to = to

    def post(self, kind: Kind, header: dict[str, Any]) -> None:
        self.to.assignments.on_frame(Frame(kind, header), self.to, PLAN)  # type: ignore[arg-type]


def sources() -> tuple[Source, Source, Source]:
    others: dict[str, Source] = {}
    return Source("a", others), Source("b", others), Source("c", others)


def test_every_source_starts_its_own_slot() -> None:
    for source, slot in zip(sources(), range(3), strict=True):
        source.assignments.run_own(PLAN)
        assert source.started == [(slot, False)]


def test_slots_of_lost_and_fenced_sources_go_to_the_others() -> None:
    a, b, c = sources()
    a.assignments.reassign(PLAN, ["a", "c"])
    assert (1, True) in a.started + c.started and not b.started
    a.assignments.reassign(PLAN, ["a"])
    assert {(1, True), (2, True)} <= set(a.started) and not b.started


def test_nothing_is_reassigned_while_everybody_works_or_nobody_can() -> None:
    a, b, c = sources()
    a.assignments.reassign(PLAN, ["a", "b", "c"])
    a.assignments.reassign(PLAN, [])
    assert a.started == b.started == c.started == []


def test_recovery_has_every_slot_run_by_its_source_even_after_two_leads_disagreed() -> None:
    a, b, c = sources()
    b.assignments._take(PLAN, 1, ["b", "b", "c"])  # it took itself for the lead: its word reached nobody
    b.started.clear()
    a.assignments.recover(PLAN, ["a", "b", "c"])
    assert b.started == [], "its counter is as high"
    a.assignments.recover(PLAN, ["a", "b", "c"])
    assert b.started == [(1, True)] and (0, True) in a.started and (2, True) in c.started
