"""Which priors count, and when a plan may name one."""

from __future__ import annotations

import hashlib

import pytest

from peers.planning import PriorRef
from peers.prior_parts import PriorPart
from peers.prior_shelf import KEPT_OFFERS, PATIENCE_S, Offer, PriorShelf, able

ROSTERS = (("a", "b"), ("c", "d"), ("e",))
NOW = 100.0
FIRST, SECOND = PriorPart("boundary", 0), PriorPart("boundary", 1)
OWN = PriorPart("corrector", 1)
PARTS = (FIRST, SECOND, *(PriorPart("corrector", stage) for stage in range(3)))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def offer(
    publisher: str = "anchor", part: PriorPart = FIRST, step: int = 5, content: str = "", nbytes: int = 9
) -> Offer:
    return Offer(publisher, part, step, digest(content or f"{part}/{step}"), nbytes)


def shelf(*offers: Offer) -> PriorShelf:
    made = PriorShelf(["anchor", "second"], PARTS, limit_bytes=100)
    for one in offers:
        assert made.take(one, NOW) == "new"
    return made


def held(*offers: Offer, by: str = "abcde") -> dict[str, tuple[str, ...]]:
    return {peer: tuple(one.name for one in offers) for peer in by}


INITIAL = (PriorRef(),) * len(PARTS)


def test_prior_is_named_when_every_peer_of_both_its_stages_holds_it() -> None:
    one = offer()
    assert shelf(one).choose(INITIAL, held(one, by="abc"), ROSTERS, NOW) == INITIAL
    assert shelf(one).choose(INITIAL, held(one, by="abcd"), ROSTERS, NOW) == (
        PriorRef(1, one.sha256),
        *INITIAL[1:],
    )


def test_correctors_prior_is_named_by_the_peers_of_its_own_stage_alone() -> None:
    one = offer(part=OWN)
    assert shelf(one).choose(INITIAL, held(one, by="abce"), ROSTERS, NOW) == INITIAL
    named = shelf(one).choose(INITIAL, held(one, by="cd"), ROSTERS, NOW)
    assert [ref.version for ref in named] == [0, 0, 0, 1, 0]
    assert named[3] == PriorRef(1, one.sha256)
    late = shelf(one).choose(INITIAL, held(one, by="c"), ROSTERS, NOW + PATIENCE_S + 1)
    assert late == named


@pytest.mark.parametrize(("by", "is_named"), [("abc", True), ("ac", True), ("abe", False), ("", False)])
def test_after_patience_half_of_each_stage_is_enough(by: str, is_named: bool) -> None:
    one = offer()
    chosen = shelf(one).choose(INITIAL, held(one, by=by), ROSTERS, NOW + PATIENCE_S + 1)
    assert (chosen[0] != PriorRef()) is is_named


def test_nothing_is_named_for_a_stage_without_a_peer() -> None:
    one = offer()
    assert shelf(one).choose(INITIAL, held(one), (("a",), (), ("e",)), NOW + 99) == INITIAL


def test_the_newest_that_may_be_named_is_and_a_plan_never_goes_back() -> None:
    old, new = offer(step=5), offer(step=10)
    both = shelf(old, new)
    first = both.choose(INITIAL, held(old), ROSTERS, NOW)
    assert first[0] == PriorRef(1, old.sha256)
    second = both.choose(first, held(old, new), ROSTERS, NOW)
    assert second[0] == PriorRef(2, new.sha256)
    assert both.choose(second, held(old), ROSTERS, NOW) == second
    assert both.choose(second, held(old, new), ROSTERS, NOW) == second, "the same prior keeps its version"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (offer(publisher="nobody"), "stranger"),
        (offer(part=PriorPart("boundary", 2)), "part"),
        (offer(part=PriorPart("boundary", -1)), "part"),
        (offer(part=PriorPart("corrector", 3)), "part"),
        (offer(nbytes=101), "size"),
    ],
)
def test_offers_that_do_not_count_are_counted_once(bad: Offer, reason: str) -> None:
    one = shelf()
    assert [one.take(bad, NOW), one.take(bad, NOW)] == [reason, None]
    assert one.counters == {reason: 1}
    assert all(one.newest(part) is None for part in PARTS)


@pytest.mark.parametrize("is_first_known", [True, False])
def test_of_two_priors_of_one_version_that_of_the_first_anchor_counts(is_first_known: bool) -> None:
    first, second = offer(content="x"), offer("second", content="y")
    one = shelf()
    for which in (first, second) if is_first_known else (second, first):
        one.take(which, NOW)
    assert one.newest(FIRST) == first
    assert one.counters["conflict"] == 1


def test_offer_of_a_stranger_counts_once_the_owner_grants_and_no_more_once_it_revokes() -> None:
    late = offer("late", step=7)
    one = shelf(offer(step=5))
    assert one.take(late, NOW) == "stranger"
    one.recognise(("anchor", "second", "late"))
    assert one.take(late, NOW) == "new"
    chosen = one.choose(INITIAL, held(late), ROSTERS, NOW)
    assert chosen[0] == PriorRef(1, late.sha256)
    one.recognise(("anchor", "second"))
    assert one.newest(FIRST) == offer(step=5)
    assert one.choose(chosen, held(late), ROSTERS, NOW) == chosen, (
        "what is in force stays until it is replaced"
    )
    replaced = one.choose(chosen, held(late, offer(step=5)), ROSTERS, NOW)
    assert replaced[0] == PriorRef(2, offer(step=5).sha256), "by any anchor's, of older weights too"


def test_revoked_anchors_offers_of_weights_that_never_were_stand_in_nobodys_way() -> None:
    one = shelf(*(offer("second", step=2**40 + number) for number in range(KEPT_OFFERS)))
    in_force = one.choose(INITIAL, held(offer("second", step=2**40)), ROSTERS, NOW)
    one.recognise(("anchor",))
    one.take(offer(step=9), NOW)
    assert one.newest(FIRST) == offer(step=9)
    assert one.choose(in_force, held(offer(step=9)), ROSTERS, NOW)[0].sha256 == offer(step=9).sha256


def test_offers_beyond_the_run_are_forgotten() -> None:
    one = shelf(offer(step=5), offer("second", step=2**40))
    one.forget_beyond(60)
    assert one.newest(FIRST) == offer(step=5)


def test_one_prior_offered_for_two_versions_is_two_offers() -> None:
    again = [offer("second", step=step, content="same") for step in (1, 50)]
    one = shelf(*again, *(offer(step=step) for step in range(2, 2 + KEPT_OFFERS)))
    chosen = one.choose(INITIAL, held(again[1]), ROSTERS, NOW + PATIENCE_S + 1)
    assert chosen[0].sha256 == again[1].sha256


def test_anchors_offer_replaces_that_of_one_that_was_revoked() -> None:
    one = shelf(offer(content="x"))
    one.recognise(("second",))
    assert one.take(offer("second", content="y"), NOW) == "new"
    found = one.newest(FIRST)
    assert found is not None and found.publisher == "second"


def test_where_peers_make_priors_the_lowest_rank_counts_and_who_leaves_takes_nothing_back() -> None:
    ranks = {"a": 3, "b": 1}
    one = PriorShelf(("a", "b"), PARTS, 100, lambda offer: ranks.get(offer.publisher))
    assert one.take(offer("c"), NOW) == "stranger"
    assert one.take(offer("a", content="x"), NOW) == "new"
    assert one.take(offer("b", content="y"), NOW) == "new"
    assert one.take(offer("a", content="z"), NOW) == "conflict"
    first = one.newest(FIRST)
    assert first is not None and first.publisher == "b"
    ranks.clear()
    one.recognise(())
    assert one.newest(FIRST) == first
    assert one.choose(INITIAL, held(first), ROSTERS, NOW)[0] == PriorRef(1, first.sha256)


def test_a_plan_goes_from_the_second_anchors_prior_to_the_firsts_of_the_same_step_and_not_back_between() -> (
    None
):
    old, theirs, ours = offer(step=5), offer("second", step=10, content="y"), offer(step=10, content="x")
    one = shelf(old, theirs)
    current = one.choose(INITIAL, held(old, theirs), ROSTERS, NOW)
    assert current[0].sha256 == theirs.sha256
    assert one.take(ours, NOW) == "new" and one.counters["conflict"] == 1
    assert one.choose(current, held(old, theirs), ROSTERS, NOW) == current, "nobody has the other one yet"
    assert one.find(FIRST, theirs.sha256) == theirs, "its age is still known"
    after = one.choose(current, held(old, theirs, ours), ROSTERS, NOW)
    assert after[0] == PriorRef(2, ours.sha256)
    assert one.choose(after, held(old, theirs, ours), ROSTERS, NOW) == after


def test_where_the_maker_of_a_replaced_prior_is_revoked_an_older_one_may_replace_it() -> None:
    old, theirs, ours = offer(step=5), offer("second", step=10, content="y"), offer(step=10, content="x")
    one = shelf(old, theirs, ours)
    in_force = (PriorRef(3, theirs.sha256), *INITIAL[1:])
    assert one.choose(in_force, held(old), ROSTERS, NOW) == in_force
    one.recognise(("anchor",))
    assert one.choose(in_force, held(old), ROSTERS, NOW)[0] == PriorRef(4, old.sha256)


def test_an_offer_that_came_too_early_is_looked_at_again() -> None:
    one = shelf(offer(step=50))
    one.forget_beyond(20)
    assert one.newest(FIRST) is None
    assert one.take(offer(step=50), NOW) is None
    one.forget_beyond(60)
    assert one.take(offer(step=50), NOW) == "new"


def test_offers_that_come_too_early_push_nothing_out() -> None:
    one = shelf(offer(step=5))
    one.forget_beyond(20)
    for step in range(21, 21 + 2 * KEPT_OFFERS):
        assert one.take(offer(step=step), NOW) is None
    assert one.newest(FIRST) == offer(step=5)
    one.forget_beyond(21)
    assert one.take(offer(step=21), NOW) == "new"


def test_sources_that_say_they_lack_a_prior_get_no_slots_unless_all_do() -> None:
    one = offer()
    holds, lacks = (one.name,), ("0" * 16,)
    assert able("abc", one.sha256, {"a": holds, "b": lacks}) == ["a", "c"], (
        "nobody knows of c that it lacks it"
    )
    assert able("abc", "", {"a": lacks, "b": lacks, "c": lacks}) == ["a", "b", "c"], (
        "all have the initial one"
    )
    assert able("ab", one.sha256, {"a": lacks, "b": ()}) == ["a", "b"]


def test_memory_is_bounded() -> None:
    one = shelf(*(offer(step=step) for step in range(100)))
    assert sum(one.find(FIRST, offer(step=step).sha256) is not None for step in range(100)) == KEPT_OFFERS
    for number in range(10_000):
        one.take(offer(publisher=f"stranger-{number}"), NOW)
    assert one.counters["stranger"] == 10_000
    newest = one.newest(FIRST)
    assert newest is not None and newest.step == 99
