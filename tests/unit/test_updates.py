"""An update file is what every member decoded, whole or refused."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peers.engine import Engine
from peers.updates import (
    MAGIC,
    Update,
    UpdateError,
    apply_update,
    averages_of,
    check_update,
    read_update,
    update_bytes,
    update_name,
    write_update,
)
from swarm.gradient.chunk import FloatChunk
from swarm.gradient.plain import PlainCompressor
from swarm.manifest import Artifact
from tests.kit.members import Members, running_engine, stage_compute, stage_run


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def made(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Update]:
    """One update of each way."""
    folder = tmp_path_factory.mktemp("run")
    members = Members(stage_run(folder), folder, engine, 3)

    async def scenario() -> dict[str, Update]:
        return {
            "exchanged": await members.step(),
            "alone": await members.step((5,)),
            "none": await members.step((0, 0, 0)),
        }

    return asyncio.run(scenario())


def same(first: Update, second: Update) -> bool:
    bare = [dataclasses.replace(update, chunks=(), slice=None) for update in (first, second)]
    slices = [
        (update.slice[0], update.slice[1].tolist()) if update.slice else None for update in (first, second)
    ]
    chunks = zip(first.chunks, second.chunks, strict=True)
    return bare[0] == bare[1] and slices[0] == slices[1] and all(torch.equal(a, b) for a, b in chunks)


@pytest.mark.parametrize("way", ["exchanged", "alone", "none"])
def test_an_update_comes_back_equal(made: dict[str, Update], way: str, tmp_path: Path) -> None:
    update, path = made[way], tmp_path / "folder" / "update"
    nbytes = write_update(path, update)
    assert nbytes == path.stat().st_size <= update_bytes(update.elements)
    again = read_update(path)
    assert same(again, update)
    again.check_content()
    assert same(check_update(path), dataclasses.replace(update, chunks=(), slice=None)) or way == "none"
    if way != "none":
        phases = PlainCompressor(update.elements, FloatChunk("fp16"), False).phases(update.step)
        [average], [decoded] = averages_of(update, phases), averages_of(again, phases)
        assert torch.equal(average, decoded)
    assert [entry.name for entry in path.parent.iterdir()] == ["update"]
    Artifact.of(path, update_name(update.step, update.stage))  # a name that the file server can serve


def test_the_digest_covers_the_prior_by_which_a_step_is_corrected(
    made: dict[str, Update], tmp_path: Path
) -> None:
    for update in made.values():
        changed = dataclasses.replace(update, corrector="c" * 64)
        write_update(tmp_path / "update", changed)
        assert read_update(tmp_path / "update").corrector == "c" * 64
        with pytest.raises(UpdateError, match="not what its round committed"):
            changed.check_content()
        write_update(tmp_path / "update", dataclasses.replace(update, corrector="../" * 10))
        with pytest.raises(UpdateError, match="head"):
            read_update(tmp_path / "update")


def test_members_of_a_round_write_the_same_file(made: dict[str, Update], tmp_path: Path) -> None:
    """So that a joiner can take half of it from each of two."""
    for number in range(2):
        write_update(tmp_path / f"{number}", made["exchanged"])
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()


@pytest.mark.parametrize("values", ["fp16", "fp32"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_updates_alone_lead_to_the_members_weights_bit_for_bit(
    engine: Engine, tmp_path: Path, values: str, compute: str
) -> None:
    manifest = stage_run(tmp_path, values=values, compute=compute)
    members, late = Members(manifest, tmp_path, engine, 3), stage_compute(manifest, tmp_path)

    async def scenario() -> None:
        for weights, scale in (
            (None, 1e-3),
            ((0, 4, 9), 1e-6),
            ((7,), 1.0),
            ((0, 0, 0), 1.0),
            (None, float("nan")),
            ((3, 1, 0), 10.0),
        ):
            await members.step(weights, scale)

    asyncio.run(scenario())
    lineage, applied = "", []
    for step in range(6):
        write_update(tmp_path / "update", members.updates[step])
        update = read_update(tmp_path / "update")
        update.check_content()
        assert update.lineage == lineage
        applied.append(apply_update(late, update) is not None)
        lineage = update.next_lineage
    assert applied == [True, True, True, False, False, True]
    assert lineage == members.lineage
    expected, state = members.state, late.state()
    assert expected.keys() == state.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    for other in members.computes.values():
        assert other.sketch() == late.sketch()


def test_an_update_of_another_stage_size_is_refused(made: dict[str, Update], tmp_path: Path) -> None:
    manifest = stage_run(tmp_path, hidden=8)
    compute = stage_compute(manifest, tmp_path)
    before = compute.sketch()
    with pytest.raises(UpdateError, match="elements where"):
        apply_update(compute, made["exchanged"])
    assert compute.sketch() == before


def test_content_that_is_not_what_the_round_committed_is_found(made: dict[str, Update]) -> None:
    good = made["exchanged"]
    changed = good.chunks[0].clone()
    changed[7] ^= 1
    assert good.slice is not None
    for bad in (
        dataclasses.replace(good, chunks=(changed, *good.chunks[1:])),
        dataclasses.replace(good, chunks=good.chunks[::-1]),
        dataclasses.replace(good, slice=None),
        dataclasses.replace(good, slice=(good.slice[0] + 1, good.slice[1])),
        dataclasses.replace(good, digest="0" * 64),
        dataclasses.replace(made["alone"], group="another"),
    ):
        with pytest.raises(UpdateError, match="not what its round committed"):
            bad.check_content()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_truncation_or_change_is_noticed(
    made: dict[str, Update], tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / "update"
    write_update(path, made[data.draw(st.sampled_from(["exchanged", "alone", "none"]))])
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:place]
    else:
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    for read in (read_update, check_update):
        with pytest.raises(UpdateError):
            read(path)


HEAD = {
    "run": "r",
    "stage": 0,
    "step": 1,
    "lineage": "",
    "group": "g",
    "digest": "d",
    "way": "exchanged",
    "elements": 4,
    "parts": [[4, 4, 12, 12]],
    "total_weight": 1,
    "slice_offset": 0,
    "slice_elements": 0,
}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.dictionaries(
        st.sampled_from(sorted(HEAD)),
        st.one_of(
            st.integers(-(2**63), 2**64 - 1),
            st.text(max_size=200),
            st.none(),
            st.booleans(),
            st.binary(max_size=9),
            st.lists(st.lists(st.integers(-1, 2**64 - 1), max_size=5), max_size=10),
            st.lists(st.lists(st.integers(1, 9), min_size=4, max_size=4), max_size=4),
        ),
        min_size=1,
        max_size=4,
    ),
    body=st.binary(max_size=64),
)
def test_a_head_that_lies_takes_no_memory_and_raises_nothing_else(
    tmp_path: Path, changes: dict[str, object], body: bytes
) -> None:
    head = msgpack.packb({**HEAD, **changes})
    content = MAGIC + len(head).to_bytes(4, "little") + head + body
    path = tmp_path / "update"
    path.write_bytes(content + hashlib.sha256(content).digest())
    try:
        update = read_update(path)
    except UpdateError:
        return
    assert sum(chunk.numel() for chunk in update.chunks) <= len(body)


@pytest.mark.parametrize(
    "changes",
    [
        {"parts": [[2**40, 1, 1, 1]]},
        {"parts": [[2**40, 2**40, 2**40, 2**40]]},
        {"parts": [[4, 4, 12, 12]] * 9},
        {"elements": 2**40, "slice_elements": 2**40, "way": "none", "parts": []},
        {"way": "none"},
        {"parts": []},
        {"elements": 2**62},
        {"way": "none", "parts": [], "slice_elements": 3},
    ],
)
def test_a_head_that_announces_terabytes_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    head = msgpack.packb({**HEAD, **changes})
    content = MAGIC + len(head).to_bytes(4, "little") + head
    path = tmp_path / "update"
    path.write_bytes(content + hashlib.sha256(content).digest())
    for read in (read_update, check_update):
        with pytest.raises(UpdateError):
            read(path)


def test_a_format_with_an_impossible_scale_is_an_update_error(made: dict[str, Update]) -> None:
    good = made["exchanged"]
    bad = good.chunks[0].clone()
    bad[:4] = torch.tensor([255, 255, 255, 127], dtype=torch.uint8)
    with pytest.raises(UpdateError, match="exponent"):
        averages_of(
            dataclasses.replace(good, chunks=(bad, *good.chunks[1:])),
            PlainCompressor(good.elements, FloatChunk("fp16"), False).phases(0),
        )
    for other in (
        PlainCompressor(good.elements, FloatChunk("fp32"), False),
        PlainCompressor(3, FloatChunk("fp16"), False),
    ):
        with pytest.raises(UpdateError, match="not what this stage averages"):
            averages_of(good, other.phases(0))
    with pytest.raises(UpdateError, match="not what this stage averages"):
        averages_of(good, ())
