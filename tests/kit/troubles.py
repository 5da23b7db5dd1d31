"""What may befall a simulated pipeline, beside deaths and flapping links."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tests.kit.work_peer import STEPS, Peer

if TYPE_CHECKING:
    from tests.kit.pipeline import Pipeline

Trouble = Literal["kill", "fence", "false loss", "restart", "resync", "empty"]
"""kill: a replica dies. fence: the leader fences a replica. false loss: a peer declares one of the next stage
lost that lives, and hears of it again later. restart: a replica dies and another joins. resync: a replica drops
all it has and comes back at the next step. empty: all replicas die, and a new one goes on where its neighbours
are."""


def trouble(pipeline: Pipeline, kind: Trouble, stage: int) -> None:
    """Let it happen to a peer of a stage now, where the stage can bear it."""
    sim, members = pipeline.sim, pipeline.members(stage)
    if not members or (kind not in ("empty", "false loss") and len(members) < 2):
        return
    victim = sim.random.choice(members)
    sim.note(f"{kind}: {victim.name}")
    match kind:
        case "kill":
            pipeline.kill(victim.name)
        case "fence":
            pipeline.fences[stage, victim.core.version].add(victim.name)
        case "false loss":
            _lose_falsely(pipeline, victim)
        case "restart":
            pipeline.kill(victim.name)
            sim.after(sim.random.uniform(0.1, 3.0), _join, pipeline, stage)
        case "resync":
            pipeline.break_round_of(victim)
            victim.suspend()
            for peer in pipeline.members(0) if stage == 0 else []:
                peer.reassign()
        case "empty":
            for peer in pipeline.living(stage):
                pipeline.kill(peer.name)
            sim.after(sim.random.uniform(0.5, 5.0), _refill, pipeline, stage)


def _lose_falsely(pipeline: Pipeline, peer: Peer) -> None:
    names = [name for name in peer.linked(peer.stage + 1) if name in peer.core.router.peers]
    if not names:
        return
    other = pipeline.peers[pipeline.sim.random.choice(names)]
    pipeline.break_link(peer, other)
    pipeline.sim.after(0.5, lambda: None if peer.is_dead else peer.on_link_lost(other))
    pipeline.sim.after(pipeline.sim.random.uniform(0.6, 5.0), pipeline.mend, peer, other)


def _join(pipeline: Pipeline, stage: int) -> Peer:
    """A new peer has links to all its neighbours; it takes part from the next step on."""
    name = f"{stage}.{len(pipeline.of_stage(stage))}"
    peer = pipeline.peers[name] = Peer(pipeline, stage, name)
    peer.suspend()
    pipeline.sim.note(f"{name} joins")
    pipeline.sim.after(0.25, peer.tick)
    for beside in (stage - 1, stage, stage + 1):
        for other in peer.linked(beside):
            one, two = (pipeline.peers[other], peer) if beside < stage else (peer, pipeline.peers[other])
            pipeline.mend(one, two)
    if not [p for p in pipeline.living(stage) if p.is_member or p.is_expected]:
        _enter_empty(pipeline, peer)
    return peer


def _refill(pipeline: Pipeline, stage: int) -> None:
    if not pipeline.living(stage):
        _join(pipeline, stage)


def _enter_empty(pipeline: Pipeline, peer: Peer) -> None:
    """Go on at the step at which this stage's work is due."""
    beside = pipeline.members(peer.stage - 1) if peer.stage > 0 else pipeline.members(1)
    version = max((p.core.version for p in beside), default=0)
    pipeline.emptied.add(peer.stage)
    for step in range(max(0, version), STEPS):
        pipeline.void(peer.stage, step)
    peer.enter(max(0, version))
