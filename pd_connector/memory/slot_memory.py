# SPDX-License-Identifier: Apache-2.0
"""Whether chunks of a cache on a GPU pass through slots on that GPU, and why not."""

from typing import TYPE_CHECKING, NamedTuple

from pd_connector.config import Config
from pd_connector.errors import ConfigError
from pd_connector.memory.device_slab import DeviceMemoryError, DeviceSlab

if TYPE_CHECKING:
    import torch


class WhyHost(NamedTuple):
    """Why chunks of a cache on a GPU pass through slots in host memory.

    Attributes:
        cause: `config`, `transport`, `kernels`, `memory` or `setup`; see `choose_slot_memory`.
        detail: the cause as a sentence, with advice.
    """

    cause: str
    detail: str

    def __str__(self) -> str:
        return f"slots in host memory ({self.cause}: {self.detail})"


class DeviceSlots(NamedTuple):
    """Slots in device memory for the sides (producer, consumer) that this rank has."""

    landing: DeviceSlab | None  # of a consumer
    sending: DeviceSlab | None  # of a producer

    @property
    def slabs(self) -> list[DeviceSlab]:
        return [slab for slab in self if slab is not None]

    def close(self) -> None:
        """Release the memory (see `DeviceSlab.close`)."""
        for slab in self.slabs:
            slab.close()


NO_DEVICE_SLOTS = DeviceSlots(None, None)


def choose_slot_memory(
    config: Config,
    cache_device: "torch.device",
    slot_device: "torch.device | None",
    *,
    produces: bool,
    consumes: bool,
    reaches_devices: bool,
) -> tuple[DeviceSlots, WhyHost | None]:
    """Allocate slots on the device, if chunks can pass through them.

    Args:
        cache_device: where the cache lies.
        slot_device: device to and from which kernels can move chunks; None if no kernels move the cache's
            pages.
        reaches_devices: whether a transport of the config moves device memory. Others copy from host memory with the
            processor.

    Returns:
        The slots, and if there are none the reason: `config` (the operator's choice), `transport` (none of the
        config's transports reaches device memory), `kernels` (Triton is missing), `memory` (the device has
        too little free memory). For a cache in host memory there is no reason.

    Raises:
        ConfigError: `slot_memory` is `device`, and that is not possible.
    """
    if cache_device.type != "cuda" and slot_device is None:
        if config.slot_memory == "device":
            raise not_possible("the cache is in host memory")
        return NO_DEVICE_SLOTS, None
    if config.slot_memory == "host":
        return NO_DEVICE_SLOTS, WhyHost("config", "slot_memory is `host`")
    why = WhyHost("kernels", "torch moves chunks, because Triton is not installed")
    if not reaches_devices:
        names = ", ".join(config.transports)
        why = WhyHost(
            "transport", f"{names} copy with the processors: `nixl` reaches device memory"
        )
    elif slot_device is not None:
        shape = config.slots, config.slot_bytes, slot_device
        try:
            landing = DeviceSlab(*shape) if consumes else None
            return DeviceSlots(landing, DeviceSlab(*shape) if produces else None), None
        except DeviceMemoryError as error:
            why = WhyHost("memory", str(error))
    if config.slot_memory == "device":
        raise not_possible(why.detail)
    return NO_DEVICE_SLOTS, why


def not_possible(detail: str) -> ConfigError:
    """The error for a config that requires slots on the device, if there cannot be any."""
    return ConfigError(
        f"slot_memory 'device': {detail}. Set `auto` to use host memory instead (config key slot_memory)"
    )
