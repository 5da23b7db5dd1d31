"""Outliers: single values so large that coding them with the rest would spoil a token, sent as they are.

Massive activations are a few channels of a few tokens, a hundred times larger than everything else (Sun et al.,
"Massive activations in large language models", 2024). Those at known positions are dealt with by the codec's dense
positions; these may turn up anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.activation.base import Layout, Payload, PayloadError, TensorSpec, check_finite
from swarm.activation.config import outlier_values


@dataclass(frozen=True, slots=True)
class Outliers:
    """One token in `interval`, those with the largest values, sends its largest values in full.

    hidden_size: H. With n tokens, e = n // interval of them send m = outlier_values(H) values each.
    """

    hidden_size: int
    interval: int

    def layout(self, tokens: int) -> Layout:
        """`outlier_tokens` int32 [e], `outlier_channels` int16 [e, m], `outliers` bfloat16 [e, m]."""
        count, values = tokens // self.interval, outlier_values(self.hidden_size)
        return {
            "outlier_tokens": TensorSpec(torch.int32, (count,)),
            "outlier_channels": TensorSpec(torch.int16, (count, values)),
            "outliers": TensorSpec(torch.bfloat16, (count, values)),
        }

    def clip_(self, centred: Tensor) -> tuple[Tensor, Tensor]:
        """Clip the largest values of centred [n, H] to their token's next; says where: int64 [e, 1] and [e, m].

        Zeros would be no neighbours of anything: a token whose largest values are ordinary would be harder to code.
        """
        size = centred.abs()
        tokens = size.amax(dim=1).topk(centred.shape[0] // self.interval).indices
        values = outlier_values(self.hidden_size)
        largest = size[tokens].topk(min(values + 1, self.hidden_size), dim=1)
        channels, limit = largest.indices[:, :values], largest.values[:, -1:]
        places = (tokens.unsqueeze(1), channels)
        centred[places] = centred[places].sign() * limit
        return places

    def take_(self, centred: Tensor, rows: Tensor) -> Payload:
        """Payload of the values of rows [n, H] whose places in centred [n, H] are clipped."""
        tokens, channels = self.clip_(centred)
        return {
            "outlier_tokens": tokens.squeeze(1).to(torch.int32),
            "outlier_channels": channels.to(torch.int16),
            "outliers": rows[tokens, channels].to(torch.bfloat16),
        }

    def put_(self, payload: Payload, rows: Tensor) -> None:
        """Write the payload's values into rows [n, H]. Raises PayloadError for a place outside, or no finite value."""
        tokens, channels = payload["outlier_tokens"].long(), payload["outlier_channels"].long()
        if not tokens.numel():
            return
        check_finite(payload, ("outliers",))
        for name, places, end in (
            ("outlier_tokens", tokens, rows.shape[0]),
            ("outlier_channels", channels, rows.shape[1]),
        ):
            low, high = torch.aminmax(places)
            if int(low) < 0 or int(high) >= end:
                raise PayloadError(f"payload tensor {name!r} holds a place outside 0..{end - 1}")
        rows[tokens.unsqueeze(1), channels] = payload["outliers"].to(rows.dtype)
