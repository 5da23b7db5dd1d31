"""Which mask ratio suits a crowd's lines. Pure.

Let x be the time that a stage's uncoded hidden states and gradients take over its line, divided by the time that it
computes meanwhile (the two overlap). A higher mask ratio costs steps: in docs/method.md 1.06 times dense's at 80, 1.15
times at 90 and 1.6 times at 95. Up to some x it pays to send more and to make fewer steps.
"""

from __future__ import annotations

from dataclasses import dataclass

LIMITS: tuple[tuple[float, float | None], ...] = (
    (1.0, None),
    (5.5, 80.0),
    (14.0, 90.0),
    (float("inf"), 95.0),
)
"""(x up to which, mask ratio); None stands for codec dense."""

TRAINING_OVER_CALIBRATION = 1.5
"""Work of forward and backward, relative to calibration's, which takes no gradients of weights: 3 products to 2."""


@dataclass(frozen=True, slots=True)
class Advice:
    """mask_ratio: None for codec dense. x: see the module."""

    mask_ratio: float | None
    x: float

    @property
    def codec(self) -> str:
        """As options of init."""
        return (
            "--codec dense" if self.mask_ratio is None else f"--codec basis --mask-ratio {self.mask_ratio:g}"
        )


def advise(hidden_size: int, link_mbps: float, seconds_per_token: float) -> Advice:
    """What suits lines of so many Mbit/s each way. seconds_per_token: a stage's compute, forward and backward.

    A middle stage sends, and receives, one token's hidden states and one token's gradients in bf16 per token. Raises
    ValueError for figures that are not positive.
    """
    if min(hidden_size, link_mbps, seconds_per_token) <= 0:
        raise ValueError(f"{hidden_size}, {link_mbps} Mbit/s, {seconds_per_token} s: all must be positive")
    x = 2 * 2 * hidden_size * 8 / (link_mbps * 1e6) / seconds_per_token
    return Advice(next(ratio for limit, ratio in LIMITS if x < limit), x)


def stage_seconds_per_token(calibration_s: float, tokens: int, stages: int) -> float:
    """A stage's compute per token, from how long calibration took for so many tokens on this machine."""
    return TRAINING_OVER_CALIBRATION * calibration_s / max(1, tokens) / stages


def note(
    advice: Advice, link_mbps: float, seconds_per_token: float, chosen: str, *, is_measured: bool
) -> str:
    """What init says. chosen: the run's codec, as options. is_measured: on this machine, not given."""
    where = "as this machine does" if is_measured else "as --stage-us-per-token says"
    us = seconds_per_token * 1e6
    verdict = "as chosen" if advice.codec == chosen else f"chosen was {chosen}"
    return (
        f"codec: on lines of {link_mbps:g} Mbit/s, with stages that take {us:,.{1 if us < 1000 else 0}f} us per token "
        f"({where}), sending everything would take {advice.x:.2g} times as long as computing: {advice.codec} suits "
        f"that best ({verdict}; see docs/method.md)"
    )
