# SPDX-License-Identifier: Apache-2.0
"""Copies plane by plane between pages and slots on the host or a device, for chunks that kernels cannot take.
Payloads on a device pass through host memory, where they are hashed.
"""

from collections.abc import Callable, Sequence

import numpy as np

from pd_connector.memory.device_bytes import DeviceBytes, Payload
from pd_connector.memory.device_slab import filled_on_host
from pd_connector.pages.cache_layers import CacheLayers
from pd_connector.pages.comparing import distances
from pd_connector.pages.one_ahead import GatherCall
from pd_connector.pages.plane_copies import PlaneCopies
from pd_connector.plan.chunks import Chunk
from pd_connector.plan.route import Route
from pd_connector.protocol.consuming.audit import Distance, can_compare
from pd_kernels.checksum import checksum_of


class SlotCopies(PlaneCopies):
    """Each call ends when its work has ended. It returns the payload's checksum if the payload lies on a device;
    for a payload in host memory the caller computes it.

    Args:
        wait: waits until all work queued on the cache's stream is done.
    """

    def __init__(self, layers: CacheLayers, wait: Callable[[], None]) -> None:
        super().__init__(layers)
        self._wait = wait

    def fill(self, call: GatherCall) -> bytes | None:
        """As `PagedCache.gather`."""
        route, chunk, pages, slot, _ = call
        with filled_on_host(slot) as payload:
            self.gather(route, chunk, pages, np.frombuffer(payload, np.uint8))
            self._wait()
            if isinstance(slot, DeviceBytes):
                return checksum_of(payload)
        return None

    def empty(
        self, route: Route, chunk: Chunk, pages: Sequence[int], payload: Payload
    ) -> bytes | None:
        """As `PagedCache.scatter`."""
        found, summed = self._on_host(route, payload)
        self.scatter(route, chunk, pages, np.frombuffer(found, np.uint8))
        self._wait()
        return summed

    def compare(
        self, route: Route, chunk: Chunk, pages: Sequence[int], payload: Payload
    ) -> tuple[bytes | None, list[Distance]]:
        """As `PagedCache.compare`."""
        found, summed = self._on_host(route, payload)
        if not can_compare(route):
            return summed, []
        words = np.frombuffer(found, np.uint8)
        away = distances(self._layers, self.copier, route, chunk, pages, words)
        self._wait()
        return summed, away

    def _on_host(self, route: Route, payload: Payload) -> tuple[memoryview, bytes | None]:
        """The payload in host memory. Bytes on a device are copied once, and the copy is hashed: a peer may
        still write into the slot."""
        if not isinstance(payload, DeviceBytes):
            return payload, None
        found = payload.to_host()
        return found, checksum_of(found)
