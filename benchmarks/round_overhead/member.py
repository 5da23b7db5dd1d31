"""A replica of this program: real p2pd, links, compute thread and rounds of one stage, without a model.

Of one round it also does parts on their own, over the same links: `move` sends the frames that an exchange sends, as
soon as it would, and computes nothing; `exchange` makes the average without a leader.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import uvloop

from benchmarks.round_overhead.crew import Place
from benchmarks.round_overhead.move import Move
from benchmarks.round_overhead.vector import SEED, Unwritten, VectorCompute
from dht.host import start_host, stop_host, visible_addresses
from peers.averaging import ROUND_KINDS, Averaging
from peers.corrections import Corrections
from peers.engine import Engine
from peers.exchange import Exchange
from peers.frames import Frame, tensor_bytes
from peers.limits import LIMITS
from peers.link import Hello, Link
from peers.links import Links
from peers.questions import Questions
from peers.round_messages import Arrival, Commit, CompactKey, Group, compact
from peers.round_work import StepSizes
from peers.rounds import RoundCore
from peers.traffic import Traffic
from swarm.anchor.config import NoCorrectorConfig
from swarm.gradient.robust import RobustConfig
from swarm.gradient.split import Split
from swarm.model.trainable import TrainableSet
from swarm.plan import Plan, Slot

STAGE, TOKENS = 1, 128
TICK_S = 0.1
ROUND_S = 60.0


class Owner:
    """Notes when a round comes how far. done: set when its commit is applied."""

    def __init__(self) -> None:
        self.marks: dict[str, float] = {}
        self.done = asyncio.Event()

    def mark(self, name: str) -> None:
        """Now, by the clock that all processes share."""
        self.marks[name] = time.monotonic()

    def freeze(self, is_frozen: bool) -> None:
        """See RoundsOwner."""

    def on_attempt(self) -> None:
        """See RoundsOwner."""
        self.mark("grouped")

    def own_tokens(self) -> int:
        """See RoundsOwner."""
        return TOKENS

    def seal(self, step: int) -> None:
        """See RoundsOwner."""
        self.mark("committed")

    def check_commit(self, commit: Commit) -> None:
        """See RoundsOwner."""

    def on_applied(self, commit: Commit, norm: float | None) -> None:
        """See RoundsOwner."""
        self.mark("applied")
        self.done.set()

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a round that is not undisturbed: {name}")


class MarkedCore(RoundCore):
    """Also notes when the average is there."""

    owner: Owner

    def on_exchanged(self, group: str, digest: str, now: float, **more: Any) -> list[Any]:
        """See RoundCore."""
        self.owner.mark("exchanged")
        return super().on_exchanged(group, digest, now, **more)


class Member:
    """One replica, told what to do by the benchmark."""

    def __init__(self, place: Place, engine: Engine, tasks: asyncio.TaskGroup) -> None:
        self._place, self._engine, self._tasks = place, engine, tasks
        self._peers: tuple[str, ...] = ()
        self._session = 0
        self._exchange: Exchange | None = None
        self._move: Move | None = None
        self._go: Callable[[float], Any] | None = None

    async def open(self) -> tuple[str, tuple[str, ...]]:
        """Start p2pd; returns peer id and addresses."""
        identity = Path(self._place.folder) / f"identity-{self._place.position}"
        self._p2p = await start_host(identity, [f"/ip4/{self._place.address}/tcp/0"])
        self._links = Links(
            self._p2p,
            Hello("a" * 40, STAGE, 1),
            Traffic(),
            on_frame=self._on_frame,
            on_up=lambda link: None,
            on_lost=lambda peer, reason: print(f"lost {peer}: {reason}"),
        )
        await self._links.start()
        return self._links.me, await visible_addresses(self._p2p)

    async def meet(self, peers: list[tuple[str, tuple[str, ...]]]) -> None:
        """Links with all of these."""
        self._peers = tuple(peer for peer, _ in peers)
        for peer, addresses in peers:
            self._links.want(peer, STAGE, addresses)
        async with asyncio.timeout(60):
            while len(self._links.open_links()) < len(peers) - 1:  # noqa: ASYNC110 - links know no events
                await asyncio.sleep(0.02)

    async def begin(self, averaging: str, elements: int) -> None:
        """Rounds over a vector of so many elements, from step 0 on."""
        self._session += 1
        self._owner = Owner()
        self._compute = VectorCompute(averaging, elements, self._place.position)
        run_id = f"{self._session:040d}"
        core = MarkedCore(
            run_id=run_id,
            run_seed=SEED,
            stage=STAGE,
            me=self._links.me,
            make_plan=lambda *_: (b"", ()),
        )
        core.owner = self._owner
        tokens = TOKENS * len(self._peers)
        self._averaging = Averaging(
            core=core,
            compute=self._compute,  # type: ignore[arg-type]
            engine=self._engine,
            links=self._links,
            questions=Questions(),
            tasks=self._tasks,
            updates=Unwritten(),  # type: ignore[arg-type]
            run_id=run_id,
            robust=RobustConfig(),
            sizes=StepSizes(TOKENS, tokens),
            owner=self._owner,  # type: ignore[arg-type]
            corrections=Corrections(NoCorrectorConfig(), STAGE, TrainableSet.of({}), "cpu"),
        )
        self._averaging.begin(0, self._peers, "", ())
        while not self._averaging.sketch:  # noqa: ASYNC110 - it knows no events
            await asyncio.sleep(0.01)

    async def prepare(self, what: str, number: int) -> None:
        """Make ready for a round, or a part of one."""
        self._exchange = self._move = None
        await {"round": self._plan, "move": self._make_move, "exchange": self._make_exchange}[what](number)

    async def go(self, at: float) -> dict[str, float]:
        """Do what was prepared, from a moment of the monotonic clock on; returns when it was how far."""
        assert self._go is not None
        await asyncio.sleep(at - time.monotonic())
        self._owner.marks.clear()
        self._owner.mark("ready")
        async with asyncio.timeout(ROUND_S):
            await self._go(at)
        return dict(self._owner.marks)

    async def weights(self) -> str:
        """The digest of the weights."""
        return hashlib.sha256(tensor_bytes(self._compute.weights)).hexdigest()

    async def tick(self) -> None:
        """Let time pass for the rounds, as a peer does."""
        while True:
            if hasattr(self, "_averaging"):
                self._averaging.tick()
            await asyncio.sleep(TICK_S)

    async def close(self) -> None:
        """Leave."""
        await self._links.close()
        await stop_host(self._p2p)

    # -- what is timed -----------------------------------------------------------------------------------

    async def _plan(self, number: int) -> None:
        core = self._averaging.core
        slots = tuple(Slot(number=position, samples=(position,)) for position in range(len(self._peers)))
        plan = Plan(
            step=core.step,
            attempt=0,
            group="",
            rows_per_microbatch=1,
            slots=slots,
            prior_versions=(),
            prior_hashes=(),
        )
        keys: tuple[CompactKey, ...] = compact(plan.keys())
        self._averaging.run(core.on_plan(plan.digest(), frozenset(keys), time.monotonic()))
        mine = (keys[self._peers.index(self._links.me)],)
        arrival = Arrival(core.step, plan.digest(), mine, TOKENS, sketch=self._averaging.sketch)
        self._owner.done.clear()

        async def go(at: float) -> None:
            self._averaging.on_ready(arrival)
            await self._owner.done.wait()

        self._go = go

    async def _make_move(self, number: int) -> None:
        phase = self._compute.compressor.phases(number)[0]
        split = Split(phase.elements, len(self._peers), LIMITS.averaging_chunk_elements)
        nbytes = [phase.codec.nbytes(split.size(chunk)) for chunk in range(split.chunks)]
        move = Move(number, self._peers.index(self._links.me), self._peers, split, nbytes, self._links)
        self._move = move

        async def go(at: float) -> None:
            await move.run()
            self._owner.mark("applied")

        self._go = go

    async def _make_exchange(self, number: int) -> None:
        count = len(self._peers)
        group = Group(
            f"bare {number}", number, 1, self._peers[0], self._peers, (TOKENS,) * count, ("",) * count, ""
        )
        compressor = self._compute.compressor
        exchange = Exchange(
            group,
            self._links.me,
            self._compute.trainable.numel,
            compressor.phases(number),
            self._engine,
            self._links.get,
            run_seed=SEED,
        )
        compression = compressor.begin(self._compute.gradient.clone(), number, TOKENS)
        self._exchange = exchange

        async def go(at: float) -> None:
            await exchange.run(compression)
            self._owner.mark("applied")

        self._go = go

    def _on_frame(self, link: Link, frame: Frame) -> None:
        if frame.kind not in ROUND_KINDS:
            return
        group = str(frame.header.get("group", ""))
        if group.startswith("move"):
            assert self._move is not None
            self._move.on_frame(frame)
        elif group.startswith("bare"):
            assert self._exchange is not None
            self._exchange.on_frame(link.peer, frame)
        else:
            self._averaging.on_frame(link.peer, frame)


def serve(pipe: Connection, place: Place) -> None:
    """Run a replica: torch in this thread, everything else in a second one, as in a peer."""
    torch.set_num_threads(1)
    engine = Engine()
    thread = threading.Thread(target=_communicate, args=(pipe, place, engine))
    thread.start()
    engine.run()
    thread.join()


def _communicate(pipe: Connection, place: Place, engine: Engine) -> None:
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_obey(pipe, place, engine))
    finally:
        engine.stop()


async def _obey(pipe: Connection, place: Place, engine: Engine) -> None:
    loop = asyncio.get_running_loop()
    commands: asyncio.Queue[Any] = asyncio.Queue()

    def receive() -> None:
        try:
            commands.put_nowait(pipe.recv())
        except (EOFError, OSError):
            loop.remove_reader(pipe.fileno())
            commands.put_nowait(None)

    loop.add_reader(pipe.fileno(), receive)
    async with asyncio.TaskGroup() as tasks:
        member = Member(place, engine, tasks)
        ticks = tasks.create_task(member.tick())
        while command := await commands.get():
            pipe.send((True, await getattr(member, command[0])(*command[1])))
        ticks.cancel()
        await member.close()
