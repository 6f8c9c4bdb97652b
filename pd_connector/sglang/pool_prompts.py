# SPDX-License-Identifier: Apache-2.0
"""Prompts that wait for chunks of the pool, from the arrival of their requests on.

Each rank of an engine looks its chunks up and reads them by itself. The ranks then agree how many of a prompt's chunks all
of them hold (`PoolPrompts.settle`). Only these can be loaded.
"""

import logging
import threading
import time
from array import array
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from pd_connector.errors import Cause, Miss
from pd_connector.kv.model import ModelFacts
from pd_connector.pool.client_pins import ClientPins
from pd_connector.pool.jobs import PromptChunk
from pd_connector.pool.keys import CHUNK_TOKENS, extend, root, salt_digest, token_bytes
from pd_connector.pool.load_breakeven import Answers, LoadBreakeven, longest_wait_s
from pd_connector.pool.loader import seconds_to_read
from pd_connector.pool.part_names import part_codec
from pd_connector.pool.store.base import FAR, Found, Store
from pd_connector.pool.trust import WriterTrust
from pd_connector.sglang.pool_chunks import HeldChunk, HeldChunks
from pd_connector.telemetry import Telemetry

logger = logging.getLogger("pd_connector.sglang")

LOOK_S = 0.1
"""Longest wait of a request for its look-up, in seconds."""
_SLOW_S = 0.25
"""A store that takes longer for a look-up is left alone for a while, in seconds."""
STALL_S = 5.0
"""Longest wait of a request for its next chunk, in seconds."""


class Apart(NamedTuple):
    """The parts of a chunk's key that differ between requests with the same tokens.

    Attributes:
        salt: from `salt_of`.
        adapter: fingerprint of its adapter's content; empty for none.
    """

    salt: str
    adapter: str = ""


def chunks_of(
    model: bytes, tokens: Sequence[int], apart: Apart, *, first: int = 0
) -> list[PromptChunk]:
    """The whole chunks of a sequence of tokens, from number `first` on.

    Args:
        model: `keys.model_root`.
        tokens: from the sequence's beginning.

    Raises:
        OverflowError: a token id has more than 32 bits.
    """
    parent = root(model, adapter=apart.adapter, salt=apart.salt)
    keys = [parent, *extend(parent, tokens)]
    digest = salt_digest(apart.salt)
    return [
        PromptChunk(
            number,
            keys[number + 1],
            keys[number],
            token_bytes(tokens[number * CHUNK_TOKENS : (number + 1) * CHUNK_TOKENS]),
            b"",
            apart.adapter,
            digest,
        )
        for number in range(first, len(keys) - 1)
    ]


def salt_of(cache_salt: str | None, extra_key: str | None, lora_id: str | None = None) -> str:
    """The salt of a request's chunks. If the request has only a cache salt, vLLM computes the same salt, so both
    engines share chunks.

    Args:
        lora_id: SGLang's id of the request's adapter, which it appends to the key. It differs from process to process.
    """
    if lora_id is not None and extra_key is not None:
        extra_key = extra_key.removesuffix(lora_id) or None
    if extra_key is None:
        return cache_salt or ""
    return f"sglang extra_key {len(extra_key)} {extra_key} {cache_salt or ''}"


@dataclass(eq=False)
class PoolPrompt:
    """One request's chunks.

    Attributes:
        model: `keys.model_root` of the weights that would use the chunks; empty if not known.
        tokens: the prompt's tokens from its beginning, as far as they may be loaded.
        first: number of the first chunk that is not in the radix cache.
        hits: chunks from `first` on that the pool has and that are worth loading, as far as there is room.
        held: the same chunks in this rank's memory.
        looked: whether the look-up has ended.
        settled: number of chunks, from the prompt's beginning, that all ranks hold or have in their caches; None: the
            prompt waits.
        matched: number of tokens in the radix cache at SGLang's last look-up.
    """

    rid: str
    model: bytes
    facts: ModelFacts
    tokens: "array[int]"
    apart: Apart
    first: int
    began_s: float
    moved_s: float
    chunks: list[PromptChunk] = field(default_factory=list)
    hits: list[Found] = field(default_factory=list)
    held: list[HeldChunk] = field(default_factory=list)
    looked: bool = False
    over: bool = False
    settled: int | None = None
    matched: int = -1
    seen: int = 0


class PoolPrompts:
    """Used by the scheduler's thread, except for `progressed`.

    Args:
        reads: whether chunks are used at all.
        codecs: this engine uses only KV that has passed in these codecs.
        counts: whether this rank counts metrics for its engine.
    """

    def __init__(
        self,
        store: Store,
        chunks: Callable[[Callable[[], None]], HeldChunks],
        trust: WriterTrust,
        codecs: Collection[str],
        telemetry: Telemetry,
        *,
        counts: bool,
    ) -> None:
        self._store = store
        self._trust = trust
        self._codecs = frozenset(codecs)
        self._telemetry = telemetry
        self._counts = counts
        self._prompts: dict[str, PoolPrompt] = {}
        self._thread = ThreadPoolExecutor(1, "pd-pool-look")
        self._probes = ThreadPoolExecutor(1, "pd-pool-probe")
        self.pins = ClientPins(store, self._thread)
        self._probing: Future[None] | None = None
        self._answers = Answers()
        self._lock = threading.Lock()  # of what the look-up's thread changes
        self.breakeven = LoadBreakeven()
        self.chunk_bytes = 0
        """Bytes of a chunk of this model; 0: none was held yet."""
        self.progress = threading.Event()
        self.held = chunks(self.progress.set)
        self.audit: dict[bytes, PromptChunk] = {}
        """Chunks of a writer that was not compared yet: to be compared once they are computed here."""
        self._audit_until_s = 0.0

    def __bool__(self) -> bool:
        return bool(self._prompts)

    def get(self, rid: str) -> PoolPrompt | None:
        return self._prompts.get(rid)

    def begin(
        self,
        rid: str,
        tokens: "array[int]",
        apart: Apart,
        computed: int,
        model: bytes,
        facts: ModelFacts,
    ) -> None:
        """A request has come: look its chunks up, and read them.

        Args:
            tokens: the prompt's tokens that may be loaded.
            computed: number of these tokens that are in the radix cache.
            model: `keys.model_root` of the weights; empty: not known, so nothing is read. The other ranks may know
                them.
        """
        self.release(rid)
        first = computed // CHUNK_TOKENS
        if len(tokens) < (first + 1) * CHUNK_TOKENS:
            return
        now = time.monotonic()
        prompt = PoolPrompt(rid, model, facts, tokens, apart, first, now, now)
        self._prompts[rid] = prompt
        with self._lock:
            asks = bool(model) and self._answers.asks(now)
        if asks:
            self._thread.submit(self._look, prompt)
        else:
            prompt.looked = True

    def _look(self, prompt: PoolPrompt) -> None:
        """Look a prompt's chunks up, and begin to read them. The look-up's thread calls it."""
        try:
            began_s = time.monotonic()
            chunks = chunks_of(prompt.model, prompt.tokens, prompt.apart)
            there = self._store.find([chunk.key for chunk in chunks])
            now = time.monotonic()
            with self._lock:
                self._answered(now - began_s, now)
            hits = self._usable(chunks, there)
            with self._lock:
                missing = [(each.tier, each.nbytes) for each in hits[prompt.first :]]
                wait_s = longest_wait_s(hits[prompt.first :])
                pays = min(prompt.first, len(hits)) + self.breakeven.chunks(missing, now, wait_s)
                idle = pays < len(hits) and (self._probing is None or self._probing.done())
                probed = self.breakeven.probe(missing, now) if idle else None
            if probed is not None:
                key, hit = chunks[prompt.first + probed].key, hits[prompt.first + probed]
                self._probing = self._probes.submit(self._probe, key, hit)
            if pays < len(hits):
                self._miss(len(hits) - pays, Miss.NOT_WORTH)
            prompt.chunks = chunks
            required = range(prompt.first, pays)
            fit = required[: self.held.fitting(hits[prompt.first : pays])]
            self._store.prefetch([chunks[n].key for n in fit if hits[n].tier == FAR])
            for number in required:
                held = self.held.hold(chunks[number], hits[number], prompt.facts)
                if held is None:
                    self._miss(pays - number, Miss.LATE)
                    break
                with self._lock:
                    prompt.hits.append(hits[number])
                    prompt.held.append(held)
                    over = prompt.over
                if over:
                    self._let_go(prompt)
                    break
        except Exception:
            logger.exception("pool: a look-up failed; the prompt is computed")
        prompt.moved_s = time.monotonic()
        prompt.looked = True
        self.progress.set()

    def _probe(self, key: bytes, hit: Found) -> None:
        """Read a chunk to measure the store. No request waits for it."""
        if (seconds := seconds_to_read(self._store, key)) is not None:
            with self._lock:
                self.breakeven.probed(hit.tier, hit.nbytes, seconds, hit.wait_s)

    def _answered(self, seconds: float, now: float) -> None:
        if seconds < _SLOW_S:
            self._answers.in_time()
        else:
            self._answers.late(now)

    def _usable(self, chunks: Sequence[PromptChunk], there: Sequence[Found | None]) -> list[Found]:
        """The first chunks that are there, up to the first that cannot be used."""
        hits: list[Found] = []
        for chunk, each in zip(chunks, there, strict=True):
            if each is None:
                evicted = self._store.was_stored(chunk.key)
                self._miss(len(chunks) - len(hits), Miss.EVICTED if evicted else Miss.NEVER_STORED)
                break
            if not self._codecs.issuperset(map(part_codec, each.parts)):
                self._miss(len(chunks) - len(hits), Miss.CODEC)
                break
            hits.append(each)
        return hits

    def settle(
        self,
        rids: Sequence[str],
        agree: Callable[[list[tuple[int, int]]], list[tuple[int, int]]],
    ) -> set[str]:
        """Let the ranks agree on prompts that wait. Returns the requests that still wait.

        Args:
            rids: requests that can be scheduled, the same on all ranks.
            agree: returns, for a list of numbers, the smallest of all ranks at each index.
        """
        waiting = [p for rid in rids if (p := self._prompts.get(rid)) and p.settled is None]
        if not waiting:
            return set()
        now = time.monotonic()
        own = [self._own(prompt, now) for prompt in waiting]
        for prompt, (ready, chunks) in zip(waiting, agree(own), strict=True):
            if ready:
                self._settle(prompt, chunks, now)
        return {prompt.rid for prompt in waiting if prompt.settled is None}

    def _own(self, prompt: PoolPrompt, now: float) -> tuple[int, int]:
        """This rank's numbers for a prompt: whether it is ready, and how many chunks it can use. It never raises,
        because the other ranks wait for the numbers."""
        try:
            return int(self._ready(prompt, now)), self._usable_chunks(prompt)
        except Exception:
            logger.exception("request %s: its prompt is computed", prompt.rid)
            return 1, prompt.first

    def _ready(self, prompt: PoolPrompt, now: float) -> bool:
        """Whether this rank expects no more chunks of a prompt."""
        if not prompt.looked:
            late = now >= prompt.began_s + LOOK_S or not self._answers.waited_for
            if late:
                if now - prompt.began_s >= _SLOW_S:
                    with self._lock:
                        self._answers.late(now)
                self._miss(1, Miss.LATE)
            return late
        done = 0
        for held in prompt.held:
            if held.problem is not None:
                return True
            if not held.done:
                break
            done += 1
        if done > prompt.seen:
            prompt.seen, prompt.moved_s = done, now
        if done == len(prompt.held):
            return True
        if now < self._moved_s(prompt, prompt.held[done]) + STALL_S:
            return False
        with self._lock:
            self.breakeven.silent(prompt.hits[done].tier, now)
        self._miss(1, Cause.STALLED)
        return True

    def _moved_s(self, prompt: PoolPrompt, held: HeldChunk) -> float:
        """When a prompt's next chunk last came closer. Chunks of the far store come one after another."""
        if held.afar:
            return max(prompt.moved_s, self.held.far_moved_s)
        return max(prompt.moved_s, held.brought_s)

    def _usable_chunks(self, prompt: PoolPrompt) -> int:
        """Number of chunks, from a prompt's beginning, that this rank holds or has in its cache. It ends before a chunk
        whose writer must be compared first."""
        number = prompt.first
        for held in prompt.held:
            if held.ready is None:
                break
            problems = (
                self._trust.problem(part.engine_id, part.writer) for part in held.ready.read.parts
            )
            if next((problem for problem in problems if problem), None) is not None:
                break
            number += 1
        return number

    def _settle(self, prompt: PoolPrompt, chunks: int, now: float) -> None:
        prompt.settled = chunks
        self._explain(prompt, chunks, now)
        used = prompt.held[: chunks - prompt.first]
        with self._lock:
            spare, prompt.held = prompt.held[len(used) :], used
            tiers = {hit.tier for hit in prompt.hits[: len(used)]}
            nbytes = sum(hit.nbytes for hit in prompt.hits[: len(used)])
            wait_s = longest_wait_s(prompt.hits[: len(used)])
            if used:
                self.chunk_bytes = nbytes // len(used)
            # When the last one was read, not when the scheduler has looked. Read before: for another request.
            seconds = max((held.done_s for held in used), default=0.0) - prompt.began_s
            if seconds > 0 and not spare and len(tiers) == 1:
                self.breakeven.loaded(tiers.pop(), nbytes, seconds, wait_s)
        for held in spare:
            self.held.release(held)

    def _explain(self, prompt: PoolPrompt, chunks: int, now: float) -> None:
        """Count the reason why the first unused chunk is not used, and have its writer compared if that is the
        reason."""
        place = chunks - prompt.first
        if place >= len(prompt.held):
            return
        held = prompt.held[place]
        if held.problem is not None:
            self._miss(1, held.problem[0])
            if held.problem[0] == Miss.LATE:
                with self._lock:
                    self.breakeven.silent(prompt.hits[place].tier, now)
            logger.warning(
                "request %s: KV from the pool is used up to token %d, the rest of the prompt is computed: %s",
                *(prompt.rid, chunks * CHUNK_TOKENS, held.problem[1]),
            )
            return
        if held.ready is None:
            return
        for part in held.ready.read.parts:
            if problem := self._trust.problem(part.engine_id, part.writer):
                self._miss(1, problem[0])
                if problem[0] is Cause.UNAUDITED and (not self.audit or now >= self._audit_until_s):
                    self.audit = {each.chunk.key: each.chunk for each in prompt.held[place:]}
                    self._audit_until_s = now + 60.0
                return

    def take(self, prompt: PoolPrompt, chunks: Collection[HeldChunk]) -> None:
        """A load has these chunks from now on, and releases them."""
        with self._lock:
            prompt.held = [held for held in prompt.held if held not in chunks]

    def release(self, rid: str) -> None:
        """A request needs its chunks no longer."""
        prompt = self._prompts.pop(rid, None)
        if prompt is not None:
            self._let_go(prompt)

    def keep_only(self, rids: Collection[str]) -> None:
        """All other requests have ended, or are being computed."""
        for rid in self._prompts.keys() - set(rids):
            self.release(rid)

    def forget(self) -> None:
        """The weights have changed: no held chunk can be used. The prompts stay, because the other ranks may learn of
        the change later, and all ranks must have the same prompts."""
        self.audit = {}
        for prompt in self._prompts.values():
            prompt.model = b""
            self._let_go(prompt)

    def clear(self) -> None:
        """The engine has emptied its cache."""
        self.keep_only(())

    def close(self) -> None:
        self.clear()
        for thread in (self._thread, self._probes):
            thread.shutdown(wait=False, cancel_futures=True)
        self.pins.close()
        self.held.close()

    def _let_go(self, prompt: PoolPrompt) -> None:
        with self._lock:
            prompt.over = True
            held, prompt.held = prompt.held, []
        for each in held:
            self.held.release(each)

    def _miss(self, number: int, cause: str) -> None:
        if self._counts:
            self._telemetry.count("pool_misses", number, cause=cause)
