"""A boundary whose prior changes while the run goes on: one codec per prior, chosen by the key.

The plan of a step names the prior of every boundary by its hash, so both ends code a microbatch, forward and
backward, with the same one, whatever either has fetched meanwhile; a replay finds the prior it began with.
"""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar

from torch import Tensor

from swarm.activation.base import BoundaryCodec, ByteCount, CodecKey, Layout, Payload
from swarm.activation.rows import RowTap


class MissingPriorError(LookupError):
    """A microbatch under a prior that is not here (yet)."""


class VersionedCodec(BoundaryCodec):
    """The codecs of one boundary by the hash of their prior; `initial` is that of the run's initial prior, "".

    `add` and `retain` may be called while another thread codes: a codec in use stays alive until it is done.
    tap: shown what is encoded here, if somebody wants some of it.
    Every method of a codec raises MissingPriorError for a key whose prior is not held.
    """

    name: ClassVar[str] = "versioned"

    def __init__(self, boundary: int, initial: BoundaryCodec) -> None:
        self.boundary = boundary
        self.tap: RowTap | None = None
        self._codecs: dict[str, BoundaryCodec] = {"": initial}

    def add(self, prior: str, codec: BoundaryCodec) -> None:
        """Hold the codec of a prior, by the prior's hash."""
        self._codecs[prior] = codec

    def holds(self, prior: str) -> bool:
        """Whether microbatches under this prior can be coded here."""
        return prior in self._codecs

    def retain(self, wanted: Container[str]) -> None:
        """Let go of all priors but these; the initial one stays, since a cold start may go back to it."""
        for prior in [prior for prior in self._codecs if prior and prior not in wanted]:
            del self._codecs[prior]

    def layout(self, key: CodecKey) -> Layout:
        """See BoundaryCodec."""
        return self._of(key).layout(key)

    def gradient_layout(self, key: CodecKey) -> Layout:
        """See BoundaryCodec."""
        return self._of(key).gradient_layout(key)

    def byte_count(self, key: CodecKey) -> ByteCount:
        """See BoundaryCodec."""
        return self._of(key).byte_count(key)

    def encode(self, hidden: Tensor, key: CodecKey) -> Payload:
        """See BoundaryCodec."""
        if self.tap is not None:
            self.tap.see(hidden, key)
        return self._of(key).encode(hidden, key)

    def decode(self, payload: Payload, key: CodecKey) -> Tensor:
        """See BoundaryCodec."""
        return self._of(key).decode(payload, key)

    def encode_gradient(self, gradient: Tensor, key: CodecKey) -> Payload:
        """See BoundaryCodec."""
        if self.tap is not None:
            self.tap.see(gradient, key)
        return self._of(key).encode_gradient(gradient, key)

    def decode_gradient(self, payload: Payload, key: CodecKey) -> Tensor:
        """See BoundaryCodec."""
        return self._of(key).decode_gradient(payload, key)

    def _of(self, key: CodecKey) -> BoundaryCodec:
        prior = key.prior(self.boundary)
        codec = self._codecs.get(prior)
        if codec is None:
            raise MissingPriorError(f"boundary {self.boundary}: prior {prior[:12]} is not held")
        return codec
