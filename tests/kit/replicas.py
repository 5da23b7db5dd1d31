"""Replicas of a stage that train in lockstep and average as their rounds would, over links in memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peers.compute import StageCompute
from peers.corrections import Corrections
from peers.engine import Engine
from peers.exchange import Exchange
from peers.frames import Kind
from peers.round_messages import Arrival, Commit, Group
from peers.round_modes import build_round_work
from peers.round_work import Average, ExchangePlan, RoundWork, StepSizes
from peers.updates import Update
from swarm.anchor.config import NoCorrectorConfig
from swarm.manifest import RunManifest
from tests.kit.members import _Wire, stage_compute


class Replicas:
    """See the module. updates: by step, as the first member recorded it. meetings: who exchanged with whom, by step."""

    def __init__(self, manifest: RunManifest, folder: Path, engine: Engine, count: int = 2) -> None:
        self.manifest, self.engine = manifest, engine
        self.names = tuple(f"member-{number}" for number in range(count))
        self.computes = {name: stage_compute(manifest, folder) for name in self.names}
        self.works: dict[str, RoundWork] = {
            name: build_round_work(
                compute,
                engine,
                Corrections(NoCorrectorConfig(), 0, compute.trainable, "cpu"),
                StepSizes(microbatch=8, step=8 * count),
                manifest.run_id,
                0,
                name,
                run_seed=manifest.seed,
            )
            for name, compute in self.computes.items()
        }
        self.updates: list[Update] = []
        self.meetings: list[set[tuple[str, ...]]] = []
        self.travelled: list[int] = []
        """Steps whose averages arrived while others ran."""

    async def step(
        self, step: int, tokens: tuple[int, ...], attempts: int = 1, *, first: int = 0, is_lost: bool = False
    ) -> tuple[int, ...]:
        """One step that commits at its last attempt; returns the weights of its round. tokens: of each member. first:
        number of the first attempt. is_lost: what begins to travel with it never arrives at the last member.
        """
        for name, count in zip(self.names, tokens, strict=True):
            self.accumulate(name, step, count)
        arrivals = [
            work.with_owed(Arrival(step, "", ((0, 0),), work.weight(step, count)))
            for work, count in zip(self.works.values(), tokens, strict=True)
        ]
        weights = tuple(arrival.weight for arrival in arrivals)
        for name, arrival in zip(self.names, arrivals, strict=True):
            for work in self.works.values():
                assert arrival.weight <= work.most_weight(step, 1, name, None)
                assert arrival.owed <= work.most_owed_by(name, step, None)
        owed, digests = tuple(arrival.owed for arrival in arrivals), {arrival.settled for arrival in arrivals}
        assert sum(weights) <= work.most_weight_of_all(step)
        for attempt in range(first, attempts):
            group = Group(
                f"g{step}-{attempt}",
                step,
                attempt,
                self.names[0],
                self.names,
                weights,
                ("",) * len(self.names),
                "",
                owed=owed if any(owed) else (),
                settled=digests.copy().pop() if len(digests) == 1 else "",
            )
            for work in self.works.values():
                work.check_group(group, None)
            made = await self.attempt(group, tokens)
        assert len({average.digest for average in made}) == 1
        commit = Commit(
            group.id, step, group.attempt, made[0].digest, self.names[0], self.names, weight=sum(weights)
        )
        for work, average in zip(self.works.values(), made, strict=True):
            await work.apply(average, commit)
            work.note_committed(group)
        self.updates.append(made[0].update)
        await self._travel(group, is_lost=is_lost)
        return weights

    async def attempt(self, group: Group, tokens: tuple[int, ...], last: int | None = None) -> list[Average]:
        """last: frames after which the last member says nothing more; then this raises ExchangeError."""
        plans = {name: self.works[name].exchanged(group) for name in self.names}
        exchanges = self._exchanges(plans, last)
        self.meetings.append({plan.group.members for plan in plans.values() if plan is not None})
        results = await asyncio.gather(
            *(
                self.works[name].average(group, exchanges.get(name), "", count)
                for name, count in zip(self.names, tokens, strict=True)
            ),
            return_exceptions=True,
        )
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            raise failures[0]
        return [result for result in results if isinstance(result, Average)]

    async def _travel(self, group: Group, *, is_lost: bool) -> None:
        exchanges = self._exchanges({name: self.works[name].travelling(group) for name in self.names})
        if is_lost and exchanges:
            last = exchanges[self.names[-1]]
            jobs = [
                asyncio.ensure_future(self.works[name].travel(exchanges[name])) for name in self.names[:-1]
            ]
            await asyncio.sleep(0.05)
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            assert last.group.step == group.step
            return
        await asyncio.gather(*(self.works[name].travel(exchange) for name, exchange in exchanges.items()))
        if exchanges:
            self.travelled.append(group.step)

    def _exchanges(
        self, plans: dict[str, ExchangePlan | None], last: int | None = None
    ) -> dict[str, Exchange]:
        exchanges: dict[str, Exchange] = {}
        counts = {self.names[-1]: last}
        for name, plan in plans.items():
            if plan is not None:
                exchanges[name] = Exchange(
                    plan.group,
                    name,
                    self.computes[name].trainable.numel,
                    plan.phases,
                    self.engine,
                    lambda target, source=name, wires={}: wires.setdefault(  # type: ignore[misc,arg-type,return-value]
                        target, Breaking(exchanges, source, target, counts.get(source))
                    ),
                    slice_span=plan.slice_span,
                    deadline_s=60.0 if last is None else 0.5,
                )
        return exchanges

    def accumulate(self, name: str, step: int, tokens: int) -> None:
        """Put a gradient of so many tokens into a member's accumulator."""
        compute: Any = self.computes[name]
        scale = tokens / self.manifest.reference_loss_tokens
        compute._accumulator.copy_(self.gradient(name, step) * scale)

    def gradient(self, name: str, step: int) -> Tensor:
        """A member's mean gradient of a step."""
        seed = 100 * step + self.names.index(name)
        numel = self.computes[name].trainable.numel
        return torch.randn(numel, generator=torch.Generator().manual_seed(seed))

    def weights(self) -> list[Tensor]:
        """Every member's local weights."""
        return [weights_of(compute) for compute in self.computes.values()]


class Breaking(_Wire):
    """Breaks after so many frames. None: never."""

    def __init__(self, exchanges: dict[str, Exchange], source: str, target: str, count: int | None) -> None:
        super().__init__(exchanges, source, target)
        self.left = count

    async def send(self, kind: Kind, header: dict[str, Any], payload: list[memoryview]) -> None:
        if self.left is not None:
            if not self.left:
                raise ConnectionError("gone")
            self.left -= 1
        await super().send(kind, header, payload)


def weights_of(compute: StageCompute) -> Tensor:
    """A copy of the weights that a member trains."""
    inner: Any = compute
    return inner._optimizer.master.clone()  # type: ignore[no-any-return]
