# SPDX-License-Identifier: Apache-2.0
"""The memory of one rank that its transports work with."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pd_connector.config import Config
from pd_connector.memory.pins import Pins
from pd_connector.memory.shared_cache import SharedCache, Span
from pd_connector.memory.slab import Slab

if TYPE_CHECKING:
    import torch


class Buffers:
    """Slots, and the cache as far as peers may look at it.

    Attributes:
        landing: slots that peers write into.
        sending: slots that chunks are gathered into.
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
        self.pins = Pins(device)
        if consumes:
            self.pins.add(self.landing.memory, "landing slots")
        if produces:
            self.pins.add(self.sending.memory, "send slots")
        self.cache = SharedCache.of(storages) if storages else None

    def close(self) -> None:
        """Give up pins and descriptors; see `Slab.close`, `SharedCache.close`."""
        self.pins.release()
        self.landing.close()
        self.sending.close()
        if self.cache:
            self.cache.close()
