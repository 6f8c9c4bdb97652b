# SPDX-License-Identifier: Apache-2.0
"""Host memory that is pinned (page-locked) for a GPU. The GPU's copy engines read and write pinned memory
directly, at the full speed of the bus, while the calling thread continues. Other memory is first copied through
the driver's own buffers.
"""

import contextlib
import logging
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pd_connector.memory import cuda_driver

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("pd_connector.memory.pins")

_PORTABLE = 1  # cudaHostRegisterPortable: for every device of this process
_READ_ONLY = 8  # cudaHostRegisterReadOnly

Memory = npt.NDArray[np.uint8]


class Pins:
    """The memory that one agent has pinned. An agent whose cache is not on a GPU pins nothing.

    Args:
        device: where the cache lies; None for the host's memory.
    """

    def __init__(self, device: "torch.device | None" = None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._held: list[weakref.finalize[Any, Memory]] = []

    def pin(self, memory: Memory, what: str, *, read_only: bool = False) -> None:
        """Pin memory until `release`, or until its last view is gone, whichever comes first.

        Memory must not be unmapped while it is pinned: CUDA would treat the next mapping at that address as pinned
        memory. All of the memory becomes resident. If memory cannot be pinned, a warning is logged, and copies from
        and to it are slower.

        Args:
            memory: an array that owns its memory, or a whole mapping.
            what: its name in the warning.
            read_only: whether it is mapped only for reading.
        """
        if self._device is None or not len(memory):
            return
        if read_only and not _pins_read_only(self._device):
            logger.warning(
                "the %s (%d bytes) cannot be pinned: %s does not pin memory that is mapped for reading only. Copies "
                "of it to the GPU are slower; with `direction: write` on the producer chunks land in pinned slots "
                "(config key direction)",
                what,
                memory.nbytes,
                self._device,
            )
            return
        address = memory.ctypes.data
        with _current(self._device) as cudart:
            flags = _PORTABLE | (_READ_ONLY if read_only else 0)
            code = int(cudart.cudaHostRegister(address, memory.nbytes, flags))
            if code:
                _forget_error(self._device)
        if code:
            logger.warning(
                "the %s (%d bytes) cannot be pinned (cudaHostRegister: error %d): copies between it and the "
                "GPU are slower. Raise the limit of locked memory (ulimit -l unlimited, or --ulimit "
                "memlock=-1), or have fewer or smaller slots (config keys slots, slot_mib)",
                what,
                memory.nbytes,
                code,
            )
            return
        undo = weakref.finalize(memory, _unpin, address, self._device)
        undo.atexit = False  # copies may still run at exit, and the end of the process unpins
        self._held = [held for held in self._held if held.alive] + [undo]

    def release(self) -> None:
        """Unpin all memory. No copy may be under way. May be called again."""
        for held in self._held:
            held()
        self._held.clear()


def _pins_read_only(device: "torch.device") -> bool:
    """Whether the device has `cudaDevAttrHostRegisterReadOnlySupported`. Without it the call would fail."""
    try:
        return cuda_driver.supports(
            cuda_driver.READ_ONLY_HOST_REGISTER_SUPPORTED, device.index or 0
        )
    except cuda_driver.CudaError:
        return True  # the call itself will show it


@contextlib.contextmanager
def _current(device: "torch.device") -> Any:
    """Make the device current in the calling thread; yields CUDA's runtime."""
    import torch

    with torch.cuda.device(device):
        yield torch.cuda.cudart()


def _unpin(address: int, device: "torch.device") -> None:
    with _current(device) as cudart:
        code = int(cudart.cudaHostUnregister(address))
        if code:
            _forget_error(device)
            logger.warning(
                "memory at %#x stays pinned (cudaHostUnregister: error %d)", address, code
            )


def _forget_error(device: "torch.device") -> None:
    """Clear the sticky error that a failed call has left in CUDA's runtime.

    torch asks for the error after each kernel launch, and would blame the engine's next kernel. So a small kernel is
    launched here to take the error.
    """
    import torch

    with contextlib.suppress(RuntimeError):
        torch.empty(1, device=device).fill_(0)
