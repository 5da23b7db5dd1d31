"""What the owner of a run chooses about its data, and the few values that the readers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

SourceKind = Literal["auto", "stdlib", "text", "jsonl", "hub"]
"""How a source is read; "auto" lets `recipe.resolve_kind` decide."""


class DataError(ValueError):
    """The data cannot be used: missing, empty, malformed or inconsistent. The message names cause and fix."""


class DataConfig(BaseModel):
    """Where the text comes from and how it becomes rows of tokens.

    The same configuration on the same files gives the same rows. With a bound (`max_*`) the documents that
    are kept are the first ones of a seeded permutation of all, so that a small subset is representative.
    A bound stops after the document that reaches it: documents are never cut.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str = Field(
        default="stdlib",
        min_length=1,
        max_length=1024,
        description="'stdlib' (sources of the running Python's standard library), a text file or a folder of "
        "text files, a JSON or JSON Lines file or a folder of them, or the name of a Hugging Face data set.",
    )
    kind: SourceKind = Field(
        default="auto", description="How to read the source: auto, stdlib, text, jsonl or hub."
    )
    text_field: str = Field(
        default="text", min_length=1, max_length=256, description="Field or column that holds the text."
    )
    split: str = Field(
        default="train", min_length=1, max_length=256, description="Split of a Hugging Face data set."
    )
    subset: str | None = Field(
        default=None, max_length=256, description="Subset (configuration name) of a Hugging Face data set."
    )
    heldout_percent: int = Field(
        default=5,
        ge=0,
        le=50,
        description="Percent of the documents that are never trained on (rounded up; 0 holds out none).",
    )
    max_documents: int | None = Field(default=None, ge=1, description="Read at most this many documents.")
    max_bytes: int | None = Field(
        default=None, ge=1, description="Stop after the document that reaches this many bytes of UTF-8 text."
    )
    max_tokens: int | None = Field(
        default=None, ge=1, description="Stop after the document that reaches this many tokens."
    )
    sequence_length: int = Field(default=1024, ge=2, le=1 << 20, description="Tokens in a packed row.")
    seed: int = Field(
        default=0, ge=0, lt=1 << 63, description="Seed of the order in which documents are taken."
    )

    @property
    def is_bounded(self) -> bool:
        """Whether any bound may leave documents out."""
        return any(bound is not None for bound in (self.max_documents, self.max_bytes, self.max_tokens))


@dataclass(frozen=True, slots=True)
class Document:
    """One text that attention never leaves. `name` says where it came from, for messages and tests."""

    name: str
    text: str


@dataclass(slots=True)
class SourceCounts:
    """What a reader passed over, filled in while its documents are read.

    undecodable_files: files that are not UTF-8 text (or hold NUL bytes).
    empty_documents: documents without any character besides white space.
    """

    undecodable_files: int = 0
    empty_documents: int = 0
