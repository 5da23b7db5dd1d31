"""When a stage's replicas average, and what becomes of the average: configurations and their schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EveryStepConfig(_Config):
    """Gradients are averaged at every step."""

    name: Literal["every_step"] = "every_step"
    overlap: int = Field(
        default=0,
        ge=0,
        le=1,
        description="1: gradients travel while the next step runs, and are applied after it",
    )


class LocalStepsConfig(_Config):
    """Local steps with the run's optimizer, then an outer step on the average of old minus new.

    With outer learning rate 1 and momentum 0 this is local SGD: the replicas' weights are averaged (Stich 2019,
    arXiv 1805.09767). With momentum it is DiLoCo (arXiv 2311.08105), with fragments Streaming DiLoCo
    (arXiv 2501.18512). SPARTA (arXiv 2601.22442) averages weights, one random slice of 1 / fragments of them after
    another.
    """

    name: Literal["local_sgd", "diloco", "streaming_diloco", "sparta"]
    every: int = Field(ge=1, description="H: steps from one average of a weight to the next")
    learning_rate: float = Field(default=1.0, gt=0, le=2, description="of the outer optimizer")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="of the outer optimizer (Nesterov)")
    fragments: int = Field(
        default=1, ge=1, le=256, description="F: parts of a stage that are averaged in turn"
    )
    keep_local: float = Field(
        default=0.0, ge=0, lt=1, description="share of the local weights that stays when global ones come"
    )
    overlap: int = Field(
        default=0,
        ge=0,
        description="steps that are trained while an average travels; applied after the last of them",
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_name(cls, data: object) -> object:
        """The methods' own values where none are given: DiLoCo's outer learning rate 0.7 and momentum 0.9, four
        fragments of Streaming DiLoCo and twenty of SPARTA, half of the local weights kept where averages come late.
        """
        if not isinstance(data, dict):
            return data
        name, every = data.get("name"), data.get("every", 1)
        defaults: dict[str, object] = {}
        if name in ("diloco", "streaming_diloco"):
            defaults |= {"learning_rate": 0.7, "momentum": 0.9}
        most = {"streaming_diloco": 4, "sparta": 20}.get(str(name))
        if most is not None and isinstance(every, int):
            defaults["fragments"] = max(1, min(most, every))
        if data.get("overlap") and name != "sparta":
            defaults["keep_local"] = 0.5
        return defaults | data

    @model_validator(mode="after")
    def _makes_sense(self) -> LocalStepsConfig:
        if self.name in ("local_sgd", "sparta") and (self.momentum or self.learning_rate != 1.0):
            raise ValueError(
                f"{self.name} averages weights: an outer momentum or learning rate belongs to diloco"
            )
        if self.name in ("local_sgd", "diloco") and self.fragments > 1:
            raise ValueError(
                f"{self.name} averages all weights at once: fragments belong to streaming_diloco and sparta"
            )
        if self.name == "sparta" and self.keep_local:
            raise ValueError(
                "sparta adds what the average changed to the local weights: keep_local has no place"
            )
        if self.fragments > self.every:
            raise ValueError(
                f"{self.fragments} fragments every {self.every} steps: at most one can be averaged after a step"
            )
        if self.overlap > self.every // self.fragments:
            raise ValueError(
                f"an overlap of {self.overlap} steps with an average every {self.every // self.fragments}: one has to "
                "be applied before the next begins"
            )
        return self


class GossipConfig(_Config):
    """GASLoC (arXiv 2606.11081): local steps, and an outer step that meets one random other replica.

        y_t = theta_t + eta (theta_(t, H) - theta_t)
        theta_(t+1) = y_t - c (y_t - mean of the pair's y_t) + gamma (y_t - y_(t-1))

    c = 1 takes the pair's mean. Replicas are never equal, but snapshots, exports and those who join need weights that
    are: after every `consensus` outer steps the whole group takes the place of the pair.
    """

    name: Literal["gasloc"] = "gasloc"
    every: int = Field(ge=1, description="H: steps from one outer step to the next")
    learning_rate: float = Field(default=1.0, gt=0, le=2, description="eta, of the outer step")
    momentum: float = Field(default=0.5, ge=0, lt=1, description="gamma, of a replica's own y")
    coupling: float = Field(default=1.0, gt=0, le=1, description="c, how far a pair comes together")
    consensus: int = Field(default=10, ge=1, description="outer steps from one average of all to the next")
    overlap: int = Field(default=0, description="only 0: pairs exchange within the round")

    @model_validator(mode="after")
    def _meets_within_the_round(self) -> Self:
        if self.overlap:
            raise ValueError(
                f"overlap {self.overlap}: pairs meet within the round, and their averages cannot travel later"
            )
        return self


OuterConfig = Annotated[EveryStepConfig | LocalStepsConfig | GossipConfig, Field(discriminator="name")]
"""When replicas average, and what becomes of the average."""
OUTERS: TypeAdapter[OuterConfig] = TypeAdapter(OuterConfig)


def interval(config: OuterConfig) -> int:
    """Steps after which the schedule of averages repeats."""
    if isinstance(config, EveryStepConfig):
        return 1
    return config.every * config.consensus if isinstance(config, GossipConfig) else config.every


def due(config: LocalStepsConfig, fragments: int, step: int, total_steps: int) -> tuple[int, ...]:
    """Fragments that are averaged after a step: number f when step + 1 = (f + 1) H / F, rounded down, modulo H; after
    the run's last step all of them, so that all replicas end with the same weights.
    """
    if step + 1 == total_steps:
        return tuple(range(fragments))
    place = (step + 1) % config.every
    return tuple(f for f in range(fragments) if (f + 1) * config.every // fragments % config.every == place)


def is_outer_step(config: GossipConfig, step: int, total_steps: int) -> bool:
    """Whether replicas meet after a step: in pairs, or all of them (`is_consensus`)."""
    return (step + 1) % config.every == 0 or step + 1 == total_steps


def is_consensus(config: GossipConfig, step: int, total_steps: int) -> bool:
    """Whether all replicas average after a step; always after the run's last one."""
    return (step + 1) % (config.every * config.consensus) == 0 or step + 1 == total_steps


@dataclass(frozen=True, slots=True)
class Overlap:
    """Which step's average is applied with which commit, where averages travel while steps run.

    What a member has at its commit of step s travels during the next `steps` steps and is applied with the commit of
    step s + steps. After the run's last step everything is averaged in the open; what could not be applied before is
    part of that, and does not travel.
    """

    steps: int
    total_steps: int

    def travels(self, step: int) -> bool:
        """Whether what members have at the commit of a step is averaged while later steps run."""
        return self.steps > 0 and step + self.steps < self.total_steps - 1

    def waits(self, step: int) -> bool:
        """Whether what members have at the commit of a step is averaged with the last step's."""
        return self.steps > 0 and self.total_steps - 1 - self.steps <= step < self.total_steps - 1

    def settled(self, step: int) -> int | None:
        """The step whose average is applied with the commit of `step`: itself without an overlap, and at the end; None
        for the first ones.
        """
        if self.steps == 0 or step == self.total_steps - 1:
            return step
        return step - self.steps if step >= self.steps else None
