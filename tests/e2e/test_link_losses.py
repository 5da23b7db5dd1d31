"""Links over real p2pd: breaks, deaths, and who is told of them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator

import pytest

from dht.host import host_died
from dht.identity import Identity
from dht.revive import revive_host
from peers.frames import Kind
from peers.limits import LIMITS
from peers.link import Hello
from peers.links import HANDLER, Liveness
from tests.kit.linked import RUN, Node, World, linked_world, until

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    yield from linked_world(tmp_path_factory)


def fresh_peer_id() -> str:
    identity = Identity.load_or_create(None)
    identity.close()
    return identity.peer_id


def test_link_that_breaks_while_the_peer_lives_comes_back_without_a_loss(world: World) -> None:
    async def scenario() -> None:
        victim, friend = world.victim, world.friend
        for breaker, other in ((victim, friend), (friend, victim)):
            ups, losses = len(victim.ups) + len(friend.ups), len(victim.losses) + len(friend.losses)
            breaker.link(other).close("a test breaks it")
            await until(lambda n=ups: len(victim.ups) + len(friend.ups) == n + 2, LIMITS.reconnect_s)
            assert len(victim.losses) + len(friend.losses) == losses
            breaker.link(other).post(Kind.ACCEPTED, {"after": "break"})
            await until(lambda o=other: o.got(Kind.ACCEPTED))

    world.run(scenario())


async def start_anew(node: Node, incarnation: int, stage: int | None = None) -> Node:
    """What another start of the same identity does, with the daemon of the first."""
    again = Node(node.p2p, node.addresses, node.stage if stage is None else stage)
    again.links.hello = Hello(RUN, again.stage, incarnation)
    await node.p2p.remove_binary_stream_handler(HANDLER)
    await again.links.start()
    return again


@pytest.mark.parametrize("side", ["that dials us", "that we dial"])
def test_neighbour_that_started_anew_is_lost_first_and_then_up(world: World, side: str) -> None:
    async def scenario() -> None:
        watcher = world.friend if side == "that dials us" else world.victim
        first = await Node.start(1 - watcher.stage)
        me = first.links.me
        for node, other in ((first, watcher), (watcher, first)):
            node.want(other)
        await until(lambda: first.ups and me in watcher.ups)
        events = len(watcher.events)
        again = await start_anew(first, 2)
        if side == "that dials us":
            again.want(watcher)
        else:  # what its record says is enough to know that the link's other end is dead
            watcher.links.want(me, again.stage, again.addresses, 2)
            await until(lambda: (me, "started anew") in watcher.losses)
            watcher.links.want(me, again.stage, again.addresses, 2)
        await until(lambda: again.ups)
        await until(lambda: len(watcher.events) >= events + 2)
        assert [e for e in watcher.events[events:] if e[1] == me] == [("lost", me), ("up", me)]
        assert watcher.link(again).hello.incarnation == 2

        # The earlier start is refused from now on, and its record does not bring it back.
        await first.links.close()
        late = await start_anew(first, 1)
        late.want(watcher)
        watcher.links.want(me, late.stage, late.addresses, 1)
        await asyncio.sleep(1.0)
        assert watcher.link(again).hello.incarnation == 2 and not late.ups
        if side == "that dials us":
            assert [reason for peer, reason in late.losses] == ["superseded"]
        watcher.links.neighbours[me].heard -= LIMITS.incarnation_kept_s
        assert not watcher.links.neighbours[me].is_superseded(1)  # its counter may have been lost
        for node in (late, again):
            await node.links.close()
        await first.close()

    world.run(scenario())


def test_neighbour_that_started_anew_may_hold_another_stage(world: World) -> None:
    async def scenario() -> None:
        first = await Node.start(0)
        me = first.links.me
        first.want(world.friend)
        await until(lambda: first.ups)
        again = await start_anew(first, 2, stage=2)
        again.links.want(world.friend.links.me, 1, world.friend.addresses)
        world.friend.links.want(me, 2, again.addresses, 2)
        await until(lambda: (me, "started anew") in world.friend.losses)
        world.friend.links.want(me, 2, again.addresses, 2)
        await until(lambda: again.ups)
        await until(lambda: world.friend.links.get(me))  # either end may see the link first
        assert world.friend.link(again).hello.stage == 2
        await again.links.close()
        await first.close()

    world.run(scenario())


@pytest.mark.parametrize(
    ("side", "outage_s"), [("that dials", 0.0), ("that is dialled", LIMITS.reconnect_s + 1)]
)
def test_links_come_back_when_the_own_daemon_was_killed_and_revived(
    world: World, side: str, outage_s: float
) -> None:
    """A neighbour may report a loss, and then an up; the peer whose daemon died has lost nobody."""

    async def scenario() -> None:
        victim, friend = world.victim, world.friend
        dying, other = (victim, friend) if side == "that dials" else (friend, victim)
        ups, seen = len(dying.ups), len(other.events)
        losses = [peer for peer, _ in dying.losses].count(other.links.me)
        os.kill(dying.p2p._child.pid, signal.SIGKILL)
        await host_died(dying.p2p)
        await asyncio.sleep(outage_s)  # the second one longer than a neighbour's would be borne
        await revive_host(dying.p2p)
        await until(lambda: len(dying.ups) > ups and dying.links.get(other.links.me))
        assert [peer for peer, _ in dying.losses].count(other.links.me) == losses
        await until(lambda: other.links.get(dying.links.me))
        me = dying.links.me
        assert [e for e in other.events[seen:] if e[1] == me] in ([("up", me)], [("lost", me), ("up", me)])
        dying.link(other).post(Kind.BUSY, {"after": "revival"})
        await until(lambda: other.got(Kind.BUSY))

    world.run(scenario())


def test_peer_that_does_not_answer_is_dialled_less_and_less_until_it_calls(world: World) -> None:
    async def scenario() -> None:
        absent = await Node.start(1)
        me = absent.links.me
        absent.want(world.victim)
        world.victim.want(absent)
        await until(lambda: absent.ups and me in world.victim.ups)
        os.kill(absent.p2p._child.pid, signal.SIGKILL)
        await host_died(absent.p2p)
        breaker = world.victim.links.neighbours[me].breaker
        lost = sum(peer == me for peer, _ in world.victim.losses)
        for failures in (1, 2, 3):
            await until(lambda n=failures: breaker.failures == n)
            for _ in range(5):
                world.victim.want(absent)  # on every tick of the session
            assert world.victim.links.neighbours[me].is_idle
            breaker.until = 0.0
            world.victim.want(absent)
        await until(lambda: world.victim.links.neighbours[me].is_idle)
        assert sum(peer == me for peer, _ in world.victim.losses) == lost + 4
        await revive_host(absent.p2p)
        await absent.links.probe(world.victim.links.me)
        await until(lambda: len(absent.ups) == 2 and breaker.failures == 0)
        await absent.close()

    world.run(scenario())


def test_address_that_does_not_answer_is_no_proof_that_its_peer_has_ended(world: World) -> None:
    """An unplugged machine, or a firewall: one of its addresses refuses, another is silent."""

    async def scenario() -> None:
        refusing = "/ip4/127.0.0.1/tcp/1"
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen(0)
            callers = [socket.socket() for _ in range(4)]  # its queue is full: it does not answer any more
            for caller in callers:
                caller.setblocking(False)
                caller.connect_ex(silent.getsockname())
            mute = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}"
            for addresses, liveness in (
                ([refusing], Liveness.GONE),
                ([refusing, mute], Liveness.UNKNOWN),
                ([], Liveness.UNKNOWN),
            ):
                peer = fresh_peer_id()
                world.friend.links.want(peer, 0, addresses)  # not our part to dial
                assert await world.friend.links.probe(peer) is liveness, addresses
            for caller in callers:
                caller.close()

    world.run(scenario())


async def kill_a_neighbour(watcher: Node) -> Node:
    """Start a neighbour, link with it, kill its daemon as kill -9 of the peer would, wait for the loss."""
    doomed = await Node.start(1 - watcher.stage)
    try:
        doomed.want(watcher)
        watcher.want(doomed)
        await until(lambda: doomed.links.me in watcher.ups)
        os.kill(doomed.p2p._child.pid, signal.SIGKILL)
        await until(lambda: any(peer == doomed.links.me for peer, _ in watcher.losses), 6)
    finally:
        await doomed.close()
    return doomed


@pytest.mark.parametrize("side", ["that we dial", "that dials us"])
def test_killed_peer_is_reported_lost_once_within_seconds(world: World, side: str) -> None:
    async def scenario() -> None:
        watcher = world.victim if side == "that we dial" else world.friend
        doomed = await kill_a_neighbour(watcher)
        await asyncio.sleep(0.3)
        assert sum(peer == doomed.links.me for peer, _ in watcher.losses) == 1

    world.run(scenario())


def test_probe_of_a_killed_peer_says_that_it_is_gone(world: World) -> None:
    """Its replica may go on alone only when a neighbour of another stage confirms this."""

    async def scenario() -> None:
        doomed = await kill_a_neighbour(world.victim)
        answers = [await world.victim.links.probe(doomed.links.me) for _ in range(3)]
        assert answers == [Liveness.GONE] * 3

    world.run(scenario())


def test_peer_that_leaves_is_lost_at_once_and_says_so(world: World) -> None:
    async def scenario() -> None:
        leaver = await Node.start(1)
        world.victim.want(leaver)
        await until(lambda: leaver.ups and leaver.links.me in world.victim.ups)
        await leaver.links.close()
        await until(lambda: (leaver.links.me, "left") in world.victim.losses, 2)
        await leaver.close()

    world.run(scenario())


def test_peer_that_was_lost_is_linked_again_when_it_is_wanted_again(world: World) -> None:
    async def scenario() -> None:
        leaver = await Node.start(1)
        world.victim.want(leaver)
        me = leaver.links.me
        await until(lambda: leaver.ups and me in world.victim.ups)
        await leaver.links.close()
        await until(lambda: (me, "left") in world.victim.losses, 2)
        again = Node(leaver.p2p, leaver.addresses, 1)
        leaver.links._on_frame = again._on_frame
        leaver.links._closing = False  # the process starts anew
        leaver.ups.clear()

        def is_back() -> bool:
            world.victim.want(leaver)  # for a while nobody is dialled who has just gone
            return bool(leaver.ups)

        await until(is_back, 15)
        await leaver.close()

    world.run(scenario())


def test_probe_tells_a_living_peer_from_one_nobody_knows(world: World) -> None:
    async def scenario() -> None:
        assert await world.victim.links.probe(world.friend.links.me) is Liveness.ALIVE
        nobody = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
        assert await world.victim.links.probe(nobody) is not Liveness.ALIVE

    world.run(scenario())
