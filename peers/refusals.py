"""Why a file server refuses a request."""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class Refused(StrEnum):
    """Why a request was refused."""

    PROTOCOL = "protocol"
    BUSY = "busy"
    MALFORMED = "malformed"
    UNKNOWN_RUN = "unknown_run"
    SEVERAL_RUNS = "several_runs"
    UNKNOWN_NAME = "unknown_name"
    MISSING = "missing"
    """The manifest names it, but this peer has not got it (yet)."""
    RANGE = "range"
    FAILED = "failed"
    """The holder's own disk failed."""


class RefusalError(Exception):
    """A request that is answered with REFUSED. header: fields of that frame."""

    def __init__(self, reason: Refused, detail: str, **more: Any) -> None:
        super().__init__(detail)
        self.header = {"reason": reason.value, "detail": detail[:400], **more}
