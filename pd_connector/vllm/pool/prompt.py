# SPDX-License-Identifier: Apache-2.0
"""A request, as the pool knows it in the scheduler: its chunks, and how far they are looked up, loaded and saved."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pd_connector.errors import Cause
from pd_connector.pool.ask import PoolAsk, read_ask
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
from pd_connector.vllm.handoff.ignored import IgnoredParams
from pd_connector.vllm.messages import Cut

if TYPE_CHECKING:
    from vllm.v1.request import Request


def pool_ask(request: "Request", tenants: Sequence[str], ignored: IgnoredParams) -> PoolAsk:
    """The client's choices about the pool. A tenant that is not among `tenants` is ignored: each invented name would take
    a share of the pool from other clients.

    Raises:
        ValueError: the field cannot be followed.
    """
    params = request.kv_transfer_params
    ask = read_ask(params.get("pool") if isinstance(params, dict) else None)
    if not ask.tenant or ask.tenant in tenants:
        return ask
    ignored.note(
        request.request_id,
        Cause.MALFORMED_PARAMS,
        f"pool.tenant {ask.tenant!r}: not in the config key pool.tenants",
        "its chunks take the share of requests without a tenant",
    )
    return msgspec.structs.replace(ask, tenant="")


class Look(NamedTuple):
    """What a look-up has found."""

    keys: list[bytes]  # the root, then a key for each whole chunk
    hits: list[Found]  # of the first ones, up to the first that the pool lacks


class Loading(NamedTuple):
    """A load under way."""

    keys: list[bytes]
    hits: list[Found]
    tokens: range
    began_s: float
    look: "Future[Look]"
    cut: Cut | None = None  # it broke off
    wait_s: float = 0.0  # for chunks of other loads from the far store

    @property
    def loaded(self) -> int:
        """Chunks that are in place once the load has ended."""
        if self.cut is None:
            return len(self.keys)
        return self.cut.stop_token // CHUNK_TOKENS - self.tokens.start // CHUNK_TOKENS

    @property
    def stop_token(self) -> int:
        """Tokens before this one are in place once the load has ended."""
        return self.tokens.stop if self.cut is None else self.cut.stop_token


@dataclass(slots=True)
class PoolPrompt:
    """The scheduler's record of one request's chunks."""

    request: "Request"
    adapter: str
    inputs: tuple[Input, ...]
    look: "Future[Look] | None"
    ask: PoolAsk
    reads: bool
    writes: bool
    pages: list[list[int]] = field(default_factory=list)
    handed_out: list[list[int]] = field(default_factory=list)  # as `PoolSaves.note` has it
    keys: list[bytes] = field(default_factory=list)
    stepped: bool = False  # the step that found its cached pages is over
    handed_over: bool = False  # by another engine, which saves it if it is of this host
    kept: int = 0  # chunks from the beginning that are in the pool, or were given to it
    hits: list[Found] = field(default_factory=list)
    unasked: bool = True  # its look-up has yet to begin
    matched_s: float = 0.0  # when vLLM first asked how much of it can be loaded
    asked_s: float = 0.0  # when its look-up began
    there: "Future[Look] | None" = (
        None  # the same look-up, until it was heard for the sake of saves
    )
    waits_until_s: float = 0.0  # the longest wait for loads of other requests
    pays: int | None = None  # chunks from the beginning that are here or worth loading
    loads: range = range(0)  # tokens that can be loaded, by our answer to vLLM
    loading: "Loading | None" = None
    failed: "Loading | None" = None  # its failed load, until the cause is reported
    shortened: int = 0  # loads that were tried again with fewer chunks
    audited: range = range(
        0
    )  # tokens that will be compared with the pool once they are computed here

    def root(self, model: bytes) -> bytes:
        """The parent of its first chunk."""
        return root(model, adapter=self.adapter, salt=self.request.cache_salt or "")

    def longer(self, keys: list[bytes], tokens: Sequence[int]) -> list[bytes]:
        """`keys` (the root, then keys of the first chunks), followed by the keys of the chunks that `tokens` add."""
        return keys + extend(keys[-1], tokens, self.inputs, first_chunk=len(keys) - 1)

    def know_keys(self, model: bytes, chunks: int) -> None:
        """Make the keys of its first `chunks` chunks."""
        keys = self.keys or [self.root(model)]
        covered = (len(keys) - 1) * CHUNK_TOKENS
        tokens = self.request.all_token_ids[covered : chunks * CHUNK_TOKENS]
        self.keys = self.longer(keys, tokens)

    def new_chunks(self, computed: int, *, ended: bool = False) -> range:
        """Numbers of the chunks to save now that `computed` tokens have their KV.

        A prompt that was handed over is saved late: with the first chunk of the answer, or when the request has
        `ended`. By then a prefill engine of this host has usually saved it, so the decode engine need not while it
        computes the first tokens."""
        # A token's KV is final once the token after it is known: drafts may be rejected.
        stop = min(computed, self.request.num_tokens - 1) // CHUNK_TOKENS
        waits = self.handed_over and stop <= self.request.num_prompt_tokens // CHUNK_TOKENS
        return range(self.kept, self.kept if waits and not ended else stop)

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
