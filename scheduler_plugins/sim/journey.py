# SPDX-License-Identifier: Apache-2.0
"""A request on its way through a simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler_plugins.order.request import Waiting
from scheduler_plugins.qos.classes import QosClass
from scheduler_plugins.router.policies.base import Request
from scheduler_plugins.sim.node import Node
from scheduler_plugins.sim.served import Served


@dataclass(eq=False, slots=True)
class Journey:
    """A request that has not ended, with its place."""

    record: Served
    request: Request
    waiting: Waiting  # the request for engines: after a death its prompt is longer, and fewer tokens remain
    p: Node | None = None  # until the decode engine has the KV
    d: Node | None = None
    attempt: int = 0  # number of the attempt; transfers of earlier attempts are outdated
    in_transfer: bool = False
    source: Node | None = None  # the engine from which its prefix is on its way

    @classmethod
    def begin(cls, record: Served, qos: QosClass) -> Journey:
        """Make the journey of an arriving request of this class."""
        arrived = record.request
        request = Request(
            arrived.id,
            arrived.tokens,
            arrived.block_hashes,
            arrived.max_tokens,
            arrived.arrival_s,
            arrived.qos,
            interactive=qos.interactive,
            ttft_slo_s=qos.slo.ttft_s,
            tpot_slo_s=qos.slo.tpot_s,
        )
        return cls(record, request, arrived)

    def go_on(self, left: int) -> None:
        """Start again after the engine died with `left` tokens to come. Generated tokens become part of the prompt. 0:
        unknown."""
        self.in_transfer, self.p, self.d, self.source = False, None, None, None
        if 0 < left < self.waiting.max_tokens:
            tokens = self.waiting.tokens + self.waiting.max_tokens - left
            self.waiting = replace(self.waiting, tokens=tokens, max_tokens=left)
            self.request = self.request._replace(tokens=tokens, max_tokens=left)
