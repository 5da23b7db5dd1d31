"""GASLoC: replicas that meet in random pairs, with an accelerated outer step of their own (arXiv 2606.11081)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from swarm.gradient.compressor import Compression, Compressor, Phase
from swarm.gradient.outer_config import GossipConfig, is_consensus, is_outer_step
from swarm.plan import seeded_order


def pair_of(
    me: str, members: Sequence[str], run_seed: int, stage: int, step: int, attempt: int = 0
) -> tuple[str, ...]:
    """This member and the one it meets after a step, in the order that all see; only itself if it is the odd one out.

    members: who takes part, the same at all of them. attempt: of the round; each draws other pairs, so that a member
    that keeps its partner waiting has to keep others waiting too.
    """
    order = seeded_order(tuple(sorted(members)), run_seed + attempt, stage, step)
    first = order.index(me) // 2 * 2
    return tuple(order[first : first + 2])


class Gossip:
    """The outer loop of one stage at one replica.

    globals: fp32 [numel], the last average of all, the same bits at all replicas; only these are common state.
    """

    def __init__(self, config: GossipConfig, total_steps: int, start: Tensor) -> None:
        self.config, self._total_steps = config, total_steps
        self.globals = start.detach().cpu().clone()
        self._start = self.globals.clone()
        """theta_t: own weights after the last outer step."""
        self._before = self.globals.clone()
        """y_(t-1); theta_0 before the first."""

    def due(self, step: int) -> bool:
        """Whether replicas meet after this step."""
        return is_outer_step(self.config, step, self._total_steps)

    def is_consensus(self, step: int) -> bool:
        """Whether all of them do."""
        return is_consensus(self.config, step, self._total_steps)

    def difference(self, local: Tensor) -> Tensor:
        """Global minus y: fp32 [numel], with y = theta_t + eta (local - theta_t)."""
        return self.globals - self._ahead(local)

    def apply(self, average: Tensor, step: int, local: Tensor, own: Tensor | None = None) -> None:
        """Take the average of differences (fp32 [numel]) of a pair in, or of all after a consensus step:

            mean = global - average;   local <- y - c (y - mean) + gamma (y - y_(t-1))

        After a consensus step the mean becomes the global weights, after the last step also the local ones. Changes
        `local` (fp32 [numel]) in place. own: not looked at, no average comes late here. Raises ValueError, with nothing
        changed, for an average that is not finite.
        """
        if not bool(torch.isfinite(average).all()):
            raise ValueError(f"the averaged difference of step {step} is not finite")
        config = self.config
        mean = self.globals - average
        if self.is_consensus(step):
            self.globals = mean
        if step + 1 == self._total_steps:
            local.copy_(mean)
            return
        y = self._ahead(local)
        theta = y - (y - mean) * config.coupling + (y - self._before) * config.momentum
        self._before, self._start = y, theta
        local.copy_(theta)

    def state(self) -> dict[str, Tensor]:
        """What snapshots hold beside the global weights: nothing."""
        return {}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless this is what `state` gave."""
        if state:
            raise ValueError(f"gasloc has no outer state that replicas share: {sorted(state)[:4]}")

    def load(self, weights: Tensor, state: Mapping[str, Tensor]) -> None:
        """Begin from these global weights (fp32 [numel])."""
        self.globals = weights.detach().cpu().clone()
        self._start, self._before = self.globals.clone(), self.globals.clone()

    def _ahead(self, local: Tensor) -> Tensor:
        """y of these local weights."""
        own = local.detach().cpu()
        return self._start + (own - self._start) * self.config.learning_rate


class OuterStepCompressor:
    """A compressor that is used after outer steps only: nothing is averaged after a local step."""

    def __init__(self, compressor: Compressor, config: GossipConfig, total_steps: int) -> None:
        self._compressor, self._config, self._total_steps = compressor, config, total_steps

    def phases(self, step: int) -> tuple[Phase, ...]:
        """See Compressor. None after a local step."""
        if not is_outer_step(self._config, step, self._total_steps):
            return ()
        return self._compressor.phases(step)

    def begin(self, gradient: Tensor, step: int, weight: int) -> Compression:
        """See Compressor. gradient: global minus y."""
        return self._compressor.begin(gradient, step, weight)

    def replay(self, averages: Sequence[Tensor], step: int) -> Tensor:
        """See Compressor."""
        return self._compressor.replay(averages, step)

    def common_state(self) -> Mapping[str, Tensor]:
        """See Compressor."""
        return self._compressor.common_state()

    def load_common_state(self, state: Mapping[str, Tensor]) -> None:
        """See Compressor."""
        self._compressor.load_common_state(state)

    def digest(self) -> str:
        """See Compressor."""
        return self._compressor.digest()
