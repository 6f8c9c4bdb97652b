# SPDX-License-Identifier: Apache-2.0
"""Look-ups in the store, in a thread of their own from the moment a request is queued.

A request waits at most `LOOK_S` for its look-up. vLLM's scheduler never waits for the store.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from pd_connector.errors import Cause, Miss
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.store.base import Found, Store
from pd_connector.pool.worth import Worth
from pd_connector.telemetry import Telemetry
from pd_connector.vllm.pool_audit import PoolAudit
from pd_connector.vllm.pool_prompt import Look, PoolAsk, PoolPrompt

logger = logging.getLogger("pd_connector.vllm")

LOOK_S = 0.1
"""Longest wait of a request for its look-up, in seconds."""
_PIN_S = 60.0
"""Chunks that a request will load are not evicted for this time, in seconds."""
_SAVED_WITHIN_S = 2.0
"""How long a client's pin waits for chunks that are being saved, in seconds."""


class PoolLooks:
    """Used by the scheduler's thread only.

    Args:
        audit: says which chunks are not believed, and when a writer is being compared.
        worth: says how many chunks pay.
    """

    def __init__(self, store: Store, audit: PoolAudit, worth: Worth, telemetry: Telemetry) -> None:
        self._store = store
        self._audit = audit
        self._worth = worth
        self._telemetry = telemetry
        self._thread = ThreadPoolExecutor(1, "pd-pool-look")

    def begin(self, prompt: PoolPrompt, model: bytes) -> None:
        """Begin a prompt's look-up, unless it has begun.

        Args:
            model: that the engine has loaded; empty while it is not known.
        """
        if prompt.reads and model:
            prompt.reads, prompt.asked_s = False, time.monotonic()
            tokens = list(prompt.request.all_token_ids)
            prompt.look = self._thread.submit(self._look, prompt, tokens, model)

    def matched(self, prompt: PoolPrompt, computed: int) -> int | None:
        """Tokens to load beyond the `computed` ones that are here; None: ask again."""
        if prompt.look is None:
            return 0
        if self._audit:  # a writer is being compared: until that is over, prompts are computed
            return self._missed(prompt, Cause.UNAUDITED)
        if not prompt.look.done():
            late = time.monotonic() >= prompt.asked_s + LOOK_S
            return self._missed(prompt, Miss.LATE) if late else None
        if prompt.pays is None:
            try:
                look = prompt.look.result()
            except Exception:
                logger.exception("pool: a look-up failed; the prompt is computed")
                return self._missed(prompt, "failed")
            prompt.keys, prompt.found = look.keys, look.found
            prompt.kept = max(prompt.kept, len(look.found))
            prompt.pays = self._paying(look.found, computed // CHUNK_TOKENS)
        stop = min(prompt.pays * CHUNK_TOKENS, prompt.request.num_tokens - 1)
        prompt.loads = stop if stop > computed else 0
        return int(max(0, stop - computed))

    def pin(self, keys: Sequence[bytes]) -> None:
        """These chunks will be loaded."""
        self._thread.submit(self._store.pin, keys, _PIN_S)

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Their load has ended."""
        self._thread.submit(self._store.unpin, keys)

    def pin_for_client(self, keys: Sequence[bytes], ask: PoolAsk) -> None:
        """A client wants these chunks to be kept."""
        self._thread.submit(self._pin, keys, ask.pin_s, f"tenant {ask.tenant}")

    def _look(self, prompt: PoolPrompt, tokens: Sequence[int], model: bytes) -> Look:
        keys = prompt.longer([prompt.root(model)], tokens)
        found: list[Found] = []
        for key, one in zip(keys[1:], self._store.find(keys[1:]), strict=True):
            if one is None:
                missing = len(keys) - 1 - len(found)
                cause = Miss.EVICTED if self._store.was_stored(key) else Miss.NEVER_STORED
                self._telemetry.count("pool_misses", missing, cause=cause)
                break
            if self._audit.refused(key):
                break
            found.append(one)
        return Look(keys, found)

    def _paying(self, found: Sequence[Found], first: int) -> int:
        """How many of the chunks found are worth loading, if the first `first` ones are here."""
        missing = [(one.tier, one.nbytes) for one in found[first:]]
        pays = min(first, len(found)) + self._worth.chunks(missing, time.monotonic())
        if pays < len(found):
            self._telemetry.count("pool_misses", len(found) - pays, cause=Miss.NOT_WORTH)
        return pays

    def _missed(self, prompt: PoolPrompt, cause: str) -> int:
        prompt.look = None
        self._telemetry.count("pool_misses", cause=cause)
        return 0

    def _pin(self, keys: Sequence[bytes], for_s: float, holder: str) -> None:
        ends = time.monotonic() + _SAVED_WITHIN_S
        while self._store.pin(keys, for_s, holder) < len(keys) and time.monotonic() < ends:
            time.sleep(0.1)
