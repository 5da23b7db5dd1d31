"""How far a peer has come in the run, for its status, metrics and records."""

from __future__ import annotations

from dataclasses import dataclass, field

SPEED_STEPS = 5
"""Steps over which the speed is taken."""


@dataclass(slots=True)
class Progress:
    """Steps, loss and speed as one peer sees them. loss: mean token loss (nats) of the last step's own ledger."""

    step: int = 0
    loss: float | None = None
    tokens_done: int = 0
    gradient_norm: float | None = None
    lost: int = 0
    """Microbatches that the commits of this stage listed as lost."""
    step_times: list[float] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)

    def finished_step(
        self, now: float, tokens: int, loss: tuple[float, int], norm: float | None, lost: int
    ) -> None:
        """A step was applied. loss: sum of token losses and loss tokens of the own ledger; norm: of the average;
        lost: microbatches that the commit lists as lost."""
        loss_sum, loss_tokens = loss
        if loss_tokens:
            self.loss = loss_sum / loss_tokens
        self.gradient_norm = norm
        self.lost += lost
        self.step += 1
        self.tokens_done += tokens
        self.step_times = [*self.step_times, now][-SPEED_STEPS - 1 :]
        self.step_tokens = [*self.step_tokens, tokens][-SPEED_STEPS:]

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of the whole run per second, over the last few steps."""
        if len(self.step_times) < 2:
            return None
        span = self.step_times[-1] - self.step_times[0]
        return sum(self.step_tokens[1 - len(self.step_times) :]) / max(span, 1e-6)

    @property
    def seconds_per_step(self) -> float | None:
        """Seconds between commits, over the last few steps."""
        if len(self.step_times) < 2:
            return None
        return (self.step_times[-1] - self.step_times[0]) / (len(self.step_times) - 1)
