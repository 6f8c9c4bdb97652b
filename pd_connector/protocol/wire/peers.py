# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of a producer are reached, and what each of them holds."""

from typing import NamedTuple

from pd_connector.kv.geometry import Shard


class Source(NamedTuple):
    """Where one rank of a producer is reached.

    The engine id, if it is not empty, must be the one that answers there.
    """

    host: str
    port: int
    engine_id: str

    @property
    def label(self) -> str:
        """Its name in metrics: host and port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Peer(NamedTuple):
    """One rank of a producer, and what it is said to hold."""

    source: Source
    shard: Shard
