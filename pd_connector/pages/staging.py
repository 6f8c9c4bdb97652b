# SPDX-License-Identifier: Apache-2.0
"""Device memory that payloads pass through between pages and slots. There are two such buffers: one is copied while a
kernel fills or empties the other.

Kernels run on the cache's own stream, copies on a second one. Events keep them in order. No call waits for a copy
before the next chunk has been queued.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from pd_connector.memory.device_bytes import Payload, address_of


class Staging:
    """Room for one payload.

    Attributes:
        room: uint8, on the device.
        free: event after the last queued work on it; None if there is none, and on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.room = torch.empty(0, dtype=torch.uint8, device=device)
        self.free: torch.cuda.Event | None = None


class Stagings:
    """Two staging buffers, used in turn by one thread.

    Args:
        copies: the stream of copies; None: the current stream.
    """

    def __init__(self, device: torch.device, copies: torch.cuda.Stream | None) -> None:
        self._device = device
        self._copies = copies
        self._all = Staging(device), Staging(device)
        self._turn = 0
        self._loaded: tuple[Payload, Staging] | None = None

    def empty(self, nbytes: int) -> Staging:
        """The next staging in turn, large enough. Work queued on the current stream from now on runs after the
        staging's last use."""
        staging = self._next(nbytes)
        _wait(staging.free, None)
        return staging

    def unload(self, staging: Staging, slot: torch.Tensor) -> None:
        """Queue a copy to a slot, after the current stream's work. `staging.free` is then an event after the copy."""
        with self._copying(record(self._device)):
            slot.copy_(staging.room[: len(slot)], non_blocking=True)
            staging.free = record(self._device)

    def load(self, payload: Payload, source: torch.Tensor) -> None:
        """Queue a copy of a payload, whose bytes are `source`, for `loaded`."""
        staging = self._next(len(source))
        with self._copying(staging.free):
            staging.room[: len(source)].copy_(source, non_blocking=True)
            staging.free = record(self._device)
        self._loaded = payload, staging

    def loaded(self, payload: Payload, source: Callable[[], torch.Tensor]) -> Staging:
        """The staging with this payload, which is copied now if `load` did not copy it. The current stream waits for
        it."""
        if self._loaded is not None and not _same(self._loaded[0], payload):
            self._loaded = None  # it was dropped, and is no longer wanted
        if self._loaded is None:
            self.load(payload, source())
        assert self._loaded is not None
        staging, self._loaded = self._loaded[1], None
        _wait(staging.free, None)
        return staging

    def settle(self) -> None:
        """Wait for every copy, and forget what was loaded."""
        self._loaded = None
        for staging in self._all:
            if staging.free is not None:
                staging.free.synchronize()

    def _next(self, nbytes: int) -> Staging:
        staging = self._all[self._turn]
        self._turn = 1 - self._turn
        if self._loaded is not None and self._loaded[1] is staging:
            self._loaded = None
        if len(staging.room) < nbytes:
            if staging.free is not None:  # torch may lend the old room again at once
                staging.free.synchronize()
            staging.room = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            if self._copies is not None:  # its memory may still be used on the current stream
                _wait(record(self._device), self._copies)
        return staging

    def _copying(self, after: "torch.cuda.Event | None") -> AbstractContextManager[object]:
        """Make the stream of copies current, after an event."""
        if self._copies is None:
            _wait(after, None)
            return contextlib.nullcontext()
        _wait(after, self._copies)
        stream: AbstractContextManager[object] = torch.cuda.stream(self._copies)
        return stream


def record(device: torch.device) -> "torch.cuda.Event | None":
    """An event after all work of the current stream; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def _wait(event: "torch.cuda.Event | None", stream: "torch.cuda.Stream | None") -> None:
    """Order later work of a stream, by default the current one, after the event."""
    if event is not None:
        event.wait(stream)


def _same(payload: Payload, other: Payload) -> bool:
    """Whether these are the same bytes in memory."""
    return (address_of(payload), len(payload)) == (address_of(other), len(other))
