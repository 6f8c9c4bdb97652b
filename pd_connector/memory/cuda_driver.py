# SPDX-License-Identifier: Apache-2.0
"""Parts of CUDA that torch does not offer: memory outside of torch's pool, private streams and threads, and a
device's attributes.

All are calls of the driver (`libcuda.so.1`). It exists on every machine with a working GPU, whichever CUDA release
torch was built for.
"""

import contextlib
import ctypes
import functools
from collections.abc import Iterator

from pd_connector.errors import PDConnectorError

READ_ONLY_HOST_REGISTER_SUPPORTED = 113
"""Device attribute: memory that this process can only read can be pinned."""

_NON_BLOCKING = 1
"""Flag for a stream that is not ordered with CUDA's default stream."""
_THREAD_LOCAL = 1
"""Mode in which only this thread's own captures forbid it calls that cannot be captured."""


class CudaError(PDConnectorError):
    """The driver is missing, or has refused a call."""


def allocate(nbytes: int, device: int) -> int:
    """Allocate memory of a device by `cuMemAlloc`; returns its address.

    Other processes can map such memory (`cuIpcGetMemHandle`), and network cards can reach it. Memory of torch's
    pool may allow neither: expandable segments are mapped piece by piece.

    Raises CudaError, for example if the device has too little free memory.
    """
    address = ctypes.c_uint64()
    with _current(device):
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
    return int(address.value)


def free(address: int, device: int) -> None:
    """Undo `allocate`. Waits for work on the device that uses the memory. Raises CudaError."""
    with _current(device):
        _call("cuMemFree_v2", ctypes.c_uint64(address))


def new_stream(device: int, priority: int) -> int:
    """Create a private stream; returns its `cudaStream_t`. It lives as long as the process.

    Args:
        priority: lower numbers come first; 0 is the default.

    Raises CudaError.
    """
    stream = ctypes.c_void_p()
    with _current(device):
        _call(
            "cuStreamCreateWithPriority",
            ctypes.byref(stream),
            ctypes.c_uint(_NON_BLOCKING),
            ctypes.c_int(priority),
        )
    return int(stream.value or 0)


def enter_thread(device: int) -> None:
    """Make the calling thread a private thread of this device, for as long as the thread lives.

    The device's context becomes current. `torch.cuda.set_device` leaves a new thread without a context on device 0,
    because torch assumes that the thread is on that device already.

    While another thread captures a CUDA graph as torch does it, CUDA refuses calls that cannot be captured, such as
    an allocation, on every other thread. The capture then fails, too. Engines capture when they start, and some
    again while they serve (SGLang after an update of weights, vLLM when it scales experts). Calls of a private thread
    belong to no capture.

    Raises CudaError.
    """
    context, handle, mode = ctypes.c_void_p(), _handle(device), ctypes.c_int(_THREAD_LOCAL)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    try:  # torch also keeps it
        _call("cuCtxSetCurrent", context)
    finally:
        _call("cuDevicePrimaryCtxRelease_v2", handle)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def supports(attribute: int, device: int) -> bool:
    """Whether the device has this attribute. Raises CudaError."""
    value = ctypes.c_int()
    _call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), _handle(device))
    return bool(value.value)


@contextlib.contextmanager
def _current(device: int) -> Iterator[None]:
    """Make this device's context, the one that torch and the engine use, current in the calling thread."""
    context, handle = ctypes.c_void_p(), _handle(device)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    try:
        _call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
    finally:
        _call("cuDevicePrimaryCtxRelease_v2", handle)


def _handle(device: int) -> ctypes.c_int:
    handle = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
    return handle


def _call(name: str, *arguments: object) -> None:
    code = getattr(_library(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _library().cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
        raise CudaError(f"{name}: {(text.value or b'error').decode()} ({code})")


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"no CUDA driver: {error}") from None
    library.cuInit(0)
    return library
