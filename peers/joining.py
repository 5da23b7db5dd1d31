"""Decisions of a peer that comes into a running swarm: when to follow, who refills, where to start. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from peers.frames import FrameError
from peers.limits import LIMITS
from peers.round_messages import MAX_STEP
from swarm.plan import seeded_order

LINEAGE_CHARACTERS = 64
CLOCK_S = 60.0
CLOCK_STEPS = 2
CLOCK_SAMPLES = 256
"""A stage's speed is taken over this time, once so many steps have gone by."""
REFILL_STEP = -2
"""The step that seeds the order of those who could refill an empty stage."""


class Standing(StrEnum):
    """What a stage peer is in its stage."""

    WAITING = "waiting"
    """The run has not started."""
    RESTORING = "restoring"
    """The start named this peer; it loads the version the run starts from."""
    CATCHING_UP = "catching_up"
    FOLLOWING = "following"
    """It is in a round without a vote."""
    VOTING = "voting"


@dataclass(frozen=True, slots=True)
class Status:
    """What a neighbour says of itself: steps applied, whether it votes and works, lineage of its weights."""

    version: int
    is_voting: bool
    lineage: str

    def pack(self) -> list[Any]:
        """Wire form."""
        return [self.version, self.is_voting, self.lineage]


def parse_status(value: object) -> Status:
    """The answer to QUERY "step". Raises FrameError."""
    if (
        not isinstance(value, list)
        or len(value) != 3
        or type(value[0]) is not int
        or type(value[1]) is not bool
        or type(value[2]) is not str
    ):
        raise FrameError("header", "a status is [version, is voting, lineage]")
    version, is_voting, lineage = value
    if not 0 <= version <= MAX_STEP or len(lineage) > LINEAGE_CHARACTERS:
        raise FrameError("range", f"a status of version {version}, lineage of {len(lineage)} characters")
    return Status(version, is_voting, lineage)


def current_status(statuses: Iterable[Status]) -> Status | None:
    """The state of a stage by the word of its voting peers: the furthest, of two lineages the greater."""
    return max((s for s in statuses if s.is_voting), key=lambda s: (s.version, s.lineage), default=None)


def may_follow(behind: int, seconds_per_update: float, gate_s: float) -> bool:
    """Whether what is missing can be had while the stage holds one round for it.

    behind: updates missing now. The commit of the round in progress is one more. seconds_per_update: 0 if unknown.
    """
    if seconds_per_update == 0:
        return behind <= 1
    return (behind + 1) * seconds_per_update <= gate_s


def falls_behind(behind: int, seconds_per_update: float, seconds_per_step: float, gate_s: float) -> bool:
    """Whether this peer is too far behind to follow, and the stage goes on at least as fast as it catches up."""
    return seconds_per_update >= seconds_per_step and not may_follow(behind, seconds_per_update, gate_s)


class Outlook:
    """Whether a peer that catches up comes closer to its stage, look by look."""

    def __init__(self) -> None:
        self._behind: deque[int] = deque(maxlen=LIMITS.catch_up_rounds + 1)
        self._hopeless, self._since = 0, 0.0

    def saw(
        self, behind: int | None, update_s: float, step_s: float | None, room_s: float, now: float
    ) -> str:
        """Another look; returns why the peer will not catch up, or "".

        behind: steps, None if nobody has the next update any more. update_s: seconds per update, 0 if unknown.
        step_s: seconds per step. room_s: what `may_follow` allows. One look, or one update, is not believed: it may
        have been slow for reasons of its own, as after an outage.
        """
        if behind is None:
            is_hopeless = step_s is not None and 2 * update_s >= step_s
            why = "the updates it needs next are gone before it has those before them"
        else:
            self._behind.append(behind)
            is_hopeless = len(self._behind) == self._behind.maxlen and behind >= self._behind[0]
            is_hopeless |= step_s is not None and falls_behind(behind, update_s, step_s, room_s)
            why = f"it is {behind} steps behind and comes no closer"
        if self._hopeless == 0:
            self._since = now
        self._hopeless = self._hopeless + 1 if is_hopeless else 0
        is_sure = self._hopeless >= LIMITS.follow_tries and now - self._since >= 2 * LIMITS.gate_s
        return why if is_sure else ""


def updates_before_a_look(seconds_per_update: float, gate_s: float) -> int:
    """How many updates are fetched before a peer looks again where its stage is: those of `gate_s`, one at least."""
    return max(1, int(gate_s / max(seconds_per_update, 1e-3))) if seconds_per_update > 0 else 1


class StepClock:
    """How fast a stage goes, by the versions that its voting peers name when they are asked."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=CLOCK_SAMPLES)

    def saw(self, version: int, now: float) -> None:
        """The stage is at this version. now: seconds of a monotonic clock."""
        if self._seen and version == self._seen[-1][1]:
            return
        if self._seen and version < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now, version))
        while now - self._seen[0][0] > CLOCK_S and version - self._seen[1][1] >= CLOCK_STEPS:
            self._seen.popleft()

    @property
    def seconds_per_step(self) -> float | None:
        """Over the last minute, or the last two steps if they took longer; None until two went by."""
        if not self._seen:
            return None
        (first_at, first), (last_at, last) = self._seen[0], self._seen[-1]
        return (last_at - first_at) / (last - first) if last - first >= CLOCK_STEPS else None


def refiller(candidates: Sequence[str], run_seed: int, stage: int) -> str:
    """Who of the waiting peers of an empty stage refills it. Raises ValueError without candidates."""
    if not candidates:
        raise ValueError(f"nobody waits to refill stage {stage}")
    return seeded_order(candidates, run_seed, stage, REFILL_STEP)[0]


def common_version(held: Sequence[Mapping[str, Iterable[int]]]) -> int:
    """The newest version that some peer of every stage holds; 0, which everybody can make, if there is none.

    held: for each stage, peer -> versions it can serve.
    """
    per_stage = [{version for versions in stage.values() for version in versions} | {0} for stage in held]
    return max(set.intersection(*per_stage)) if per_stage else 0


def stages_without_state(held: Sequence[Mapping[str, Iterable[int]]]) -> list[int]:
    """Stages in which nobody holds anything newer than version 0 while another stage does."""
    newest = [max((v for versions in stage.values() for v in versions), default=0) for stage in held]
    return [stage for stage, version in enumerate(newest) if version == 0] if any(newest) else []


def thinnest_stage(stages: int, held: Sequence[int], chance: float) -> int:
    """The stage with the fewest peers. held: the stage of every peer in view; chance: in [0, 1), breaks ties."""
    counts = [held.count(stage) for stage in range(stages)]
    thinnest = [stage for stage, count in enumerate(counts) if count == min(counts)]
    return thinnest[int(chance * len(thinnest))]
