"""Whose priors are used, before and after the owner revoked one."""

from __future__ import annotations

from peers.revoked import GRACE_S, Revocations


def revoked(*offered: str, has_plan: bool = True) -> Revocations:
    trust = Revocations(("good", "bad"))
    if has_plan:
        trust.named(["before"], 0.0)
    trust.change(("good",), ("bad",), offered, 100.0)
    return trust


def test_anchors_are_trusted_and_strangers_never() -> None:
    trust = Revocations(("good", "bad"))
    for is_named in (False, True):
        assert trust.accepts("good", "a", is_named=is_named)
        assert not trust.accepts("stranger", "a", is_named=is_named)


def test_revoked_anchors_prior_is_used_where_a_plan_names_it_if_it_was_offered_before() -> None:
    trust = revoked("offered")
    assert trust.accepts("bad", "offered", is_named=True)
    assert not trust.accepts("bad", "offered", is_named=False)
    assert trust.accepts("bad", "before", is_named=True), "the first plan named it"


def test_revoked_anchors_newer_prior_is_not_used_whoever_names_it() -> None:
    trust = revoked("offered")
    assert not trust.accepts("bad", "newer", is_named=True)
    trust.named(["newer"], 100.0 + GRACE_S + 1)
    assert not trust.accepts("bad", "newer", is_named=True)


def test_plan_made_by_who_had_not_heard_of_it_yet_is_followed() -> None:
    trust = revoked()
    trust.named(["older"], 100.0 + GRACE_S / 2)
    assert trust.accepts("bad", "older", is_named=True)


def test_newcomer_works_with_what_the_others_work_with() -> None:
    trust = revoked(has_plan=False)
    assert trust.accepts("bad", "theirs", is_named=True), "while it catches up"
    trust.named(["theirs"], 1000.0)
    assert trust.accepts("bad", "theirs", is_named=True)
    assert not trust.accepts("bad", "newer", is_named=True)


def test_pardon_counts() -> None:
    trust = revoked()
    trust.change(("good", "bad"), (), (), 200.0)
    assert trust.accepts("bad", "newer", is_named=False)
