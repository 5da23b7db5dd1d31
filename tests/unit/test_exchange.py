"""Averaging over in-memory links: equal bit for bit, right, and all or nothing."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch

import peers.butterfly
import peers.exchange
from peers.engine import Engine
from peers.exchange import ExchangeError
from peers.frames import Frame, FrameError, Kind
from peers.limits import LIMITS
from swarm.gradient.values import ValueFormat, decode_values, encode_values
from tests.kit.members import running_engine
from tests.kit.mesh import Mesh, Wire, contributions

CHUNK = 16


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = dataclasses.replace(LIMITS, averaging_chunk_elements=CHUNK, round_s=0.7)
    monkeypatch.setattr(peers.exchange, "LIMITS", limits)
    monkeypatch.setattr(peers.butterfly, "LIMITS", limits)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine() as engine:
        yield engine


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))


@pytest.mark.parametrize("values", ["fp32", "fp16"])
@pytest.mark.parametrize("members", [2, 3, 4])
@pytest.mark.parametrize("elements", [1, 3, CHUNK * 2, CHUNK * 9 + 5])
def test_members_hold_the_same_weighted_mean_bit_for_bit(
    engine: Engine, values: ValueFormat, members: int, elements: int
) -> None:
    async def scenario() -> None:
        vectors, weights = contributions(members, elements), [3, 0, 5, 11][:members]
        kept = [vector.clone() for vector in vectors]
        for seed in range(3):
            mesh = Mesh(engine, vectors, weights, values, seed=seed)
            results = await mesh.run()
            averages = [result[0] for result in results.values() if isinstance(result, tuple)]
            assert len(averages) == members and not mesh.refused
            assert len({digest for _, digest in results.values()}) == 1  # type: ignore[misc]
            assert all(torch.equal(average, averages[0]) for average in averages)
            exact = sum(w * v.double() for w, v in zip(weights, vectors, strict=True)) / sum(weights)
            allowed = 1e-6 if values == "fp32" else 2.0**-9
            torch.testing.assert_close(averages[0].double(), exact, rtol=allowed, atol=1e-4 * allowed)
        assert all(torch.equal(a, b) for a, b in zip(vectors, kept, strict=True))

    run(scenario())


def test_single_contributor_is_passed_on_exactly(engine: Engine) -> None:
    async def scenario() -> None:
        vectors = contributions(3, 50)
        results = await Mesh(engine, vectors, [0, 7, 0], "fp32").run()
        assert all(torch.equal(result[0], vectors[1]) for result in results.values())  # type: ignore[index]

    run(scenario())


@pytest.mark.parametrize("members", [2, 3, 4])
def test_dead_member_fails_the_attempt_of_all_and_changes_nothing(engine: Engine, members: int) -> None:
    async def scenario() -> None:
        vectors = contributions(members, 200)
        kept = [vector.clone() for vector in vectors]
        mesh = Mesh(engine, vectors, [1] * members, "fp16", dead=frozenset(["peer-1"]))
        results = await mesh.run()
        assert len(results) == members - 1
        assert all(isinstance(r, ExchangeError) and r.reason == "disconnected" for r in results.values())
        assert all(torch.equal(a, b) for a, b in zip(vectors, kept, strict=True))

    run(scenario())


@pytest.mark.parametrize("moment", range(0, 60, 7))
def test_member_that_dies_half_way_fails_the_attempt_or_leaves_equal_results(
    engine: Engine, moment: int
) -> None:
    async def scenario() -> None:
        sent = [0]
        mesh = Mesh(engine, contributions(3, 300), [1, 2, 3], "fp32", seed=moment)

        def tamper(source: str, target: str, kind: Kind, data: bytearray) -> None:
            sent[0] += 1
            if sent[0] == moment:
                mesh.dead.add("peer-2")

        mesh.tamper = tamper
        results = await mesh.run()
        held = [result for name, result in results.items() if name != "peer-2" and isinstance(result, tuple)]
        assert len({digest for _, digest in held}) <= 1
        failures = [result for result in results.values() if not isinstance(result, tuple)]
        assert all(isinstance(failure, ExchangeError) for failure in failures)

    run(scenario())


def test_two_links_that_fail_in_two_ways_at_once_are_one_failure() -> None:
    """Anything but ExchangeError would end the peer."""

    async def no_pause() -> None:
        """Both fail in the same turn of the loop."""

    class Immediate:
        def submit(self, priority: int, job: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
            future = asyncio.get_running_loop().create_future()
            future.set_result(job(*arguments))
            return future

    async def scenario() -> None:
        mesh = Mesh(Immediate(), contributions(3, 48), [0, 1, 0], "fp32", dead=frozenset(["peer-0"]))  # type: ignore[arg-type]
        exchange = mesh.exchanges["peer-1"]
        broken = Wire(mesh, "peer-1", "peer-0")
        exchange._link_of = lambda target: broken if target == "peer-0" else None  # type: ignore[assignment,return-value]
        mesh.pause = no_pause  # type: ignore[method-assign]
        with pytest.raises(ExchangeError):
            await exchange.run()

    run(scenario())


def test_member_that_says_nothing_fails_the_attempt_at_its_deadline(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers.exchange, "LIMITS", dataclasses.replace(LIMITS, round_s=0.1))

    async def scenario() -> None:
        mesh = Mesh(engine, contributions(2, 64), [1, 1], "fp32")
        with pytest.raises(ExchangeError) as caught:
            await mesh.exchanges["peer-0"].run()
        assert caught.value.reason == "late"

    run(scenario())


def test_cancelled_attempt_leaves_the_gradient_and_no_task_behind(engine: Engine) -> None:
    async def scenario() -> None:
        vectors = contributions(2, 64)
        kept, before = vectors[0].clone(), asyncio.all_tasks()
        task = asyncio.create_task(Mesh(engine, vectors, [1, 1], "fp32").exchanges["peer-0"].run())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert torch.equal(vectors[0], kept)
        assert asyncio.all_tasks() == before

    run(scenario())


def test_average_that_differs_for_one_member_shows_in_its_digest(engine: Engine) -> None:
    def tamper(source: str, target: str, kind: Kind, data: bytearray) -> None:
        if kind is Kind.AVERAGE and target == "peer-2" and source == "peer-0":
            data[0] ^= 1

    async def scenario() -> None:
        results = await Mesh(engine, contributions(3, 100), [1, 1, 1], "fp32", tamper=tamper).run()
        digests = [result[1] for result in results.values()]  # type: ignore[index]
        assert digests[0] == digests[1] != digests[2]

    run(scenario())


def frame(kind: Kind, chunk: object, data: bytes) -> Frame:
    return Frame(kind, {"group": "g", "phase": 0, "chunk": chunk}, (memoryview(bytearray(data)),))


@pytest.mark.parametrize(
    ("sender", "bad"),
    [
        (
            "peer-1",
            Frame(Kind.PART, {"group": "g", "phase": 1, "chunk": 0}, (memoryview(bytearray(4 * CHUNK)),)),
        ),
        ("peer-1", frame(Kind.PART, 3, bytes(4 * CHUNK))),  # the last chunk is shorter
        ("peer-1", frame(Kind.PART, 4, bytes(4 * CHUNK))),
        ("peer-1", frame(Kind.PART, -1, bytes(4 * CHUNK))),
        ("peer-1", frame(Kind.PART, "0", bytes(4 * CHUNK))),
        ("peer-1", frame(Kind.PART, 2, bytes(4 * CHUNK))),  # peer-1's own
        ("peer-2", frame(Kind.PART, 0, bytes(4 * CHUNK))),  # weight 0
        ("stranger", frame(Kind.PART, 0, bytes(4 * CHUNK))),
        ("peer-1", frame(Kind.AVERAGE, 0, bytes(4 * CHUNK))),  # not its reducer
    ],
)
def test_chunk_that_does_not_belong_is_refused_and_harms_nothing(
    engine: Engine, sender: str, bad: Frame
) -> None:
    async def scenario() -> None:
        vectors = contributions(3, 3 * CHUNK + 4)
        mesh = Mesh(engine, vectors, [1, 1, 0], "fp32")
        mine = asyncio.create_task(mesh.exchanges["peer-0"].run())
        await asyncio.sleep(0.01)
        with pytest.raises(FrameError):
            mesh.exchanges["peer-0"].on_frame(sender, bad)
        others = [asyncio.create_task(mesh.exchanges[name].run()) for name in ("peer-1", "peer-2")]
        average, _ = await mine
        await asyncio.gather(*others)
        torch.testing.assert_close(average, (vectors[0] + vectors[1]) / 2)

    run(scenario())


@pytest.mark.parametrize(
    "bad",
    [
        frame(Kind.AVERAGE, 0, bytes(4 * CHUNK)),  # the receiver's own chunk
        frame(Kind.PART, 3, bytes(4 * CHUNK)),  # the sender's own
    ],
)
def test_bad_chunk_that_came_before_the_exchange_began_fails_no_more_than_the_attempt(
    engine: Engine, bad: Frame
) -> None:
    """Anything but ExchangeError would end the peer."""

    async def scenario() -> None:
        mesh = Mesh(engine, contributions(2, 4 * CHUNK), [1, 1], "fp32")
        mesh.deliver("peer-1", "peer-0", bad)
        results = await mesh.run()
        failures = [result for result in results.values() if isinstance(result, BaseException)]
        assert all(isinstance(failure, ExchangeError) for failure in failures), failures

    run(scenario())


def test_average_with_an_impossible_scale_fails_no_more_than_the_attempt(engine: Engine) -> None:
    """A hostile member of the group sends it: anything but ExchangeError would end the peer."""

    def tamper(source: str, target: str, sent: Kind, data: bytearray) -> None:
        if sent is Kind.AVERAGE and source == "peer-1":
            data[:4] = b"\xff\xff\xff\x7f"

    async def scenario() -> None:
        results = await Mesh(engine, contributions(2, 4 * CHUNK), [1, 1], "fp16", tamper=tamper).run()
        victim = results["peer-0"]
        assert isinstance(victim, ExchangeError), repr(victim)
        assert (victim.reason, victim.suspects) == ("schema", ("peer-1",))

    run(scenario())


@pytest.mark.parametrize("attack", ["scale", "size", "not_finite", "norm"])
def test_a_part_that_cannot_count_is_left_out_and_its_sender_is_told(engine: Engine, attack: str) -> None:
    values: ValueFormat = "fp16" if attack == "scale" else "fp32"
    reasons = {"scale": "codec", "size": "size", "not_finite": "not_finite", "norm": "norm"}

    def tamper(source: str, target: str, sent: Kind, data: bytearray) -> None:
        if sent is not Kind.PART or source != "peer-1":
            return
        if attack == "scale":
            data[:4] = b"\xff\xff\xff\x7f"
        elif attack == "size":
            del data[-1:]
        else:
            numbers = torch.frombuffer(data, dtype=torch.float32)
            numbers.mul_(1000.0 if attack == "norm" else float("nan"))

    async def scenario() -> None:
        vectors = contributions(4, 8 * CHUNK)
        mesh = Mesh(engine, vectors, [1, 1, 2, 1], values, tamper=tamper)
        results = await mesh.run()
        assert len({digest for _, digest in results.values()}) == 1  # type: ignore[misc]
        average = results["peer-0"][0]  # type: ignore[index]
        without = (vectors[0] + 2 * vectors[2] + vectors[3]) / 4
        exact = (vectors[0] + vectors[1] + 2 * vectors[2] + vectors[3]) / 5
        own = slice(2 * CHUNK, 4 * CHUNK)  # what it reduces itself it takes its own part of
        expected = without.clone()
        expected[own] = exact[own]
        torch.testing.assert_close(average, expected, rtol=1e-3, atol=1e-7)
        for name in ("peer-0", "peer-2", "peer-3"):
            assert mesh.exchanges[name].refused == {("peer-1", reasons[attack]): 2}
        assert mesh.exchanges["peer-1"].refused == {} and mesh.exchanges["peer-1"].refused_own == 6
        assert len(mesh.refused) == (6 if attack == "size" else 0)  # an offence besides

    run(scenario())


def test_a_chunk_of_which_nothing_can_be_decoded_names_who_sent_it(engine: Engine) -> None:
    """Its reducer has no weight, so the one part that it gets is all there is."""

    def tamper(source: str, target: str, sent: Kind, data: bytearray) -> None:
        if sent is Kind.PART:
            data[:4] = b"\xff\xff\xff\x7f"

    async def scenario() -> None:
        results = await Mesh(engine, contributions(2, 4 * CHUNK), [0, 1], "fp16", tamper=tamper).run()
        failure = results["peer-0"]
        assert isinstance(failure, ExchangeError), repr(failure)
        assert (failure.reason, failure.suspects) == ("schema", ("peer-1",))

    run(scenario())


def test_part_that_comes_twice_counts_once(engine: Engine) -> None:
    async def scenario() -> None:
        vectors, chunks = contributions(2, 4 * CHUNK), [0, 1]
        mesh = Mesh(engine, vectors, [1, 1], "fp32")

        def tamper(source: str, target: str, kind: Kind, data: bytearray) -> None:
            if kind is Kind.AVERAGE and source == "peer-0" and chunks:  # peer-0 has reduced this chunk
                part = encode_values(vectors[1][CHUNK * chunks[0] : CHUNK * (chunks[0] + 1)], "fp32")
                mesh.deliver("peer-1", "peer-0", frame(Kind.PART, chunks.pop(0), bytes(part.numpy())))

        mesh.tamper = tamper
        results = await mesh.run()
        for average, _ in results.values():  # type: ignore[misc]
            torch.testing.assert_close(average, (vectors[0] + vectors[1]) / 2)
        assert not mesh.refused, "a repeat is no offence of whoever answers it"

    run(scenario())


def test_an_average_that_comes_twice_is_an_offence_also_while_the_first_is_decoded(engine: Engine) -> None:
    async def scenario() -> None:
        vectors = contributions(2, 2 * CHUNK)  # a chunk for each
        mesh = Mesh(engine, vectors, [1, 1], "fp32")

        def tamper(source: str, target: str, kind: Kind, data: bytearray) -> None:
            if kind is Kind.AVERAGE and target == "peer-1":
                header = {"group": "g", "phase": 0, "chunk": 0, "refused": []}
                mesh.deliver(source, target, Frame(Kind.AVERAGE, header, (memoryview(bytearray(data)),)))

        mesh.tamper = tamper
        results = await mesh.run()
        for average, _ in results.values():  # type: ignore[misc]
            torch.testing.assert_close(average, (vectors[0] + vectors[1]) / 2)
        assert [str(error).partition(": ")[2] for error in mesh.refused] == [
            "the average of chunk 0 came twice"
        ]

    run(scenario())


def test_average_is_encoded_once_and_decoded_by_everybody(engine: Engine) -> None:
    """So rounding is the same everywhere: what the reducer keeps is what it sent."""

    async def scenario() -> None:
        vectors = contributions(2, CHUNK)
        results = await Mesh(engine, vectors, [1, 2], "fp16").run()
        average = results["peer-0"][0]  # type: ignore[index]
        half = CHUNK // 2
        again = [decode_values(encode_values(part, "fp16"), "fp16", half) for part in average.split(half)]
        assert torch.equal(torch.cat(again), average)

    run(scenario())
