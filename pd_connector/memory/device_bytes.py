# SPDX-License-Identifier: Apache-2.0
"""The bytes of a chunk, in host or device memory."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


class DeviceBytes:
    """Bytes of a slot in device memory. Used like a `memoryview` of a slot in host memory.

    Attributes:
        tensor: uint8 `[nbytes]`, dense. The memory lives as long as a tensor of it.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: "torch.Tensor") -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, part: slice) -> "DeviceBytes":
        return DeviceBytes(self.tensor[part])

    def __bytes__(self) -> bytes:
        return bytes(self.to_host())

    @property
    def nbytes(self) -> int:
        return len(self.tensor)

    @property
    def address(self) -> int:
        """Address of the first byte, in the device's memory."""
        return int(self.tensor.data_ptr())

    def to_host(self) -> memoryview:
        """A copy in host memory. Waits for all work queued on the current stream."""
        copied: memoryview = self.tensor.to("cpu", copy=True).numpy().data
        return copied


Payload = memoryview | DeviceBytes
"""The bytes of a chunk, in host memory or in a device's."""


def address_of(payload: Payload) -> int:
    """Address of the first byte, in the memory in which it lies."""
    if isinstance(payload, DeviceBytes):
        return payload.address
    return int(np.frombuffer(payload, np.uint8).ctypes.data)
