# SPDX-License-Identifier: Apache-2.0
"""One load serves all requests of an engine that want its chunks: the others wait, and find the pages in vLLM's own cache."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.vllm.pool.prompt import PoolPrompt

_LONGEST_WAIT_S = 10.0
"""A request waits for other requests' loads at most this long in all, in seconds. Then it reads for itself."""
_CACHED_WITHIN_S = 1.0
"""vLLM caches the pages of a load when it next looks at its request. The longest wait for that, in seconds."""


@dataclass
class _Load:
    keys: frozenset[bytes]
    until_s: float = float("inf")


class SharedLoads:
    """Used by the scheduler's thread only.

    Attributes:
        caching: whether vLLM keeps pages for other requests.
    """

    def __init__(self) -> None:
        self.caching = False
        self._loads: dict[str, _Load] = {}

    def begin(self, request_id: str, keys: Iterable[bytes]) -> None:
        """A request loads these chunks from now on."""
        self._loads[request_id] = _Load(frozenset(keys))

    def ended(self, request_id: str) -> None:
        """A load has filled its pages. vLLM has not put them into its prefix cache yet."""
        if load := self._loads.get(request_id):
            load.until_s = time.monotonic() + _CACHED_WITHIN_S

    def forget(self, request_id: str) -> None:
        """Its pages are in vLLM's cache, or will never be."""
        self._loads.pop(request_id, None)

    def comes(self, prompt: PoolPrompt, computed: int, now: float) -> bool:
        """Whether a request should wait, because another request loads the chunk that it needs next.

        Args:
            computed: tokens of the request that are here.
        """
        if not self.caching or prompt.request.skip_reading_prefix_cache:
            return False
        key = prompt.keys[computed // CHUNK_TOKENS + 1]
        if not any(key in load.keys and now < load.until_s for load in self._loads.values()):
            return False
        prompt.waits_until_s = prompt.waits_until_s or now + _LONGEST_WAIT_S
        return now < prompt.waits_until_s
