# SPDX-License-Identifier: Apache-2.0
"""The memory of one rank that its transports work with."""

from typing import TYPE_CHECKING

from pd_connector.config import Config
from pd_connector.memory.pins import Pins
from pd_connector.memory.slab import Slab

if TYPE_CHECKING:
    import torch


class Buffers:
    """Landing and send slots.

    Attributes:
        landing: slots that peers write into.
        sending: slots that chunks are gathered into.
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
        self.pins = Pins(device)
        if consumes:
            self.pins.add(self.landing.memory, "landing slots")
        if produces:
            self.pins.add(self.sending.memory, "send slots")

    def close(self) -> None:
        """Give up pins and descriptors (see `Slab.close`)."""
        self.pins.release()
        self.landing.close()
        self.sending.close()
