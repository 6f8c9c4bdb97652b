# SPDX-License-Identifier: Apache-2.0
"""Mock engines as processes, and the statistics of their caches."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pd_bench.router import scaled
from pd_connector.tools.launch import Service

_RUN = "import sys; from scheduler_plugins.sim.mock.command import main; sys.exit(main())"
_HITS, _QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"


class MockProcess(Service):
    """One mock engine with the bench's cost model.

    Args:
        costs: file with the cost model.
        speed: speed as a multiple of real time.
        args: further arguments of `pd-router mock`.
    """

    def __init__(
        self, name: str, costs: Path, speed: float, log: Path, args: Sequence[str] = ()
    ) -> None:
        super().__init__(name, log)
        self._events, self._replay = self.reserve(), self.reserve()
        self._args = [*args, "--cost-model", str(costs), "--speed", str(speed)]

    @property
    def events(self) -> str:
        """Its endpoints for KV events and their replay, as in the router's `--kv-events`."""
        return f"{self.base_url}={self._endpoint(self._events)},{self._endpoint(self._replay)}"

    def command(self) -> list[str]:
        sizes = ["--cache-blocks", str(scaled.CACHE_BLOCKS)]
        sizes += ["--block-tokens", str(scaled.BLOCK_TOKENS)]
        events = ["--kv-events", self._endpoint(self._events)]
        events += ["--kv-replay", self._endpoint(self._replay)]
        link = ["--bytes-per-s", str(scaled.BYTES_PER_S)]
        address = ["--host", self.host, "--port", str(self.port)]
        return [sys.executable, "-c", _RUN, *address, *sizes, *link, *events, *self._args]

    def _endpoint(self, port: int) -> str:
        return f"tcp://{self.host}:{port}"


class PrefixHits(NamedTuple):
    """Prompt tokens that prefill engines have found in their caches so far."""

    queries: float  # prompt tokens
    hits: float

    def since(self, before: PrefixHits) -> float:
        """The fraction of prompt tokens found since an earlier moment."""
        return (self.hits - before.hits) / max(1.0, self.queries - before.queries)


def prefix_hits(engines: Sequence[MockProcess]) -> PrefixHits:
    """Queries and hits of these engines together."""
    samples = [engine.metrics() for engine in engines]
    return PrefixHits(
        sum(sample.total(_QUERIES) for sample in samples),
        sum(sample.total(_HITS) for sample in samples),
    )
