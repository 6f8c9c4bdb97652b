# SPDX-License-Identifier: Apache-2.0
"""The settings of a mock engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.sim.links import Network


@dataclass(frozen=True, kw_only=True)
class MockSettings:
    """One mock engine."""

    host: str = "127.0.0.1"
    port: int = 0
    model: str = "mock"
    costs: CostModel
    order: str = "srjf_calibrated"
    cache_blocks: int = 8000
    block_tokens: int = 16
    kv_tokens: float = inf
    speed: float = 1.0
    """Speed as a multiple of real time."""
    network: Network = field(default_factory=Network)
    kv_events: str = ""
    """ZMQ endpoint of its KV events, such as `tcp://127.0.0.1:5557`; empty: none."""
    kv_replay: str = ""
    sglang: bool = False
    """Whether it describes itself like SGLang's server."""
    decode_apart: bool = False
    """Whether a separate machine decodes. The mock is then a prefill and a decode engine at one address."""

    def __post_init__(self) -> None:
        """Raises: ValueError: naming the setting, the value found and the value wanted."""
        if not self.host:
            raise ValueError("host '': must be an address to listen on, such as 127.0.0.1")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port {self.port}: must be between 0 and 65535")
        if self.kv_replay and not self.kv_events:
            raise ValueError(f"kv_replay {self.kv_replay!r}: is set without kv_events; set both")
        for name in ("cache_blocks", "block_tokens"):
            if (count := getattr(self, name)) < 1:
                raise ValueError(f"{name} {count}: must be 1 or more")
        if not 0 < self.speed < inf:
            raise ValueError(f"speed {self.speed}: must be a number above 0")
        if not self.kv_tokens > 0:
            raise ValueError(f"kv_tokens {self.kv_tokens}: must be above 0")
