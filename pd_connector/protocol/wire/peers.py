# SPDX-License-Identifier: Apache-2.0
"""The addresses of a producer's ranks, and their shards."""

from typing import NamedTuple

from pd_connector.kv.geometry import Shard


class Source(NamedTuple):
    """The address of one rank of a producer.

    An engine id that is not empty must be that of the engine that answers there.
    """

    host: str
    port: int
    engine_id: str

    @property
    def label(self) -> str:
        """The rank's name in metrics: host and port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Peer(NamedTuple):
    """One rank of a producer: its address, and its shard as its engine has told it."""

    source: Source
    shard: Shard
