# SPDX-License-Identifier: Apache-2.0
"""Look-ups in the store, in a thread of their own from the moment a request is queued.

A request waits at most `LOOK_S` for its look-up. vLLM asks for the result right after it has queued the request. If the
answer had to wait for the next step, a request would lose a step of a busy engine. So the scheduler waits up to
`SOON_S` in a step. A store that is slow or does not answer is left alone: `Answers` says when for look-ups,
`LoadBreakeven` for loads.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from pd_connector.errors import Cause, Miss
from pd_connector.pool.client_pins import ClientPins
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.load_breakeven import Answers, LoadBreakeven, longest_wait_s
from pd_connector.pool.loader import seconds_to_read
from pd_connector.pool.part_names import part_codec, part_draft
from pd_connector.pool.store.base import FAR, Found, Store
from pd_connector.telemetry import Telemetry
from pd_connector.vllm.pool.audit import PoolAudit
from pd_connector.vllm.pool.before_reset import BeforeReset
from pd_connector.vllm.pool.prompt import Look, PoolPrompt
from pd_connector.vllm.pool.sharing import SharedLoads

logger = logging.getLogger("pd_connector.vllm")

LOOK_S = 0.1
"""Longest wait of a request for its look-up, in seconds."""
SOON_S = 0.002
"""Longest wait of the scheduler in a step, for all its requests together, in seconds. Most look-ups take a fifth of it."""
_SLOW_S = 0.25
"""A store that takes longer for a look-up is left alone, in seconds. It takes 10 ms for the longest prompts; the rest is for a
busy machine."""
_PIN_S = 60.0
"""Chunks that a request will load are not evicted for this time, in seconds."""


class PoolLookups:
    """Used by the scheduler's thread only.

    Attributes:
        shared: loads under way. Requests that need the same chunks wait for them.
        draft: the engine's draft model, as names of parts have it; empty without one.

    Args:
        audit: knows which chunks are not trusted, and whether a writer is being compared.
        worth: says how many chunks pay.
        codecs: this engine uses only KV that has passed in these codecs.
    """

    def __init__(
        self,
        store: Store,
        audit: PoolAudit,
        worth: LoadBreakeven,
        telemetry: Telemetry,
        codecs: Sequence[str],
    ) -> None:
        self._store = store
        self._audit = audit
        self._breakeven = worth
        self._telemetry = telemetry
        self._codecs = frozenset(codecs)
        self._thread = ThreadPoolExecutor(1, "pd-pool-look")
        self._probes = ThreadPoolExecutor(1, "pd-pool-probe")
        self._pins = ClientPins(store, self._thread)
        self._probe: Future[None] | None = None
        # bytes of loads from the far store that have begun, by request
        self.coming: dict[str, int] = {}
        self._probed: list[tuple[str, int, float, float]] = []  # as `LoadBreakeven.probed` has it
        self._answers = Answers()
        self._found_in: deque[float] = deque()  # seconds that the store took for look-ups
        self._asked_s = float("inf")  # since when the store has not answered the thread
        self._patience_s = SOON_S  # what is left of it in this step
        self._before_reset = BeforeReset()
        self.shared = SharedLoads()
        self.draft = ""

    def begin(self, prompt: PoolPrompt, model: bytes) -> None:
        """Begin a prompt's look-up, unless it has begun, or the store is left alone.

        Args:
            model: the model that the engine has loaded; empty while it is unknown.
        """
        if not model or not prompt.unasked:
            return
        self._hear()
        now = time.monotonic()
        if not self._answers.asks(now):
            return
        prompt.unasked, prompt.asked_s = False, now
        tokens = list(prompt.request.all_token_ids)
        prompt.there = self._thread.submit(self._look, prompt, tokens, model)
        if prompt.reads:
            prompt.look = prompt.there

    def matched(self, prompt: PoolPrompt, computed: int) -> int | None:
        """Number of tokens to load beyond the `computed` tokens that are here; None: ask again later."""
        if prompt.look is None:
            return 0
        if self._audit:  # a writer is being compared: until that is over, prompts are computed
            return self._missed(prompt, Cause.UNAUDITED)
        self._hear()
        if not self._soon(prompt.look):
            late = time.monotonic() >= prompt.asked_s + LOOK_S or not self._answers.waited_for
            return self._missed(prompt, Miss.LATE) if late else None
        if prompt.pays is None:
            try:
                look = prompt.look.result()
            except Exception:
                logger.exception("pool: a look-up failed; the prompt is computed")
                return self._missed(prompt, "failed")
            prompt.keys, prompt.hits = look.keys, look.hits
            prompt.pays = self._paying(look, computed // CHUNK_TOKENS)
        stop = min(prompt.pays * CHUNK_TOKENS, prompt.request.num_tokens - 1)
        prompt.loads = range(computed, stop)
        if prompt.loads and self.shared.comes(prompt, computed, time.monotonic()):
            return None
        return int(max(0, stop - computed))

    def reset(self, prompts: Iterable[PoolPrompt], saving: Sequence[bytes]) -> None:
        """This engine's caches were reset: chunks that are in the pool now are not used until this engine has computed
        them itself. Look-ups of requests that wait begin again.

        Args:
            saving: keys of chunks that are being saved.
        """
        self._thread.submit(self._note_reset, saving)
        for prompt in prompts:
            if prompt.look is not None:
                prompt.look = prompt.there = prompt.pays = None
                prompt.unasked, prompt.loads = True, range(0)
                self.shared.forget(prompt.request.request_id)

    def _note_reset(self, saving: Sequence[bytes]) -> None:
        before = self._before_reset
        before.begin([*self._store.keys(), *saving], other_hosts=self._store.reaches_far)
        logger.info(
            "pool: this engine's caches were reset. It does not use the %d chunks that the pool has by now%s, until it has "
            "computed them itself. Other engines go on to use them; `pd-connector pool clear` removes them for all",
            len(before),
            ", nor any of other hosts" if self._store.reaches_far else "",
        )

    def forget_reset(self) -> None:
        """What is known of the last reset does not hold any more."""
        self._thread.submit(self._before_reset.end)

    def computed(self, prompt: PoolPrompt, tokens: int, model: bytes) -> None:
        """A request has ended. This engine has computed KV of its first `tokens` tokens since the reset."""
        if self._before_reset and model:
            chunks = min(tokens, prompt.request.num_tokens - 1) // CHUNK_TOKENS
            prompt.know_keys(model, chunks)
            self._before_reset.computed(prompt.keys[1 : chunks + 1])

    def next_step(self) -> None:
        """A step was scheduled: the scheduler may wait again."""
        self._patience_s = SOON_S

    def _soon(self, look: Future[Look]) -> bool:
        """Whether a look-up has ended, or ends while the scheduler may wait for it."""
        if look.done() or self._patience_s <= 0 or not self._answers.waited_for:
            return look.done()
        began_s = time.monotonic()
        wait([look], self._patience_s)
        self._patience_s -= time.monotonic() - began_s
        return look.done()

    def stored(self, prompt: PoolPrompt) -> int:
        """Number of a prompt's leading chunks that its look-up found, returned once; 0 until the look-up ends, and afterwards."""
        if prompt.there is None or not prompt.there.done():
            return 0
        look, prompt.there = prompt.there, None
        return len(look.result().hits) if look.exception() is None else 0

    def pin(self, keys: Sequence[bytes]) -> None:
        """These chunks will be loaded."""
        self._thread.submit(self._store.pin, keys, _PIN_S)

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Their load has ended."""
        self._thread.submit(self._store.unpin, keys)

    def pin_for_client(self, prompt: PoolPrompt, tenants: int) -> None:
        """Pin the chunks of this prompt, as its client has requested. `tenants`: number of tenants that share the
        pool."""
        keys = prompt.keys[1 : prompt.request.num_prompt_tokens // CHUNK_TOKENS + 1]
        self._pins.pin(keys, prompt.ask.pin_s, prompt.ask.tenant, tenants)

    def _hear(self) -> None:
        """Take in what the threads have measured."""
        while self._probed:
            self._breakeven.probed(*self._probed.pop())
        now = time.monotonic()
        if now - self._asked_s >= _SLOW_S:
            self._answers.late(now)
        while self._found_in:
            if self._found_in.popleft() < _SLOW_S:
                self._answers.in_time()
            else:
                self._answers.late(now)

    def _look(self, prompt: PoolPrompt, tokens: Sequence[int], model: bytes) -> Look:
        keys = prompt.longer([prompt.root(model)], tokens)
        self._asked_s = began_s = time.monotonic()
        try:
            there = self._store.find(keys[1:])
        finally:
            self._asked_s = float("inf")
            self._found_in.append(time.monotonic() - began_s)
        hits: list[Found] = []
        for key, hit in zip(keys[1:], there, strict=True):
            if hit is None:
                missing = len(keys) - 1 - len(hits)
                cause = Miss.EVICTED if self._store.was_stored(key) else Miss.NEVER_STORED
                self._telemetry.count("pool_misses", missing, cause=cause)
                break
            if key in self._before_reset:
                self._telemetry.count("pool_misses", len(keys) - 1 - len(hits), cause=Miss.RESET)
                break
            if not self._codecs.issuperset(map(part_codec, hit.parts)):
                self._telemetry.count("pool_misses", len(keys) - 1 - len(hits), cause=Miss.CODEC)
                break
            if self.draft and any(part_draft(name) != self.draft for name in hit.parts):
                self._telemetry.count("pool_misses", len(keys) - 1 - len(hits), cause=Miss.DRAFT)
                break
            if self._audit.refused(key):
                break
            hits.append(hit)
        return Look(keys, hits)

    def wait_s(self, hits: Sequence[Found]) -> float:
        """How long chunks of other loads are on their way from the far store before these can come, in seconds: as the
        carrier has told at their look-up, or for loads that have begun since."""
        if not any(hit.tier == FAR for hit in hits):
            return 0.0
        coming_s = self._breakeven.seconds(FAR, sum(self.coming.values()))
        return max(longest_wait_s(hits), coming_s)

    def _paying(self, look: Look, first: int) -> int:
        """How many of the chunks of a look-up are worth using: the first `first` chunks, which are here, and those that
        load faster than they are computed."""
        hits, now = look.hits, time.monotonic()
        missing = [(hit.tier, hit.nbytes) for hit in hits[first:]]
        wait_s = self.wait_s(hits[first:])
        pays = min(first, len(hits)) + self._breakeven.chunks(missing, now, wait_s)
        if pays < len(hits):
            self._telemetry.count("pool_misses", len(hits) - pays, cause=Miss.NOT_WORTH)
            idle = self._probe is None or self._probe.done()
            if idle and (place := self._breakeven.probe(missing, now)) is not None:
                key, hit = look.keys[first + place + 1], hits[first + place]
                self._probe = self._probes.submit(self._read, key, hit)
        return pays

    def _read(self, key: bytes, hit: Found) -> None:
        """Read a chunk to measure the store. No request waits for it."""
        if (seconds := seconds_to_read(self._store, key)) is not None:
            self._probed.append((hit.tier, hit.nbytes, seconds, hit.wait_s))

    def _missed(self, prompt: PoolPrompt, cause: str) -> int:
        prompt.look = None
        self._telemetry.count("pool_misses", cause=cause)
        return 0
