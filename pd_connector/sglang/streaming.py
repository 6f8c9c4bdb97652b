# SPDX-License-Identifier: Apache-2.0
"""Reports KV of a running prefill step to the agent layer by layer, as SGLang writes it.

SGLang itself reports KV only after a step. Here each layer's write to the pool is seen if the step runs layer by
layer in Python. A step that runs as one CUDA graph shows no writes, and its KV passes after the step.

Every step is announced when it begins. While the prompt is computed, the decode engine finds pages for the
request and opens the transfer. So nothing of that is left to do after the prefill.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from pd_connector.agent.commands import Computed
from pd_connector.errors import Cause
from pd_connector.sglang.rank import Rank
from pd_connector.sglang.sender import Sender

logger = logging.getLogger("pd_connector.sglang")

MIN_STEP_TOKENS = 256
"""Shortest step to stream by layers. A shorter step ends before streaming would pay."""
_POOLS = "sglang.srt.mem_cache.memory_pool"
_WRITES = (
    f"{_POOLS}.MHATokenToKVPool.set_kv_buffer",
    f"{_POOLS}.MLATokenToKVPool.set_kv_buffer",
    f"{_POOLS}.MLATokenToKVPool.set_mla_kv_buffer",
    "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool.set_kv_buffer",
)


_HEARERS: list[Callable[..., None]] = []
"""Called after each write to a layer of the pool: one `Streaming`, while the engine prefills."""


@cache
def _hook_writes() -> None:
    """Hook the pool's writes. This is not done at the package's import, because other engines would pay for it with each layer."""
    for write in _WRITES:
        HookRegistry.register(write, _heard, HookType.AFTER)
    HookRegistry.apply_hooks()


def _heard(result: Any, *args: Any, **options: Any) -> None:
    for hears in _HEARERS:
        hears(result, *args, **options)


class Streaming:
    """The prefill steps of one rank. Used by the scheduler's thread.

    Args:
        pool: SGLang's `token_to_kv_pool`.
        layers: whether KV is reported layer by layer; if not, steps are only announced.
    """

    def __init__(self, rank: Rank, scheduler: Any, pool: Any, *, layers: bool) -> None:
        self._rank = rank
        self._slots = scheduler.req_to_token_pool
        self._pool = pool
        self._layers = layers
        self._step: list[Computed] = []
        if layers:
            _hook_writes()
            _HEARERS.append(self._written)

    def close(self) -> None:
        """Stop reporting."""
        if self._written in _HEARERS:
            _HEARERS.remove(self._written)

    @contextlib.contextmanager
    def step(self, batch: Any) -> Iterator[None]:
        """A context in which the batch is computed."""
        if batch.forward_mode.is_extend():
            self._step = [step for req in batch.reqs if (step := self._begin(req))]
        try:
            yield
        finally:
            self._step = []

    def _begin(self, req: Any) -> Computed | None:
        """Announce the next step, with its pages if its layers are reported one by one. Returns None if they are not."""
        sender = req.disagg_kv_sender
        if not isinstance(sender, Sender):  # SGLang's own, for a health check
            return None
        tokens = min(req.extend_end, len(req.origin_input_ids))
        if not self._layers or tokens - req.prefix_len < MIN_STEP_TOKENS:
            sender.announce()
            return None
        try:
            slots = self._slots.req_to_token[req.kv.req_pool_idx, :tokens]
            size = self._rank.pages.size
            return sender.begin_step((slots[::size] // size).tolist(), tokens)
        except Exception as error:  # SGLang would end the whole engine
            logger.exception("a prefill step cannot be streamed: its request ends")
            sender.fail(Cause.INTERNAL, repr(error))
            return None

    def _written(self, result: Any, pool: Any, layer: Any, *args: Any, **options: Any) -> None:
        """A layer's K and V of all requests in the step have been written, or will be by work queued on the stream. A
        pool within another pool does not get the layer's number: the outer pool does."""
        if layer is None or not self._step:
            return
        # The step's prefixes may be loaded meanwhile (KV pool, HiCache). The layer's attention waits for them, but only after
        # this write.
        place = (
            layer.layer_id - self._pool.start_layer
        )  # below 0: an inner pool's own number; nothing is told then
        if place >= 0 and (loads := self._pool.layer_transfer_counter) is not None:
            loads.wait_until(place)
        for step in self._step:
            self._rank.agent.submit(step._replace(stop_layer=layer.layer_id + 1))
