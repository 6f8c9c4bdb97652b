# SPDX-License-Identifier: Apache-2.0
"""NIXL over UCX on host or device memory, as the GPU benchmark uses it."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pd_bench.gpu.cache import GpuCache
from pd_connector.tools.wire import MoveError
from pd_connector.transport.nixl.library import import_nixl, persistently

_BACKEND = "UCX"


class Endpoint:
    """One NIXL agent with its peer.

    Args:
        role: of this side, for its name.
        cache: tells the kind of memory.
        regions: address and bytes of the memory that transfers read and write, on the cache's device.
        settings: of `nixl_agent_config`.

    Raises:
        MoveError: NIXL is missing.
    """

    def __init__(
        self,
        role: str,
        cache: GpuCache,
        regions: Sequence[tuple[int, int]],
        settings: Mapping[str, Any],
    ) -> None:
        os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")  # as vLLM does
        try:
            api = import_nixl()
        except ImportError as error:
            raise MoveError(f"{error}: install pd-connector[nixl]") from error
        self.memory = cache.memory
        self.device = cache.device.index or 0
        name = f"{role}-{os.getpid()}-{time.monotonic_ns()}"
        config = api.nixl_agent_config(**settings)
        self.nixl: Any = persistently(lambda: api.nixl_agent(name, config))
        described = [(address, nbytes, self.device, "") for address, nbytes in regions]
        self._registered = self.nixl.register_memory(described, self.memory, [_BACKEND])
        self.remote = ""

    @property
    def metadata(self) -> bytes:
        return bytes(self.nixl.get_agent_metadata())

    def meet(self, metadata: bytes) -> None:
        self.remote = self.nixl.add_remote_agent(metadata).decode()

    def write(self, here: int, there: int, nbytes: int, peer_device: int, note: bytes) -> Any:
        """Start to write bytes to an address in the peer's memory; the note follows them. Returns a handle. Raises
        MoveError."""
        ours = self.nixl.get_xfer_descs([(here, nbytes, self.device)], self.memory)
        theirs = self.nixl.get_xfer_descs([(there, nbytes, peer_device)], self.memory)
        handle = self.nixl.initialize_xfer("WRITE", ours, theirs, self.remote, note, [_BACKEND])
        if self.nixl.transfer(handle) == "ERR":
            raise MoveError("NIXL does not start a write")
        return handle

    def tell(self, note: bytes) -> None:
        self.nixl.send_notif(self.remote, note)

    def notes(self) -> list[bytes]:
        """The peer's notes since the last call."""
        received = self.nixl.get_new_notifs([_BACKEND])
        return [note for notes in received.values() for note in notes]

    def ended(self, handle: Any) -> bool:
        """Whether a transfer has ended; an ended transfer is forgotten. This call also sends a write's note. Raises
        MoveError if the transfer has failed."""
        state = self.nixl.check_xfer_state(handle)
        if state == "PROC":
            return False
        self.nixl.release_xfer_handle(handle)
        if state != "DONE":
            raise MoveError(f"NIXL says {state}")
        return True

    def close(self) -> None:
        self.nixl.deregister_memory(self._registered)
        self.nixl = None
