"""Where peers are and whether they answer: knocking, and what is remembered of them."""

from __future__ import annotations

import asyncio
import socket

import pytest

from dht.acquaintances import KEPT_S, MAX_KEPT, Acquaintances
from dht.knock import Knock, knock, reachable_addresses
from dht.records import PeerRecord


@pytest.mark.parametrize(
    ("addresses", "usable"),
    [
        (
            ["/ip4/127.0.0.1/tcp/1", "/ip4/203.0.113.5/tcp/1/p2p/rubbish", "/ip4/203.0.113.5/tcp/2"],
            ["203.0.113.5"],
        ),
        (
            ["/ip4/127.0.0.1/tcp/1", "/dns4/localhost/tcp/1", "/ip6/::1/tcp/1"],
            ["127.0.0.1", "localhost", "::1"],
        ),
        (["/ip6/::1/tcp/1", "/dns4/seed.example.org/tcp/1"], ["seed.example.org"]),
        (["rubbish", "/ip4/203.0.113.5/udp/1/quic-v1"], []),
    ],
)
def test_loopback_addresses_count_only_for_a_peer_that_has_no_other(
    addresses: list[str], usable: list[str]
) -> None:
    assert [address.host for address in reachable_addresses(addresses)] == usable


def test_knock_says_open_if_one_address_answers_and_refused_only_if_all_refuse() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            is_open = f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}"
            closed = "/ip4/127.0.0.1/tcp/1"
            unknown = "/dns4/no-such-host.invalid/tcp/1"
            assert await knock([closed, is_open]) is Knock.OPEN
            assert await knock([closed, "/ip4/127.0.0.2/tcp/1"]) is Knock.REFUSED
            assert await knock([unknown]) is Knock.UNKNOWN
            assert await knock([]) is Knock.UNKNOWN

    asyncio.run(scenario())


def record(number: int, **changes: object) -> PeerRecord:
    fields: dict[str, object] = {
        "run_id": "run-1",
        "peer_id": "Qm" + "1" * 40 + "".join("123456789"[int(d) % 9] for d in f"{number:04d}"),
        "public_key": b"key",
        "incarnation": 1,
        "role": "stage",
        "stage": 0,
        "state": "online",
        "addresses": (f"/ip4/203.0.113.5/tcp/{number + 1}",),
    }
    return PeerRecord(**(fields | changes))  # type: ignore[arg-type]


def test_acquaintances_are_remembered_for_a_while_unless_they_said_goodbye() -> None:
    known = Acquaintances()
    known.remember([record(1), record(2), record(3, addresses=())], now=0.0)
    assert sorted(addresses for _, addresses in known.sample(9)) == [record(1).addresses, record(2).addresses]
    assert len(known.sample(1)) == 1
    known.remember([record(2, state="offline"), record(1, addresses=("/ip4/203.0.113.9/tcp/9",))], now=1.0)
    assert known.sample(9) == [(record(1).peer_id, ("/ip4/203.0.113.9/tcp/9",))]
    known.remember([], now=KEPT_S + 1.5)
    assert known.sample(9) == []


def test_acquaintances_are_bounded_and_the_longest_unseen_go_first() -> None:
    known = Acquaintances()
    many = [record(0, peer_id="Qm" + f"{number:042d}".replace("0", "A")) for number in range(1, MAX_KEPT + 2)]
    for now, each in enumerate(many):
        known.remember([each], now=now / 1000)
    kept = {peer for peer, _ in known.sample(MAX_KEPT + 9)}
    assert len(kept) == MAX_KEPT and many[0].peer_id not in kept and many[-1].peer_id in kept
