# SPDX-License-Identifier: Apache-2.0
"""An engine's commands to its ranks' pools: save a chunk, or fill pages from chunks."""

from collections.abc import Sequence
from typing import NamedTuple

from pd_connector.pool.keys import CHUNK_TOKENS


class PromptChunk(NamedTuple):
    """One chunk of a sequence of tokens, by everything that its KV depends on.

    Attributes:
        number: its place in the sequence, from 0.
        key: as `keys.chain` computes it.
        parent: key of the chunk before it, or the root.
        tokens: `keys.token_bytes` of its token ids.
        inputs: `keys.inputs_digest` of images and other inputs that begin in it.
        adapter: content of the adapter in use; empty for none.
        salt: `keys.salt_digest` of the request's cache salt.
    """

    number: int
    key: bytes
    parent: bytes
    tokens: bytes
    inputs: bytes
    adapter: str
    salt: bytes

    @property
    def first_token(self) -> int:
        return self.number * CHUNK_TOKENS

    @property
    def stop_token(self) -> int:
        return self.first_token + CHUNK_TOKENS


class Save(NamedTuple):
    """Copy a computed chunk into the pool. Its pages are kept until every rank has answered `Saved`."""

    request: str  # a name of this save alone
    model: bytes  # `keys.model_root` of the weights that have computed it
    chunk: PromptChunk
    pages: tuple[Sequence[int], ...]  # by table, those that hold its tokens; -1: freed already
    tenant: str = ""


class Saved(NamedTuple):
    """The pages of a save are no longer read. The chunk may still be on its way into the pool."""

    request: str


class Fill(NamedTuple):
    """Load tokens [first_token, stop_token) from chunks of the pool. Answered by `Finished`.

    With `compares` no page is written: the pages already hold this KV, computed here, and the loaded KV is compared
    with it.
    """

    request: str
    model: bytes  # `keys.model_root` of the weights that will use it
    chunks: tuple[PromptChunk, ...]  # in order; they hold all of these tokens
    first_token: int
    stop_token: int
    pages: tuple[Sequence[int], ...]  # by table, from the prompt's start; -1: not to be written
    compares: bool = False
