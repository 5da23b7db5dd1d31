"""Simulated time and a simulated network, for the properties of the pure cores.

Messages take random times; control messages of one link keep their order, bulk messages overtake each other.
A killed node is gone at once: some prefix of what it had sent still arrives, then everybody else learns of its
loss, each at a moment of its own. A flap loses what is on its way between two living nodes.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Message:
    """Something on its way."""

    source: str
    target: str
    at: float
    deliver: Callable[[], None]
    is_lost: bool = False


class Simulation:
    """Events in order of their time. Everything random comes from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.log: list[str] = []
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()

    def after(self, delay_s: float, event: Callable[..., None], *arguments: Any) -> None:
        """Let something happen in `delay_s` seconds."""
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), event, arguments))

    def note(self, text: str) -> None:
        """Remember what happened, for a failing seed."""
        self.log.append(f"{self.now:8.3f} {text}")

    def run(self, is_over: Callable[[], bool], deadline_s: float) -> bool:
        """Go on until `is_over`; False if the deadline (or the end of all events) comes first."""
        while self._events:
            if is_over():
                return True
            at, _, event, arguments = heapq.heappop(self._events)
            if at > deadline_s:
                return False
            self.now = at
            event(*arguments)
        return is_over()


class Network:
    """Links between named nodes."""

    def __init__(self, simulation: Simulation, longest_s: float = 0.2) -> None:
        self.simulation = simulation
        self.dead: set[str] = set()
        self.broken: set[frozenset[str]] = set()
        self._longest_s = longest_s
        self._last: dict[tuple[str, str], float] = {}
        self._on_way: list[Message] = []

    def send(self, source: str, target: str, deliver: Callable[[], None], *, is_bulk: bool = False) -> None:
        """Send a message; on a link that is down, or whose other end is dead, it is lost."""
        if source in self.dead or target in self.dead or frozenset((source, target)) in self.broken:
            return
        simulation = self.simulation
        at = simulation.now + simulation.random.uniform(0.001, self._longest_s)
        if not is_bulk:
            at = max(at, self._last.get((source, target), 0.0) + 1e-6)
            self._last[source, target] = at
        message = Message(source, target, at, deliver)
        self._on_way.append(message)
        simulation.after(at - simulation.now, self._arrive, message)

    def kill(self, victim: str, others: list[str], on_lost: Callable[[str], None]) -> None:
        """The victim is gone now; each of the others learns of it in its own time."""
        simulation = self.simulation
        self.dead.add(victim)
        simulation.note(f"{victim} is killed")
        for other in others:
            if other in self.dead:
                continue
            learns_at = simulation.now + simulation.random.uniform(0.2, 2.0)
            coming = sorted(
                (m for m in self._on_way if m.source == victim and m.target == other), key=lambda m: m.at
            )
            arriving = simulation.random.randint(0, len(coming))
            for number, message in enumerate(coming):
                message.is_lost = message.is_lost or number >= arriving or message.at >= learns_at
            simulation.after(learns_at - simulation.now, self._tell, other, on_lost)
        for message in self._on_way:
            message.is_lost = message.is_lost or message.target == victim

    def flap(self, one: str, other: str) -> None:
        """The link between two living nodes breaks and stands again.

        Of what was on its way some is lost; the rest arrives before anything that is sent over the new link.
        """
        self.simulation.note(f"{one} -- {other} flaps")
        pair = frozenset((one, other))
        self.broken.add(pair)  # answers to what arrives now go down with the old link
        coming = [m for m in self._on_way if {m.source, m.target} == {one, other} and not m.is_lost]
        for message in sorted(coming, key=lambda m: m.at):
            is_lost = self.simulation.random.random() < 0.5
            if not is_lost and message.target not in self.dead:
                message.deliver()
            message.is_lost = True
        self.broken.discard(pair)

    def _tell(self, other: str, on_lost: Callable[[str], None]) -> None:
        if other not in self.dead:
            on_lost(other)

    def _arrive(self, message: Message) -> None:
        self._on_way.remove(message)
        if not message.is_lost and message.target not in self.dead:
            message.deliver()
