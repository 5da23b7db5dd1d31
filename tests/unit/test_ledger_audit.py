"""The audit of ledgers finds what it is there to find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.kit.ledger import LedgerTail, audit, last_words, read_lines

KEYS = [[0, 0], [0, 1], [1, 0], [1, 1]]


def line(keys: list[list[int]], step: int = 3, group: str = "g", **more: Any) -> dict[str, Any]:
    base = {
        "step": step,
        "stage": 1,
        "peer": "p",
        "group": group,
        "keys": keys,
        "all_keys": KEYS,
        "roster": ["p"],
    }
    return {**base, "at": 10.0 + step, "loss": [len(keys) * 2.0, len(keys)], **more}


def test_a_partition_is_exact() -> None:
    found = audit({"a": [line(KEYS[:1])], "b": [line(KEYS[1:])]}, stages=2)
    assert found.is_exact and found.problems() == []
    assert found.losses == {3: 2.0} and found.committed_at == {(3, 1): 13.0}


def test_a_key_in_two_ledgers_is_doubled() -> None:
    found = audit({"a": [line(KEYS[:2])], "b": [line(KEYS[1:])]})
    assert set(found.doubled) == {(3, 1, 0, 1)} and not found.is_exact


def test_a_key_in_no_ledger_is_missing_unless_it_is_lost() -> None:
    assert audit({"a": [line(KEYS[1:])]}).missing == {(3, 1, 0, 0)}
    found = audit({"a": [line(KEYS[1:], lost=[[0, 0]])]})
    assert found.is_exact and found.lost == {(3, 1, 0, 0)}


def test_a_lost_key_that_was_trained_is_doubled() -> None:
    assert audit({"a": [line(KEYS, lost=[[0, 0]])]}).doubled == {(3, 1, 0, 0): 2}


def test_two_groups_of_one_step_are_a_split() -> None:
    assert audit({"a": [line(KEYS[:2])], "b": [line(KEYS[2:], group="h")]}).split == {(3, 1)}


def test_a_dead_members_ledger_counts_whole_or_not_at_all() -> None:
    words = {"step": 3, "stage": 1, "ledger": KEYS[:2]}
    assert audit({"a": [line(KEYS[2:])], "b": []}, {"b": words}).is_exact
    assert audit({"a": [line(KEYS)], "b": []}, {"b": words}).is_exact, "the group did without it"
    assert not audit({"a": [line(KEYS[1:])], "b": []}, {"b": words}).is_exact
    assert not audit({"a": [line(KEYS[3:])], "b": []}, {"b": words}).is_exact
    earlier = {"step": 2, "stage": 1, "ledger": KEYS[:2]}
    assert not audit({"a": [line(KEYS[2:])], "b": []}, {"b": earlier}).is_exact


def test_a_step_committed_with_a_member_that_was_killed_before_its_line_is_whole() -> None:
    before = line([], step=2, peer="q", all_keys=[], roster=["p", "q"])
    together = line(KEYS[2:], roster=["p", "q"])
    assert audit({"a": [together], "b": [before]}, killed=["b"]).is_exact
    assert not audit({"a": [together], "b": [before]}).is_exact
    assert not audit({"a": [line(KEYS[2:])], "b": [before]}, killed=["b"]).is_exact, "committed without it"
    long_ago = {**before, "step": 1}
    assert not audit({"a": [together], "b": [long_ago]}, killed=["b"]).is_exact


def test_a_line_that_was_begun_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    tail = LedgerTail(path)
    assert tail.fresh() == [] and read_lines(path) == []
    whole = json.dumps(line(KEYS)) + "\n"
    path.write_text(whole + whole[:20])
    assert len(read_lines(path)) == 1 and len(tail.fresh()) == 1 and tail.fresh() == []
    path.write_text(whole + whole)
    assert len(tail.fresh()) == 1 and len(tail.read()) == 2


def test_last_words_are_found_among_others() -> None:
    log = 'INFO before\n{"killed_at": "after_backward", "step": 2, "ledger": []}\n'
    assert last_words(log) == {"killed_at": "after_backward", "step": 2, "ledger": []}
    assert last_words("INFO nothing\n") is None
