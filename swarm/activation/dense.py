"""The dense codec: every value crosses the boundary.

In bf16 it is what anchors, evaluation and reference runs use; in fp32 it makes a pipeline comparable, bit for
bit, with the uncut model.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from swarm.activation.base import (
    BoundaryCodec,
    ByteCount,
    CodecKey,
    Layout,
    Payload,
    TensorSpec,
    check_finite,
    check_payload,
)
from swarm.activation.config import DenseConfig

WIRE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Wire dtypes by their configuration name."""


class DenseCodec(BoundaryCodec):
    """Hidden states and gradients as they are, rounded to the wire dtype.

    The Jacobian is the identity (rounding is passed straight through), so both directions are the same map.
    """

    name: ClassVar[str] = "dense"

    def __init__(self, config: DenseConfig, *, hidden_size: int, dtype: torch.dtype) -> None:
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.wire_dtype = WIRE_DTYPES[config.values]

    def layout(self, key: CodecKey) -> Layout:
        """`values`: wire dtype [B, T, H]."""
        return {"values": TensorSpec(self.wire_dtype, (*key.shape, self.hidden_size))}

    def gradient_layout(self, key: CodecKey) -> Layout:
        """The same as forward."""
        return self.layout(key)

    def byte_count(self, key: CodecKey) -> ByteCount:
        """All bytes are ordinary."""
        return ByteCount(coded=self.layout(key)["values"].nbytes, dense_positions=0)

    def encode(self, hidden: Tensor, key: CodecKey) -> Payload:
        """Round to the wire dtype. hidden: float [B, T, H]."""
        return {"values": hidden.to(self.wire_dtype).contiguous()}

    def decode(self, payload: Payload, key: CodecKey) -> Tensor:
        """Hidden states [B, T, H] in the compute dtype. Raises PayloadError (layout, non-finite value)."""
        check_payload(payload, self.layout(key))
        check_finite(payload, ("values",))
        return payload["values"].to(self.dtype)

    def encode_gradient(self, gradient: Tensor, key: CodecKey) -> Payload:
        """Round to the wire dtype. gradient: float [B, T, H]."""
        return self.encode(gradient, key)

    def decode_gradient(self, payload: Payload, key: CodecKey) -> Tensor:
        """Gradient [B, T, H] in the compute dtype. Raises PayloadError (layout, non-finite value)."""
        return self.decode(payload, key)
