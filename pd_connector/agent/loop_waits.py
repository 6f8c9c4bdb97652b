# SPDX-License-Identifier: Apache-2.0
"""When the agent's thread has something to do: it waits for sockets, transports, the engine's device, and deadlines."""

import math
import time
from collections.abc import Sequence
from typing import Any

import zmq

from pd_connector.agent.consuming.consumer_side import ConsumerSide
from pd_connector.agent.pool_side import PoolSide
from pd_connector.agent.producing.producer_side import ProducerSide
from pd_connector.transport.base import Transport

_BUSY_TRANSPORT_POLL_MS = 1
"""For transports that do not tell when they have made progress (`Transport.restless`)."""
_UNHURRIED_POLL_MS = 5
"""Answers to heartbeats of many sessions come one by one. Taken together they cost a fraction."""
_COMPILING_POLL_MS = 20
"""Nothing tells when a background compilation has ended."""
_DOUBT_S = 0.25
"""Nor when a peer's machine does not acknowledge what it was sent. Looked at while transfers are under way."""
_DEVICE_POLL_MS = 1
"""Nor when a device has done a step."""


class LoopWaits:
    """Used by the agent's thread only.

    Attributes:
        only_data: whether the last wait ended because transports alone have something to tell.

    Args:
        always: what is polled besides transports and sessions: sockets and descriptors.
        longest_s: longest time without a look at everything, in seconds.
    """

    def __init__(
        self,
        always: Sequence[Any],
        transports: Sequence[Transport],
        producer: ProducerSide | None,
        consumer: ConsumerSide | None,
        pool: PoolSide | None,
        longest_s: float,
    ) -> None:
        self.only_data = False
        self._always = always
        self._transports = transports
        self._producer, self._consumer, self._pool = producer, consumer, pool
        self._longest_s = longest_s
        self._poller = self._others = zmq.Poller()  # `_others`: without a consumer's sessions
        self._polled: list[Any] = []

    def wait(self, stepped: float) -> None:
        """Wait until there may be something to do.

        Args:
            stepped: when everything was looked at last, in seconds, monotonic.
        """
        consumer = self._consumer
        sessions = consumer.pollables if consumer else []
        others = self._pollables()
        if [*sessions, *others] != self._polled:  # rarely
            self._polled = [*sessions, *others]
            self._poller, self._others = _poller(self._polled), _poller(others)
        sides = [side for side in (self._producer, consumer) if side]
        restless = any(t.restless for t in self._transports) and any(s.busy for s in sides)
        timeout_ms = _BUSY_TRANSPORT_POLL_MS if restless else self._longest_ms(stepped)
        if any(side.compiling for side in sides):
            timeout_ms = min(timeout_ms, _COMPILING_POLL_MS)
        if consumer and consumer.urgent:
            timeout_ms = 0
        elif consumer and consumer.unhurried and not restless:
            self._others.poll(_UNHURRIED_POLL_MS)
        ready = self._poll(timeout_ms)
        data = [each for transport in self._transports for each in transport.pollables]
        self.only_data = bool(timeout_ms and ready) and all(what in data for what in ready)

    def _poll(self, timeout_ms: int) -> list[Any]:
        """What has something to tell, within `timeout_ms`. Returns also when the engine's device has computed
        what is to be sent or saved; a look at that alone costs next to nothing."""
        ends = time.monotonic() + timeout_ms / 1000
        sides = [side for side in (self._producer, self._pool) if side]
        while timeout_ms > _DEVICE_POLL_MS and any(side.waits_for_device for side in sides):
            ready = self._poller.poll(_DEVICE_POLL_MS)
            done = any(side.device_done for side in sides)
            if ready or done or time.monotonic() >= ends:
                return [what for what, _ in ready]
        return [what for what, _ in self._poller.poll(timeout_ms)]

    def _longest_ms(self, stepped: float) -> int:
        """How long nothing is to be done, if nothing comes."""
        wait_s = self._longest_s
        if any(side.busy for side in (self._producer, self._consumer) if side):
            wait_s = min(wait_s, _DOUBT_S)
        if self._consumer:
            wait_s = min(wait_s, max(0.0, self._consumer.due - stepped))
        if self._pool:
            wait_s = min(wait_s, max(0.0, self._pool.due_s - stepped))
        return math.ceil(1000 * wait_s)

    def _pollables(self) -> list[Any]:
        """All pollables except the consumer's sessions."""
        found = list(self._always)
        for owner in (self._producer, *self._transports):
            if owner:
                found += owner.pollables
        return found


def _poller(pollables: Sequence[Any]) -> zmq.Poller:
    poller = zmq.Poller()
    for pollable in pollables:
        poller.register(pollable, zmq.POLLIN)
    return poller
