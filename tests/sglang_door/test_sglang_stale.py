# SPDX-License-Identifier: Apache-2.0
"""KV of a producer that was found to serve other weights is not found in SGLang's own radix cache."""

from typing import Any

import pytest

pytest.importorskip("sglang.srt")

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang_door.sglang_rig import Rig, prompt, request

from pd_connector.sglang.stale import CacheNamespace


class Cache:
    """SGLang's radix cache, and the gauges of an agent."""

    def __init__(self) -> None:
        self.tree = Rig().tree
        self.gauges = {"distrusted_producers": 0.0}
        self.namespace = CacheNamespace(lambda: self.gauges)

    def request(self, salt: str | None = None) -> Any:
        made = request("r", prompt(64))
        made.extra_key = salt
        self.namespace.enter(made)
        return made

    def finish(self, req: Any) -> None:
        """SGLang caches the KV of a request that has ended."""
        key = RadixKey(req.origin_input_ids, req.extra_key)
        self.tree.insert(InsertParams(key=key, value=torch.arange(64)))

    def found(self, req: Any) -> int:
        key = RadixKey(req.origin_input_ids, req.extra_key)
        return self.tree.match_prefix(MatchPrefixParams(key=key)).device_prefix_len


def test_kv_of_a_producer_that_is_found_unlike_later_is_not_found_any_more() -> None:
    cache = Cache()
    cache.finish(cache.request())
    assert cache.found(cache.request()) == 64
    running = cache.request()
    cache.gauges["distrusted_producers"] = 1.0
    assert cache.found(cache.request()) == 0
    cache.finish(running)  # it may have begun with such KV
    assert cache.found(cache.request()) == 0
    later = cache.request()
    cache.finish(later)
    assert cache.found(cache.request()) == 64, "later KV is found by later requests"


def test_every_producer_that_is_found_unlike_counts_also_after_the_agent_has_begun_anew() -> None:
    cache = Cache()
    for distrusted in (1.0, 2.0, 0.0, 1.0):
        before = cache.request()
        cache.finish(before)
        rises = distrusted > cache.gauges["distrusted_producers"]
        cache.gauges["distrusted_producers"] = distrusted
        assert cache.found(cache.request()) == (0 if rises else 64)


def test_namespaces_that_sglang_has_itself_stay_apart() -> None:
    cache = Cache()
    assert (cache.request().extra_key, cache.request("a").extra_key) == (None, "a")
    cache.gauges["distrusted_producers"] = 1.0
    cache.finish(cache.request("a"))
    assert cache.found(cache.request("a")) == 64
    assert cache.found(cache.request("b")) == cache.found(cache.request()) == 0
