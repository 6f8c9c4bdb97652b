# SPDX-License-Identifier: Apache-2.0
"""The memory of one rank that its transports work with."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pd_connector.config import Config
from pd_connector.pins import Pins
from pd_connector.shared_cache import SharedCache, Span
from pd_connector.slab import Slab

if TYPE_CHECKING:
    import torch


_PRIVATE = frozenset({"tcp", "ucx"})
"""Transports whose peers cannot write into slots by themselves."""


class Buffers:
    """Slots, and the cache as far as peers may look at it.

    Attributes:
        landing: slots that peers write into.
        sending: slots that chunks are gathered into.
        private_landing: slots for a transport whose peers write nothing by themselves: memory that
            nobody but this process writes. The same as `landing` where that is such memory, too.
        private_sending: the same of `sending`.
        pins: what of it is pinned for the cache's GPU.
        cache: what peers on this machine may read of the cache; None where that is nothing.

    Args:
        device: where the cache lies.
        storages: the memory in which peers may look at it; empty where they may not.
        produces: consumers will read from here.
        consumes: producers will write here.
    """

    def __init__(
        self,
        config: Config,
        device: "torch.device",
        storages: Sequence[Span],
        *,
        produces: bool,
        consumes: bool,
    ) -> None:
        shared = "shm" in config.transports
        self.landing = Slab(config.slots, config.slot_bytes, shared=shared)
        self.sending = Slab(config.slots, config.slot_bytes, shared=shared)
        self.private_landing, self.private_sending = self.landing, self.sending
        if not _PRIVATE.issuperset(config.transports):
            # Reserved, not touched: what is not used costs nothing.
            self.private_landing = Slab(config.slots, config.slot_bytes)
            self.private_sending = Slab(config.slots, config.slot_bytes)
        self.pins = Pins(device)
        if consumes:
            self._pin(config, self.landing, self.private_landing, "landing slots")
        if produces:
            self._pin(config, self.sending, self.private_sending, "send slots")
        self.cache = SharedCache.of(storages) if storages else None

    def _pin(self, config: Config, slots: Slab, private: Slab, what: str) -> None:
        self.pins.add(slots.memory, what)
        if private is not slots and "tcp" in config.transports:
            self.pins.add(private.memory, f"{what} of tcp")

    def close(self) -> None:
        """Give up pins and descriptors; see `Slab.close`, `SharedCache.close`."""
        self.pins.release()
        self.landing.close()
        self.sending.close()
        if self.cache:
            self.cache.close()
