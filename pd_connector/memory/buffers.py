# SPDX-License-Identifier: Apache-2.0
"""The memory of one rank that its transports use."""

from typing import TYPE_CHECKING, NamedTuple

from pd_connector.config import Config
from pd_connector.errors import ConfigError
from pd_connector.memory.pins import Pins
from pd_connector.memory.slab import Slab
from pd_connector.memory.slot_memory import (
    NO_DEVICE_SLOTS,
    WhyHost,
    choose_slot_memory,
    not_possible,
)

if TYPE_CHECKING:
    import torch


class SlotUse(NamedTuple):
    """How the transports of a rank use its slots, together."""

    reaches_devices: bool = False  # some move device memory
    maps_slots: bool = False  # peers of some map the slots
    private_slots: bool = False  # some need slots that no peer can reach
    one_sided: bool = False  # peers of some write into slots by themselves


class Buffers:
    """Landing and send slots.

    Attributes:
        landing: slots that peers write into.
        sending: slots that chunks are gathered into.
        private_landing: landing slots that only this process can write, for transports whose peers do not
            write into slots directly. The same slab as `landing` if that memory is private.
        private_sending: send slots of the same kind.
        device_slots: slots in the memory of the cache's GPU, with the same numbers and sizes, for
            transports that reach device memory.
        why_host: why there are no device slots; None if there are, and for a cache in host memory.
        pins: slots that are pinned for the cache's GPU.

    Args:
        device: where the cache lies.
        use: how the config's transports use the slots.
        produces: whether chunks are gathered into the send slots.
        consumes: whether chunks arrive in the landing slots.
        slot_device: device to which kernels can gather chunks; None if no kernels move the cache's pages.

    Raises:
        ConfigError: `slot_memory: device` is impossible, or there is no memory for the slots.
    """

    def __init__(
        self,
        config: Config,
        device: "torch.device",
        use: SlotUse,
        *,
        produces: bool,
        consumes: bool,
        slot_device: "torch.device | None" = None,
    ) -> None:
        self._must_be_on_device = config.slot_memory == "device"
        self.device_slots, self.why_host = choose_slot_memory(
            config,
            device,
            slot_device,
            produces=produces,
            consumes=consumes,
            reaches_devices=use.reaches_devices,
        )
        shared = use.maps_slots
        self.landing, self.sending = _slab(config, shared=shared), _slab(config, shared=shared)
        self.private_landing, self.private_sending = self.landing, self.sending
        if use.private_slots and use.one_sided:
            # Reserved but not touched: unused slots cost no physical memory.
            self.private_landing, self.private_sending = _slab(config), _slab(config)
        self.pins = Pins(device)
        if consumes:
            self._pin(self.landing, self.private_landing, "landing slots")
        if produces:
            self._pin(self.sending, self.private_sending, "send slots")

    def _pin(self, slots: Slab, private: Slab, what: str) -> None:
        self.pins.pin(slots.memory, what)
        if private is not slots:
            self.pins.pin(private.memory, f"private {what}")

    def leave_device(self, problem: str) -> None:
        """Slots on the device are not usable: continue with slots in host memory.

        Raises:
            ConfigError: the config requires device slots.
        """
        self.device_slots.close()
        self.device_slots, self.why_host = NO_DEVICE_SLOTS, WhyHost("setup", problem)
        if self._must_be_on_device:
            raise not_possible(problem)

    def why_staged(self, *, reaches: bool, used: bool) -> str:
        """Why the chunks of a session pass through host memory although the cache is on a GPU; empty if they do
        not.

        Args:
            reaches: whether the session's transport can move device memory.
            used: whether the session uses slots on the device.
        """
        if used or not self.slot_memory:
            return ""
        if self.why_host is not None:
            return self.why_host.cause
        return "peer" if reaches else "transport"

    @property
    def slot_memory(self) -> str:
        """Where slots lie, for the log; empty for a cache in host memory."""
        if self.why_host is not None:
            return str(self.why_host)
        return "slots in device memory" if self.device_slots.slabs else ""

    def close(self) -> None:
        """Release pins, descriptors and device memory (see `Slab.close`)."""
        self.device_slots.close()
        self.pins.release()
        self.landing.close()
        self.sending.close()


def _slab(config: Config, *, shared: bool = False) -> Slab:
    try:
        return Slab(config.slots, config.slot_bytes, shared=shared)
    except (MemoryError, OSError) as error:
        raise ConfigError(
            f"slots {config.slots} of slot_mib {config.slot_mib}: this host has no memory for them ({error}); "
            "up to four sets of slots are needed; lower `slots` or `slot_mib` (config keys slots, slot_mib)"
        ) from None
