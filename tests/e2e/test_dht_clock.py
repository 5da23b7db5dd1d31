"""A peer whose clock is wrong: measured against the swarm's, warned of, refused, and never silenced by a step."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import uvloop

from dht.clock import ClockSkewError, SwarmClock
from dht.dial import connect_peer
from dht.host import start_host, stop_host
from dht.identity import Identity
from dht.noticeboard import Noticeboard
from dht.records import PeerRecord

pytestmark = pytest.mark.e2e

SEED = """
import asyncio, json, sys
from dht.host import start_host, stop_host, visible_addresses
from dht.identity import Identity
from dht.noticeboard import Noticeboard
async def main():
    identity = Identity.load_or_create(None)
    identity.lock()
    host = await start_host(identity.path)
    board = await Noticeboard.create(host, identity, run_id="run-1")
    print((await visible_addresses(host))[0], flush=True)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        await board.refresh()
        print(json.dumps({peer: record.step for peer, record in board.view().items()}), flush=True)
    await board.close()
    await stop_host(host)
    identity.close()
asyncio.run(main())
"""


class Seed:
    """A seed whose clock is right, in a process of its own: hivemind has one clock per process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SEED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    async def steps(self) -> dict[str, int]:
        """What it sees: the step of each peer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("look\n")
        self.process.stdin.flush()
        line = await asyncio.to_thread(self.process.stdout.readline)
        return {str(peer): int(step) for peer, step in json.loads(line).items()}


@pytest.fixture(scope="module")
def seed() -> Iterator[Seed]:
    seed = Seed()
    yield seed
    seed.process.communicate()


def told(message: str) -> float:
    """How far the message says that this machine's clock is ahead, in seconds."""
    match = re.search(r"clock is ([\d.]+) s (behind|ahead of) the swarm's", message)
    assert match, message
    return float(match[1]) * (1 if match[2] == "ahead of" else -1)


def test_wrong_clock_is_measured_then_tolerated_warned_of_or_refused_with_the_figure(
    seed: Seed, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        identity = Identity.load_or_create(None)
        host = None
        try:
            identity.lock()
            host = await start_host(identity.path)
            await connect_peer(host, seed.address.rpartition("/")[2], [seed.address], 10)
            for number, off_s in enumerate((2, -2, 5, -5, 61, -61)):
                caplog.clear()
                clock = SwarmClock(wall=lambda off=off_s: time.time() + off)
                if abs(off_s) > 60:
                    with pytest.raises(ClockSkewError, match="NTP") as caught:
                        await Noticeboard.create(host, identity, [seed.address], "run-1", clock=clock)
                    assert told(str(caught.value)) == pytest.approx(off_s, abs=0.5)
                    continue
                with caplog.at_level(logging.WARNING, "dht.noticeboard"):
                    board = await Noticeboard.create(host, identity, [seed.address], "run-1", clock=clock)
                assert clock.offset_s == pytest.approx(-off_s, abs=0.5)
                warnings = [told(r.getMessage()) for r in caplog.records if "clock" in r.getMessage()]
                assert warnings == ([pytest.approx(off_s, abs=0.5)] if abs(off_s) > 2 else [])
                assert await board.publish(record(identity, number))
                assert (await seed.steps())[identity.peer_id] == number, "its records are timely there"
                await board.close()
        finally:
            if host is not None:
                await stop_host(host)
            identity.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(scenario(), 60))


def test_clock_that_steps_back_does_not_silence_announcements(seed: Seed) -> None:
    async def scenario() -> None:
        identity = Identity.load_or_create(None)
        wall_s = [0.0]
        host = None
        try:
            identity.lock()
            host = await start_host(identity.path)
            await connect_peer(host, seed.address.rpartition("/")[2], [seed.address], 10)
            clock = SwarmClock(wall=lambda: time.time() + wall_s[0])
            board = await Noticeboard.create(host, identity, [seed.address], "run-1", clock=clock)
            for number, wall_s[0] in enumerate((0.0, -3600.0, 3600.0)):
                assert await board.publish(record(identity, number))
                assert (await seed.steps())[identity.peer_id] == number
            await board.close()
        finally:
            if host is not None:
                await stop_host(host)
            identity.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(scenario(), 60))


def record(identity: Identity, step: int) -> PeerRecord:
    return PeerRecord(
        run_id="run-1",
        peer_id=identity.peer_id,
        public_key=identity.public_key,
        incarnation=identity.incarnation,
        role="stage",
        stage=0,
        state="online",
        step=step,
    )
