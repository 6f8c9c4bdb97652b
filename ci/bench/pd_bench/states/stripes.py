# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: four ranks that share the tokens of a prompt hand it to one that keeps all of them.

No CPU engine of vLLM runs context parallelism. So agents move MLA caches that vLLM's own specs lay out, over TCP on one
machine. What arrives is compared element by element.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from pd_bench.report import BenchError, Comparison, Param
from pd_bench.sample import Sample
from pd_connector.agent.agent import Agent
from pd_connector.config import Config
from pd_connector.kv.model import ModelFacts
from pd_connector.protocol.consuming.incoming import Finished, Load
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.protocol.wire.peers import Peer, Source

RANKS, LAYERS, WIDTH, PAGE, TOKENS = 4, 8, 576, 64, 8192
"""Ranks that share tokens, layers, elements of a latent, tokens of a page on a rank, and tokens of the prompt: 75 MB."""
BAR = 1.3
_NAME, _IDENTITY = "bench", b"stripes"
_TIMEOUT_S, _POLL_S = 60.0, 0.0005


class StripedRank:
    """A rank's cache and agent.

    Args:
        rank, ranks: its place among the ranks that share the prompt's tokens. The only one of 1 receives.
        interleave: tokens in a row that a rank keeps.
    """

    def __init__(self, rank: int, ranks: int, interleave: int) -> None:
        from vllm.v1 import kv_cache_interface as kv
        from vllm.v1.kv_cache_layout import KVCacheLayout

        from pd_connector.vllm.cache import describe_cache
        from pd_connector.vllm.shards import engine_shards

        produces, pages = ranks > 1, TOKENS // PAGE // ranks
        options = {"block_size": PAGE, "num_kv_heads": 1, "head_size": WIDTH}
        spec: Any = kv.MLAAttentionSpec(dtype=torch.bfloat16, **options)
        names = [f"layers.{number}.attn" for number in range(LAYERS)]
        size = pages * spec.page_size_bytes
        self._layers = {}
        for name in names:
            placed = kv.KVCacheTensor(size, [name], size, spec.page_size_bytes)
            memory = torch.zeros(size, dtype=torch.int8)
            views = kv.create_kv_cache_views(memory, spec, pages, KVCacheLayout.LBHNC, placed)
            (self._layers[name],) = views
        parallel = SimpleNamespace(
            tensor_parallel_size=ranks,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=ranks,
            cp_kv_cache_interleave_size=interleave,
            rank=rank,
            world_size=ranks,
        )
        module = SimpleNamespace(total_num_kv_heads=None, attn_backend=None)
        config: Any = SimpleNamespace(
            cache_config=SimpleNamespace(cache_dtype="auto", block_size=PAGE),
            compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(names, module)),
            parallel_config=parallel,
        )
        groups = kv.KVCacheConfig(pages, [], [kv.KVCacheGroupSpec(names, spec)])
        numbers = {name: number for number, name in enumerate(names)}
        cache = describe_cache(self._layers, groups, config, numbers)
        random = torch.Generator().manual_seed(rank + produces)
        self._table = torch.randperm(pages, generator=random)
        if produces:
            kept = torch.arange(TOKENS)
            self._write(kept[kept // interleave % ranks == rank])
        self._shard = cache.geometry.shard
        self._agent = Agent(
            Config(transports=("tcp",)),
            _NAME,
            ModelFacts(b"model", b"model"),
            cache,
            produces=produces,
            consumes=not produces,
            shards=engine_shards(config, self._shard),
        )

    @property
    def peer(self) -> Peer:
        """This rank, for one that fetches from it."""
        return Peer(Source("127.0.0.1", self._agent.port, _NAME), self._shard)

    def offer(self, transfer: str) -> None:
        """Offer the prompt for one fetch."""
        self._agent.outcomes()
        pages = (tuple(self._table.tolist()),)
        self._agent.submit(Offer(transfer, transfer, pages, _IDENTITY, TOKENS, TOKENS, final=True))

    def fetch(self, transfer: str, peers: tuple[Peer, ...]) -> float:
        """Fetch it from all ranks; returns the seconds. Raises BenchError if it does not arrive, or is wrong."""
        for layer in self._layers.values():
            layer.zero_()
        pages = (tuple(self._table.tolist()),)
        load = Load(transfer, transfer, peers, _IDENTITY, 0, TOKENS, pages, wait=True)
        began = time.perf_counter()
        self._agent.submit(load)
        while not (ended := self._agent.outcomes()):
            if time.perf_counter() - began > _TIMEOUT_S:
                raise BenchError(f"nothing has arrived within {_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)
            self._agent.wait_for_outcome(0.1)
        seconds = time.perf_counter() - began
        (finished,) = ended
        assert isinstance(finished, Finished)
        if finished.cause is not None:
            raise BenchError(f"{finished.cause}: {finished.detail}")
        for number, layer in enumerate(self._layers.values()):
            if not torch.equal(self._rows(layer), _values(number, torch.arange(TOKENS))):
                raise BenchError(f"layer {number} has arrived wrong")
        return seconds

    def close(self) -> None:
        """End the agent."""
        self._agent.close()

    def _write(self, tokens: torch.Tensor) -> None:
        for number, layer in enumerate(self._layers.values()):
            rows = _values(number, tokens).view(-1, layer.shape[1], PAGE, WIDTH)
            layer[self._table] = rows.view(torch.bfloat16)

    def _rows(self, layer: torch.Tensor) -> torch.Tensor:
        """What a layer keeps, by token."""
        return layer[self._table].view(torch.int16).reshape(-1, WIDTH)


def _values(layer: int, tokens: torch.Tensor) -> torch.Tensor:
    """Numbered elements of these tokens, `[token, WIDTH]`."""
    numbers = tokens[:, None] * WIDTH + torch.arange(WIDTH) + 7919 * layer
    return numbers.to(torch.int16)


@contextmanager
def _striped(interleave: int) -> Iterator[Callable[[str], float]]:
    """Agents of both sides; yields a function that moves the prompt once and returns the seconds."""
    with ExitStack() as stack:
        sources = [
            stack.enter_context(closing(StripedRank(rank, RANKS, interleave)))
            for rank in range(RANKS)
        ]
        destination = stack.enter_context(closing(StripedRank(0, 1, interleave)))
        peers = tuple(source.peer for source in sources)

        def move(transfer: str) -> float:
            for source in sources:
                source.offer(transfer)
            return destination.fetch(transfer, peers)

        yield move


def measure(runs: int, warm_ups: int) -> Comparison:
    """An interleave of one token beside one of a page, in turn.

    Raises:
        BenchError: KV has not arrived, or is wrong.
    """
    seconds: dict[str, list[float]] = {"token": [], "page": []}
    with _striped(1) as by_token, _striped(PAGE) as by_page:
        for number in range(warm_ups + runs):
            for name, move in (("token", by_token), ("page", by_page)):
                taken = move(f"{name} {number}")
                if number >= warm_ups:
                    seconds[name].append(taken * 1e3)
    token, page = (Sample(tuple(seconds[name])) for name in ("token", "page"))
    params: dict[str, Param] = {"prompt_tokens": TOKENS, "ranks": f"{RANKS} to 1"}
    return Comparison("interleave of a token", params, token, page, "ms", BAR)
