"""The stage worker: carries out what the work core decides, with links and the compute thread.

A microbatch's life on this peer: FORWARD frame -> `WorkCore.on_forward` -> compute thread (decode, layers,
encode) -> FORWARD to the next stage -> GRADIENT back -> compute thread (backward, accumulate, encode) ->
GRADIENT to the previous stage.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from peers import injector
from peers import work_items as items
from peers.compute import Boundaries, StageCompute, Work
from peers.engine import Engine, JobPriority
from peers.frames import Frame, FrameError, Kind, need, need_count, pack_tensors
from peers.limits import LIMITS
from peers.link import Link
from peers.links import Links
from peers.payloads import BatchFormat, samples_of, unpack_forward, unpack_layout
from peers.questions import Questions
from peers.routing import Router
from peers.work import WorkCore
from peers.work_messages import parse_ready
from swarm.activation.base import CodecKey, PayloadError
from swarm.data.dataset import PackedDataset
from swarm.plan import MicrobatchKey, Plan

logger = logging.getLogger("swarm_peer.stage")
MAX_LOSS_TOKENS = 2**40


class StageWorker:
    """One stage's microbatches: the shell around `WorkCore`. Lives in the communication loop."""

    def __init__(
        self,
        *,
        stage: int,
        stages: int,
        compute: StageCompute,
        boundaries: Boundaries,
        form: BatchFormat,
        engine: Engine,
        links: Links,
        questions: Questions,
        source_window: int,
        dataset: PackedDataset | None,
        tasks: asyncio.TaskGroup,
        on_ledger: Callable[[], None],
        on_slot_done: Callable[[int], None],
        on_give_up: Callable[[MicrobatchKey], None],
    ) -> None:
        self.stage, self.stages = stage, stages
        self.core = WorkCore(
            is_last=stage == stages - 1,
            router=Router(window=max(2, LIMITS.in_flight // 2)),
            source_window=source_window,
        )
        self._compute, self._boundaries, self._form = compute, boundaries, form
        self._engine, self._links, self._questions = engine, links, questions
        self._dataset = dataset
        self._tasks = tasks
        self._on_ledger, self._on_slot_done, self._on_give_up = on_ledger, on_slot_done, on_give_up
        self._ready: dict[str, Link] = {}
        self._ready_from: dict[str, int] = {}
        self._left_out: dict[str, tuple[int, int]] = {}
        self.codec_bytes = dict.fromkeys(
            ("forward", "gradient", "ids", "tokens", "gradient_tokens", "dense_positions"), 0
        )
        injector.testify(self._testimony)

    def _testimony(self) -> dict[str, Any]:
        """What this peer takes with it when it dies (fault tests): its step, its keys of it, and how many it had."""
        keys = [[key.slot, key.microbatch] for key in self.core.ledger]
        return {"step": self.core.version, "held": self.core.in_flight + len(keys), "ledger": keys}

    # -- frames ------------------------------------------------------------------------------------------

    def on_forward(self, link: Link, frame: Frame, plan: Plan) -> None:
        """A FORWARD of the previous stage under a known plan. Raises FrameError."""
        codec = self._boundaries.incoming
        if codec is None or link.hello.stage != self.stage - 1:
            raise FrameError("stage", f"stage {self.stage} takes no FORWARD from stage {link.hello.stage}")
        key = parse_key(frame)
        is_replay = need(frame.header, "replay", bool)
        if self.core.entry(key) is not None:
            work_, payload = None, None  # a repeat: what came first counts
        else:
            work_, payload = unpack_forward(frame.data(), key, plan, self._form, codec)
        self.run(self.core.on_forward(link.peer, key, work_, payload, is_replay, time.monotonic()))

    def on_gradient(self, link: Link, frame: Frame) -> None:
        """A GRADIENT of the next stage. Raises FrameError."""
        codec = self._boundaries.outgoing
        if codec is None or link.hello.stage != self.stage + 1:
            raise FrameError("stage", f"stage {self.stage} takes no GRADIENT from stage {link.hello.stage}")
        key = parse_key(frame)
        loss_sum = need(frame.header, "loss_sum", float)
        if not math.isfinite(loss_sum):
            raise FrameError("range", f"a loss of {loss_sum}")
        loss_tokens = need_count(frame.header, "loss_tokens", MAX_LOSS_TOKENS)
        entry = self.core.entry(key)
        payload = None
        if entry is not None and entry.phase is items.Phase.OUT and entry.work is not None:
            payload = unpack_layout(frame.data(), codec.gradient_layout(entry.work.codec_key))
            if loss_tokens != entry.work.batch.loss_tokens:
                raise FrameError("range", f"{loss_tokens} loss tokens for {key}")
        self.run(self.core.on_gradient(link.peer, key, payload, loss_sum, loss_tokens, time.monotonic()))

    def on_reply(self, link: Link, frame: Frame) -> None:
        """ACCEPTED, BUSY or REFUSED for a key. Raises FrameError."""
        if "key" not in frame.header:
            return  # REFUSED without a key is about the frame, not the work
        key, now = parse_key(frame), time.monotonic()
        if frame.kind is Kind.ACCEPTED:
            self.core.on_accepted(link.peer, key)
        elif frame.kind is Kind.BUSY:
            self.run(self.core.on_busy(link.peer, key, now))
        else:
            reason = need(frame.header, "reason", str)[:40]
            self.run(self.core.on_refused(link.peer, key, reason, now))

    def on_ready_frame(self, link: Link, frame: Frame) -> None:
        """READY of any neighbour. Raises FrameError."""
        ready = parse_ready(frame.header)
        if link.hello.stage == self.stage + 1:
            self.on_ready(link, ready.step)
            for peer in ready.without:
                self._on_left_out(peer, ready.step)

    def on_ready(self, link: Link, step: int = 0) -> None:
        """READY of a peer of the next stage: it works from this step on, and what it owes is repeated on this link.

        Nothing is sent to it on a link before its READY: READY repeats all, and of two copies of a microbatch one
        could be refused for lack of room, and go elsewhere, while the other is accepted.
        """
        incarnation, least = self._left_out.get(link.peer, (0, 0))
        if step < least and link.hello.incarnation == incarnation:
            return  # it has not heard yet that its stage went on without it
        self._left_out.pop(link.peer, None)
        self._ready_from[link.peer] = step
        if self._ready.get(link.peer) is link and link.peer in self.core.router.peers:
            self.core.router.lift_fences_of(link.peer)
            return
        self._ready[link.peer] = link
        self.run(self.core.on_peer_up(link.peer, time.monotonic()))

    def _on_left_out(self, peer: str, step: int) -> None:
        """The next stage works without this peer from this step on, whether the peer has heard of it or not."""
        if peer in self._ready and self._ready_from.get(peer, 0) < step:
            self._left_out[peer] = (self._ready[peer].hello.incarnation, step)
            self.on_lost(peer)

    def on_link_up(self, link: Link) -> None:
        """The link to a peer of the next stage that was at work stands again: it says READY soon, or never."""
        if link.peer in self.core.router.peers and link.peer in self._ready:
            self._tasks.create_task(self._expect_ready(link))

    def on_lost(self, peer: str) -> None:
        """A peer of the next stage is lost: all that went to it goes elsewhere."""
        self._ready.pop(peer, None)
        self._ready_from.pop(peer, None)
        if len(self._left_out) > LIMITS.links:
            self._left_out.clear()
        self.run(self.core.on_peer_lost(peer, time.monotonic()))

    async def _expect_ready(self, link: Link) -> None:
        await asyncio.sleep(LIMITS.ready_s)
        if self._links.get(link.peer) is link and self._ready.get(link.peer) is not link:
            self.run(self.core.on_peer_lost(link.peer, time.monotonic()))

    # -- orders of the trainer ---------------------------------------------------------------------------

    def assign(self, plan: Plan, slot: int, is_replay: bool) -> None:
        """Run a slot of the plan (stage 0)."""
        digest = plan.digest()
        works = [
            (MicrobatchKey(step=plan.step, plan=digest, slot=slot, microbatch=number), None)
            for number in range(len(plan.microbatches(slot)))
        ]
        self.run(self.core.assign(slot, works, is_replay, time.monotonic()))

    def run(self, actions: Iterable[items.Action]) -> None:
        """Carry out what the core decided, in order."""
        for action in actions:
            match action:
                case items.Forward(entry):
                    self._tasks.create_task(self._forward(entry))
                case items.Backward(entry):
                    self._tasks.create_task(self._backward(entry))
                case items.SendForward(peer, entry):
                    self._send_forward(peer, entry)
                case items.SendGradient(peer, entry):
                    self._send_gradient(peer, entry)
                case items.Reply(peer, kind, key, reason):
                    self._reply(peer, kind, key, reason)
                case items.AskHolders(entry):
                    self._tasks.create_task(self._ask_holders(entry))
                case items.SlotDone(slot):
                    self._on_slot_done(slot)
                case items.LedgerGrew():
                    self._on_ledger()
                case items.KeyLost(key):
                    logger.warning("nobody can give the gradient of microbatch %s any more", key)
                    self._tasks.create_task(self._submit(JobPriority.BACKWARD, self._compute.drop, key))
                    self._on_ledger()
                case items.GiveUp(key):
                    self._on_give_up(key)
                case items.ClearAccumulator():
                    self._tasks.create_task(self._submit(JobPriority.ROUND, self._compute.clear))

    # -- compute -----------------------------------------------------------------------------------------

    async def _forward(self, entry: items.Entry) -> None:
        is_last = self._boundaries.outgoing is None
        job = self._finish_job if is_last else self._forward_job
        try:
            result = await self._engine.submit(JobPriority.FORWARD, job, entry)
        except PayloadError as error:
            logger.warning("microbatch %s of %s: %s", entry.key, entry.upstream, error)
            self.run(self.core.on_unreadable(entry, time.monotonic()))
            return
        if result is None:
            return
        if is_last:
            injector.hit("after_backward", entry.key.step)
            gradient, loss_sum, loss_tokens = result
            if not math.isfinite(loss_sum):
                self._on_give_up(entry.key)
                return
            actions = self.core.on_backward_done(entry, gradient, (loss_sum, loss_tokens), time.monotonic())
        else:
            actions = self.core.on_forward_done(entry, result, time.monotonic())
        self.run(actions)

    async def _backward(self, entry: items.Entry) -> None:
        try:
            result = await self._engine.submit(JobPriority.BACKWARD, self._backward_job, entry)
        except PayloadError as error:
            logger.warning("gradient of microbatch %s from %s: %s", entry.key, entry.downstream, error)
            self.run(self.core.on_unreadable(entry, time.monotonic()))
            return
        if result is not None:
            injector.hit("after_backward", entry.key.step)
            self.run(self.core.on_backward_done(entry, result[0], None, time.monotonic()))

    async def _submit(self, priority: JobPriority, job: Callable[..., Any], *arguments: Any) -> None:
        await self._engine.submit(priority, job, *arguments)

    def _work(self, entry: items.Entry, plan: Plan | None) -> Work:
        """A source reads its microbatch on the compute thread, when its turn comes."""
        if entry.work is None:
            if self._dataset is None or plan is None:
                raise RuntimeError(f"microbatch {entry.key} has no data on this peer")
            batch = self._dataset.batch(samples_of(entry.key, plan))
            entry.work = Work(entry.key, batch, CodecKey.of(batch, entry.key.step, plan.prior_hashes))
        work_: Work = entry.work
        return work_

    def _forward_job(self, entry: items.Entry) -> Any:
        plan = self.core.plan  # before the look: an entry that is not dropped then is of this plan
        if entry.is_dropped:
            return None
        return self._compute.forward(self._work(entry, plan), entry.incoming)

    def _finish_job(self, entry: items.Entry) -> Any:
        plan = self.core.plan
        if entry.is_dropped:
            return None
        return self._compute.finish(self._work(entry, plan), entry.incoming)

    def _backward_job(self, entry: items.Entry) -> Any:
        if entry.is_dropped:
            self._compute.drop(entry.key)
            return None
        return (self._compute.backward(self._work(entry, None), entry.returned),)

    # -- frames out --------------------------------------------------------------------------------------

    def _send_forward(self, peer: str, entry: items.Entry) -> None:
        link, codec = self._links.get(peer), self._boundaries.outgoing
        if link is None or codec is None:
            return  # the loss of the peer is on its way, and the entry with it
        if self._ready.get(peer, link) is not link:
            return  # the peer has not said READY on its new link
        work_: Work = entry.work
        batch = self._form.pack(work_.batch)
        payload = pack_tensors(entry.outgoing.values())
        if not entry.is_replay:
            count = codec.byte_count(work_.codec_key)
            self.codec_bytes["forward"] += count.coded
            self.codec_bytes["dense_positions"] += count.dense_positions
            self.codec_bytes["ids"] += sum(part.nbytes for part in batch)
            self.codec_bytes["tokens"] += work_.batch.tokens
        header = {"key": entry.key.pack(), "replay": entry.is_replay}
        self._tasks.create_task(
            self._send_bulk(link, Kind.FORWARD, header, batch + payload, "after_forward_sent")
        )

    def _send_gradient(self, peer: str, entry: items.Entry) -> None:
        link = self._links.get(peer)
        if link is None or entry.gradient is None:
            return  # whoever repeats the FORWARD gets it then
        header = {
            "key": entry.key.pack(),
            "loss_sum": float(entry.loss_sum),
            "loss_tokens": entry.loss_tokens,
        }
        payload = pack_tensors(entry.gradient.values())
        self.codec_bytes["gradient"] += sum(part.nbytes for part in payload)
        self.codec_bytes["gradient_tokens"] += entry.work.batch.tokens
        self._tasks.create_task(self._send_bulk(link, Kind.GRADIENT, header, payload, "after_gradient"))

    async def _send_bulk(
        self, link: Link, kind: Kind, header: dict[str, Any], payload: list[memoryview], point: injector.Point
    ) -> None:
        try:
            await link.send(kind, header, payload)
        except ConnectionError:
            return  # repeated when the peer is up again, sent elsewhere if it is lost
        injector.hit(point, header["key"][0])

    def _reply(self, peer: str, kind: str, key: MicrobatchKey, reason: str) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.post(Kind(kind), {"key": key.pack(), "reason": reason})
            if kind == Kind.ACCEPTED:
                injector.hit("after_accepted", key.step)

    async def _ask_holders(self, entry: items.Entry) -> None:
        plan, router = entry.key.plan, self.core.router
        links = [
            link for link in self._links.open_links(self.stage + 1) if not router.is_fenced(link.peer, plan)
        ]
        answers = await self._questions.ask(links, "holder", entry.key.pack(), is_enough=lambda a: a is True)
        holder = next((peer for peer, answer in answers.items() if answer is True), None)
        denied = {peer for peer, answer in answers.items() if answer is False}
        now = time.monotonic()
        is_certain = bool(denied) and self.core.askable(entry) <= denied
        if holder is None and (not is_certain or self._links.expects(self.stage + 1)):
            # Somebody who may hold it did not answer: its link is down, or not there yet. Choosing another peer now
            # would train the key twice, and calling it lost would lose it.
            self.run(self.core.on_holder_unknown(entry, now))
        else:
            self.run(self.core.on_holder(entry, holder, now))


def parse_key(frame: Frame) -> MicrobatchKey:
    """The key in a frame's header. Raises FrameError."""
    try:
        return MicrobatchKey.unpack(frame.header.get("key"))
    except ValueError as error:
        raise FrameError("key", str(error)[:120]) from error
