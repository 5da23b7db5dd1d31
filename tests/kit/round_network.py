"""Links between replicas that are cut, heal, and come back with another process behind them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

from tests.kit.simulation import Network

PeerEvent = Callable[[str, str], None]
"""(who learns of it, about whom)"""


class RoundNetwork(Network):
    """A network whose partitions last. Everybody learns of a cut, a death or a new process in a time of its own."""

    def bind(self, *, on_lost: PeerEvent, on_up: PeerEvent, on_restarted: PeerEvent) -> None:
        """Who is told."""
        self._on_lost, self._on_up, self._on_restarted = on_lost, on_up, on_restarted
        self._told: set[tuple[str, str]] = set()  # (who, about whom): knows of the loss
        self._partition: dict[str, int] = {}

    def sees(self, one: str, other: str) -> bool:
        """Whether two nodes could talk now."""
        return one == other or (frozenset((one, other)) not in self.broken and not {one, other} & self.dead)

    def die(self, victim: str, others: list[str]) -> None:
        """A node is gone; the others learn of it."""
        self.kill(victim, others, lambda other: self._lose(other, victim))

    def cut(self, names: list[str], side: dict[str, int]) -> None:
        """Part the nodes; some of what is on its way across is lost."""
        self.heal(names)
        self._partition = side
        for one, other in combinations(names, 2):
            if side[one] != side[other]:
                self._break(one, other)
                for who, whom in ((one, other), (other, one)):
                    self.simulation.after(self.simulation.random.uniform(0.2, 2.0), self._learn, who, whom)

    def heal(self, names: list[str]) -> None:
        """All links that a partition broke stand again."""
        side, self._partition = self._partition, {}
        if side:
            for one, other in combinations(names, 2):
                if side[one] != side[other] and not {one, other} & self.dead:
                    self.simulation.after(self.simulation.random.uniform(0.0, 1.0), self._rejoin, one, other)

    def revive(self, name: str, others: list[str]) -> None:
        """Another process answers to the name of a dead one."""
        self.dead.discard(name)
        for other in others:
            self.broken.add(frozenset((name, other)))
            self._told.discard((name, other))
            self.simulation.after(self.simulation.random.uniform(0.1, 1.0), self._greet, name, other)

    def _is_parted(self, one: str, other: str) -> bool:
        side = self._partition
        return bool(side) and side.get(one) != side.get(other)

    def _break(self, one: str, other: str) -> None:
        self.broken.add(frozenset((one, other)))
        for message in self._on_way:
            if {message.source, message.target} == {one, other}:
                message.is_lost = True

    def _learn(self, who: str, whom: str) -> None:
        if frozenset((who, whom)) in self.broken and self._is_parted(who, whom) and who not in self.dead:
            self._lose(who, whom)

    def _lose(self, who: str, whom: str) -> None:
        if (who, whom) not in self._told and not (whom not in self.dead and self.sees(who, whom)):
            self._told.add((who, whom))
            self._on_lost(who, whom)

    def _rejoin(self, one: str, other: str) -> None:
        pair = frozenset((one, other))
        if pair & self.dead or self._is_parted(one, other) or pair not in self.broken:
            return
        self._stand(one, other)

    def _stand(self, one: str, other: str) -> None:
        self.broken.discard(frozenset((one, other)))
        for who, whom in ((one, other), (other, one)):
            self._told.discard((who, whom))
            self._on_up(who, whom)

    def _greet(self, name: str, other: str) -> None:
        if {name, other} & self.dead or self._is_parted(name, other):
            if not {name, other} & self.dead:
                self.simulation.after(1.0, self._greet, name, other)
            return
        if (other, name) not in self._told:
            self._on_lost(other, name)
        self._on_restarted(other, name)
        self._stand(name, other)
