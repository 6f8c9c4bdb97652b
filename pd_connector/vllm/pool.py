# SPDX-License-Identifier: Apache-2.0
"""The pool in the scheduler: which chunks are saved, and which are loaded instead of being computed.

A look-up runs in a thread of its own from the moment a request is queued. A request waits for it at most `LOOK_S`.
Pages of a save have one reference more until all ranks have copied them, so that vLLM cannot reuse them.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pd_connector.kv.geometry import page_span
from pd_connector.pool.jobs import Fill, PromptChunk, Save
from pd_connector.pool.keys import (
    CHUNK_TOKENS,
    Input,
    extend,
    inputs_digest,
    root,
    salt_digest,
    token_bytes,
)
from pd_connector.pool.store.base import Found, Store
from pd_connector.telemetry import Telemetry
from pd_connector.vllm.inputs import RequestIdentity
from pd_connector.vllm.streaming import kept_pages, scheduled
from pd_connector.vllm.windows import NULL_PAGE, Windows

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("pd_connector.vllm")

LOOK_S = 0.1
"""Longest wait of a request for its look-up, in seconds."""
PIN_S = 60.0
"""Chunks that a request will load are not evicted for this time, in seconds."""
MOST_SAVES = 64
"""Saves under way. More chunks than that are not saved: their pages would be missed."""
_STARTS_S = 300.0
"""How long steps are asked for until ranks have told their model, in seconds: they read all of its bytes first."""


class _Look(NamedTuple):
    """What a look-up has found."""

    keys: list[bytes]  # the root, then a key for each whole chunk
    found: list[Found]  # of the first ones, up to the first that the pool lacks


@dataclass(slots=True)
class _Prompt:
    request: "Request"
    adapter: str
    inputs: tuple[Input, ...]
    queued_s: float
    look: "Future[_Look] | None"
    reads: bool  # its look-up has yet to begin
    writes: bool
    pages: list[list[int]] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    stepped: bool = False  # the step that found its cached pages is over
    kept: int = 0  # chunks from the beginning that are in the pool, or were given to it
    loads: int = 0  # token at which a load ends; 0 without one
    pinned: list[bytes] = field(default_factory=list)


class PoolSide:
    """Called by vLLM's scheduler only.

    Args:
        store: where chunks are.
        windows: page sizes and windows of the engine's page tables.
        identity: of requests' prompts.
        ranks: number of ranks of this engine.
    """

    def __init__(
        self,
        store: Store,
        windows: Windows,
        identity: RequestIdentity,
        telemetry: Telemetry,
        *,
        ranks: int,
        reads: bool = True,
        writes: bool = True,
    ) -> None:
        self._store = store
        self._windows = windows
        self._identity = identity
        self._telemetry = telemetry
        self._ranks = ranks
        self._reads = reads
        self._writes = writes
        self._models: dict[int, bytes] = {}  # by rank
        self._prompts: dict[str, _Prompt] = {}
        self._blocks: BlockPool | None = None
        self._saves: dict[str, tuple[list[KVCacheBlock], int]] = {}  # with the ranks to answer
        self._numbered = 0
        self._began_s = time.monotonic()
        self._looks = ThreadPoolExecutor(1, "pd-pool-look")

    def bind(self, blocks: "BlockPool") -> None:
        """Attach vLLM's pages."""
        self._blocks = blocks

    @property
    def model(self) -> bytes:
        """The model that all ranks have loaded, as the pool knows it; empty where the pool cannot be used."""
        told = set(self._models.values())
        return told.pop() if len(self._models) == self._ranks and len(told) == 1 else b""

    @property
    def saving(self) -> bool:
        """Whether pages are kept for saves."""
        return bool(self._saves)

    @property
    def pending(self) -> bool:
        """Whether ranks have something to tell: that pages of saves are copied, or, after their start, their model."""
        return self.saving or (not self._models and time.monotonic() < self._began_s + _STARTS_S)

    def models_told(self, models: Mapping[int, bytes]) -> None:
        """Ranks have told which model they have loaded. KV of requests that run now may be of two models."""
        before = self.model
        self._models.update(models)
        if before and self.model != before:
            self.forget_all()

    def forget_all(self) -> None:
        """KV of the requests that run now must not be saved."""
        self._prompts.clear()

    def add(self, request: "Request") -> None:
        """A request has been queued: begin to look for its chunks."""
        if (
            request.prompt_token_ids is None
            or request.prompt_embeds is not None
            or getattr(request, "resumable", False)
        ):
            return
        try:
            adapter = self._identity.adapters.content(request)
        except OSError:
            return  # its content is not known
        prompt = _Prompt(
            request,
            adapter,
            self._identity.inputs(request),
            time.monotonic(),
            None,
            reads=self._reads,
            writes=self._writes,
        )
        self._prompts[request.request_id] = prompt
        self._begin_look(prompt)

    def _begin_look(self, prompt: _Prompt) -> None:
        if prompt.reads and self.model:
            prompt.reads = False
            tokens = list(prompt.request.all_token_ids)
            prompt.look = self._looks.submit(self._look, prompt, tokens, self.model)

    def _look(self, prompt: _Prompt, tokens: Sequence[int], model: bytes) -> _Look:
        """In the thread of look-ups."""
        keys = _longer(prompt, [_root(prompt, model)], tokens)
        found: list[Found] = []
        for one in self._store.find(keys[1:]):
            if one is None:
                break
            found.append(one)
        return _Look(keys, found)

    def matched(self, request: "Request", computed: int) -> int | None:
        """Tokens to load beyond the `computed` ones that are here; None: ask again."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            return 0
        self._begin_look(prompt)  # the model was not known when the request came
        if prompt.look is None:
            return 0
        if not prompt.look.done():
            if time.monotonic() < prompt.queued_s + LOOK_S:
                return None
            prompt.look = None
            self._telemetry.count("pool_misses", cause="late")
            return 0
        try:
            look = prompt.look.result()
        except Exception:
            logger.exception("pool: a look-up failed; the prompt is computed")
            prompt.look = None
            return 0
        prompt.keys, prompt.kept = look.keys, max(prompt.kept, len(look.found))
        stop = min(len(look.found) * CHUNK_TOKENS, request.num_tokens - 1)
        prompt.loads = stop if stop > computed else 0
        return int(max(0, stop - computed))

    def allocated(
        self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int
    ) -> Fill | None:
        """Pages have been allocated. Returns the command that fills them, if there is something to load."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None or not prompt.loads or prompt.look is None:
            return None
        stop, prompt.loads, prompt.look = prompt.loads, 0, None
        first = stop - external_tokens
        if not external_tokens or not self.model:
            return None
        chunks = range(first // CHUNK_TOKENS, -(-stop // CHUNK_TOKENS))
        prompt.pinned = prompt.keys[chunks.start + 1 : chunks.stop + 1]
        self._store.pin(prompt.pinned, PIN_S)
        tables = []
        for table, size in zip(
            kept_pages(blocks.get_block_ids()), self._windows.page_sizes, strict=True
        ):
            before = min(len(table), first // size)
            tables.append([-1] * before + list(table[before:]))
        return Fill(
            request.request_id,
            self.model,
            tuple(self._chunk(prompt, number) for number in chunks),
            first,
            stop,
            tuple(tables),
        )

    def load_ended(self, request_id: str, *, failed: bool) -> bool:
        """The ranks have ended a load. Returns whether it was one from the pool."""
        prompt = self._prompts.get(request_id)
        if prompt is None or not prompt.pinned:
            return False
        self._store.unpin(prompt.pinned)
        if failed:
            prompt.kept = 0  # what is damaged has been removed: save it again
        else:
            self._telemetry.count("pool_hits", len(prompt.pinned))
        prompt.pinned = []
        return True

    def step(self, output: "SchedulerOutput") -> list[Save]:
        """A step was scheduled. Returns saves of chunks that earlier steps have computed."""
        if not self._prompts:
            return []
        for request_id in output.preempted_req_ids or ():
            if prompt := self._prompts.get(request_id):
                prompt.stepped = False
        saves: list[Save] = []
        provisional = getattr(output, "has_sync_kv_loads", False)
        for request_id, computed in scheduled(output, self._prompts):
            prompt = self._prompts[request_id]
            if not prompt.stepped:
                # Pages that it found in the cache may be filled by this very step.
                prompt.stepped = True
                prompt.writes &= not provisional
            elif prompt.writes and not prompt.adapter:
                saves += self._saves_of(prompt, computed, prompt.pages)
        return saves

    def finished(self, request: "Request", pages: Sequence[Sequence[int]]) -> list[Save]:
        """A request has ended. Returns saves of the chunks that it has computed last."""
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is None:
            return []
        if prompt.pinned:
            self._store.unpin(prompt.pinned)
            return []
        if not prompt.stepped or not prompt.writes:
            return []
        if not self._identity.adapters.unchanged(request):
            return []
        return self._saves_of(prompt, request.num_computed_tokens, pages)

    def saved(self, answers: Mapping[str, int]) -> None:
        """Ranks have copied pages. `answers`: their number by save."""
        for name, ranks in answers.items():
            if name not in self._saves:
                continue
            blocks, left = self._saves[name]
            if left > ranks:
                self._saves[name] = blocks, left - ranks
                continue
            del self._saves[name]
            assert self._blocks is not None
            self._blocks.free_blocks(reversed(blocks))

    def _saves_of(
        self, prompt: _Prompt, computed: int, pages: Sequence[Sequence[int]]
    ) -> list[Save]:
        request = prompt.request
        # A token's KV is final once the token after it is known: drafts may be rejected.
        stop = min(computed, request.num_tokens - 1) // CHUNK_TOKENS
        if stop <= prompt.kept or not self.model or self._blocks is None:
            return []
        keys = prompt.keys or [_root(prompt, self.model)]
        known = (len(keys) - 1) * CHUNK_TOKENS
        prompt.keys = _longer(prompt, keys, request.all_token_ids[known : stop * CHUNK_TOKENS])
        first, prompt.kept = prompt.kept, stop
        wanted = range(first, stop)
        there = self._store.find(prompt.keys[first + 1 : stop + 1])
        saves = []
        for number, found in zip(wanted, there, strict=True):
            if found is not None:
                continue
            if len(self._saves) >= MOST_SAVES:
                self._telemetry.count("pool_misses", cause="busy")
                break
            saves.append(self._save(self._chunk(prompt, number), pages))
        return saves

    def _save(self, chunk: PromptChunk, pages: Sequence[Sequence[int]]) -> Save:
        assert self._blocks is not None
        tables = []
        for table, size in zip(pages, self._windows.page_sizes, strict=True):
            span = page_span(chunk.first_token, chunk.stop_token, size)
            tables.append(list(table[span.start : span.stop]))
        held = [self._blocks.blocks[page] for page in _distinct(tables)]
        self._blocks.touch(held)
        self._numbered += 1
        name = f"save {self._numbered}"
        self._saves[name] = held, self._ranks
        return Save(name, self.model, chunk, kept_pages(tables))

    def _chunk(self, prompt: _Prompt, number: int) -> PromptChunk:
        first, stop = number * CHUNK_TOKENS, (number + 1) * CHUNK_TOKENS
        tokens = prompt.request.all_token_ids[first:stop]
        return PromptChunk(
            number,
            prompt.keys[number + 1],
            prompt.keys[number],
            token_bytes(tokens),
            inputs_digest(prompt.inputs, number),
            prompt.adapter,
            salt_digest(prompt.request.cache_salt or ""),
        )


def _root(prompt: _Prompt, model: bytes) -> bytes:
    return root(model, adapter=prompt.adapter, salt=prompt.request.cache_salt or "")


def _longer(prompt: _Prompt, keys: list[bytes], tokens: Sequence[int]) -> list[bytes]:
    """The keys, and those of the chunks that `tokens` add."""
    return keys + extend(keys[-1], tokens, prompt.inputs, first_chunk=len(keys) - 1)


def _distinct(tables: Iterable[Iterable[int]]) -> list[int]:
    """All pages, each once, without those that vLLM has freed."""
    return list(dict.fromkeys(page for table in tables for page in table if page != NULL_PAGE))
