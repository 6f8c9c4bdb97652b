# SPDX-License-Identifier: Apache-2.0
"""Pages with KV of other weights are found by no request, with vLLM's own pool of pages."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from pd_connector.vllm.stale import StalePages


class Pool:
    """The part of vLLM's `BlockPool` that is used."""

    num_gpu_blocks = 8

    def __init__(self):
        self.cached = set(range(8))

    def evict_blocks(self, pages):
        self.cached -= pages


def step(new=(), running=()):
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=request) for request in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[request for request, _ in running],
            new_block_ids=[(list(pages),) if pages else None for _, pages in running],
        ),
    )


@pytest.fixture
def made():
    pool = Pool()
    stale = StalePages()
    stale.bind(pool)
    return stale, pool


def test_all_pages_leave_the_prefix_cache_when_weights_have_changed(made):
    stale, pool = made
    assert not stale.changed({})
    assert pool.cached
    assert stale.changed({0: 1})
    assert not pool.cached
    pool.cached = {1, 2}
    assert not stale.changed({0: 1})
    assert pool.cached == {1, 2}, "they have changed once"
    assert stale.changed({1: 1}), "another rank's"


def test_pages_of_requests_that_ran_meanwhile_are_taken_out_whenever_vllm_caches_them(made):
    stale, pool = made
    stale.step(step(new=["old"]))
    stale.changed({0: 1})
    pool.cached = {1, 2, 3}
    stale.step(step(new=["new"], running=[("old", [2])]))
    assert pool.cached == {1, 3}
    pool.cached = {1, 2, 3}
    stale.step(step(running=[("old", []), ("new", [3])]))
    assert pool.cached == {1, 3}
    pool.cached = {1, 2, 3}
    stale.finished("old", ([1, 2],))
    stale.finished("new", ([3],))
    assert pool.cached == {3}
    stale.step(step(running=[]))
    assert pool.cached == {3}


def test_what_a_producer_sent_leaves_the_prefix_cache_when_it_is_not_trusted_any_more(made):
    stale, pool = made
    stale.step(step(new=["running"]))
    stale.distrusted({0: {"distrusted_producers": 0.0}, 1: {}})
    assert pool.cached
    stale.distrusted({1: {"distrusted_producers": 1.0}})
    assert not pool.cached
    pool.cached = {1, 2}
    stale.distrusted({1: {"distrusted_producers": 1.0}})
    assert pool.cached == {1, 2}
    stale.finished("running", ([2],))
    assert pool.cached == {1}, "it had used what came"
