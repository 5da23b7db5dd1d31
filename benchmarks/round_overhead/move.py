"""Moving the payload of a round, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

from peers.frames import Frame, Kind
from peers.links import Links
from swarm.gradient.split import Split


class Move:
    """The frames of an exchange without what is in them: parts to the reducers; averages once all parts are there."""

    def __init__(
        self, number: int, me: int, peers: tuple[str, ...], split: Split, nbytes: list[int], links: Links
    ) -> None:
        self._number, self._me, self._peers, self._split = number, me, peers, split
        self._nbytes, self._links = nbytes, links
        self._zeros = memoryview(bytes(max(nbytes)))
        self._parts: dict[int, int] = {}
        self._left = split.chunks - sum(split.reducer(chunk) == me for chunk in range(split.chunks))
        self._mine = split.chunks - self._left
        self._tasks: set[asyncio.Task[None]] = set()
        self.done = asyncio.Event()

    async def run(self) -> None:
        """Send the parts, and wait for all that is due here."""
        for distance in range(1, len(self._peers)):
            self._start(self._send_parts((self._me + distance) % len(self._peers)))
        await self.done.wait()

    def on_frame(self, frame: Frame) -> None:
        """One of the frames of this move."""
        chunk = frame.header["chunk"]
        if frame.kind is Kind.AVERAGE:
            self._left -= 1
        else:
            self._parts[chunk] = self._parts.get(chunk, 0) + 1
            if self._parts[chunk] == len(self._peers) - 1:
                self._mine -= 1
                for distance in range(1, len(self._peers)):
                    self._start(self._send(Kind.AVERAGE, (self._me + distance) % len(self._peers), chunk))
        if self._left == self._mine == 0:
            self.done.set()

    async def _send_parts(self, member: int) -> None:
        for chunk in range(self._split.chunks):
            if self._split.reducer(chunk) == member:
                await self._send(Kind.PART, member, chunk)

    async def _send(self, kind: Kind, member: int, chunk: int) -> None:
        link = self._links.get(self._peers[member])
        assert link is not None, "a link has broken"
        payload = self._zeros[: self._nbytes[chunk]]
        await link.send(kind, {"group": f"move {self._number}", "phase": 0, "chunk": chunk}, [payload])

    def _start(self, sending: Any) -> None:
        task = asyncio.get_running_loop().create_task(sending)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
