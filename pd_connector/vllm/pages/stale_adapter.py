# SPDX-License-Identifier: Apache-2.0
"""KV of requests whose adapter (LoRA) is replaced before their first step.

Such KV may be in vLLM's prefix cache, on its way here, or loaded already. vLLM would use it with the weights of the new
adapter. So the request is computed from its beginning, with the adapter that is loaded now. The same holds for a request
that was preempted, and resumes.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pd_connector.vllm.handoff.uncomputable import Uncomputable
from pd_connector.vllm.identity.adapters import Adapters
from pd_connector.vllm.pages.status import PageRule, Use

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request


class StaleAdapterPages(PageRule):
    """Keeps other requests from using KV of a request whose adapter was replaced. Before its first step, the request
    itself does not use it either.

    Args:
        adapters: what is known of the engine's adapters.
        uncomputable: requests that cannot be computed here. They wait.
        given_up: called with each request whose loaded KV is not used.
    """

    cause = "adapter"
    forbids = tuple(Use)

    def __init__(
        self,
        adapters: Adapters,
        uncomputable: Uncomputable,
        given_up: Callable[[str], None],
    ) -> None:
        self._adapters = adapters
        self._uncomputable = uncomputable
        self._given_up = given_up
        self._loaded: set[str] = set()  # requests with a load, before their first step

    def bind(self, manager: "KVCacheManager") -> None:
        """Watch vLLM's look-ups in its prefix cache and its allocations."""
        look_up, allocate = manager.prefix_cache_lookup_enabled, manager.allocate_slots

        def prefix_cache_lookup_enabled(request: "Request") -> bool:
            if not self._adapters.replaced(request, look=False):
                return bool(look_up(request))
            if request.request_id not in self._uncomputable:
                # Other parts of a MultiConnector load nothing either. For such a request vLLM ignores
                # what connectors answer, and computes.
                request.skip_reading_prefix_cache = True
            return False

        def allocate_slots(
            request: "Request", *args: Any, **options: Any
        ) -> "KVCacheBlocks | None":
            begins = not options.get("delay_cache_blocks")  # otherwise pages for a load
            loaded = request.num_computed_tokens and request.request_id in self._loaded
            if begins and loaded and self._adapters.replaced(request):
                self._loaded.discard(request.request_id)
                self._given_up(request.request_id)
                manager.free(request)
                request.num_computed_tokens = 0
                return None  # vLLM looks at it again in the next step
            new: KVCacheBlocks | None = allocate(request, *args, **options)
            if new is not None:
                (self._loaded.discard if begins else self._loaded.add)(request.request_id)
            return new

        manager.prefix_cache_lookup_enabled = prefix_cache_lookup_enabled
        manager.allocate_slots = allocate_slots

    def holds(self, request: "Request") -> bool:
        return not self._adapters.unchanged(request)

    def finished(self, request: "Request") -> None:
        self._loaded.discard(request.request_id)
        self._adapters.finished(request)
