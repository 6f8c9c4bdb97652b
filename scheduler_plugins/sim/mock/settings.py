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
    """How many times faster than real time it is."""
    network: Network = field(default_factory=Network)
    kv_events: str = ""
    """ZMQ endpoint of its KV events, such as `tcp://127.0.0.1:5557`; empty: none."""
    kv_replay: str = ""
    sglang: bool = False
    """It describes itself as SGLang's server does."""
    decode_apart: bool = False
    """A machine of its own decodes, beside prefills: one address for a prefill and a decode engine."""
