# SPDX-License-Identifier: Apache-2.0
"""Memory of a GPU that is not there: host memory that torch believes to be a device's."""

import ctypes
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from streams import STREAMS

ALIGNMENT = 512
CUDA, BYTES = 2, (1, 8, 1)
UNWRITTEN = 0xA5
META, CUDA_TYPE, DEVICE_TYPES = 14, 1, 24
EXCHANGE_DEVICE, GET_DEVICE, METHODS = 1, 2, 24
"""Places in the methods of `c10::impl::DeviceGuardImplInterface`, and how many to copy."""


class _Managed(ctypes.Structure):
    """A tensor of one axis of bytes, as DLPack hands it over (`DLManagedTensor`)."""

    _fields_ = (
        *(("data", ctypes.c_void_p), ("kind", ctypes.c_int), ("device", ctypes.c_int)),
        *(("axes", ctypes.c_int), ("dtype", ctypes.c_uint8 * 2), ("lanes", ctypes.c_uint16)),
        *(("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.c_void_p)),
        *(("offset", ctypes.c_uint64), ("context", ctypes.c_void_p)),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    )


class Region:
    """Memory that is never given back, only lent again: as by torch's allocator, a kernel that comes too late
    writes into the next tensor."""

    def __init__(self, nbytes: int) -> None:
        self.room = np.full(nbytes + ALIGNMENT, UNWRITTEN, np.uint8)
        self.address = -(-self.room.ctypes.data // ALIGNMENT) * ALIGNMENT
        self.nbytes = nbytes
        self.shape = (ctypes.c_int64 * 1)()
        self.managed: _Managed | None = None


class DeviceMemory:
    """Regions that are lent, by their addresses, and those that are free, by the stream that used them: torch lends a
    region again only on that stream, and at once."""

    def __init__(self) -> None:
        self.lent: dict[int, tuple[int, Region]] = {}
        """Bytes that were asked for, and the region."""
        self._free: dict[Any, list[Region]] = defaultdict(list)
        self._deleter = _Managed._fields_[-1][1](self._deleted)
        self._streams: dict[int, Any] = {}
        self.pool: tuple[int, int] | None = None
        """While a graph is captured: its memory, which stays its own, and `allocated` counts it."""
        self.allocated: list[int] | None = None

    def tensor(self, nbytes: int) -> torch.Tensor:
        """Uint8 `[nbytes]` on the device."""
        if self.allocated is not None and nbytes:
            self.allocated.append(nbytes)
        region = self.lend(nbytes, self.pool or STREAMS.current.cuda_stream)
        region.shape[0] = nbytes
        region.managed = _Managed(
            *(region.address, CUDA, 0, 1, (ctypes.c_uint8 * 2)(*BYTES[:2]), BYTES[2]),
            *(region.shape, None, 0, region.address, self._deleter),
        )
        return torch._C._from_dlpack(
            _new_capsule(ctypes.addressof(region.managed), b"dltensor", None)
        )

    def lend(self, nbytes: int, stream: Any = 0) -> Region:
        free = self._free[stream]
        fitting = [region for region in free if nbytes <= region.nbytes <= 2 * nbytes + ALIGNMENT]
        if fitting:
            free.remove(fitting[-1])
        region = fitting[-1] if fitting else Region(max(1, nbytes))
        self.lent[region.address] = nbytes, region
        self._streams[region.address] = stream
        return region

    def give_back(self, address: int) -> None:
        _, region = self.lent.pop(address)
        self._free[self._streams[address]].append(region)

    def holds(self, address: int) -> bool:
        return any(at <= address < at + nbytes for at, (nbytes, _) in list(self.lent.items()))

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """First and last address, and one more, of what is lent now, or belongs to graphs."""
        spans = [(at, at + nbytes) for at, (nbytes, _) in list(self.lent.items()) if nbytes]
        pools = [free for of, free in self._free.items() if isinstance(of, tuple)]
        spans += [(each.address, each.address + each.nbytes) for free in pools for each in free]
        starts, ends = np.array(sorted(spans), np.int64).reshape(-1, 2).T
        return starts, ends

    def spoil(self, pool: tuple[int, int]) -> None:
        """What lies in a graph's memory before a replay is nobody's."""
        for region in self._free[pool]:
            region.room.fill(UNWRITTEN)

    def _deleted(self, managed: int) -> None:
        self.give_back(_Managed.from_address(managed).context)


_new_capsule: Any = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def allow_cuda_tensors() -> None:
    """torch without CUDA has no guard for its devices. The one of `meta`, which does nothing, will do, once it says
    that the current device is `cuda:0`."""
    with open("/proc/self/maps") as maps:
        path = next(line.split()[-1] for line in maps if line.rstrip().endswith("libc10.so"))
    name = "_ZN3c104impl26device_guard_impl_registryE"
    registry = (ctypes.c_void_p * DEVICE_TYPES).in_dll(ctypes.CDLL(path), name)
    theirs = ctypes.c_void_p.from_address(registry[META] or 0).value or 0
    ctypes.memmove(_METHODS, theirs, METHODS * 8)
    for place in (GET_DEVICE, EXCHANGE_DEVICE):
        _METHODS[place] = ctypes.cast(_cuda_0, ctypes.c_void_p).value
    _GUARD.value = ctypes.addressof(_METHODS)
    registry[CUDA_TYPE] = ctypes.addressof(_GUARD)


_GUARD, _METHODS = ctypes.c_void_p(), (ctypes.c_void_p * METHODS)()
"""An object of a class of C++: the address of its methods."""


@ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_void_p, ctypes.c_uint16)
def _cuda_0(guard: int, device: int) -> int:
    return CUDA_TYPE


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor on the host. It does not keep the memory from being lent again."""
    storage = tensor.untyped_storage()
    found = torch.empty(0, dtype=tensor.dtype)
    if storage.nbytes():
        room = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
        flat = torch.frombuffer(room, dtype=torch.uint8).untyped_storage()
        return found.set_(flat, tensor.storage_offset(), tensor.shape, tensor.stride())
    return found.new_empty(tensor.shape)


MEMORY = DeviceMemory()
