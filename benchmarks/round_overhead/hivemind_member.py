"""A replica that averages with hivemind's DecentralizedAverager: a DHT and an averager, each a process of its own."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from hivemind import DHT
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from hivemind.compression import Float16Compression, NoCompression
from hivemind.p2p import P2P
from hivemind.utils import get_dht_time

from benchmarks.round_overhead.crew import Place, wait_until

ROUND_S = 60.0
COMPRESSIONS = {"fp32": NoCompression, "fp16": Float16Compression}


class HivemindMember:
    """One replica, told what to do by the benchmark."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._dht: Any = None
        self._averager: Any = None
        self._control: Any = None
        P2P._UNIX_SOCKET_PREFIX = f"/unix{place.folder}/hivemind-"

    def open(self, initial_peers: list[str]) -> list[str]:
        """Start the DHT; returns its addresses."""
        self._dht = DHT(
            initial_peers=initial_peers, start=True, host_maddrs=[f"/ip4/{self._place.address}/tcp/0"]
        )
        return [str(address) for address in self._dht.get_visible_maddrs()]

    def begin(self, averaging: str, elements: int, replicas: int, matchmaking_s: float, prefix: str) -> None:
        """An averager for a vector of so many elements."""
        if self._averager is not None:
            self._averager.shutdown()
        self._vector = torch.randn(elements, generator=torch.Generator().manual_seed(self._place.position))
        self._averager = DecentralizedAverager(
            [torch.zeros(elements)],
            self._dht,
            start=True,
            prefix=prefix,
            target_group_size=replicas,
            min_matchmaking_time=matchmaking_s,
            request_timeout=0.6 * matchmaking_s,
            compression=COMPRESSIONS[averaging](),
        )

    def prepare(self, what: str, number: int) -> None:
        """Put this replica's vector in; `ahead`: find the group, and wait with the all-reduce."""
        with self._averager.get_tensors() as tensors:
            tensors[0].copy_(self._vector)
        self._control = None
        if what == "ahead":
            self._control = self._averager.step(
                gather=self._place.position,
                wait=False,
                require_trigger=True,
                scheduled_time=get_dht_time() + 5.0,
                timeout=ROUND_S,
                allow_retries=False,
            )
            deadline = time.monotonic() + ROUND_S
            while (
                self._control.stage != AveragingStage.AWAITING_TRIGGER
                and time.monotonic() < deadline
                and not self._control.done()
            ):
                time.sleep(0.02)

    def go(self, at: float) -> dict[str, float]:
        """Average, from a moment of the monotonic clock on; returns when it began and ended, and the group's size."""
        wait_until(at)
        ready = time.monotonic()
        if self._control is not None:
            self._control.allow_allreduce()
            group = self._control.result(timeout=ROUND_S)
        else:
            group = self._averager.step(gather=self._place.position, timeout=ROUND_S)
        return {"ready": ready, "applied": time.monotonic(), "members": float(len(group or ()))}

    def mean(self) -> float:
        """First value of what the averager holds."""
        with self._averager.get_tensors() as tensors:
            return float(tensors[0][0])

    def close(self) -> None:
        """Leave."""
        if self._averager is not None:
            self._averager.shutdown()
        if self._dht is not None:
            self._dht.shutdown()


def serve(pipe: Connection, place: Place) -> None:
    """Run a replica."""
    torch.set_num_threads(1)
    member = HivemindMember(place)
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            break
        pipe.send((True, getattr(member, command)(*arguments)))
    member.close()
