# SPDX-License-Identifier: Apache-2.0
"""The ranks of one SGLang engine that share out the model: they find each other when they start."""

import uuid
from typing import Any, NamedTuple

from pd_connector.kv.geometry import Shard
from pd_connector.protocol.wire.peers import Peer


class _Part(NamedTuple):
    """What the ranks of an engine exchange when they start."""

    replica: int  # of the attention, where several ranks have whole copies of it
    name: str
    shard: Shard


class EngineRanks:
    """Every rank makes it at the same time, and calls `gather` at the same time.

    Args:
        parallel: SGLang's groups of ranks.
        shard: what this rank holds.

    Attributes:
        engine_id: one name for all of these ranks.
        shards: what each of them holds.
    """

    def __init__(self, parallel: Any, shard: Shard) -> None:
        self._world = parallel.world_group
        own = _Part(parallel.attn_dp_rank, f"sglang-{uuid.uuid4().hex[:12]}", shard)
        parts = [part for part in self._world.all_gather_object(own) if part.replica == own.replica]
        self.engine_id: str = parts[0].name
        self.shards: list[Shard] = [part.shard for part in parts]

    def gather(self, own: Peer) -> tuple[Peer, ...]:
        """The addresses of all these ranks; `own` is this rank's."""
        peers = self._world.all_gather_object(own)
        return tuple(peer for peer in peers if peer.source.engine_id == self.engine_id)
