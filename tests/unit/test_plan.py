from __future__ import annotations

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from swarm.plan import MAX_SAMPLES_PER_STEP, MicrobatchKey, Plan, Slot, group_id, seeded_order, split_samples

DIGEST = "a" * 64


def plan(**changes: object) -> Plan:
    values: dict[str, object] = {
        "step": 3,
        "attempt": 0,
        "group": "",
        "rows_per_microbatch": 2,
        "slots": (Slot(number=0, samples=(4, 5, 6)), Slot(number=1, samples=(7, 8))),
        "prior_versions": (0, 1),
        "prior_hashes": ("", DIGEST),
    }
    return Plan(**{**values, **changes})  # type: ignore[arg-type]


def test_plan_survives_the_wire_with_its_hash() -> None:
    again = Plan.from_bytes(plan().to_bytes())
    assert again == plan() and again.digest() == plan().digest()


@pytest.mark.parametrize(
    "change",
    [
        {"step": 4},
        {"attempt": 1},
        {"group": DIGEST},
        {"rows_per_microbatch": 1},
        {"slots": (Slot(number=0, samples=(4, 5, 6, 7, 8)),)},
        {"slots": (Slot(number=0, samples=(4, 5, 6)), Slot(number=1, samples=(8, 7)))},
        {"prior_versions": (0, 2)},
        {"prior_hashes": ("", "b" * 64)},
        {"is_last": True},
        {"keep_snapshot": True},
    ],
)
def test_hash_covers_everything_that_decides_what_is_computed(change: dict[str, object]) -> None:
    assert plan(**change).digest() != plan().digest()


def test_slots_are_cut_into_whole_microbatches_and_a_rest() -> None:
    assert plan().microbatches(0) == [(4, 5), (6,)]
    keys = list(plan().keys())
    assert [(key.slot, key.microbatch) for key in keys] == [(0, 0), (0, 1), (1, 0)]
    assert {key.plan for key in keys} == {plan().digest()}


@given(st.binary(max_size=200))
def test_garbage_is_no_plan_and_says_so(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a plan"):
        Plan.from_bytes(data)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("versions", "hashes"),
    [
        ((0,), ("", "")),
        ((0, 0), ("", DIGEST)),
        ((0, 1), ("", "")),
        ((0, -1), ("", DIGEST)),
        ((0, 1), ("", "x" * 64)),
        ((0, 1), ("", "a" * 65)),
    ],
)
def test_prior_is_version_and_hash_together(versions: tuple[int, ...], hashes: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="prior version"):
        plan(prior_versions=versions, prior_hashes=hashes)


@given(st.lists(values, min_size=9, max_size=9), st.integers(0, 9))
def test_well_formed_msgpack_of_the_wrong_types_is_no_plan(fields: list[object], keep: int) -> None:
    good = msgpack.unpackb(plan().to_bytes())
    data = msgpack.packb([*good[:keep], *fields[keep:]])
    try:
        Plan.from_bytes(data)
    except ValueError:
        return
    assert Plan.from_bytes(Plan.from_bytes(data).to_bytes()) == Plan.from_bytes(data)


def test_nesting_too_deep_for_python_is_no_plan() -> None:
    deep = b"\x91" * 1010 + b"\x00"
    with pytest.raises(ValueError, match="not a plan"):
        Plan.from_bytes(b"\x98" + deep + b"\x00" * 7)


@pytest.mark.parametrize("slots", [(Slot(number=1, samples=(0,)),), (), "ab"])
def test_slots_that_are_not_numbered_in_order_are_refused(slots: object) -> None:
    with pytest.raises(ValidationError):
        plan(slots=slots)


def test_step_with_too_many_samples_is_refused() -> None:
    half = tuple(range(MAX_SAMPLES_PER_STEP // 2 + 1))
    with pytest.raises(ValidationError, match="at most"):
        plan(slots=(Slot(number=0, samples=half), Slot(number=1, samples=half)))


def test_key_survives_the_wire_and_refuses_everything_else() -> None:
    key = MicrobatchKey(step=3, plan=DIGEST, slot=1, microbatch=2)
    assert MicrobatchKey.unpack(key.pack()) == key and hash(MicrobatchKey.unpack(key.pack())) == hash(key)
    for bad in (
        None,
        [],
        [3, DIGEST, 1],
        [3, DIGEST, True, 2],
        [3, "short", 1, 2],
        [-1, DIGEST, 1, 2],
        [3, DIGEST, 256, 0],
    ):
        with pytest.raises(ValueError):
            MicrobatchKey.unpack(bad)


@given(st.integers(1, 200), st.integers(1, 9), st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_split_gives_every_sample_to_one_source_in_whole_microbatches(
    samples: int, rows: int, shares: list[float]
) -> None:
    slots = split_samples(range(samples), rows, {f"peer-{i}": share for i, share in enumerate(shares)})
    assert [sample for slot in slots for sample in slot] == list(range(samples))
    assert all(len(slot) % rows == 0 for slot in slots[:-1]) and all(slots)
    assert len(slots) <= len(shares)


@given(st.integers(1, 100), st.lists(st.floats(0.1, 10), min_size=1, max_size=6))
def test_split_is_within_one_microbatch_of_the_shares(samples: int, shares: list[float]) -> None:
    slots = split_samples(range(samples), 1, {f"peer-{i}": share for i, share in enumerate(shares)})
    exact = [samples * share / sum(shares) for share in shares]
    if len(slots) == len(shares):
        assert all(abs(len(slot) - value) < 1 + 1e-9 for slot, value in zip(slots, exact, strict=True))


def test_split_without_samples_or_sources_is_refused() -> None:
    for samples, shares in (((), {"a": 1.0}), ((1,), {})):
        with pytest.raises(ValueError, match="cannot split"):
            split_samples(samples, 1, shares)


@given(st.sets(st.text(max_size=5), max_size=6), st.integers(0, 2**31), st.integers(0, 100))
@settings(max_examples=50)
def test_leaders_order_depends_on_the_set_of_peers_alone(peers: set[str], seed: int, step: int) -> None:
    order = seeded_order(sorted(peers), seed, 1, step)
    assert seeded_order(sorted(peers, reverse=True), seed, 1, step) == order
    assert sorted(order) == sorted(peers)
    gone = order[1:]
    assert seeded_order(gone, seed, 1, step) == gone, "the death of the first moves everybody up by one"


def test_leadership_changes_from_step_to_step() -> None:
    firsts = {seeded_order(["a", "b", "c"], 1, 0, step)[0] for step in range(30)}
    assert firsts == {"a", "b", "c"}


def test_group_id_names_run_stage_step_attempt_leader_and_members() -> None:
    base = ("run", 1, 2, 3, "a", ("a", "b"))
    ids = {group_id(*base)}
    for place, other in enumerate(("r", 0, 0, 0, "b", ("a", "c"))):
        changed = list(base)
        changed[place] = other
        ids.add(group_id(*changed))  # type: ignore[arg-type]
    assert len(ids) == 7
    assert group_id("run", 1, 2, 3, "a", ("b", "a")) == group_id(*base)
