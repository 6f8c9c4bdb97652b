# SPDX-License-Identifier: Apache-2.0
"""Slabs in a device's memory: chunks pass from slot to slot between GPUs, without host memory."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pd_connector.errors import PDConnectorError
from pd_connector.memory import cuda_driver
from pd_connector.memory.device_bytes import DeviceBytes, Payload

if TYPE_CHECKING:
    import torch

LEAST_FREE_BYTES = 1 << 30
"""Memory left free on a device for the engine, which captures CUDA graphs after its cache was made."""

_UNWRITTEN = 0xA5
"""Initial bytes of slots. Zeros would match the sums of a kernel that did not run."""


class DeviceMemoryError(PDConnectorError):
    """A slab cannot be allocated on the device."""


@contextlib.contextmanager
def filled_on_host(slot: Payload) -> Iterator[memoryview]:
    """Host memory to fill, as large as the slot: the slot itself, or memory that is copied to it at the end."""
    if not isinstance(slot, DeviceBytes):
        yield slot
        return
    import torch

    payload = bytearray(len(slot))
    yield memoryview(payload)
    slot.tensor.copy_(torch.frombuffer(payload, dtype=torch.uint8))  # waits: it is not pinned


class DeviceSlab:
    """One contiguous buffer of equal slots in a device's memory, outside of torch's pool. Another process or a
    network card can reach it, whatever PYTORCH_CUDA_ALLOC_CONF says.

    Args:
        slots: number of slots.
        slot_bytes: size of each, a multiple of 16.
        device: owner of the memory. `cpu` stands for a device in tests.

    Raises:
        DeviceMemoryError: the device has too little free memory.
    """

    def __init__(self, slots: int, slot_bytes: int, device: "torch.device") -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.device = device
        self._tensor = _allocate(self.nbytes, device)
        self._tensor.fill_(_UNWRITTEN)
        self._tensor[:1].cpu()  # wait: other streams write to the slab next

    @property
    def address(self) -> int:
        """Address of the first byte, in the device's memory; valid while the slab lives."""
        return int(self._tensor.data_ptr())

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def memory(self) -> str:
        """NIXL's name for this kind of memory."""
        return "VRAM" if self.device.type == "cuda" else "DRAM"

    @property
    def number(self) -> int:
        """The device's number in this process."""
        return self.device.index or 0

    def slot(self, index: int, nbytes: int | None = None) -> DeviceBytes:
        """The first `nbytes` bytes of a slot (all of it by default), writable."""
        start = index * self.slot_bytes
        stop = start + (self.slot_bytes if nbytes is None else nbytes)
        return DeviceBytes(self._tensor[start:stop])

    def close(self) -> None:
        """Release the memory. It is freed when the last slot taken from it is released."""
        self._tensor = self._tensor[:0].clone()


class _Allocation:
    """Memory of a device, in the form that torch accepts (`__cuda_array_interface__`)."""

    def __init__(self, nbytes: int, device: int) -> None:
        address = cuda_driver.allocate(nbytes, device)
        undo = weakref.finalize(self, cuda_driver.free, address, device)
        undo.atexit = False  # the end of the process frees it; the driver may be gone by then
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _allocate(nbytes: int, device: "torch.device") -> "torch.Tensor":
    import torch

    if device.type != "cuda":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    free, _ = torch.cuda.mem_get_info(device)
    if free < nbytes + LEAST_FREE_BYTES:
        raise DeviceMemoryError(
            f"{device} has {free >> 20} MiB free: slots of {nbytes >> 20} MiB would leave less than "
            f"{LEAST_FREE_BYTES >> 20} MiB for the engine. Lower the engine's share of the memory "
            "(vLLM: --gpu-memory-utilization, SGLang: --mem-fraction-static), or have fewer or smaller "
            "slots (config keys slots, slot_mib)"
        )
    try:
        return torch.as_tensor(_Allocation(nbytes, device.index or 0), device=device)
    except cuda_driver.CudaError as error:
        raise DeviceMemoryError(f"slots of {nbytes >> 20} MiB on {device}: {error}") from None
