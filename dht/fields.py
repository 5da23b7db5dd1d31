"""Types of fields that stand in several records."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

_MAX_INTEGER = 2**53

RunId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
PeerIdText = Annotated[str, Field(pattern=r"^[1-9A-HJ-NP-Za-km-z]{40,64}$")]
Count = Annotated[int, Field(ge=0, le=_MAX_INTEGER)]
