# SPDX-License-Identifier: Apache-2.0
"""vLLM engines whose ranks share the tokens of a sequence (DCP), or keep copies of them (PCP): the door describes their caches,
agents hand a request over, and every element is compared with what vLLM would keep there."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_cache_interface")

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.agents import LONG, TRANSPORTS, Ranks, ranks
from support.vllm_caches import (
    Engine,
    Layer,
    attention,
    hand_over,
    moved,
    pages_as_on_a_gpu,
    words,
    workers,
)
from support.vllm_steps import OFFER, PAGE, SteppedEngine
from vllm.v1 import kv_cache_interface as kv

from pd_connector.kv.geometry import Shard, pages_for
from pd_connector.plan import route
from pd_connector.protocol.consuming.incoming import Load
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.vllm.connector import PDConnector
from pd_connector.vllm.messages import RankAddress
from pd_connector.vllm.pages.windows import Windows
from pd_connector.vllm.shards import engine_shards, own_shard

__all__ = ["pages_as_on_a_gpu", "ranks"]

GQA = [attention(f"layers.{n}.attn", 2, 8, 8) for n in range(2)]
MLA = [attention(f"layers.{n}.attn", 1, 12, 0) for n in range(3)]
TOKENS = 141


ONE = Engine()
TOKEN = Engine(tp=4, dcp=2, interleave=1)
BY_PAGE = Engine(tp=4, dcp=2, interleave=16)
SMALL = Engine(tp=4, dcp=2, interleave=4, page=8)
COPIES = Engine(tp=2, pcp=2)
ACROSS = Engine(pcp=2, dcp=2, interleave=2)
ALL = Engine(tp=2, pcp=2, dcp=4, interleave=8)


@pytest.mark.parametrize(
    ("layers", "ours", "theirs", "transport"),
    [
        (GQA, TOKEN, ONE, "tcp"),
        (GQA, BY_PAGE, Engine(tp=2, page=32), "shm"),
        (GQA, Engine(page=32), SMALL, "shm written"),
        (GQA, TOKEN, TOKEN, "shm direct"),
        (GQA, TOKEN, BY_PAGE, "shm"),
        (GQA, COPIES, SMALL, "tcp"),
        (MLA, ALL, ONE, "tcp with a key"),
        (MLA, Engine(tp=4, dcp=4, interleave=2), ACROSS, "shm"),
        (MLA, Engine(tp=4), ALL, "tcp"),
        (MLA, ACROSS, COPIES, "shm written"),
    ],
    ids=lambda value: "-".join(map(str, value[:5])) if isinstance(value, Engine) else None,
)
def test_agents_of_unlike_engines_hand_over_every_element(
    ranks: Ranks, layers: Sequence[Layer], ours: Engine, theirs: Engine, transport: str
) -> None:
    settings = LONG | TRANSPORTS[transport]
    sources = [ranks.add(one) for one in workers(ours, layers, TOKENS, fills=True, **settings)]
    others = [ranks.add(one) for one in workers(theirs, layers, TOKENS, fills=False, **settings)]
    hand_over(sources, others)
    assert [worker.problem() for worker in others] == [""] * len(others)


@st.composite
def engines(draw: st.DrawFn, heads: int) -> Engine:
    """Any sizes that vLLM would start: ranks with the same heads are a multiple of those that share tokens."""
    tp, pcp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3]))
    holders = max(1, tp // heads) * pcp
    dcp = draw(st.sampled_from([size for size in range(1, holders + 1) if holders % size == 0]))
    page = draw(st.sampled_from([8, 16, 24]))
    return Engine(tp, pcp, dcp, draw(st.sampled_from([1, 2, 4, 8])), page)


@given(st.data(), st.sampled_from([GQA[:1], MLA[:1]]), st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_every_element_arrives_between_any_two_engines(
    data: st.DataObject, layers: Sequence[Layer], tokens: int
) -> None:
    ours, theirs = (data.draw(engines(layers[0].heads)) for _ in range(2))
    others = workers(theirs, layers, tokens, fills=False)
    moved(workers(ours, layers, tokens, fills=True), others)
    assert not any(worker.problem() for worker in others)


def test_another_interleave_than_the_engines_own_is_found_by_the_elements() -> None:
    """A control."""
    others = workers(ONE, GQA, TOKENS, fills=False)
    moved(workers(TOKEN, GQA, TOKENS, fills=True, told=TOKEN._replace(interleave=2)), others)
    assert any(worker.problem() for worker in others)


def test_ranks_of_another_order_are_found_by_the_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: vLLM's groups of decode context parallelism span ranks of prefill context parallelism first."""
    sources = workers(ALL, MLA, TOKENS, fills=True)
    monkeypatch.setattr(
        Shard, "cp_rank", property(lambda shard: shard.pcp_rank * shard.tp_size + shard.tp_rank)
    )
    others = workers(ONE, MLA, TOKENS, fills=False)
    route._routes.cache_clear()  # it may know these engines
    moved(sources, others)
    route._routes.cache_clear()
    assert any(worker.problem() for worker in others)


def test_what_the_consumer_has_already_is_not_written() -> None:
    sources, others = (
        workers(TOKEN, MLA, TOKENS, fills=True),
        workers(ACROSS, MLA, TOKENS, fills=False),
    )
    moved(sources, others, first=64)
    for worker in others:
        for number in range(len(MLA)):
            found, late = words(worker.tensors[number]), worker.entries(number, 64)
            for (page, place), values in worker.entries(number).items():
                assert np.array_equal(found[page, :, place], values) == ((page, place) in late)


def test_layers_that_every_rank_keeps_whole_are_not_split() -> None:
    """A draft model that runs without context parallelism, and an indexer's tail."""
    layers = [*GQA, attention("layers.2.attn", 2, 8, 8, dcp_sharded=False)]
    (worker, *_) = workers(TOKEN, layers, TOKENS, fills=True)
    assert sorted(group.interleave for group in worker.geometry.groups) == [0, 1, 1]
    windows = Windows.of([layer.spec(TOKEN) for layer in layers], TOKEN.dcp)
    assert windows.page_sizes == (32, 32, 16)


def test_workers_are_numbered_as_vllm_numbers_them() -> None:
    config = ALL.config(0, {})
    shards = []
    for rank in range(ALL.ranks):
        config.parallel_config.rank = rank
        shards.append(own_shard(config, [0, 1]))
    assert [(one.tp_rank, one.pcp_rank) for one in shards] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [one.cp_rank for one in shards] == [ALL.cp_rank(rank) for rank in range(4)]
    assert engine_shards(config, shards[0]) == tuple(shards)


def test_addresses_that_vllm_does_not_tell_apart_are_not_lost() -> None:
    """Without decode context parallelism its key of a worker is the stage and the tensor-parallel rank."""
    connector = object.__new__(PDConnector)
    told: list[Any] = []
    connector._scheduler = SimpleNamespace(set_peers=lambda *given: told.append(given))
    connector._engine_id = "e"
    every = [
        RankAddress("127.0.0.1", 7000 + 2 * pcp + tp, Shard(0, 2, tp, 2, 1, pcp, 2))
        for pcp in range(2)
        for tp in range(2)
    ]
    for one in every:
        one.copies = tuple(two for two in every if two.shard.tp_rank == one.shard.tp_rank)
    connector.set_xfer_handshake_metadata_pp_aware({(0, 1): every[3], (0, 0): every[2]})
    ((peers, _, _),) = told
    assert [peer.source.port for peer in peers] == [7000, 7001, 7002, 7003]


@pytest.mark.parametrize("tokens", [31, 32, 33, 100])
def test_page_tables_count_the_tokens_of_all_ranks(tokens: int) -> None:
    """Against vLLM's own scheduler."""
    spec = kv.FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    alone = kv.FullAttentionSpec(
        block_size=PAGE, num_kv_heads=1, head_size=1, dtype=torch.float32, dcp_sharded=False
    )
    for specs in ([spec], [spec, alone]):
        engine = SteppedEngine(specs=specs, dcp=2, caching=False, budget=512, audit="off")
        engine.add("p", tokens, **OFFER, transfer_id="t")
        sizes = [2 * PAGE, PAGE][: len(specs)]
        (offer,) = [one for one in engine.step() if isinstance(one, Offer)]
        assert [len(table) for table in offer.pages] == [pages_for(tokens, n) for n in sizes]
        engine = SteppedEngine(specs=specs, dcp=2, caching=False, budget=512, audit="off")
        engine.fetch("d", tokens + 1)
        (load,) = [one for one in engine.step() + engine.step() if isinstance(one, Load)]
        assert load.stop_token == tokens
        assert all(
            len(table) >= pages_for(tokens, n) for table, n in zip(load.pages, sizes, strict=True)
        )
