# SPDX-License-Identifier: Apache-2.0
"""The consumers and producers that a NIXL transport knows, with what is under way to and from them."""

from dataclasses import dataclass, field
from typing import Any

from pd_connector.transport.nixl.address import NixlAddress
from pd_connector.transport.nixl.agent import NixlAgent


@dataclass(slots=True)
class NixlConsumer:
    agent: NixlAgent
    remote: str
    address: NixlAddress
    on_device: bool  # slots of both sides lie there
    writes: dict[int, Any] = field(default_factory=dict)  # token: handle
    failed: bool = False  # a write to it: the agent does not reach it again


@dataclass(slots=True)
class NixlRead:
    handle: Any
    header: bytes
    slot: int
    nbytes: int


@dataclass(slots=True)
class NixlProducer:
    """An expected producer. It has an agent from the first read on: most sessions only write."""

    address: NixlAddress
    on_device: bool  # slots of both sides lie there
    agent: NixlAgent | None = None
    remote: str = ""
    reads: list[NixlRead] = field(default_factory=list)
