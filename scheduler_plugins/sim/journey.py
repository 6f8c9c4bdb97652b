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
    """A request that has not ended, and where it is."""

    record: Served
    asked: Request
    waiting: Waiting  # as engines get it: after a death it has more tokens, and fewer to come
    p: Node | None = None  # until the decode engine has the KV
    d: Node | None = None
    attempt: int = 0  # what an earlier attempt has on its way is out of date
    in_transfer: bool = False
    source: Node | None = None  # the engine that its prefix is on its way from

    @classmethod
    def begin(cls, record: Served, qos: QosClass) -> Journey:
        """A request of this class arrives."""
        one = record.request
        asked = Request(
            one.id,
            one.tokens,
            one.block_hashes,
            one.max_tokens,
            one.arrival_s,
            one.qos,
            interactive=qos.interactive,
            ttft_slo_s=qos.slo.ttft_s,
            tpot_slo_s=qos.slo.tpot_s,
        )
        return cls(record, asked, one)

    def go_on(self, left: int) -> None:
        """Its engine died when `left` tokens were to come: those it has become part of its prompt.
        0: nothing is known."""
        self.in_transfer, self.p, self.d, self.source = False, None, None, None
        if 0 < left < self.waiting.max_tokens:
            tokens = self.waiting.tokens + self.waiting.max_tokens - left
            self.waiting = replace(self.waiting, tokens=tokens, max_tokens=left)
            self.asked = self.asked._replace(tokens=tokens, max_tokens=left)
