# SPDX-License-Identifier: Apache-2.0
"""A request, as the pool knows it in the scheduler: its chunks, and how far they are looked up, loaded and saved."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pd_connector.pool.jobs import PromptChunk
from pd_connector.pool.keys import (
    CHUNK_TOKENS,
    Input,
    extend,
    inputs_digest,
    root,
    salt_digest,
    token_bytes,
)
from pd_connector.pool.store.base import Found

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Look(NamedTuple):
    """What a look-up has found."""

    keys: list[bytes]  # the root, then a key for each whole chunk
    found: list[Found]  # of the first ones, up to the first that the pool lacks


class Loading(NamedTuple):
    """A load under way."""

    keys: list[bytes]
    found: list[Found]
    tokens: range
    began_s: float


@dataclass(slots=True)
class PoolPrompt:
    request: "Request"
    adapter: str
    inputs: tuple[Input, ...]
    queued_s: float
    look: "Future[Look] | None"
    reads: bool  # its look-up has yet to begin
    writes: bool
    pages: list[list[int]] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    stepped: bool = False  # the step that found its cached pages is over
    kept: int = 0  # chunks from the beginning that are in the pool, or were given to it
    found: list[Found] = field(default_factory=list)
    loads: int = 0  # token at which a load ends; 0 without one
    loading: "Loading | None" = None
    failed: "Loading | None" = None  # its load, until its cause is told
    audited: range = range(
        0
    )  # tokens that will be compared with the pool once they are computed here

    def root(self, model: bytes) -> bytes:
        """The parent of its first chunk."""
        return root(model, adapter=self.adapter, salt=self.request.cache_salt or "")

    def longer(self, keys: list[bytes], tokens: Sequence[int]) -> list[bytes]:
        """Keys of its first chunks (the root before them), and those of the chunks that `tokens` add."""
        return keys + extend(keys[-1], tokens, self.inputs, first_chunk=len(keys) - 1)

    def chunk(self, number: int) -> PromptChunk:
        """One of its chunks, whose key is known."""
        first, stop = number * CHUNK_TOKENS, (number + 1) * CHUNK_TOKENS
        return PromptChunk(
            number,
            self.keys[number + 1],
            self.keys[number],
            token_bytes(self.request.all_token_ids[first:stop]),
            inputs_digest(self.inputs, number),
            self.adapter,
            salt_digest(self.request.cache_salt or ""),
        )
