# SPDX-License-Identifier: Apache-2.0
"""One NIXL agent with the backend UCX, over slabs in host or device memory.

Peers' metadata is parsed by NIXL's C++ code; NIXL's Python helpers that unpickle are not used.
"""

import logging
import os
import resource
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pd_connector.errors import TransportError
from pd_connector.hosts import is_loopback
from pd_connector.memory.device_slab import DeviceSlab
from pd_connector.memory.slab import Slab
from pd_connector.transport.nixl.library import import_nixl, persistently

logger = logging.getLogger("pd_connector.transport.nixl.transport")

_DESCRIPTORS = 64
"""Descriptors that must be free before an agent is made. It takes some twenty and needs more while it is made. If UCX
runs out of them in between, it ends the process."""
_BACKEND = "UCX"
_HOST = "DRAM"


class Place(NamedTuple):
    """Where bytes lie, in this process or in a peer's."""

    address: int
    memory: str = _HOST  # what NIXL calls it: `DRAM` for a host's, `VRAM` for a device's
    device: int = 0  # number in its process


class NixlAgent:
    """Registers its slabs when made.

    Args:
        name: by which peers know it.
        host: what this engine listens on; UCX is kept to loopback if that is loopback.
        slabs: memory of this process to transfer from and into.

    Raises:
        TransportError: NIXL is missing, or UCX cannot be set up.
    """

    def __init__(self, name: str, host: str, *slabs: Slab | DeviceSlab) -> None:
        self._registered: list[Any] = []
        _check_descriptors()
        api = _import_api()
        options = {"engine_config": "NET_DEVICES=lo"} if is_loopback(host) else {}

        def opened() -> Any:
            settings = api.nixl_agent_config(enable_prog_thread=False, backends=[])
            agent = api.nixl_agent(name, settings)
            agent.create_backend(_BACKEND, options)
            return agent

        try:
            self._nixl: Any = persistently(opened)
            for memory, regions in _regions(slabs).items():
                self._registered.append(self._nixl.register_memory(regions, memory, [_BACKEND]))
        except Exception as error:
            raise TransportError(
                f"nixl agent with backend {_BACKEND} cannot be made: {error!r}; "
                "`pd-connector doctor` shows UCX's devices"
            ) from error

    @property
    def metadata(self) -> bytes:
        """What a peer's agent needs to reach this one's memory."""
        return bytes(self._nixl.get_agent_metadata())

    def meet(self, metadata: bytes) -> str:
        """Learn of a peer's agent; returns its name. Raises what NIXL raises."""
        return str(self._nixl.add_remote_agent(metadata).decode())

    def start(
        self,
        operation: Literal["READ", "WRITE"],
        remote: str,
        here: Place,
        there: Place,
        nbytes: int,
        note: bytes = b"",
    ) -> Any:
        """Start a transfer between two places; returns its handle. The source must be complete: NIXL does not wait for
        a stream that still writes it.

        Raises what NIXL raises: its exceptions have no common base.
        """
        handle = self._nixl.initialize_xfer(
            operation,
            self._nixl.get_xfer_descs([(here.address, nbytes, here.device)], here.memory),
            self._nixl.get_xfer_descs([(there.address, nbytes, there.device)], there.memory),
            remote,
            note,
            [_BACKEND],
        )
        try:
            state = self._nixl.transfer(handle)
        except Exception:
            handle.release()
            raise
        if state == "ERR":
            handle.release()
            raise TransportError("posting failed")
        return handle

    def progress(self, handle: Any) -> str | None:
        """None while the transfer is under way; then what went wrong, empty for nothing."""
        try:
            state = self._nixl.check_xfer_state(handle)
        except Exception as error:
            return repr(error)
        if state == "PROC":
            return None
        return "" if state == "DONE" else "the transfer failed"

    def release(self, handle: Any) -> None:
        """Forget a transfer. That alone does not stop it."""
        try:
            handle.release()
        except Exception as error:
            logger.warning("nixl does not release a transfer: %r", error)

    def notes(self) -> dict[str, list[bytes]]:
        """Notes that have come since the last call, by the sender's name."""
        try:
            return dict(self._nixl.get_new_notifs([_BACKEND]))
        except Exception as error:  # such as a sender's name that is not text
            logger.warning("nixl notifications lost: %r", error)
            return {}

    def close(self) -> None:
        """Destroy the agent, which stops its transfers. All their handles must have been released."""
        if self._nixl is not None:
            for registered in self._registered:
                self._nixl.deregister_memory(registered)
            self._registered.clear()
            self._nixl = None


def place_in(slab: Slab | DeviceSlab, offset: int) -> Place:
    """The byte at this offset of a slab."""
    if isinstance(slab, DeviceSlab):
        return Place(slab.address + offset, slab.memory, slab.number)
    return Place(slab.address + offset)


def _regions(slabs: Sequence[Slab | DeviceSlab]) -> dict[str, list[tuple[int, int, int, str]]]:
    """What is registered, by its kind of memory, as NIXL takes it."""
    by_kind: dict[str, list[tuple[int, int, int, str]]] = {}
    for slab in slabs:
        first = place_in(slab, 0)
        by_kind.setdefault(first.memory, []).append((first.address, slab.nbytes, first.device, ""))
    return by_kind


def _import_api() -> Any:
    try:
        api = import_nixl()
    except ImportError as error:
        raise TransportError(
            f"transport nixl: {error}. Install it with `pip install 'pd-connector[nixl]'`, or "
            "take it out of the config key transports"
        ) from error
    if "NIXL_LOG_LEVEL" not in os.environ:  # it logs every agent, on standard output
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return api


def _check_descriptors() -> None:
    """Raises TransportError: too few descriptors are free."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        free = limit - len(os.listdir("/proc/self/fd"))
    except OSError:  # not even for this
        free = 0
    if limit != resource.RLIM_INFINITY and free < _DESCRIPTORS:
        raise TransportError(
            f"nixl agent cannot be made: {free} of {limit} descriptors are free, {_DESCRIPTORS} are wanted; "
            "raise the limit (ulimit -n)"
        )


_TRIAL_BYTES = 4096
_TRIAL_S = 10.0


def try_out(agent: NixlAgent, name: str, slab: DeviceSlab) -> None:
    """Move a few bytes within the first slot of a slab that the agent has registered.

    Args:
        name: the agent's own.

    Raises:
        TransportError: they did not arrive.
    """
    nbytes = min(_TRIAL_BYTES, slab.slot_bytes // 2)
    slot = slab.slot(0).tensor
    slot[:nbytes] = slot.new_ones(nbytes).cumsum(0) % 251
    slot[nbytes : 2 * nbytes] = 0
    expected = slot[:nbytes].cpu()  # waits for both
    try:
        handle = agent.start("WRITE", name, place_in(slab, 0), place_in(slab, nbytes), nbytes)
    except Exception as error:
        raise TransportError(f"nixl does not move memory of {slab.device}: {error!r}") from error
    deadline = time.monotonic() + _TRIAL_S
    while (problem := agent.progress(handle)) is None and time.monotonic() < deadline:
        time.sleep(0.0005)
    agent.release(handle)
    if problem is None:
        problem = f"nothing arrived within {_TRIAL_S:g} s"
    elif not problem and not slot[nbytes : 2 * nbytes].cpu().equal(expected):
        problem = "what arrived is not what was sent"
    if problem:
        raise TransportError(f"nixl does not move memory of {slab.device}: {problem}")
