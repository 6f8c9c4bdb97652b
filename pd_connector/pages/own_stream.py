# SPDX-License-Identifier: Apache-2.0
"""Streams and threads of a GPU that the engine does not use. torch lends the same 32 streams of each priority in
turn to all callers, including the engine. Work of one caller would then wait for another's.
"""

import logging

import torch

from pd_connector.memory.cuda_driver import CudaError, enter_thread, new_stream

logger = logging.getLogger("pd_connector.pages.paged_cache")

_PRIORITY = -1
"""Higher priority than the engine's streams, so that a chunk's kernel does not queue behind a prefill's."""


def own_streams(
    device: torch.device,
) -> tuple[torch.cuda.Stream, torch.cuda.Stream] | tuple[None, None]:
    """Two new streams: for kernels, and for copies beside them. They live as long as the process, because torch keeps
    memory by stream. None for a CPU."""
    if device.type != "cuda":
        return None, None
    return _own_stream(device), _own_stream(device)


def own_thread(device: torch.device) -> None:
    """Make the device current in the calling thread, and the thread a private thread
    (`cuda_driver.enter_thread`). Does nothing for a CPU."""
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)
    try:
        enter_thread(device.index or 0)
    except CudaError as error:
        logger.warning("CUDA graphs cannot be captured while KV is moved: %s", error)


def _own_stream(device: torch.device) -> torch.cuda.Stream:
    try:
        handle = new_stream(device.index or 0, _PRIORITY)
    except CudaError as error:
        logger.warning(
            "the cache uses one of torch's streams, which the engine may also use: %s", error
        )
        return torch.cuda.Stream(device, priority=_PRIORITY)
    return torch.cuda.ExternalStream(handle, device=device)
