# SPDX-License-Identifier: Apache-2.0
"""The memory of one rank that its transports work with."""

from typing import TYPE_CHECKING

from pd_connector.config import Config
from pd_connector.memory.pins import Pins
from pd_connector.memory.slab import Slab

if TYPE_CHECKING:
    import torch


_PRIVATE = frozenset({"tcp", "ucx"})
"""Transports whose peers cannot write into slots by themselves."""


class Buffers:
    """Landing and send slots.

    Attributes:
        landing: slots that peers write into.
        sending: slots that chunks are gathered into.
        private_landing: landing slots that nobody but this process can write, for transports whose
            peers do not write into slots by themselves. The same slab as `landing` where that is
            such memory.
        private_sending: send slots of the same kind.
        pins: slots that are pinned for the cache's GPU.

    Args:
        device: where the cache lies.
        produces: whether chunks are gathered into the send slots.
        consumes: whether chunks arrive in the landing slots.
    """

    def __init__(
        self, config: Config, device: "torch.device", *, produces: bool, consumes: bool
    ) -> None:
        shared = "shm" in config.transports
        self.landing = Slab(config.slots, config.slot_bytes, shared=shared)
        self.sending = Slab(config.slots, config.slot_bytes, shared=shared)
        self.private_landing, self.private_sending = self.landing, self.sending
        if not _PRIVATE.issuperset(config.transports):
            # Reserved, not touched: unused slots cost no physical memory.
            self.private_landing = Slab(config.slots, config.slot_bytes)
            self.private_sending = Slab(config.slots, config.slot_bytes)
        self.pins = Pins(device)
        if consumes:
            self._pin(config, self.landing, self.private_landing, "landing slots")
        if produces:
            self._pin(config, self.sending, self.private_sending, "send slots")

    def _pin(self, config: Config, slots: Slab, private: Slab, what: str) -> None:
        self.pins.add(slots.memory, what)
        if private is not slots and "tcp" in config.transports:
            self.pins.add(private.memory, f"{what} of tcp")

    def close(self) -> None:
        """Give up pins and descriptors (see `Slab.close`)."""
        self.pins.release()
        self.landing.close()
        self.sending.close()
