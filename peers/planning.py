"""The plans a peer knows, made and checked. Pure.

What a step computes is a pure function of manifest, step, attempt, group and sources, so a plan that
arrives is checked by its samples: nobody can make a peer train something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peers.frames import FrameError
from peers.prior_parts import parts_of
from swarm.activation.registry import needs_prior
from swarm.data.order import samples_of_step
from swarm.manifest import RunManifest
from swarm.plan import Plan, Slot, split_samples

KEPT_PLANS = 16
MAX_ATTEMPT = 2**16


class StalePlanError(FrameError):
    """A plan of a step that lies behind, or far ahead of a peer that others have left behind."""


@dataclass(frozen=True, slots=True)
class PriorRef:
    """The prior in force at a part of the run, as plans name it: see `Plan`."""

    version: int = 0
    sha256: str = ""

    def next(self, sha256: str) -> PriorRef:
        """The prior of this hash in place of this one; this one if it is the same."""
        return self if sha256 == self.sha256 else PriorRef(self.version + 1, sha256)


def prior_refs(plan: Plan) -> tuple[PriorRef, ...]:
    """The priors that a plan names, one per part of the run."""
    return tuple(map(PriorRef, plan.prior_versions, plan.prior_hashes))


def initial_refs(manifest: RunManifest) -> tuple[PriorRef, ...]:
    """The run's initial priors."""
    return (PriorRef(),) * len(parts_of(manifest))


def make_plan(
    manifest: RunManifest,
    step: int,
    attempt: int,
    group: str,
    sources: Sequence[str],
    priors: Sequence[PriorRef] = (),
) -> tuple[Plan, tuple[str, ...]]:
    """The plan of a step and who runs its slots: one slot per source, equal shares.

    priors: one per part of the run (`parts_of`); none stands for the initial ones.
    """
    priors = priors or initial_refs(manifest)
    samples = step_samples(manifest, step)
    shares = dict.fromkeys(sources, 1.0)
    slots = split_samples(samples, manifest.rows_per_microbatch, shares)
    plan = Plan(
        step=step,
        attempt=attempt,
        group=group,
        rows_per_microbatch=manifest.rows_per_microbatch,
        slots=tuple(Slot(number=number, samples=slot) for number, slot in enumerate(slots)),
        prior_versions=tuple(prior.version for prior in priors),
        prior_hashes=tuple(prior.sha256 for prior in priors),
        is_last=step == manifest.total_steps - 1,
        keep_snapshot=manifest.keeps_snapshot(step),
    )
    return plan, tuple(sources[: len(slots)])


def step_samples(manifest: RunManifest, step: int) -> list[int]:
    """Sample ids of a step, in order."""
    return samples_of_step(manifest.seed, manifest.data.train_samples, manifest.samples_per_step, step)


class PlanBook:
    """Plans by hash, of the steps around the current one; for each step the latest attempt counts."""

    def __init__(self, manifest: RunManifest) -> None:
        self._manifest = manifest
        self._plans: dict[str, Plan] = {}

    def get(self, digest: str) -> Plan | None:
        """A plan by its hash."""
        return self._plans.get(digest)

    def of_step(self, step: int) -> Plan | None:
        """The latest attempt known for a step."""
        plans = [plan for plan in self._plans.values() if plan.step == step]
        return max(plans, key=lambda plan: plan.attempt, default=None)

    def parse(self, data: bytes, version: int) -> Plan:
        """Check a plan that arrived. Raises FrameError unless it is one this run can have around `version`.

        StalePlanError, one of them, for another step of the run.
        """
        try:
            plan = Plan.from_bytes(data)
        except ValueError as error:
            raise FrameError("plan", str(error)[:160]) from error
        if plan.step >= self._manifest.total_steps:
            raise FrameError("plan", f"a plan of step {plan.step} of {self._manifest.total_steps}")
        if not version - 1 <= plan.step <= version + 1:
            raise StalePlanError("plan", f"a plan of step {plan.step} while step {version} is worked on")
        samples = [sample for slot in plan.slots for sample in slot.samples]
        if samples != step_samples(self._manifest, plan.step):
            raise FrameError("plan", f"the plan of step {plan.step} names other samples than the run's order")
        if plan.rows_per_microbatch != self._manifest.rows_per_microbatch:
            raise FrameError("plan", f"{plan.rows_per_microbatch} rows per microbatch")
        if plan.attempt > MAX_ATTEMPT or len(plan.prior_versions) != len(parts_of(self._manifest)):
            raise FrameError("plan", f"attempt {plan.attempt}, {len(plan.prior_versions)} priors")
        if any(plan.prior_versions[: self._manifest.model.stages - 1]) and not needs_prior(
            self._manifest.codec
        ):
            raise FrameError("plan", f"priors {plan.prior_versions[:4]} for a codec that has none")
        if plan.keep_snapshot != self._manifest.keeps_snapshot(plan.step):
            raise FrameError("plan", f"another snapshot flag for step {plan.step}")
        if plan.is_last != (plan.step == self._manifest.total_steps - 1):
            raise FrameError("plan", f"step {plan.step} is not the last")
        return plan

    def add(self, plan: Plan) -> bool:
        """Remember a plan; False if it was known."""
        digest = plan.digest()
        if digest in self._plans:
            return False
        self._plans[digest] = plan
        while len(self._plans) > KEPT_PLANS:
            self._plans.pop(next(iter(self._plans)))
        return True
